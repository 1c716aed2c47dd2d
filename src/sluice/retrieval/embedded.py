"""The retriever over the embedded store: searches run on threads, so that nothing waits for disk.

Each thread has a connection of its own. A search that is given up goes on to its deadline at most,
which SQLite keeps itself.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice.retrieval.passages import Passage, RetrievalFailed, RetrievalLate
from sluice.retrieval.store import DocumentStore, path_of

_THREADS = 2


class EmbeddedRetriever:
    """Finds passages in one collection; see ``passages.Retriever``.

    The collection may be filled, emptied and deleted meanwhile.
    """

    def __init__(self, folder: Path, collection: str) -> None:
        self._folder, self._collection = folder, collection
        self._threads = ThreadPoolExecutor(_THREADS, "retrieval")
        self._own = threading.local()
        self._open = set[DocumentStore]()

    async def find(self, question: str, passages_max: int, within_s: float) -> Sequence[Passage]:
        """The best passages, best first. Raises ``RetrievalFailed``."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        search = loop.run_in_executor(
            self._threads, self._search, question, passages_max, ends_s, loop
        )
        return await search

    def _search(
        self, question: str, passages_max: int, ends_s: float, loop: asyncio.AbstractEventLoop
    ) -> list[Passage]:
        left_s = ends_s - loop.time()
        if left_s <= 0:
            raise RetrievalLate("other searches took its time")
        try:
            return self._store().search(question, passages_max, left_s)
        except RetrievalLate:
            raise
        except RetrievalFailed:
            self._forget()
            raise

    def _store(self) -> DocumentStore:
        """The connection of this thread, opened again where the file is another one by now."""
        try:
            found = path_of(self._folder, self._collection).stat()
        except OSError:
            self._forget()
            return DocumentStore.open(self._folder, self._collection)
        file = (found.st_dev, found.st_ino)
        if getattr(self._own, "file", None) != file:
            self._forget()
            self._own.store = DocumentStore.open(self._folder, self._collection)
            self._own.file = file
            self._open.add(self._own.store)
        store: DocumentStore = self._own.store
        return store

    def _forget(self) -> None:
        if getattr(self._own, "file", None) is not None:
            self._own.file = None
            self._open.discard(self._own.store)
            self._own.store.close()

    async def close(self) -> None:
        """Let searches end, at their deadlines at most, and close the collection."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        for store in self._open:
            store.close()
