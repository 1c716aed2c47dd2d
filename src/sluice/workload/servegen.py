"""Traffic described per client, as ServeGen publishes it: a rate and a burstiness for each window.

Xiang et al., ServeGen (arXiv 2505.09999). One file holds, for each client and window of ten
minutes, the law of the gaps between its requests; a second one the quantiles of its lengths. The
rate of the whole is scaled by taking a part of the requests of every client, so that the shape of
each one's bursts stays.
"""

import csv
import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from heapq import merge
from math import ceil, isfinite
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import NamedTuple

from sluice.core.admission import NS_PER_S
from sluice.workload.arrivals import RATE_RPS_MAX, checked_rate
from sluice.workload.asks import Ask, BadWorkload, Part, own_text
from sluice.workload.lengths import TOKENS_MAX, Empirical
from sluice.workload.mixes import Mix
from sluice.workload.synthetic import Names

WINDOW_S = 600.0
TIME_S_MAX = 1e11
SHAPE_MIN = 1e-3
_RATES, _TOKENS = "_rates_", "_token_quantiles_"
_LAWS = ("Gamma", "Weibull")


class Window(NamedTuple):
    """Ten minutes of one client: the law of its gaps with its shape and scale."""

    start_s: float
    rate_rps: float
    law: str
    shape: float
    scale: float


def is_servegen(path: Path) -> bool:
    """Whether the file holds rates of clients."""
    return {"client", "rate_rps", "dist"} <= set(_header(path))


@dataclass(frozen=True, eq=False)
class ServeGen:
    """The traffic of all clients. ``rate_rps`` None keeps its mean rate.

    Raises ``BadWorkload`` where a file cannot be used.
    """

    path: Path
    rate_rps: float | None = None
    mix: Mix = field(default_factory=Mix)
    output_tokens_max: int | None = None

    @cached_property
    def clients(self) -> Mapping[int, list[Window]]:
        """The windows of each client, in order."""
        found: dict[int, list[Window]] = defaultdict(list)
        for line, row in _rows(self.path):
            try:
                window = Window(
                    float(row["t_s"]),
                    float(row["rate_rps"]),
                    row["dist"],
                    float(row["p1"]),
                    float(row["p2"]),
                )
                client = int(row["client"])
            except (KeyError, TypeError, ValueError):
                raise BadWorkload(
                    f"{self.path}:{line}: client, t_s, rate_rps, p1 and p2 must be numbers"
                ) from None
            _check(f"{self.path}:{line}", window)
            found[client].append(window)
        if not any(window.rate_rps for windows in found.values() for window in windows):
            raise BadWorkload(f"{self.path} has no clients with a rate above 0")
        return found

    @cached_property
    def lengths(self) -> Mapping[int, tuple[Empirical, Empirical]]:
        """Input and output lengths of the clients that have them, over all of the time."""
        path = self.path.with_name(self.path.name.replace(_RATES, _TOKENS))
        if path == self.path or not path.is_file():
            raise BadWorkload(
                f"{self.path} has no lengths: the file with *{_TOKENS}* in its name belongs beside "
                f"the one with *{_RATES}*"
            )
        kept: dict[int, dict[str, Empirical]] = defaultdict(dict)
        for line, row in _rows(path):
            client, name, lengths = _lengths_in(f"{path}:{line}", row)
            kept[client].setdefault(name, lengths)
        found = {
            client: (fields["input_tokens"], fields["output_tokens"])
            for client, fields in sorted(kept.items())
            if {"input_tokens", "output_tokens"} <= fields.keys()
        }
        if not found:
            raise BadWorkload(f"{path} has no client with both input_tokens and output_tokens")
        return found

    @property
    def mean_rate_rps(self) -> float:
        """Requests per second over the whole time."""
        windows = [window for client in self.clients.values() for window in client]
        starts = [window.start_s for window in windows]
        span_s = max(starts) - min(starts) + WINDOW_S
        return sum(window.rate_rps for window in windows) * WINDOW_S / span_s

    def mean_tokens(self) -> tuple[float, float]:
        """Input and output, weighed by traffic."""
        total = prompt = output = 0.0
        for client, windows in self.clients.items():
            weight = sum(window.rate_rps for window in windows)
            lengths = self._lengths_of(client)
            total += weight
            prompt += weight * lengths[0].mean
            output += weight * lengths[1].mean
        return prompt / total, output / total

    def asks(self, seed: int) -> Iterator[Ask]:
        """See ``Workload``. Ends with the last window."""
        wanted = self.mean_rate_rps if self.rate_rps is None else checked_rate(self.rate_rps)
        # More than there is comes from copies of the clients that keep their own time.
        copies = ceil(wanted / self.mean_rate_rps - 1e-9)
        share = wanted / self.mean_rate_rps / copies
        first_s = min(windows[0].start_s for windows in self.clients.values())
        streams = [
            self._client(client, share, Random(f"{seed}/{client}/{copy}"))
            for client in sorted(self.clients)
            for copy in range(copies)
        ]
        names = Names(self.mix, seed)
        for number, (at_s, prompt, output) in enumerate(merge(*streams, key=itemgetter(0))):
            at_ns = round((at_s - first_s) * NS_PER_S)
            parts = (Part(own_text(number), prompt),)
            yield Ask(number, at_ns, parts, output, self.output_tokens_max, *names.draw())

    def _client(self, client: int, share: float, draw: Random) -> Iterator[tuple[float, int, int]]:
        prompts, outputs = self._lengths_of(client)
        for start_s, _, law, shape, scale in self.clients[client]:
            gap = _gaps(law, draw)
            at_s = start_s + gap(shape, scale) * draw.random()  # somewhere within a gap
            while at_s < start_s + WINDOW_S:
                kept = draw.random() < share
                lengths = prompts.draw(draw), outputs.draw(draw)
                if kept:
                    yield at_s, *lengths
                at_s += gap(shape, scale)

    def _lengths_of(self, client: int) -> tuple[Empirical, Empirical]:
        """Those of the client, or of another one where the source does not tell them."""
        known = self.lengths
        if client in known:
            return known[client]
        others = list(known.values())
        return others[client % len(others)]


def _check(where: str, window: Window) -> None:
    """Raises ``BadWorkload`` where no requests can come by it."""
    if not (0.0 <= window.start_s <= TIME_S_MAX and 0.0 <= window.rate_rps <= RATE_RPS_MAX):
        raise BadWorkload(
            f"{where}: t_s is {window.start_s:g} and rate_rps {window.rate_rps:g}; they must be 0 "
            f"or more, and at most {TIME_S_MAX:g} and {RATE_RPS_MAX:g}"
        )
    # A smaller scale would be more requests in a window than there is any use for.
    least = 1.0 / RATE_RPS_MAX
    known = window.law in _LAWS and isfinite(window.shape) and isfinite(window.scale)
    if not known or window.shape < SHAPE_MIN or window.scale < least:
        raise BadWorkload(
            f"{where}: dist is {window.law!r} with p1 {window.shape:g} and p2 {window.scale:g}; it "
            f"must be {' or '.join(_LAWS)} with p1 at least {SHAPE_MIN:g} and p2 {least:g}"
        )


def _lengths_in(where: str, row: Mapping[str, str]) -> tuple[int, str, Empirical]:
    """Client, what is measured, and its distribution. Raises ``BadWorkload``."""
    try:
        # The name of fields beyond the header is None.
        quantiles = tuple(
            (float(name[1:]) / 100, float(value))
            for name, value in row.items()
            if name and name[0] == "q"
        )
        client, measured = int(row["client"]), row["field"]
    except (KeyError, TypeError, ValueError):
        raise BadWorkload(f"{where}: client and quantiles must be numbers of a field") from None
    if not quantiles or any(not 0.0 <= tokens <= TOKENS_MAX for _, tokens in quantiles):
        raise BadWorkload(f"{where}: quantiles q… must be there, of 0 to {TOKENS_MAX:,} tokens")
    return client, measured, Empirical(quantiles)


def _gaps(law: str, draw: Random) -> Callable[[float, float], float]:
    """Draws gaps by shape and scale."""
    if law == "Gamma":
        return draw.gammavariate
    return lambda shape, scale: draw.weibullvariate(scale, shape)


def _header(path: Path) -> list[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.readline().strip().split(",")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return []


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise BadWorkload(f"cannot read {path}: {error}") from None
