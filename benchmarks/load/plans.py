"""Plans: which request goes out when, drawn from a seed before a run begins.

The same plan is played against a live engine (``client.py``) and in virtual time (``virtual.py``).
Nothing here measures or sends.
"""

import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

CHAT_PROMPT_TOKENS = 80
CHAT_OUTPUT_TOKENS = 64
# What the chat template and the system message add to the words of a prompt.
FRAME_TOKENS = 17
SYSTEM_TEXT = "Be brief."
# Each is one token of the model's vocabulary with the blank before it.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body back parent face "
    "others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``at_s`` counts from the start of the run; ``slo`` names an SLO class.

    It asks for ``limit_tokens`` where that is set and ends after ``output_tokens`` all the same,
    which only a simulated engine does on demand.
    """

    id: str
    at_s: float
    prompt_tokens: int = CHAT_PROMPT_TOKENS
    output_tokens: int = CHAT_OUTPUT_TOKENS
    slo: str = "chat"
    tenant: str = ""
    limit_tokens: int | None = None

    @property
    def text(self) -> str:
        """A prompt of the right length that shares no beginning with another one's."""
        draw = Random(self.id.partition("~")[0])
        count = max(1, self.prompt_tokens - FRAME_TOKENS)
        return " ".join(draw.choices(WORDS, k=count))


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests by time, and the part of the run that is counted.

    Load is kept up before and after that part, so that neither an empty start nor a quiet end is
    taken for the steady state. After ``end_s`` nothing is waited for.
    """

    asks: tuple[Ask, ...]
    from_s: float
    to_s: float
    end_s: float

    @property
    def counted_s(self) -> float:
        """Length of the part that is counted."""
        return self.to_s - self.from_s


@dataclass(frozen=True, slots=True)
class Span:
    """How long a run is: ``warm_s`` before and ``tail_s`` after the ``counted_s`` that matter.

    ``drain_s`` is waited for answers after the last arrival: what is good has come by then.
    """

    counted_s: float
    warm_s: float = 5.0
    tail_s: float = 3.0
    drain_s: float = 15.0

    @property
    def arriving_s(self) -> float:
        """Time during which requests arrive."""
        return self.warm_s + self.counted_s + self.tail_s

    def plan(self, asks: Sequence[Ask]) -> Plan:
        """A plan of this length."""
        to_s = self.warm_s + self.counted_s
        ordered = tuple(sorted(asks, key=lambda ask: ask.at_s))
        return Plan(ordered, self.warm_s, to_s, self.arriving_s + self.drain_s)


def poisson(
    rate: float, span: Span, seed: int, *, prefix: str = "p", tenant: str = ""
) -> list[Ask]:
    """Chat requests with exponential gaps."""
    asks: list[Ask] = []
    draw, at_s = Random(f"{prefix}{seed}"), 0.0
    while (at_s := at_s + draw.expovariate(rate)) < span.arriving_s:
        asks.append(Ask(f"{prefix}{seed}-{len(asks)}", at_s, tenant=tenant))
    return asks


def azure(path: Path, rate: float, span: Span, seed: int, lengths: "Lengths") -> list[Ask]:
    """A stretch of the trace with its time scaled to the rate, and its lengths scaled and clipped.

    Requests that follow each other in the trace do so here, so bursts and the pairing of prompt
    with output stay.
    """
    rows = trace(path)
    count = round(rate * span.arriving_s)
    first = Random(seed).randrange(max(1, len(rows) - count - 1))
    part = rows[first : first + count + 1]
    scale = span.arriving_s / (part[-1][0] - part[0][0])
    return [
        Ask(f"a{seed}-{first + number}", (t_s - part[0][0]) * scale, *lengths.of(prompt, output))
        for number, (t_s, prompt, output) in enumerate(part[:-1])
    ]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token lengths are multiplied by ``scale``; a request is cut to ``tokens_max`` in all."""

    scale: float
    tokens_max: int

    def of(self, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
        """Prompt and output tokens."""
        output = min(max(2, round(output_tokens * self.scale)), self.tokens_max // 4)
        prompt = max(FRAME_TOKENS + 1, round(prompt_tokens * self.scale))
        return min(prompt, self.tokens_max - output), output


def trace(path: Path) -> list[tuple[float, int, int]]:
    """Arrival, prompt tokens and output tokens of each request of a trace file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [
            (float(row["t_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
            for row in csv.DictReader(file)
        ]


def again(ask: Ask, at_s: float, attempt: int) -> Ask:
    """The same request sent once more by a client that was told to wait."""
    return replace(ask, id=f"{ask.id.partition('~')[0]}~{attempt}", at_s=at_s)
