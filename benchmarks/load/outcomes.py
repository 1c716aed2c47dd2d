"""What became of each request, in the same form whether it was live or in virtual time."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.load.answers import Answer
from benchmarks.load.plans import Ask


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a run. Times are seconds from the planned time unless said otherwise.

    ``at_s`` is the planned time in the run, ``status`` 0 where no answer came. ``whole`` says that
    the answer is complete. ``text_s`` are the times of its chunks in the run. ``lag_s`` is how much
    later than planned it was sent.
    """

    id: str
    at_s: float
    slo: str
    tenant: str
    status: int
    whole: bool
    prompt_tokens: int
    tokens: int = 0
    text_s: tuple[float, ...] = ()
    refused_s: float | None = None
    lag_s: float = 0.0
    reason: str = ""
    degraded: str = ""
    retry_after_s: float | None = None
    should_retry: bool | None = None

    @property
    def served(self) -> bool:
        """Whether it was not refused; one that was never answered counts as served badly."""
        return self.status in {0, 200}

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.text_s[0] - self.at_s if self.text_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` for an answer in one chunk."""
        if len(self.text_s) < 2 or self.tokens < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between its chunks."""
        return [later - earlier for earlier, later in pairwise(self.text_s)]

    def good(self, targets: "Targets") -> bool:
        """Whether it is complete and inside its targets."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        return (
            self.status == 200
            and self.whole
            and ttft_s is not None
            and ttft_s <= targets.ttft_s
            and (tpot_s is None or tpot_s <= targets.tpot_s)
        )


@dataclass(frozen=True, slots=True)
class Targets:
    """Times to be met by chat requests; ``stream_tpot_s`` by streams beside long prompts."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2
    stream_tpot_s: float = 0.06

    @property
    def classes(self) -> Mapping[str, tuple[float, float]]:
        """TTFT and TPOT of each SLO class that requests name.

        Streams are read as they come; steps beside long prompts take what their target allows, so
        it is to be a little less than twice the p99 of their gaps when ten of them are alone. Long
        prompts are in no hurry.
        """
        chat = (self.ttft_s, self.tpot_s)
        return {"chat": chat, "stream": (self.ttft_s, self.stream_tpot_s), "long": (60.0, 0.5)}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what became of its requests, and what is known of the engine meanwhile.

    At ``end_s`` what had no answer was left. ``facts`` are figures by name, few for engines that
    tell nothing.
    """

    outcomes: tuple[Outcome, ...]
    from_s: float
    to_s: float
    end_s: float
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def counted(self) -> list[Outcome]:
        """The requests of the part that counts."""
        return [one for one in self.outcomes if self.from_s <= one.at_s < self.to_s]

    @property
    def counted_s(self) -> float:
        """Length of that part."""
        return self.to_s - self.from_s

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Run":
        """Back from plain values."""
        outcomes = tuple(
            Outcome(**{**one, "text_s": tuple(one["text_s"])}) for one in document["outcomes"]
        )
        rest = {name: document[name] for name in ("from_s", "to_s", "end_s", "facts")}
        return cls(outcomes, **rest)


def outcome_of(
    ask: Ask, answer: Answer, planned_s: float, sent_s: float | None, began_s: float
) -> Outcome:
    """What a live answer says; times of the clock become times of the run."""
    refused = answer.status not in {0, 200} and answer.head_s is not None
    return Outcome(
        id=ask.id,
        at_s=planned_s - began_s,
        slo=ask.slo,
        tenant=ask.tenant,
        status=answer.status,
        whole=answer.whole,
        prompt_tokens=ask.prompt_tokens,
        tokens=answer.tokens,
        text_s=tuple(round(t_s - began_s, 5) for t_s in answer.text_s),
        refused_s=answer.head_s - planned_s if refused and answer.head_s is not None else None,
        lag_s=0.0 if sent_s is None else sent_s - planned_s,
        reason=answer.reason,
        degraded=answer.degraded,
        retry_after_s=answer.retry_after_s,
        should_retry=answer.should_retry,
    )
