"""One HTML file that loads nothing: the frame around plots and tables.

Called by ``plan_page.py`` and ``doctor_page.py``, which say what stands in it.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto;
padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .25rem .8rem .25rem 0; text-align: left;
vertical-align: top; border-bottom: 1px solid #8883; }
.plots { display: grid; gap: 1.5rem;
grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
figure { margin: 0; }
svg { width: 100%; height: auto; } small { opacity: .75; }
.wide { overflow-x: auto; } .wide table { min-width: 860px; }
.wide td:first-child { white-space: nowrap; }
"""


def page_of(title: str, parts: Iterable[str]) -> str:
    """The page with this title; ``parts`` are HTML already."""
    name = escape(title)
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>{name}</h1>",
    )
    return "\n".join((*head, *parts, "</body></html>"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are text."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines_of = [
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f"<table>{f'<tr>{titles}</tr>' if head else ''}{''.join(lines_of)}</table>"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all. Raises ``OSError``.

    What is no file, such as ``/dev/stdout``, is written to and stays what it is.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
