"""The block ledger under arbitrary use: it always balances, and shared blocks hold equal tokens."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sluice.core.kv import BlockLedger, BlockTable
from sluice.testing.ledgers import check_ledger

SIZE = 3
BLOCKS = 9


class Holder:
    def __init__(self, tokens):
        self.tokens = tokens
        self.table = BlockTable()
        self.computed = 0


class LedgerMachine(RuleBasedStateMachine):
    holders = Bundle("holders")

    def __init__(self):
        super().__init__()
        self.ledger = BlockLedger(BLOCKS, SIZE)
        self.live: list[Holder] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(target=holders, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=15))
    def enter(self, tokens):
        holder = Holder(tokens)
        before = self.ledger.available
        cached_tokens = self.ledger.cached_tokens(tokens)
        holder.computed = self.ledger.attach(holder.table, tokens)
        assert holder.computed == cached_tokens
        assert holder.computed < len(tokens)
        if not self.ledger.grow(holder.table, len(tokens)):
            self.ledger.release(holder.table)
            assert self.ledger.available == before
            return holder
        self.live.append(holder)
        self.compute(holder, holder.computed)
        return holder

    @rule(holder=holders, tokens=st.integers(1, 6))
    def compute_more(self, holder, tokens):
        if holder in self.live:
            self.compute(holder, min(len(holder.tokens), holder.computed + tokens))

    @rule(holder=holders, token=st.integers(0, 1))
    def extend(self, holder, token):
        if holder not in self.live or holder.computed < len(holder.tokens):
            return
        if self.ledger.grow(holder.table, len(holder.tokens) + 1):
            holder.tokens.append(token)

    @rule(holder=consumes(holders))
    def leave(self, holder):
        if holder in self.live:
            self.live.remove(holder)
            self.ledger.release(holder.table)

    def compute(self, holder, computed):
        for index in range(holder.computed // SIZE, -(-computed // SIZE)):
            self.content[holder.table.blocks[index]] = tuple(holder.tokens[: (index + 1) * SIZE])
        holder.computed = computed
        self.ledger.publish(holder.table, holder.tokens, computed)

    @invariant()
    def balances(self):
        check_ledger(self.ledger, [holder.table for holder in self.live])

    @invariant()
    def every_full_block_holds_its_own_prefix(self):
        for holder in self.live:
            for index in range(holder.computed // SIZE):
                block = holder.table.blocks[index]
                assert self.content[block] == tuple(holder.tokens[: (index + 1) * SIZE])


TestLedgerMachine = LedgerMachine.TestCase
