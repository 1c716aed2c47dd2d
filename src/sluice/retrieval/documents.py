"""Files to passages: what is read, how its text is found, and where it is cut.

Called by ``sluice docs add``. A passage is a run of whole paragraphs of about ``PASSAGE_CHARS``;
a longer paragraph is cut between sentences, or words. Nothing is stored here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

# About 200 tokens of English: enough to hold an answer, and small enough that several fit.
PASSAGE_CHARS = 800
FILE_BYTES_MAX = 16 * 1024**2
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|(?<=[。！？])")
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_TITLE_CHARS_MAX = 120
# What follows a tag or comment that never ends is looked at anew for each "<" in it when the parser
# is closed: of more than this its text is taken as it stands.
_UNCLOSED_CHARS_MAX = 4096
_TAG = re.compile(r"<[^<>]*>")


class Unreadable(Exception):
    """A file that holds no text; the message says why."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document as it is stored. ``id`` is the path that it was given by."""

    id: str
    title: str
    passages: tuple[str, ...]


def files_below(path: Path) -> Iterator[Path]:
    """The file itself, or all files below a folder in order of their names; none that is hidden."""
    if not path.is_dir():
        yield path
        return
    for found in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in found.relative_to(path).parts)
        if found.is_file() and not hidden:
            yield found


def read_document(path: Path) -> Document:
    """A file as passages. Raises ``Unreadable``, or ``OSError``."""
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise Unreadable("has a name that is not UTF-8") from None
    if not path.is_file():
        raise Unreadable("is no regular file")  # a device has no end, and a pipe may have no start
    with path.open("rb") as file:
        content = file.read(FILE_BYTES_MAX + 1)
    if len(content) > FILE_BYTES_MAX:
        raise Unreadable(f"has more than {FILE_BYTES_MAX // 1024**2} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise Unreadable("is not text: it has zero bytes")
    title = ""
    if path.suffix.lower() in _HTML_SUFFIXES:
        title, text = _text_of_html(text)
    passages = tuple(passages_of(text))
    if not passages:
        raise Unreadable("has no text")
    return Document(path.as_posix(), title or _title_of(text), passages)


def passages_of(text: str) -> Iterator[str]:
    """The text in pieces of at most ``PASSAGE_CHARS`` where it has any place to cut."""
    held = ""
    for paragraph in _PARAGRAPH.split(text.replace("\r\n", "\n")):
        for piece in _pieces(paragraph.strip()):
            if held and len(held) + len(piece) + 2 > PASSAGE_CHARS:
                yield held
                held = ""
            held = f"{held}\n\n{piece}" if held else piece
    if held:
        yield held


def _pieces(paragraph: str) -> Iterator[str]:
    """A paragraph whole where it is short enough, else cut as late as the limit allows."""
    at = 0  # what is left is not copied: a file may be one paragraph
    while len(paragraph) - at > PASSAGE_CHARS:
        limit = at + PASSAGE_CHARS
        ends = [found.start() for found in _SENTENCE.finditer(paragraph, at + 1, limit)]
        cut = ends[-1] if ends else paragraph.rfind(" ", at + 1, limit)
        if cut <= at:
            cut = limit
        yield paragraph[at:cut].strip()
        at = cut
        while paragraph[at].isspace():  # its end is none
            at += 1
    if paragraph:
        yield paragraph[at:]


def _title_of(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip()), "")
    return first.strip("#=*- \t")[:_TITLE_CHARS_MAX]


def _text_of_html(page: str) -> tuple[str, str]:
    """Title and visible text of a page; blocks become paragraphs."""
    reader = _HtmlText()
    reader.feed(page)
    if len(reader.rawdata) <= _UNCLOSED_CHARS_MAX:
        reader.close()
    else:
        reader.handle_data(_TAG.sub(" ", reader.rawdata))
    return " ".join("".join(reader.title).split())[:_TITLE_CHARS_MAX], "".join(reader.text)


class _HtmlText(HTMLParser):
    """Collects what a reader would see."""

    _UNSEEN = frozenset({"script", "style", "template", "noscript"})
    _BLOCKS = frozenset({
        "p", "div", "li", "ul", "ol", "table", "tr", "section", "article", "br", "pre",
        "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "header", "footer", "nav",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.text: list[str] = []
        self._unseen = 0
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Note what begins here."""
        self._unseen += tag in self._UNSEEN
        self._in_title = tag == "title"
        if tag in self._BLOCKS:
            self.text.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        """Note what ends here."""
        if tag in self._UNSEEN:
            self._unseen = max(0, self._unseen - 1)
        self._in_title = False
        if tag in self._BLOCKS:
            self.text.append("\n\n")

    def handle_data(self, piece: str) -> None:
        """Keep text that is seen."""
        if not self._unseen:
            (self.title if self._in_title else self.text).append(piece)
