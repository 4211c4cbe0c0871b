"""Units, currencies and percent signs at the end of a value (a currency also in front of it), under one name each."""

from __future__ import annotations

import re

_UNIT_NAMES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre", "in": "inch inche",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram gramme gm", "kg": "kilogram", "mg": "milligram", "lb": "pound", "oz": "ounce",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "", "week": "", "month": "", "year": "yr", "l": "liter litre",
    "ml": "milliliter millilitre", "mi/h": "mph", "km/h": "kmh kph kmph", "degree": "deg", "radian": "rad", "dollar": "$ usd buck", "cent": "¢",
    "euro": "€ eur", "£": "gbp", "unit": "", "n": "newton", "j": "joule", "w": "watt", "v": "volt", "hz": "hertz", "pa": "pascal", "mol": "mole",
}  # fmt: skip
_UNIT_OF = {alias: unit for unit, aliases in _UNIT_NAMES.items() for alias in (unit, *aliases.split())}
_TAIL = re.compile(r"(?:\s*(?:\\text\{[^{}]*\}|\^\{-?\d\}|\^\{\\text\{[^{}]*\}\}|\^\{\\circ\}|/|\\cdot))+$")
_TAIL_START = re.compile(r"\\text\{|\^\{\\circ\}|\^\{\\text")
_PLAIN_TAIL = re.compile(r"(?<=[\d)}])\s*((?:[A-Za-z]{2,}|[A-Za-z](?=[/^]|$))(?:[ /]+[A-Za-z]+)*(?:\^\{[23]\})?)$|\s+([A-Za-z][A-Za-z ]*[A-Za-z])$")
_CURRENCY = re.compile(r"(-?)\s*(\\\$|\$|€|£|¥|₹)\s*(?=[-\d.(\\])|(?<=\d)\s*(\\\$|€|£|¥|₹)$")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")


def unit_name(text: str) -> str:
    """One name for a unit in many spellings; percent is "%"."""
    words = text.replace("\\text", " ").replace("\\cdot", " ").replace("^{\\circ}", " degree ").lower()
    words = re.sub(r"\^\{(-?\d)\}", r"^\1", words).replace("{", " ").replace("}", " ").replace(" per ", "/").replace(".", " ")
    if words.strip() in ("percent", "per cent", "%", "\\%", "percentage", "pct"):
        return "%"
    out: list[str] = []
    power = ""
    for word in re.findall(r"[a-z$€£¥₹¢'\"]+|\^-?\d|/", words):
        if word in ("square", "squared", "sq", "cubic", "cubed", "cu"):
            exponent = "^2" if word.startswith("sq") else "^3"
            if word.endswith("d") and out:
                out.append(exponent)
            else:
                power = exponent
            continue
        if word in ("of", "the", "a", "an", "each"):
            continue
        if word[0] in "/^":
            out.append(word)
            continue
        singular = _UNIT_OF.get(word) or _UNIT_OF.get(word.removesuffix("s")) or _UNIT_OF.get(word.removesuffix("es")) or word.removesuffix("s")
        out.append(("" if not out or out[-1] == "/" else " ") + singular + power)
        power = ""
    return "".join(out)


_NO_UNITS = re.compile(r"\b(?:and|or|not|if|no|to|is|are|than|base|for|all|where|when|with|but|solutions?|then|mod)\b", re.IGNORECASE)


def split_quantity(text: str) -> tuple[str, str] | None:
    """(value, unit name) of a value with a unit, a currency or a percent sign; None for others. Only one unit, at the end (a currency also in front)."""
    if text.endswith(("\\%", "%")):
        return text.removesuffix("%").removesuffix("\\").strip(), "%"
    money = _CURRENCY.search(text)
    if money and (money.start() == 0 or money[3]):
        rest = (text[: money.start()] + (money[1] or "") + text[money.end() :]).strip()
        more = split_quantity(rest)  # \$5 dollars
        symbol = unit_name((money[2] or money[3]).removeprefix("\\"))
        return (more[0], symbol) if more and more[1] == symbol else (rest, symbol) if not more else None
    tail = _TAIL.search(text)
    if tail:
        start = _TAIL_START.search(text, tail.start())
        if start and start.start() > 0 and not _NO_UNITS.search(text[start.start() :]):
            value, unit = text[: start.start()].strip(), text[start.start() :]
            name = unit_name(unit)
            if value and not value.endswith(("/", "^", "_", "\\cdot")) and not (name == "degree" and _TRIGONOMETRIC.search(value)):
                return value, name
    plain = _PLAIN_TAIL.search(text)
    if plain:
        unit = plain[1] or plain[2]
        known = unit_name(unit)
        value = text[: plain.start()].strip()
        if (
            value
            and not _NO_UNITS.search(unit)
            and (plain[2] or " " in text[plain.start() : plain.start(1)] or known.partition("/")[0].partition("^")[0] in _UNIT_NAMES)
        ):
            if re.search(r"(?<![\\A-Za-z])[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", value)):
                return None  # the letter is one variable among others
            return value, known
    return None
