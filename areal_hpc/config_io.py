"""Configurations in and out: YAML files, and `--section.option value` on the command line (parsed by tyro). An unknown name is one line that offers the nearest."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from areal_hpc import objectives
from areal_hpc.config import Config, ConfigError, to_dict


def save_yaml(config: Config, path: Path) -> None:
    """Write the resolved configuration."""
    path.write_text(as_yaml(config))


def as_yaml(config: Config) -> str:
    """The configuration as YAML, with what is behind each `auto` as a comment; `load_yaml` reads it back."""
    text = yaml.safe_dump(_lists(to_dict(config)), sort_keys=False)
    for name, value in objectives.resolved_options(config).items():  # a comment: fed back with another objective, `auto` must still mean that one's value
        text = text.replace(f"\n  {name}: auto\n", f"\n  {name}: auto  # {value}\n", 1)
    return text


def _lists(value: Any) -> Any:
    """With lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, tuple) else value


class _UniqueKeys(yaml.SafeLoader):
    """YAML allows a key twice and keeps one of them in silence: refuse."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"key '{name}' stands {names.count(name)} times in one section")
        return super().construct_mapping(node, deep)


def load_yaml(path: str, base: Config, source: str = "--config=") -> Config:
    """`base` with the values of a YAML file. Raises ConfigError: missing file, malformed YAML, unknown key (nearest named), wrong type.

    `source`: where the user said which file, for messages; empty for a file of our own.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{source}{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}{path}: not a text file ({error.reason})") from error
    try:
        values = yaml.load(text, _UniqueKeys)  # a safe loader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}{path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}{path}: expected sections such as 'train:', found {type(values).__name__}")
    return _merged(base, values, path, "")


def _merged(base: Any, values: dict[str, Any], path: str, prefix: str) -> Any:
    names = [item.name for item in dataclasses.fields(base)]
    hints = typing.get_type_hints(type(base))
    changes = {}
    for name, value in values.items():
        if name not in names:
            raise ConfigError(f"{path}: unknown key '{prefix}{name}'{_nearest(str(name), names)}; there are: {', '.join(names)}")
        old = getattr(base, name)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: '{prefix}{name}' is a section; expected its options, found {value!r}")
            changes[name] = _merged(old, value, path, f"{prefix}{name}.")
        else:
            changes[name] = _typed(value, hints[name], f"{path}: {prefix}{name}")
    return dataclasses.replace(base, **changes)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """The YAML value as the field's type; refuses anything that would change it."""
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(item, typing.get_args(hint)[0], where) for item in value)
    options = typing.get_args(hint) if typing.get_origin(hint) not in (tuple, None) else (hint,)
    for option in options:
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
        if value in (typing.get_args(option) or (option if isinstance(option, str) else None,)):
            return value
    if float in (hint, *options) and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+", value):
        return float(value)  # YAML 1.1 reads 1e-3 as text
    raise ConfigError(f"{where}={value!r}: expected {_describe(hint)}")


def _describe(hint: Any) -> str:
    choices = typing.get_args(hint)
    return " or ".join(_describe(c) for c in choices) if choices else getattr(hint, "__name__", repr(hint))


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""


def option_names() -> list[str]:
    """All options as they are typed: --section.option-name."""
    names = []
    for item in dataclasses.fields(Config):
        default = getattr(Config(), item.name)
        if dataclasses.is_dataclass(default):
            names += [f"--{item.name}.{part.name}".replace("_", "-") for part in dataclasses.fields(default)]
        else:
            names.append(f"--{item.name}".replace("_", "-"))
    return names


def split_files(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files named by `--config`, the rest). Raises ConfigError when a name is missing."""
    files, others = [], []
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name != "--config":
            others.append(argument)
            continue
        value = value or next(rest, "")
        if not value or value.startswith("--"):
            raise ConfigError("--config needs a file: --config FILE.yaml")
        files.append(value)
    return files, others


def parse_options(args: Sequence[str], base: Config, prog: str) -> Config:
    """`base` with command-line options. Raises ConfigError in one line; `--help` prints all options and exits 0."""
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            config, unknown = tyro.cli(Config, default=base, args=list(args), prog=prog, return_unknown_args=True, config=(tyro.conf.AvoidSubcommands,))
    except SystemExit as stop:
        if stop.code == 0:
            print(said.getvalue(), end="")
            raise
        raise ConfigError(_one_line(said.getvalue())) from None
    if unknown:
        option = unknown[0].split("=")[0]
        raise ConfigError(f"unknown option '{option}'{_nearest(option.replace('_', '-'), option_names())}")
    return config


def _one_line(said: str) -> str:
    """What tyro says, without title, frame and hints: it rules sections off by lines of dashes, and frames them on terminals that have the characters."""
    sections: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines():
        text = line.strip(" │")
        if text and set(text) <= set("─-"):
            sections.append([])
        elif text and not text.startswith(("╭", "╰")):
            sections[-1].append(text)
    message = sections[0 if "╭" in said else 1]
    return " ".join(message).rstrip(".")
