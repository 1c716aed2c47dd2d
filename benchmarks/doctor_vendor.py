"""A vendor behind the gateway, for ``doctor_incidents``: a small model of its own."""

import heapq
from collections.abc import Sequence
from pathlib import Path
from random import Random

from benchmarks.doctor_cases import MODEL, NS, Case
from benchmarks.doctor_traffic import Place, Wish
from sluice.telemetry import records
from sluice.telemetry.journal_file import JournalFile
from sluice.telemetry.records import AnyRecord


class Vendor:
    """Two upstreams of a vendor: latency, a budget of requests per second, and retries after 429.

    Writes what the gateway's observer would write.
    """

    RETRY_S, TRIES = 1.0, 4

    def __init__(self, case: Case, faults: dict[str, float], folder: Path | None) -> None:
        self._draw = Random(f"{case.seed}/vendor")
        self._faults = faults
        self._file = None if folder is None else JournalFile(folder, "simulation")
        self.latencies: dict[int, dict[str, float]] = {}
        self._kept: list[AnyRecord] = []

    def run(self, place: Place, wishes: Sequence[Wish]) -> None:
        """Answer all requests."""
        rate = place.rate_rps
        budget, tokens, last_s = 1.6 * rate, 5.0, 0.0
        heap = [(wish.at_ns / NS, wish.number, 1) for wish in wishes]
        heapq.heapify(heap)
        by_number = {wish.number: wish for wish in wishes}
        for name in ("up-0", "up-1"):
            self._write(records.ReplicaChanged(0, name, MODEL, "ready"))
        while heap:
            at_s, number, attempt = heapq.heappop(heap)
            wish, hurt = by_number[number], at_s * NS >= place.fault_ns
            if attempt == 1:
                self._arrive(wish)
            throttled = self._faults.get("vendor_throttling")
            limit = rate * (1.05 - 0.35 * throttled) if throttled is not None and hurt else budget
            tokens = min(5.0, tokens + (at_s - last_s) * limit)
            last_s = at_s
            again_s = self._attempt(wish, at_s, attempt, hurt=hurt, tokens=tokens)
            if again_s is not None:
                heapq.heappush(heap, (again_s, number, attempt + 1))
            else:
                tokens -= 1.0
        if self._file is not None:
            for record in sorted(self._kept, key=lambda each: each.t_ns):
                self._file.append(record)
            self._file.close()

    def _write(self, record: AnyRecord) -> None:
        self._kept.append(record)

    def _arrive(self, wish: Wish) -> None:
        self._write(
            records.RequestArrived(
                wish.at_ns, str(wish.number), MODEL, wish.at_ns, wish.shared + wish.own,
                2 * wish.output, tenant=wish.tenant,
            )
        )  # fmt: skip

    def _attempt(
        self, wish: Wish, at_s: float, attempt: int, *, hurt: bool, tokens: float
    ) -> float | None:
        """One try; when the next one is to be, ``None`` where this one answers."""
        draw, t_ns, name = Random(f"{wish.number}/{attempt}"), int(at_s * NS), str(wish.number)
        failing = self._faults.get("upstream_failover") if hurt else None
        replica = f"up-{wish.number % 2}" if attempt == 1 else f"up-{(wish.number + 1) % 2}"
        self._write(records.RequestDispatched(t_ns, name, replica, attempt))
        if tokens < 1.0 and attempt < self.TRIES:
            told_ns = t_ns + int(0.02 * NS)
            self._write(records.AttemptFailed(told_ns, name, replica, attempt, "full", "429"))
            wait_s: float = self.RETRY_S * 2.0 ** (attempt - 1) * draw.uniform(0.8, 1.2)
            return at_s + 0.02 + wait_s
        if failing is not None and replica == "up-0" and draw.random() < 0.15 + 0.8 * failing:
            wait_s = (0.5 + 3.0 * failing) * draw.uniform(0.8, 1.2)
            self._write(
                records.AttemptFailed(
                    t_ns + int(wait_s * NS), name, replica, attempt, "fault", "no answer"
                )
            )
            return at_s + wait_s
        slow = self._faults.get("upstream_slow") if hurt else None
        factor = 1.0 if slow is None else 1.25 + 1.5 * slow
        first_s = at_s + factor * (0.15 + 4e-5 * (wish.shared + wish.own)) * draw.lognormvariate(
            0.0, 0.35
        )
        gap_s = factor * 0.012 * draw.lognormvariate(0.0, 0.15)
        self._end(wish, at_s, first_s, first_s + gap_s * (wish.output - 1), attempt)
        return None

    def _end(self, wish: Wish, at_s: float, first_s: float, end_s: float, attempt: int) -> None:
        name, arrived_s = str(wish.number), wish.at_ns / NS
        ttft_ns, tpot_ns = int((first_s - arrived_s) * NS), int((end_s - first_s) * NS)
        tpot_ns //= max(1, wish.output - 1)
        self._write(records.FirstToken(int(first_s * NS), name, ttft_ns))
        replica = f"up-{(wish.number + (attempt > 1)) % 2}"
        self._write(
            records.RequestEnded(
                int(end_s * NS), name, MODEL, "stop", wish.at_ns, replica, attempt,
                wish.shared + wish.own, 0, wish.output,
                admission_ns=int((at_s - arrived_s) * NS),
                prefill_ns=int((first_s - at_s) * NS), decode_ns=int((end_s - first_s) * NS),
                ttft_ns=ttft_ns, tpot_ns=tpot_ns,
            )
        )  # fmt: skip
        self.latencies[wish.number] = {
            "ttft": ttft_ns / NS, "tpot": tpot_ns / NS, "e2e": end_s - arrived_s,
        }  # fmt: skip
