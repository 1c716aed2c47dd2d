"""Writes into docs/planning.md what the commands that it shows print.

``python -m tools.shown_output`` runs each ``$ sluice …`` line of a ``console`` block and puts its
output behind it; tests/cli/test_planning_page.py fails while the page says something else. A
command may end in ``| head -N`` and may go on in the next line after a backslash.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

from sluice.cli.main import run

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
_BLOCK = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_COMMAND = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.MULTILINE)
_HEAD = re.compile(r"\s*\| head -(\d+)$")


def refreshed(text: str) -> str:
    """The page with the output of each command behind it."""
    return _BLOCK.sub(lambda block: _block(block.group()), text)


def _block(text: str) -> str:
    commands: list[str] = _COMMAND.findall(text)
    return "".join(command + output_of(command) for command in commands)


def output_of(shown: str) -> str:
    """What the command prints, errors too."""
    line = shown.removeprefix("$ ").replace("\\\n", " ").strip()
    head = _HEAD.search(line)
    program, *arguments = shlex.split(_HEAD.sub("", line))
    if program != "sluice":
        raise ValueError(f"{line} is not a sluice command")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        run(arguments)
    lines = printed.getvalue().splitlines(keepends=True)
    return "".join(lines if head is None else lines[: int(head.group(1))])


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
