"""Prompts: the text and tokens that a problem is put to a model with. Everything that builds a prompt does it here.

    prompts = Prompts(config.data, tokenizer)
    prompts.tokens(problem)                  # int32 [P]
    problems = prompts.fitting(problems)     # without those whose prompts are over-long

With a chat template (the model's folder has one, and data.chat_template is auto): the conversation, rendered with the opening of the answer. The template writes the
special tokens itself. Otherwise: data.system_prompt and a blank line if there is one, the question, data.suffix; the tokenizer adds its special tokens.

A template is a program that came with the model: it runs in Jinja's sandbox, set up as Hugging Face does (transformers, `apply_chat_template`), and can only make text.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal_hpc.config import ConfigError, Data
from areal_hpc.data.datasets import Problem, Problems, without_overlong

if TYPE_CHECKING:
    import numpy as np

    from areal_hpc.models.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that templates may use, out of tokenizer_config.json and special_tokens_map.json."""


_TURN = "the turn of the assistant, 7f3a"
"""Stands for a turn of the model when a template is asked what comes behind it."""


class Prompts:
    """Problem -> prompt, for one model. Raises ConfigError for a template that is malformed (here) or refuses a conversation (on use)."""

    def __init__(self, data: Data, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._render = chat_renderer(tokenizer.files) if data.chat_template == "auto" else None
        self._num_added = len(tokenizer.encode("", add_special_tokens=self._render is None)) + 1  # a word-piece tokenizer may put a space in front

    @property
    def uses_template(self) -> bool:
        return self._render is not None

    def text(self, problem: Problem) -> str:
        """What the model reads, special tokens of the template included."""
        system = self._data.system_prompt
        if self._render:
            *before, (role, last) = problem.messages or (("user", problem.question),)
            turns = [(role, content) for role, content in before if not (system and role == "system")]
            instruction = [("system", system)] if system else []
            return self._render([*instruction, *turns, (role, last + self._data.suffix.rstrip())])
        system = system or "\n\n".join(content for role, content in problem.messages if role == "system")
        return f"{system}\n\n{problem.question}{self._data.suffix}" if system else problem.question + self._data.suffix

    def tokens(self, problem: Problem) -> np.ndarray:
        """Token ids, int32 [P]."""
        return self._tokenizer.encode(self.text(problem), add_special_tokens=self._render is None)

    def reply_tokens(self, text: str) -> np.ndarray:
        """What the model reads when its environment answers a turn, int32 [E]; the answer goes on behind it.

        Without a chat template the text as it is; with one a user's message and the opening of the next turn. The token that ended the model's turn is not
        repeated. Names of special tokens in the text are read as such. Raises ConfigError for a template that shows no turns of the assistant.
        """
        if self._render is None:
            return self._tokenizer.encode(text, add_special_tokens=False)
        rendered = self._render([("user", "?"), ("assistant", _TURN), ("user", text)])
        before, found, rest = rendered.partition(_TURN)
        if not found:
            raise ConfigError(
                f"the model's chat template leaves out the assistant's turns ({before[:60]!r}...), which environments need; use --data.chat-template none"
            )
        tokens = self._tokenizer.encode(rest, add_special_tokens=False)
        return tokens[1:] if len(tokens) and int(tokens[0]) in self._tokenizer.stop_token_ids else tokens

    def is_overlong(self, problem: Problem) -> bool:
        """Whether the prompt has more than data.max_prompt_tokens tokens. A short text needs no counting: no token is less than a character of ASCII."""
        text = self.text(problem)
        limit = self._data.max_prompt_tokens
        if text.isascii() and len(text) + self._num_added <= limit:
            return False
        return len(self._tokenizer.encode(text, add_special_tokens=self._render is None)) > limit

    def fitting(self, problems: Problems) -> Problems:
        """The problems whose prompts are short enough; the others are counted in the report. Raises ConfigError when a side becomes empty."""
        return without_overlong(problems, self.is_overlong, self._data.max_prompt_tokens)


Renderer = Callable[[list[tuple[str, str]]], str]
"""[(role, content), ...] -> text that ends where the answer begins. Raises ConfigError."""


def chat_renderer(files: dict[str, bytes]) -> Renderer | None:
    """The chat template of a tokenizer's files (name -> content); None if they have none. chat_template.jinja comes before the one of tokenizer_config.json."""
    settings = _settings(files, "tokenizer_config.json")
    jinja_file = files.get("chat_template.jinja")
    source = jinja_file.decode("utf-8") if jinja_file is not None else _default_template(settings.get("chat_template"))
    if not source:
        return None
    template = _compile(source)
    values = _special_tokens(_settings(files, "special_tokens_map.json")) | _special_tokens(settings)

    def render(messages: list[tuple[str, str]]) -> str:
        import jinja2

        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            text: str = template.render(messages=conversation, tools=None, documents=None, add_generation_prompt=True, **values)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            roles = ", ".join(role for role, _ in messages)
            raise ConfigError(
                f"the model's chat template refuses a conversation of {roles}: {error}; use --data.chat-template none, or other messages"
            ) from error
        return text

    return render


def _settings(files: dict[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ConfigError(f"{name} of the model's folder: {error}") from error
    return found if isinstance(found, dict) else {}


def _default_template(value: Any) -> str:
    """A template, or the one named "default" of a list of them."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
        if not isinstance(value, str):
            raise ConfigError(f"tokenizer_config.json: none of its chat templates is named 'default'; there are {', '.join(map(repr, named))}")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"tokenizer_config.json: chat_template must be text, found {type(value).__name__}")
    return value or ""


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _compile(source: str) -> Any:
    """The template in the environment that Hugging Face gives it. Raises ConfigError for a syntax error."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}` marks answers for training; prompts hold none, so it is its content."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's way)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)  # Jinja's own escapes for HTML

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template, line {error.lineno}: {error.message}") from error
