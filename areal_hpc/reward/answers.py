"""The answer a model marked as its last: what follows the last "####" of its text, up to the end of that line."""

from __future__ import annotations

MARKER = "####"


def extract(text: str) -> str | None:
    """The marked answer without surrounding white space; None without a marker, or with nothing behind the last one."""
    _, marker, rest = text.rpartition(MARKER)
    answer = rest.partition("\n")[0].strip()
    return answer if marker and answer else None
