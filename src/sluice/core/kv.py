"""The ledger of KV blocks of one replica, with a prefix cache over full blocks.

Accounting only: which block belongs to which table, which computed blocks can be shared, which may
be reclaimed. ``core/batching.py`` decides who gets blocks; the executor owns the memory behind the
ids.

The prefix cache is a tree. A node is a full, computed block, identified by its parent node and the
exact tokens in it, so two prefixes are the same node only if every token is equal. A table that
holds a node holds all of the node's ancestors. Therefore a node without references has no
referenced descendant, and because a table gives its blocks back from the last to the first,
``_idle`` always has children in front of their parents: reclaiming from its front takes the least
recently used leaf.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

# Identity of a cached block: the node before it (``None`` at the root) and its tokens.
NodeKey = tuple[int | None, tuple[int, ...]]
# A computed block that later prompts may share: its id, which is never used again, and the block.
# Plain tuples: a long prompt makes hundreds of them.
Node = tuple[int, int]


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Changed by the ledger alone.

    ``ids`` is the tuple that rows carry, rebuilt only when the table changes. ``published`` counts
    the leading blocks that are nodes of the prefix tree, ``tail`` is the last of those nodes.
    """

    blocks: list[int] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    published: int = 0
    tail: int | None = None


class BlockLedger:
    """Counts every block as free, idle (cached, unreferenced) or referenced by tables."""

    def __init__(self, blocks_total: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.blocks_total = blocks_total
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.shared = 0  # blocks with two references or more
        self._free = list(range(blocks_total - 1, -1, -1))
        self._references = [0] * blocks_total
        self._nodes: dict[NodeKey, Node] = {}
        self._key_of_block: dict[int, NodeKey] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._nodes_made = 0

    @property
    def available(self) -> int:
        """Blocks that can be had at once: free ones, and idle ones that would be reclaimed."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks in the prefix tree, referenced or idle."""
        return len(self._nodes)

    @property
    def used(self) -> int:
        """Referenced blocks; a shared one counts once."""
        return self.blocks_total - self.available

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks whose cells hold that many tokens."""
        return -(-tokens // self.block_size)

    def private(self, table: BlockTable) -> int:
        """Blocks that would become available if this table were released."""
        if not self.shared:
            return len(table.blocks)
        return list(map(self._references.__getitem__, table.blocks)).count(1)

    def attach(self, table: BlockTable, tokens: Seq[int]) -> int:
        """Give an empty table the longest cached prefix of ``tokens``; returns its token count.

        The last token is never taken from the cache, since its logits are needed.
        """
        for node, block in self._path(tokens):
            self._reference(block)
            table.blocks.append(block)
            table.published += 1
            table.tail = node
        table.ids = tuple(table.blocks)
        return len(table.blocks) * self.block_size

    def cached_tokens(self, tokens: Seq[int]) -> int:
        """How many tokens ``attach`` would find in the cache."""
        return sum(1 for _ in self._path(tokens)) * self.block_size

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Extend the table so that it holds ``tokens``; False and no change where blocks lack."""
        missing = self.blocks_for(tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        for _ in range(missing):
            block = self._free.pop() if self._free else self._reclaim()
            self._references[block] = 1
            table.blocks.append(block)
        table.ids = tuple(table.blocks)
        return True

    def publish(self, table: BlockTable, tokens: Seq[int], computed: int) -> None:
        """Enter the table's full blocks below ``computed`` into the prefix tree.

        Where an equal block is there already the table takes that one and gives its own back, which
        keeps each content once and each table's published blocks a path of the tree.
        """
        if not self.prefix_cache:
            return
        size, tail, changed = self.block_size, table.tail, False
        for index in range(table.published, computed // size):
            key = (tail, tuple(tokens[index * size : (index + 1) * size]))
            block = table.blocks[index]
            fresh = (self._nodes_made + 1, block)
            tail, known = node = self._nodes.setdefault(key, fresh)  # the tokens are hashed once
            if node is fresh:
                self._nodes_made += 1
                self._key_of_block[block] = key
            elif known != block:
                self._reference(known)
                self._dereference(block)
                table.blocks[index] = known
                changed = True
        table.published, table.tail = max(table.published, computed // size), tail
        if changed:
            table.ids = tuple(table.blocks)

    def release(self, table: BlockTable) -> None:
        """Take all blocks of the table back; published ones stay cached until reclaimed."""
        for block in reversed(table.blocks):
            self._dereference(block)
        table.blocks = []
        table.ids = ()
        table.published = 0
        table.tail = None

    def _path(self, tokens: Seq[int]) -> Iterator[Node]:
        """The nodes of the longest cached prefix that leaves a token to compute."""
        size, parent = self.block_size, None
        for start in range(0, (len(tokens) - 1) // size * size, size):
            node = self._nodes.get((parent, tuple(tokens[start : start + size])))
            if node is None:
                return
            yield node
            parent = node[0]

    def _reference(self, block: int) -> None:
        count = self._references[block] = self._references[block] + 1
        if count == 1:
            del self._idle[block]
        elif count == 2:
            self.shared += 1

    def _dereference(self, block: int) -> None:
        count = self._references[block] = self._references[block] - 1
        if count == 1:
            self.shared -= 1
        elif count == 0:
            if block in self._key_of_block:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _reclaim(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._nodes[self._key_of_block.pop(block)]
        return block
