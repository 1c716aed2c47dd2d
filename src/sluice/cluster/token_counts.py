"""Tokens of texts that come again and again: counted once, and the text itself is not kept.

Used by ``pipelines`` for passages, whose tokens take longer to count than all else that a pipeline
does with them. Called in any thread.
"""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock

# Of each text a hash and two numbers are kept, some 200 bytes: together less than a megabyte.
TEXTS_MAX = 4096


class TokenCounts:
    """Counts by ``count``, of the latest ``TEXTS_MAX`` texts once.

    Two texts of one length and one hash, by the key of this process, would be taken for one.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._lock = Lock()

    def __call__(self, text: str) -> int:
        """How many tokens a text has."""
        key = hash(text), len(text)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        tokens = self._count(text)
        with self._lock:
            self._known[key] = tokens
            if len(self._known) > TEXTS_MAX:
                self._known.popitem(last=False)
        return tokens
