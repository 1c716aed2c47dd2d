"""How fast a pool's replicas are, and how long the answers of its requests get.

Learned from load reports and from requests that ran to their end; asked by ``core/pools.py`` and
``core/fleet_replica.py`` for every prediction. Nothing is decided here.
"""

from sluice.core.admission import NS_PER_S
from sluice.core.events import Ended, Report
from sluice.core.lengths import HISTORY_MIN, OutputLengths
from sluice.core.request import EndReason, Request

# Weight of the past against one completed request: about ten requests make the memory.
KEPT_SHARE = 0.9
# What the fastest and least ever seen keep with each report: they halve in about 7,000.
EXTREME_KEPT = 0.9999
# Stand-ins until the first completion or report; Retry-After needs some number from the start.
SERVICE_NS_UNKNOWN = 1 * NS_PER_S
OUTPUT_TOKENS_UNKNOWN = 256


class ServiceTimes:
    """Speeds and output lengths of one model.

    Load reports say how fast a replica is now. Where they do not, as those of remote engines, time
    per token comes from the phases of completed requests. ``mean_output_tokens`` is the mean output
    of the requests that completed of late, ``decode_tokens_per_s`` what a replica gives when it is
    full, ``mean_prefill_tokens`` their mean prompt without what
    was cached.
    """

    def __init__(self) -> None:
        self._lengths = OutputLengths()
        self._prefill_ns = 0.0
        self._prefill_tokens = 0.0
        self._decode_ns = 0.0
        self._output_tokens = 0.0
        self._requests = 0.0
        self._completed = 0
        self._asked_tokens = 0.0
        self._asked = 0.0
        self._fastest_tokens_per_s = 0.0
        self._least_token_ns = 0.0
        self.decode_tokens_per_s = 0.0
        self.mean_output_tokens = OUTPUT_TOKENS_UNKNOWN
        self.mean_prefill_tokens = 0

    def reported(self, report: Report) -> None:
        """Note how fast a replica is when it has little else to do; a change is believed slowly."""
        rate, step_ns = report.prefill_tokens_per_s, report.step_ns
        self._fastest_tokens_per_s = max(EXTREME_KEPT * self._fastest_tokens_per_s, rate)
        full = report.decode_tokens_per_s
        if full > 0:
            kept = KEPT_SHARE if self.decode_tokens_per_s else 0.0
            self.decode_tokens_per_s = kept * self.decode_tokens_per_s + (1.0 - kept) * full
        if step_ns > 0:
            least_ns = self._least_token_ns / EXTREME_KEPT if self._least_token_ns else step_ns
            self._least_token_ns = min(least_ns, step_ns)

    def asked(self, request: Request) -> None:
        """Learn what is asked for, which stands in for what was needed until something was."""
        tokens = min(request.output_tokens_max, OUTPUT_TOKENS_UNKNOWN)
        self._asked_tokens = KEPT_SHARE * self._asked_tokens + tokens
        self._asked = KEPT_SHARE * self._asked + 1.0
        if not self._requests:
            self.mean_output_tokens = round(self._asked_tokens / self._asked)

    def completed(self, ended: Ended, request: Request) -> None:
        """Learn from one request that ran to its end."""
        usage, phases = ended.usage, ended.phases
        computed = max(1, usage.prompt_tokens - usage.cached_tokens)
        output = usage.completion_tokens // request.choices
        self._prefill_ns = KEPT_SHARE * self._prefill_ns + phases.prefill_ns
        self._prefill_tokens = KEPT_SHARE * self._prefill_tokens + computed
        decode_ns = phases.decode_ns + phases.preempted_ns
        self._decode_ns = KEPT_SHARE * self._decode_ns + decode_ns
        self._output_tokens = KEPT_SHARE * self._output_tokens + output
        self._requests = KEPT_SHARE * self._requests + 1.0
        self.mean_output_tokens = max(1, round(self._output_tokens / self._requests))
        self.mean_prefill_tokens = round(self._prefill_tokens / self._requests)
        self._completed += 1
        cut = ended.reason is EndReason.LENGTH
        self._lengths.observe(output, request.slo_class, cut=cut)

    def output_tokens(self, request: Request, produced: int, quantile: float) -> int:
        """Further tokens of one choice that this share of such requests do not exceed.

        While few were seen it is the mean of those for every quantile. Of one that is longer than
        what is known, as much again as it produced is expected: none is taken to be about to end
        for being long.
        """
        left = max(1, request.output_tokens_max - produced)
        length: int | None = self.mean_output_tokens if self._requests else OUTPUT_TOKENS_UNKNOWN
        if self._completed >= HISTORY_MIN:
            length = self._lengths.length(produced, quantile, request.slo_class)
        if length is None:
            return min(left, max(produced, self.mean_output_tokens)) if produced else left
        return min(left, length - produced if length > produced else max(1, produced))

    def prefill_ns(self, tokens: int, report: Report | None) -> int:
        """Predicted time to compute so many prompt tokens on a replica that reported this."""
        if report is not None and report.prefill_tokens_per_s > 0:
            return round(tokens * NS_PER_S / report.prefill_tokens_per_s)
        if self._requests:
            return round(tokens * self._prefill_ns / self._prefill_tokens)
        return 0

    def least_prefill_ns(self, tokens: int) -> int | None:
        """Time to compute so many prompt tokens on a replica that has nothing else to do.

        ``None`` where nothing is known yet.
        """
        fastest = self._fastest_tokens_per_s
        if fastest:
            return round(tokens * NS_PER_S / fastest)
        return self.prefill_ns(tokens, None) if self._requests else None

    def least_token_ns(self) -> int | None:
        """Time between two tokens of a sequence that is nearly alone, ``None`` where unknown."""
        return round(self._least_token_ns) or None

    def token_ns(self, report: Report | None) -> int:
        """Predicted time between two tokens of one sequence on a replica that reported this."""
        if report is not None and report.step_ns > 0:
            return report.step_ns
        if self._requests:
            return round(self._decode_ns / max(1.0, self._output_tokens))
        return SERVICE_NS_UNKNOWN // OUTPUT_TOKENS_UNKNOWN

    def work_s(self, prefill_tokens: int, output_tokens: int, seats: int) -> float | None:
        """Time that so many tokens take of a replica that is as full as it can be, ``None`` where
        its speed is unknown. Without reports a request takes its share of the ``seats``."""
        full = self.decode_tokens_per_s
        if full:
            return (self.least_prefill_ns(prefill_tokens) or 0) / NS_PER_S + output_tokens / full
        if not self._requests:
            return None
        whole_ns = self.prefill_ns(prefill_tokens, None) + output_tokens * self.token_ns(None)
        return whole_ns / max(1, seats) / NS_PER_S

    def mean_ns(self, report: Report | None) -> int:
        """Predicted time that a request of the usual size is on board of a replica."""
        if not self._requests and (report is None or report.step_ns <= 0):
            return SERVICE_NS_UNKNOWN
        prefill_ns = self.prefill_ns(self.mean_prefill_tokens, report)
        return max(1, prefill_ns + self.mean_output_tokens * self.token_ns(report))
