"""Which replica gets a request, of those that can take it at once: score, pick.

Called by ``core/pools.py`` with what is known of each replica of one model. Nothing is changed here
except a ``PrefixMemory``, by its own ``add``.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from sluice.core.events import ReplicaScore
from sluice.core.request import Request

# A decision names the replica that was chosen and this many less one that it was preferred to.
SCORES_TOLD = 4


def block_chain(prompt: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """One number for each full block of the prompt, which stands for all tokens up to its end."""
    chain, ends = 0, range(block_size, len(prompt) + 1, block_size)
    return tuple(chain := hash((chain, prompt[end - block_size : end])) for end in ends)


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
        for block in chain:
            self.known[block] = None
            self.known.move_to_end(block)
        while len(self.known) > self._blocks_max:
            self.known.popitem(last=False)


class Candidate(NamedTuple):
    """A ready replica as it stands for one request.

    ``places`` are dispatched to it and not ended. ``prefill_tokens`` wait there for a first token.
    ``cached_tokens`` of the request's prompt are probably cached. ``kv_fits`` says whether its KV
    pool is predicted to hold the request too. ``held_back`` is 1 where its load reports have
    stopped and it was tried enough, 2 where it failed the request before. ``weight`` is its share
    of the work.
    """

    replica_id: str
    places: int
    prefill_tokens: int
    cached_tokens: int
    kv_fits: bool
    held_back: int
    weight: float = 1.0


def blocks_needed(request: Request, output_tokens: int, block_size: int) -> int:
    """Blocks for the prompt once and ``output_tokens`` of every choice."""
    prompt_blocks = -(-request.prompt_tokens // block_size)
    return prompt_blocks + request.choices * -(-output_tokens // block_size)


def rank(prompt_tokens: int, candidates: Sequence[Candidate]) -> tuple[ReplicaScore, ...]:
    """The replicas that can take a request, best first, as many as are worth telling.

    One that is held back counts only where there is no other. The score is uncached prefill tokens
    (waiting there, and the request's own) times the sequences there, plus those sequences; what
    is there counts by the replica's weight. A replica whose KV pool is predicted to be short comes
    after all others. Ties go to the one listed first.
    """
    judged = [
        (
            back,
            not fits,
            ((waiting / weight + own) * (places or 1) + places) / weight,
            number,
            waiting + own,
        )
        for number, (_, places, waiting, cached, fits, back, weight) in enumerate(candidates)
        for own in (prompt_tokens - cached,)
    ]
    judged.sort()
    return tuple(
        [
            ReplicaScore(
                candidates[number].replica_id, score, uncached, candidates[number].places, not short
            )
            for _, short, score, number, uncached in judged[:SCORES_TOLD]
        ]
    )
