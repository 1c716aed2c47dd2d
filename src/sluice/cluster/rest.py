"""Whether an engine that runs elsewhere is to sleep, and does.

Asked by ``remote.RemoteReplica`` between two looks at its engine. When a replica is warm and not
needed is the fleet's decision.
"""

import logging

from sluice.executors.stream import Sleeper

_log = logging.getLogger(__name__)

_ADVICE = (
    "; it keeps its memory while it is warm: start vLLM with --enable-sleep-mode and "
    "VLLM_SERVER_DEV_MODE=1, or leave out models.NAME.sleep"
)


class Rest:
    """The sleep of one engine. ``wanted`` may be set at any time, and holds after ``settle``.

    How an engine is that was never asked is not known: one before this gateway may have left it
    asleep.
    """

    def __init__(self, name: str, engine: Sleeper) -> None:
        self._name = name
        self._engine = engine
        self.wanted = False
        self._sleeps: bool | None = None
        self._why = ""  # it is not as it is wanted

    @property
    def is_settled(self) -> bool:
        """Whether it can be told to be ready: it is awake, or nobody wants more than a warm one."""
        return self.wanted or self._sleeps is False

    async def settle(self) -> None:
        """Let it be as it is wanted. One that will not sleep is left as it is."""
        wanted = self.wanted
        if self._sleeps is wanted or (wanted and self._why):
            return
        why = await (self._engine.sleep() if wanted else self._engine.wake())
        if not why:
            self._sleeps = wanted
            _log.info("replica %s %s", self._name, "sleeps" if wanted else "is awake")
        elif why != self._why:
            _log.warning("replica %s: %s%s", self._name, why, _ADVICE if wanted else "")
        self._why = why
