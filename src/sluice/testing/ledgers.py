"""The books of a block ledger, checked against the tables that should be in them."""
# ruff: noqa: SLF001 - an auditor looks into everything

from collections.abc import Sequence

from sluice.core.errors import InternalError
from sluice.core.kv import BlockLedger, BlockTable


def check_ledger(ledger: BlockLedger, tables: Sequence[BlockTable]) -> None:
    """Raise ``InternalError`` unless every block is accounted for exactly once."""
    references = [0] * ledger.blocks_total
    for table in tables:
        if table.ids != tuple(table.blocks) or len(set(table.blocks)) != len(table.blocks):
            raise InternalError("a block table is inconsistent")
        for block in table.blocks:
            references[block] += 1
    idle = [block for block in ledger._key_of_block if references[block] == 0]
    referenced = sum(1 for count in references if count)
    problems = {
        "reference counts": references != ledger._references,
        "idle blocks": sorted(idle) != sorted(ledger._idle),
        "shared blocks": ledger.shared != sum(1 for count in references if count > 1),
        "conservation": len(ledger._free) + len(idle) + referenced != ledger.blocks_total,
        "free blocks": any(references[block] for block in ledger._free),
        "nodes": len(ledger._nodes) != len(ledger._key_of_block),
        "idle order": not _children_first(ledger),
    }
    found = [name for name, wrong in problems.items() if wrong]
    if found:
        raise InternalError(f"the block ledger does not balance: {', '.join(found)}")


def _children_first(ledger: BlockLedger) -> bool:
    """Whether reclaiming from the front never takes a node that still has children."""
    nodes, keys = ledger._nodes, ledger._key_of_block
    place = {nodes[keys[block]][0]: order for order, block in enumerate(ledger._idle)}
    for block in ledger._idle:
        (parent, _), (node, _) = keys[block], nodes[keys[block]]
        if parent is not None and parent in place and place[parent] < place[node]:
            return False
    return True
