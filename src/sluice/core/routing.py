"""Which replica gets a request, of those that can take it at once: score, pick.

Called by ``core/pools.py`` with what is known of each replica of one model. Nothing is changed here
except a ``PrefixMemory``, by its own ``add``.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from sluice.core.events import ReplicaScore
from sluice.core.request import Request

# A decision names the replica that was chosen and this many less one that it was preferred to.
SCORES_TOLD = 4


def block_chain(prompt: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """One number for each full block of the prompt, which stands for all tokens up to its end."""
    chain, ends = 0, range(block_size, len(prompt) + 1, block_size)
    return tuple([chain := hash((chain, prompt[end - block_size : end])) for end in ends])


class PrefixMemory:
    """Which prompt prefixes a replica has probably cached, from what was dispatched to it.

    Keeps one entry per full block of prompt, the least recently used dropped first, as many as the
    replica has blocks. An estimate: the replica's own prefix cache decides what is reused.
    ``known`` holds the blocks, the least recently used first.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self.known: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.known

    def cached_blocks(self, chain: tuple[int, ...]) -> int:
        """Leading blocks of a prompt that are known."""
        known, blocks = self.known, 0
        for block in chain:
            if block not in known:
                break
            blocks += 1
        return blocks

    def add(self, chain: tuple[int, ...]) -> None:
        """Note that a prompt is computed on this replica."""
        known = self.known
        for block in chain:
            if block in known:
                known.move_to_end(block)
            else:
                known[block] = None
        while len(known) > self._blocks_max:
            known.popitem(last=False)


class Load(Protocol):
    """What is looked at of a replica: the requests that are there, as ``places``, those of their
    prompt tokens that wait for a first token, and its share of the work."""

    @property
    def id(self) -> str: ...

    @property
    def places(self) -> int: ...

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def weight(self) -> float: ...


LoadT = TypeVar("LoadT", bound=Load)


class Doubt(NamedTuple):
    """What speaks against a replica that could take a request; the smaller one goes first.

    ``held_back`` is 1 where its load reports have stopped and it was tried enough, 2 where it
    failed the request before. ``kv_short`` says that its KV pool is predicted not to hold it too.
    """

    held_back: int
    kv_short: bool


NO_DOUBT = Doubt(held_back=0, kv_short=False)


def blocks_needed(request: Request, output_tokens: int, block_size: int) -> int:
    """Blocks for the prompt once and ``output_tokens`` of every choice."""
    prompt_blocks = -(-request.prompt_tokens // block_size)
    return prompt_blocks + request.choices * -(-output_tokens // block_size)


def rank(
    prompt_tokens: int,
    cached: Mapping[str, int],
    replicas: Sequence[LoadT],
    doubt_of: Callable[[LoadT], Doubt | None],
    *,
    asks_all: bool,
) -> tuple[ReplicaScore, ...]:
    """The replicas that can take a request, best first, as many as are worth telling.

    The score is uncached prefill tokens (waiting there, and the request's own) times the sequences
    there, plus those sequences; what is there counts by the replica's weight. ``cached`` tokens of
    the prompt are probably in the prefix caches. Ties go to the one listed first, and any doubt
    comes after all others. ``doubt_of`` gives ``None`` for a replica that cannot take it; without
    ``asks_all`` it is asked in the order of scores, about no more than are told.
    """
    scores: list[float] = []
    for replica in replicas:
        places, weight, own = replica.places, replica.weight, prompt_tokens
        if cached:
            own -= cached.get(replica.id, 0)
        scores.append(((replica.prefill_tokens / weight + own) * (places or 1) + places) / weight)
    found, doubtful = [], []
    for number in sorted(range(len(scores)), key=scores.__getitem__):
        replica, score = replicas[number], scores[number]
        doubt = doubt_of(replica)
        if doubt is None:
            continue
        uncached = replica.prefill_tokens + prompt_tokens - cached.get(replica.id, 0)
        if doubt == NO_DOUBT:
            found.append((doubt, score, number, uncached))
            if len(found) == SCORES_TOLD and not asks_all:
                break
        else:
            doubtful.append((doubt, score, number, uncached))
    if doubtful:
        found += sorted(doubtful)
    return tuple(
        [
            ReplicaScore(
                replicas[number].id, score, uncached, replicas[number].places, not doubt.kv_short
            )
            for doubt, score, number, uncached in found[:SCORES_TOLD]
        ]
    )
