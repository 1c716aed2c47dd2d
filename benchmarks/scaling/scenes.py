"""What is played: parts of published traces on replicas so small that a handful keeps up.

Requests keep their own lengths and times. The rate is scaled by leaving requests out, each with the
same chance, never by stretching time, so that cold starts keep their proportion to the load's
changes. What is left needs about five replicas of few sequences: a fleet in which one replica more
or less counts. All of this makes chance larger than in a fleet that serves the whole trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from random import Random

from sluice.core.admission import NS_PER_S
from sluice.core.costmodel import Coefficients
from sluice.core.roster import BatchingLimits
from sluice.workload.asks import Ask, Workload
from sluice.workload.servegen import ServeGen, is_servegen
from sluice.workload.traces import Trace, facts_of

BLOCK = 64
CHUNK = 2048


@dataclass(frozen=True)
class Scene:
    """One part of a trace, and the replicas that it is played on.

    ``share`` of the requests are kept, up to ``to_s`` (and, of clients, from ``from_s``). A replica
    runs ``seats`` sequences. Its steps take ``step_s``, a prompt token ``token_s`` and a row of
    decoding ``row_s`` more.
    """

    name: str
    file: str
    to_s: float
    share: float
    seats: int
    ttft_s: float
    tpot_s: float
    step_s: float = 0.040
    token_s: float = 0.0004
    row_s: float = 0.002
    from_s: float = 0.0
    context: int = 32_768

    @property
    def coefficients(self) -> Coefficients:
        """How long steps take."""
        return Coefficients(self.step_s * 1e9, self.token_s * 1e9, self.row_s * 1e9, 0.0, 0.0)

    @property
    def batching(self) -> BatchingLimits:
        """What a replica holds."""
        blocks = max(self.context, self.seats * self.context // 4) // BLOCK
        return BatchingLimits(
            self.context,
            BLOCK,
            blocks,
            sequences_max=self.seats,
            chunk_tokens_max=CHUNK,
            step_ns_max=NS_PER_S,
        )

    def work_s(self, ask: Ask) -> float:
        """Replica seconds that a request takes of a replica that is full, with nothing cached."""
        full_s = (self.step_s + self.row_s * self.seats) / self.seats
        return ask.prompt_tokens * self.token_s + ask.output_tokens * full_s


class Within(ServeGen):
    """The clients of a part of the time."""

    def __init__(self, path: Path, from_s: float, to_s: float) -> None:
        super().__init__(path)
        kept = {
            client: [one for one in windows if from_s <= one.start_s < to_s]
            for client, windows in self.clients.items()
        }
        found = {client: windows for client, windows in kept.items() if windows}
        object.__setattr__(self, "clients", found)


@dataclass(frozen=True)
class Part:
    """The requests of a scene, drawn once."""

    scene: Scene
    folder: Path
    seed: int

    @cached_property
    def drawn(self) -> list[Ask]:
        """All of them, in order."""
        return list(self._draw())

    def asks(self, seed: int) -> Iterator[Ask]:  # noqa: ARG002 - they are drawn once
        """See ``Workload``."""
        return iter(self.drawn)

    def _draw(self) -> Iterator[Ask]:
        scene, number = self.scene, 0
        chance, end_ns = Random(f"{self.seed}/{scene.name}"), self.span_s * NS_PER_S
        for ask in takewhile(lambda ask: ask.at_ns < end_ns, self._whole().asks(self.seed)):
            fits = ask.prompt_tokens + ask.output_tokens <= scene.context - BLOCK
            if chance.random() < scene.share and fits:
                yield replace(ask, number=number)
                number += 1

    def _whole(self) -> Workload:
        path = self.folder / self.scene.file
        if is_servegen(path):
            return Within(path, self.scene.from_s, self.scene.to_s)
        return Trace(facts_of(path))

    @property
    def span_s(self) -> float:
        """How long it goes on."""
        return self.scene.to_s - self.scene.from_s

    def rates(self, bucket_s: float) -> list[float]:
        """Replicas that the requests of each bucket keep busy."""
        rates = [0.0] * (int(self.span_s / bucket_s) + 1)
        for ask in self.drawn:
            rates[int(ask.at_ns / NS_PER_S / bucket_s)] += self.scene.work_s(ask) / bucket_s
        return rates


_LARGE = "servegen_m_large_rates_day0-8.csv.gz"
_SMALL = "servegen_m_small_rates_day0-8.csv.gz"
_R1 = "servegen_deepseek_r1_rates_day0.csv.gz"
SCENES = (
    Scene("azure-conv", "azure2023_conv_first60pct.csv.gz", 2100, 0.25, 4, 5.0, 0.25),
    Scene(
        "azure-code", "azure2023_code_first60pct.csv.gz", 2050, 0.5, 4, 12.0, 0.5,
        token_s=0.0008,
    ),
    Scene(
        "mooncake-conv", "mooncake_conversation_first60pct.csv.gz", 2120, 0.33, 4, 20.0, 0.25,
        token_s=0.0001, context=131_072,
    ),
    Scene(
        "mooncake-synth", "mooncake_synthetic.csv.gz", 1020, 0.5, 4, 20.0, 0.25,
        token_s=0.0001, context=131_072,
    ),
    Scene(
        "m-large", _LARGE, 82_200, 0.002, 2, 10.0, 0.5, 0.08, 0.0008, 0.004, from_s=75_000
    ),
    Scene(
        "m-small", _SMALL, 612_600, 0.0008, 2, 10.0, 0.8, 0.32, 0.0032, 0.016, from_s=605_400
    ),
    Scene("r1", _R1, 80_400, 1 / 80, 4, 10.0, 0.25, 0.08, 0.0004, 0.004, from_s=73_200),
)  # fmt: skip
