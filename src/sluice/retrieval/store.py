"""The embedded store: one SQLite file for each collection, searched with BM25 by FTS5.

Filled by ``sluice docs``, searched by ``embedded`` while it is being filled: readers see a state
between two changes (write-ahead log). An object is used by one thread at a time.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from sluice.retrieval.documents import Document
from sluice.retrieval.passages import Passage, RetrievalFailed, RetrievalLate
from sluice.retrieval.terms import asked, indexed

_SUFFIX = ".sqlite"
_FORMAT = 1
_BUSY_S = 5.0
# Instructions of SQLite's machine between two looks at the clock: some tens of microseconds.
_INSTRUCTIONS = 2_000
_TABLES = f"""
PRAGMA user_version = {_FORMAT};
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, sha256 TEXT NOT NULL, passages INTEGER NOT NULL,
    chars INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passages (
    key INTEGER PRIMARY KEY, document TEXT NOT NULL, number INTEGER NOT NULL, text TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_of ON passages (document);
CREATE VIRTUAL TABLE IF NOT EXISTS terms USING fts5 (
    text, tokenize = 'unicode61 remove_diacritics 2'
);
"""
_SEARCH = """
SELECT passages.document, passages.number, passages.text, documents.title, found.score
FROM (SELECT rowid, -bm25(terms) AS score FROM terms WHERE terms MATCH ? ORDER BY rank LIMIT ?)
AS found
JOIN passages ON passages.key = found.rowid
JOIN documents ON documents.id = passages.document
ORDER BY found.score DESC, passages.key
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """A document as it is listed."""

    id: str
    title: str
    passages: int
    chars: int


class DocumentStore:
    """One collection. Raises ``RetrievalFailed`` where its file cannot be used."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, folder: Path, collection: str) -> "DocumentStore":
        """A collection that exists."""
        path = path_of(folder, collection)
        if not path.is_file():
            raise RetrievalFailed(f"there is no collection {collection}; fill it with sluice docs")
        return cls(_connected(path))

    @classmethod
    def create(cls, folder: Path, collection: str) -> "DocumentStore":
        """A collection, made where there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        connection = _connected(path_of(folder, collection))
        with _failing():
            connection.execute("PRAGMA journal_mode = WAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > _FORMAT:
                raise RetrievalFailed(f"the collection {collection} was made by a later version")
            connection.executescript(_TABLES)
        return cls(connection)

    def close(self) -> None:
        """Close its file."""
        self._connection.close()

    # ----------------------------------------------------------------------------------- changing

    def add(self, document: Document) -> bool:
        """Store a document in place of an earlier one of its id; false where nothing changed."""
        digest = sha256("\0".join((document.title, *document.passages)).encode()).hexdigest()
        with _failing(), self._connection as change:
            known = change.execute("SELECT sha256 FROM documents WHERE id = ?", (document.id,))
            if known.fetchone() == (digest,):
                return False
            self._delete(document.id)
            change.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?)",
                (
                    document.id,
                    document.title,
                    digest,
                    len(document.passages),
                    sum(map(len, document.passages)),
                ),
            )
            for number, text in enumerate(document.passages, 1):
                added = change.execute(
                    "INSERT INTO passages (document, number, text) VALUES (?, ?, ?)",
                    (document.id, number, text),
                )
                # The title says what all passages are about.
                change.execute(
                    "INSERT INTO terms (rowid, text) VALUES (?, ?)",
                    (added.lastrowid, indexed(f"{document.title}\n{text}")),
                )
        return True

    def remove(self, document_id: str) -> bool:
        """Delete a document; false where there is none."""
        with _failing(), self._connection:
            return self._delete(document_id)

    def _delete(self, document_id: str) -> bool:
        execute = self._connection.execute
        keys = execute("SELECT key FROM passages WHERE document = ?", (document_id,)).fetchall()
        self._connection.executemany("DELETE FROM terms WHERE rowid = ?", keys)
        execute("DELETE FROM passages WHERE document = ?", (document_id,))
        return execute("DELETE FROM documents WHERE id = ?", (document_id,)).rowcount > 0

    # ------------------------------------------------------------------------------------ reading

    def documents(self) -> list[Stored]:
        """All documents, by id."""
        with _failing():
            rows = self._connection.execute(
                "SELECT id, title, passages, chars FROM documents ORDER BY id"
            )
            return [Stored(*row) for row in rows]

    def search(
        self,
        question: str,
        passages_max: int,
        within_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> list[Passage]:
        """The best passages, best first. Raises ``RetrievalLate`` when the time is over."""
        match = asked(question)
        if not match:
            return []
        ends_s = clock_s() + within_s
        self._connection.set_progress_handler(lambda: clock_s() > ends_s, _INSTRUCTIONS)
        try:
            with _failing():
                rows = self._connection.execute(_SEARCH, (match, passages_max)).fetchall()
        except RetrievalFailed:
            if clock_s() > ends_s:
                raise RetrievalLate("the search was stopped at its deadline") from None
            raise
        finally:
            self._connection.set_progress_handler(None, 0)
        return [Passage(*row) for row in rows]


def path_of(folder: Path, collection: str) -> Path:
    """The file of a collection."""
    return folder / f"{collection}{_SUFFIX}"


def collections_in(folder: Path) -> list[str]:
    """The names of all collections."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}"))


def _connected(path: Path) -> sqlite3.Connection:
    with _failing():
        return sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)


@contextmanager
def _failing() -> Iterator[None]:
    """What SQLite finds wrong, in its own words: they hold no text of documents."""
    try:
        yield
    except sqlite3.Error as error:
        raise RetrievalFailed(f"the collection cannot be used: {error}") from error
