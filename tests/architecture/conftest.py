"""What the tests of this folder look at: the project's own source, parsed once."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "sluice"


@dataclass(frozen=True, slots=True)
class Module:
    """One source file."""

    path: Path
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        """Path below ``src/sluice``, with forward slashes."""
        return self.path.relative_to(SOURCE).as_posix()


def parse(path: Path) -> Module:
    """Read and parse one file."""
    text = path.read_text(encoding="utf-8")
    return Module(path, text, ast.parse(text))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> list[Module]:
    """All of ``src/sluice``."""
    return [parse(path) for path in sorted(SOURCE.rglob("*.py"))]
