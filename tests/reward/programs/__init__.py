"""Programs that a sandbox meets: hostile.txt does harm where it can; cheats.txt and printed_cheats.txt want a reward without earning it; honest.txt earns one."""

from pathlib import Path

HERE = Path(__file__).parent
MARK = "#### "


def load(name: str) -> dict[str, str]:
    """{title: program} of one of the files."""
    found = {}
    for section in (HERE / f"{name}.txt").read_text().split("\n" + MARK):
        title, _, program = section.removeprefix(MARK).partition("\n")
        found[title] = program + "\n"
    return found
