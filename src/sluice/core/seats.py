"""How many sequences a replica can run at a time: within their time per token, within the KV pool.

The look ahead of ``core/residency.py``'s two questions, asked for more sequences like the
residents: the fleet gives a replica no more than that, so that who would wait inside waits where it
can still be decided about. Reported by ``core/batching.py``.
"""

from bisect import bisect_right

from sluice.core.costmodel import Load
from sluice.core.lengths import Holding, peak_blocks
from sluice.core.residency import context_tokens, holding, reserve_blocks
from sluice.core.roster import Roster

FURTHER_MAX = 4  # further sequences that the KV pool is tried for: the count is soon taken again


class Seats:
    """Counts the seats of one replica; the count holds until somebody comes or goes.

    ``known`` is the last count, ``decode_tokens_per_s`` what so many residents like the last ones
    give together, 0 while there were none.

    So steps that are taken in one stretch leave the same count as one by one, if it is taken at the
    end of the stretch as well.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._version = -1
        self.known = roster.limits.sequences_max
        self.decode_tokens_per_s = 0.0

    def count(self) -> int:
        """The residents, and further sequences like them that they leave time and blocks for."""
        changed = self._version != self._roster.version
        if changed:
            self._version = self._roster.version
            self.known = self._counted()
        if changed or self._roster.cost.learns:
            self._time_full()
        return self.known

    def _counted(self) -> int:
        roster = self._roster
        if not roster.residents or self._ample():
            return roster.limits.sequences_max
        held = [holding(sequence, roster) for sequence in roster.residents]
        return max(1, min(self._in_time(held), len(held) + self._further(held)))

    def _time_full(self) -> None:
        """Note how fast it would be with all seats taken, as far as the KV pool holds them."""
        roster = self._roster
        if roster.residents:
            usual = max(1, roster.ceiling.tokens // len(roster.residents))
            held = max(1, roster.limits.blocks_total // roster.ledger.blocks_for(usual))
            rows = min(self.known, held)
            step_ns = roster.cost.step_ns(Load(rows, rows, rows * usual))
            self.decode_tokens_per_s = rows * 1e9 / max(1, step_ns)

    def _ample(self) -> bool:
        """Whether there is time and room for all, whatever the outputs will be."""
        roster, rows_max = self._roster, self._roster.limits.sequences_max
        ledger, ceiling, rows = roster.ledger, roster.ceiling, len(roster.residents)
        usual = ceiling.tokens // rows
        blocks = ledger.shared + ceiling.blocks + FURTHER_MAX * ledger.blocks_for(usual)
        if blocks > ledger.blocks_total - reserve_blocks(rows + FURTHER_MAX, roster):
            return False
        targets_ns = [s.generation.request.tpot_ns for s in roster.waiting]
        tightest_ns = min((t for t in (ceiling.tightest_ns, *targets_ns) if t), default=None)
        if tightest_ns is None:
            return True
        load = Load(rows_max, rows_max, rows_max * usual)
        return roster.cost.step_ns(load) <= tightest_ns * (1.0 - roster.limits.prefill_share)

    def _in_time(self, held: list[Holding]) -> int:
        """Rows of the mean context of which a step leaves each its time per token."""
        roster = self._roster
        limits, cost = roster.limits, roster.cost
        targets = [s.generation.request.tpot_ns for s in (*roster.residents, *roster.waiting)]
        if not any(targets):
            return limits.sequences_max
        context = sum(map(context_tokens, held)) // len(held)

        def step_ns(rows: int) -> int:
            return cost.step_ns(Load(rows, rows, rows * context))

        alone_ns = step_ns(1)  # a target that a row alone cannot meet counts for nobody
        tightest_ns = min((t for t in targets if t and t > alone_ns), default=None)
        if tightest_ns is None:
            return limits.sequences_max
        budget_ns = tightest_ns * (1.0 - limits.prefill_share)
        return bisect_right(range(1, limits.sequences_max + 1), budget_ns, key=step_ns)

    def _further(self, held: list[Holding]) -> int:
        """How many more of the usual size the KV pool holds at the worst moment to come."""
        roster = self._roster
        ledger, size = roster.ledger, roster.ledger.block_size
        usual = self._usual()
        full = [*held, *[usual] * FURTHER_MAX]
        ends = sum(h.after(h.remaining, size).private for h in full)
        room = ledger.blocks_total - reserve_blocks(len(full), roster)
        if ledger.shared + ends <= room:
            return roster.limits.sequences_max
        for further in range(1, FURTHER_MAX + 1):
            concerned = [*held, *[usual] * further]
            room = ledger.blocks_total - reserve_blocks(len(concerned), roster)
            if peak_blocks(concerned, ledger.shared, size) > room:
                return further - 1
        return FURTHER_MAX

    def _usual(self) -> Holding:
        """A new sequence like the residents: their mean prompt, a class and limit of theirs."""
        roster = self._roster
        requests = [sequence.generation.request for sequence in roster.residents]
        cells = sum(len(request.prompt) for request in requests) // len(requests)
        output_max = sum(request.output_tokens_max for request in requests) // len(requests)
        slo_class = requests[-1].slo_class
        remaining = roster.lengths.remaining(0, output_max, slo_class=slo_class)
        blocks = roster.ledger.blocks_for(cells)
        return Holding(cells, remaining, blocks, blocks, prefilling=True)
