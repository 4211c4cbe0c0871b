r"""One spelling for what mathematicians write in many: `normalise` is a function of the text alone, idempotent, and linear in it.

The result is LaTeX without layout: `\frac{..}{..}`, `\sqrt{..}`, `^{..}` and `_{..}` with braces, `\text{..}` kept (units and words live there), digits ASCII,
no thousands separators, no `\left`, no thin spaces, no dollar signs of mathematics mode. What it says is not changed: `1/2`, `0.5` and `\frac{1}{2}` stay three texts.
"""

from __future__ import annotations

import re
import unicodedata


def words(text: str) -> tuple[str, ...]:
    """For tables of words."""
    return tuple(text.split())


_GREEK = words("alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi psi omega")
_GREEK_LETTERS = "αβγδεζηθικλμνξοπρστυφχψω"
_GLYPHS = {
    **{letter: f"\\{name} " for letter, name in zip(_GREEK_LETTERS, _GREEK, strict=True)},
    **{upper: f"\\{name} " for upper, name in {"Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ω": "Omega"}.items()},
    **dict.fromkeys("−‐‑‒–—﹣", "-"),
    **dict.fromkeys("·⋅∙•", "\\cdot "),
    **dict.fromkeys("’‘ʼ′", "'"),
    **dict.fromkeys("“”″", '"'),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    "×": "\\times ", "✕": "\\times ", "÷": "\\div ", "∕": "/", "⁄": "/", "∗": "*", "±": "\\pm ", "∓": "\\mp ",
    "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∞": "\\infty ", "∅": "\\emptyset ", "∪": "\\cup ", "∩": "\\cap ",
    "∈": "\\in ", "∖": "\\setminus ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "°": "^{\\circ}", "º": "^{\\circ}",
    "⟨": "\\langle ", "⟩": "\\rangle ", "∠": "\\angle ", "…": "\\ldots ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ",
    "٫": ".", "٬": ",", "∶": ":", "→": "\\to ", "∧": "\\land ", "∨": "\\lor ", "∣": "|",
}  # fmt: skip
_GLYPH = re.compile("[" + re.escape("".join(_GLYPHS)) + "]")
_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()", strict=True))
_SUPERSCRIPT = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
_SUBSCRIPT = re.compile("[" + "".join(_SUBSCRIPTS) + "]+")
_UNICODE_ROOT = re.compile(r"([√∛∜])\s*(?:\{([^{}]*)\}|\(([^()]*)\)|([0-9.]+|[A-Za-z]|\\[a-z]+))")
_ROOTS = {"√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"}

_LAYOUT = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|left|right|middle|[bB]igg?[lrm]?|mleft|mright|null|hfill|boldmath|large|Large|normalsize|small)(?![A-Za-z])\s*\.?"
    r"|\\[!]|\\(?:phantom|hspace|vspace)\*?\s*\{[^{}]*\}"
)
_DIGIT_GROUP = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\;|\\:|\\!|~|\\ |\\thinspace\s?|,\\!|[\u00a0\u2009\u202f'])(?=\d{3}(?!\d))")
_SPACES = re.compile(r"\\[,;:>]|\\ |~|\\(?:quad|qquad|enspace|enskip|thinspace|medspace|space|thickspace)(?![A-Za-z])|\s+")
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge",
    "neq": "ne", "lt": "<", "gt": ">", "ast": "\\cdot", "varnothing": "emptyset", "emptyset": "emptyset", "backslash": "setminus", "dots": "ldots",
    "cdots": "ldots", "dotsc": "ldots", "dotsb": "ldots", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]", "lvert": "|", "rvert": "|",
    "vert": "|", "mid": "|", "colon": ":", "degree": "^{\\circ}", "overrightarrow": "vec", "imath": "i", "jmath": "j", "Rightarrow": "to",
    "rightarrow": "to", "mathop": "operatorname", "wedge": "land", "vee": "lor", "lnot": "neg", "operatorname*": "operatorname", "isin": "in", "arctg": "arctan",
    "tg": "tan", "ctg": "cot", "smallsetminus": "setminus", "bigcup": "cup", "bigcap": "cap", "varphi": "phi", "varepsilon": "epsilon", "euro": "€",
    "pounds": "£", "textdollar": "\\$", "textdegree": "^{\\circ}", "percent": "\\%", "textpercent": "\\%", "bar": "overline", "Bar": "overline",
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+\*?)")
_FONT = re.compile(r"\\(?:mathbf|mathit|mathsf|mathtt|boldsymbol|bm|pmb|mathnormal|mathcal|mathscr|vec|hat)(?:\s*\{([^{}]*)\}|\s+([A-Za-z0-9])|([0-9]))")
_TEXT = re.compile(r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|textup|emph|mbox|hbox|mathrm|operatorname|rm|text)\s*\{")
_BLACKBOARD = re.compile(r"\\mathbb\s*([A-Z])|\\(R|Z|N|Q|C)(?![A-Za-z])|\\(real|Real)s?(?![A-Za-z])")
_ARGUMENT = r"\s*(?:(\{)|([A-Za-z0-9])|(\\[A-Za-z]+))"
_SCRIPT = re.compile(
    r"([\^_])\s*(?:\(([-+]?[0-9]+(?:/[0-9]+)?)\)|([-+]?[0-9]+(?![.0-9])|[A-Za-z*']|\\(?:circ|prime|infty|pi|theta|alpha|beta|ast)(?![A-Za-z])))"
)
_PLAIN_WORDS = {
    "sqrt": "\\sqrt", "pi": "\\pi ", "infinity": "\\infty ", "inf": "\\infty ", "oo": "\\infty ", "infty": "\\infty ", "sin": "\\sin ", "cos": "\\cos ",
    "tan": "\\tan ", "cot": "\\cot ", "sec": "\\sec ", "csc": "\\csc ", "arcsin": "\\arcsin ", "arccos": "\\arccos ", "arctan": "\\arctan ", "ln": "\\ln ",
    "log": "\\log ", "exp": "\\exp ", "theta": "\\theta ", "alpha": "\\alpha ", "beta": "\\beta ", "lambda": "\\lambda ", "sigma": "\\sigma ",
    "sinh": "\\sinh ", "cosh": "\\cosh ", "tanh": "\\tanh ", "abs": "\\abs ", "gcd": "\\gcd ", "lcm": "\\lcm ", "max": "\\max ", "min": "\\min ",
     "cup": "\\cup ", "cap": "\\cap ", "floor": "\\floor ", "ceil": "\\ceil ", "cbrt": "\\cbrt ",
}  # fmt: skip
_NEED_ARGUMENTS = frozenset(words("abs max min gcd lcm floor ceil cbrt"))
_WORD = re.compile(r"(?<![A-Za-z\\])([A-Za-z]{2,8})(?![A-Za-z])(\s*\()?")
_MIXED = re.compile(r"(?<![\d.\w}^])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_PLAIN_MIXED = re.compile(r"(?<![\d.\w}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_GROUPED = re.compile(r"(?<![\d.,\w])(\d{1,3}(?:,\d{3})+)(?![\d,]|\.\d*,)")
_TIGHT = re.compile(r"\s*([-+*/^_=<>(){}\[\]|,;:!&\x01]|\\[{}%])\s*")


def normalise(text: str) -> str:
    """The one spelling of `text`."""
    text = _characters(text)
    text = _DIGIT_GROUP.sub("", text).replace("\\\\", "\x01")  # rows of matrices
    text = _unwrapped(text)
    text = _LAYOUT.sub(lambda match: " " if match[0][-1:].isspace() else "", text)
    text = _COMMAND.sub(_renamed, text)
    text = _fonts(text)
    text, texts = _set_aside_texts(text)
    text = _BLACKBOARD.sub(lambda match: f"\\mathbb{{{match[1] or match[2] or 'R'}}}", text)
    text = text.replace("**", "^").replace("\\div", "/").replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ")
    text = _WORD.sub(_plain_word, text)
    text = _SPACES.sub(" ", text)
    text = _SCRIPT.sub(lambda match: f"{match[1]}{{{match[2] or match[3]}}}", text)
    text = _braced_arguments(text)
    text = _SCIENTIFIC.sub(lambda match: f"{match[1]}\\cdot 10^{{{int(match[2]) if len(match[2]) < 8 else match[2]}}}", text)
    text = _PLAIN_MIXED.sub(lambda match: f"{match[1]}\\frac{{{match[2]}}}{{{match[3]}}}", text)
    text = _MIXED.sub(_improper, text)
    if not re.search(r"[(\[{]\d{1,3},\d{3}(?:,\d{3})*[)\]}]", text):
        text = _GROUPED.sub(lambda match: match[1].replace(",", ""), text)
    text = _TIGHT.sub(r"\1", text)
    text = re.sub(r"\s+(?=\\[A-Za-z])", "", re.sub(r"(\\[A-Za-z]+)\s+(?![A-Za-z])", r"\1", text)).replace("\x01", "\\\\")
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?", text.strip()):
        text = text.replace(" ", "")
    text = _put_back(text, texts)
    return _outer(text.strip())


def _characters(text: str) -> str:
    """Unicode to ASCII and LaTeX commands."""
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[c] for c in match[0]) + "}", text)
    text = _SUBSCRIPT.sub(lambda match: "_{" + "".join(_SUBSCRIPTS[c] for c in match[0]) + "}", text)
    text = re.sub(r"[¼½¾⅐-⅞]", _vulgar_fraction, text)
    text = _GLYPH.sub(lambda match: _GLYPHS[match[0]], text)
    text = _GLYPH.sub(lambda match: _GLYPHS[match[0]], unicodedata.normalize("NFKC", text))
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    return _UNICODE_ROOT.sub(lambda match: f"{_ROOTS[match[1]]}{{{match[2] or match[3] or match[4]}}}", text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _unwrapped(text: str) -> str:
    r"""Without mathematics mode: $..$, \(..\), \[..\]. A dollar before a digit that nothing closes is money and becomes \$."""
    text = re.sub(r"\\[()]|\\\[|(?<!\\)\\\](?!\d)", " ", text) if "\\(" in text or "\\[" in text else text
    if text.count("$") - text.count("\\$") == 1:
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text)
    return re.sub(r"(?<!\\)\$", " ", text)


def _renamed(match: re.Match[str]) -> str:
    new = _RENAMED.get(match[1])
    if new is None:
        return match[0]
    return f"\\{new}" if new.isalpha() and new.isascii() and new not in ("i", "j") else new


def _fonts(text: str) -> str:
    r"""Without \mathbf{..} and its like (innermost first, a few levels)."""
    for _ in range(4):
        text, count = _FONT.subn(lambda match: match[1] if match[1] is not None else match[2] or match[3], text)
        if not count:
            break
    return text


def _plain_word(match: re.Match[str]) -> str:
    """sqrt, pi, sin ... as commands; max, min ... only where arguments follow (20 min is a time)."""
    known = _PLAIN_WORDS.get(match[1])
    if known is None or (match[1] in _NEED_ARGUMENTS and not match[2]):
        return match[0]
    return known + (match[2] or "")


def _set_aside_texts(text: str) -> tuple[str, list[str]]:
    r"""Contents of \text{..} and its like out of the way, so that no rule for mathematics touches them: each leaves \x00NUMBER\x00."""
    found: list[str] = []
    out, position = [], 0
    for match in _TEXT.finditer(text):
        if match.start() < position:
            continue
        depth, stop = 1, match.end()
        while stop < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[stop], 0)
            stop += 1
        if depth:
            break
        content = " ".join(_TEXT.sub("", _SPACES.sub(" ", text[match.end() : stop - 1])).replace("{", "").replace("}", "").split())
        known = _PLAIN_WORDS.get(content)
        out.append(text[position : match.start()])
        if known and (content not in _NEED_ARGUMENTS or match[0].startswith("\\operatorname")):
            out.append(known)
        elif not re.search(r"[A-Za-z]", content) or content in ("i", "e", "d"):
            out.append(content)
        else:
            out.append(f"\x00{len(found)}\x00")
            found.append(content)
        position = stop
    return "".join(out) + text[position:], found


def _put_back(text: str, found: list[str]) -> str:
    return re.sub(r"\s*\x00(\d+)\x00\s*", lambda match: f"\\text{{{found[int(match[1])]}}}" if int(match[1]) < len(found) else "", text)


def _braced_arguments(text: str) -> str:
    r"""\frac12, \frac1{2}, \sqrt3, \sqrt(2), x^\frac12 with braces."""
    text = re.sub(r"\\(overline|dot)\s*(\d)", r"\\\1{\2}", text)
    text = re.sub(r"((?:\\dot\{\d\})+)", lambda match: f"\\overline{{{re.sub('[^0-9]', '', match[1])}}}", text)
    text = re.sub(r"\\pmod\s*([0-9A-Za-z])", r"\\pmod{\1}", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(?:([0-9])|([A-Za-z])(?![A-Za-z]))", lambda m: f"\\sqrt{m[1] or ''}{{{m[2] or m[3]}}}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\\[A-Za-z]+)", lambda m: f"\\sqrt{m[1] or ''}{{{m[2]}}}" if m[2] not in ("\\frac", "\\sqrt") else m[0], text)
    text = re.sub(r"\\(frac|binom)\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\\1{\2}{\3}", text)
    text = re.sub(r"\\(frac|binom)\s*([0-9A-Za-z])\s*(?=\{)", r"\\\1{\2}", text)
    text = re.sub(r"\\(frac|binom)\s*(\\(?:pi|theta|alpha|beta))\s*([0-9A-Za-z])", r"\\\1{\2}{\3}", text)
    text = re.sub(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*([0-9A-Za-z])", r"\1{\2}", text)
    return re.sub(r"\{([^{}]*)\\choose\s*([^{}]*)\}", r"\\binom{\1}{\2}", text)


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = match[1], match[2], match[3]
    if max(len(whole), len(top), len(bottom)) > 18 or int(top) >= int(bottom):
        return match[0]
    return f"\\frac{{{int(whole) * int(bottom) + int(top)}}}{{{bottom}}}"


def _outer(text: str) -> str:
    """Without what surrounds the whole: a period at the end, braces, a lone text command around nothing but digits."""
    while True:
        before = text
        text = text.strip().rstrip(";,")
        if text.endswith(".") and not text.endswith(("..", "p.m.", "a.m.")):
            text = text[:-1]
        if text.startswith("{") and text.endswith("}") and _closes_at_end(text):
            text = text[1:-1]
        if text.startswith(":"):
            text = text[1:]
        if text == before:
            return text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0) if text[position - 1 : position] != "\\" else 0
        if depth == 0:
            return position == len(text) - 1
    return False
