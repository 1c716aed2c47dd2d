"""How long replicas took to start, by stage, and whether one that is ready was cold or warm.

Told by ``observer`` what is asked of replicas and what they say. Nothing is measured twice: a warm
replica that is woken says again that it is ready, and has not been loaded again.
"""

from sluice.runtime.messages import Ready
from sluice.telemetry.metric_table import Stage


class Starts:
    """The starts of all replicas that run here. ``last`` has the stages of the last of each."""

    def __init__(self) -> None:
        self.last: dict[str, dict[Stage, int]] = {}
        self._asked_ns: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._fresh: set[str] = set()
        self._draining: set[str] = set()

    def asked(self, replica_id: str, now_ns: int) -> None:
        """It is to be started, or woken. One that drains is neither: it goes on."""
        if replica_id in self._draining:
            self._draining.discard(replica_id)
        else:
            self._asked_ns[replica_id] = now_ns

    def drains(self, replica_id: str) -> None:
        """It gets nothing more, and may yet be taken back."""
        self._draining.add(replica_id)

    def over(self, replica_id: str) -> None:
        """Its process is gone, or is not wanted any more."""
        for known in (self._loaded, self._fresh, self._draining):
            known.discard(replica_id)
        self._asked_ns.pop(replica_id, None)

    def is_loaded(self, replica_id: str) -> bool:
        """Whether it has said since it was started that it is ready."""
        return replica_id in self._loaded

    def ready(self, replica_id: str, ready: Ready, now_ns: int) -> dict[Stage, int]:
        """The stages of the start that is over, in nanoseconds; none where it went on serving."""
        asked_ns = self._asked_ns.pop(replica_id, None)
        whole_ns = ready.load_ns if asked_ns is None else now_ns - asked_ns
        if self.is_loaded(replica_id):
            return {} if asked_ns is None else {Stage.WAKE: whole_ns}
        self._loaded.add(replica_id)
        self._fresh.add(replica_id)
        found = {
            Stage.PLACE: max(0, whole_ns - ready.load_ns),
            Stage.LOAD: ready.load_ns - ready.compile_ns,
            Stage.COMPILE: ready.compile_ns,
        }
        self.last[replica_id] = found
        return found

    def is_first(self, replica_id: str) -> bool:
        """Whether the request that it is given is the first since it was loaded."""
        if replica_id not in self._fresh:
            return False
        self._fresh.discard(replica_id)
        return True

    def first_token(self, replica_id: str, taken_ns: int) -> None:
        """The first token of that request came so long after it was given."""
        self.last[replica_id][Stage.FIRST_TOKEN] = taken_ns
