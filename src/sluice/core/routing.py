"""Which replica gets a request, of those that can take it at once: score, pick.

Called by ``core/pools.py`` with what is known of each replica of one model. Nothing is changed here
except a ``PrefixMemory``, by its own ``add``.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sluice.core.events import ReplicaLimits, ReplicaScore
from sluice.core.request import Request


def block_chain(prompt: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """One number for each full block of the prompt, which stands for all tokens up to its end."""
    chain, ends = 0, range(block_size, len(prompt) + 1, block_size)
    return tuple(chain := hash((chain, prompt[end - block_size : end])) for end in ends)


class PrefixMemory:
    """Which prompt prefixes a replica has probably cached, from what was dispatched to it.

    Keeps one entry per full block of prompt, the least recently used dropped first, as many as the
    replica has blocks. An estimate: the replica's own prefix cache decides what is reused.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._known: OrderedDict[int, None] = OrderedDict()

    def cached_blocks(self, chain: tuple[int, ...]) -> int:
        """Leading blocks of a prompt that are known."""
        missing = (blocks for blocks, block in enumerate(chain) if block not in self._known)
        return next(missing, len(chain))

    def add(self, chain: tuple[int, ...]) -> None:
        """Note that a prompt is computed on this replica."""
        for block in chain:
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._blocks_max:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica as it stands for one request.

    ``places`` are dispatched to it and not ended. ``prefill_tokens`` wait there for a first token.
    ``cached_tokens`` of the request's prompt are probably cached. ``blocks_used`` are in use or
    promised. ``held_back`` is set where its load reports have stopped and it was tried enough.
    """

    replica_id: str
    limits: ReplicaLimits
    places: int
    prefill_tokens: int
    cached_tokens: int
    blocks_used: int
    held_back: bool


def blocks_needed(request: Request, output_tokens: int, block_size: int) -> int:
    """Blocks for the prompt once and ``output_tokens`` of every choice."""
    prompt_blocks = -(-len(request.prompt) // block_size)
    return prompt_blocks + request.choices * -(-output_tokens // block_size)


def rank(
    request: Request, output_tokens: int, candidates: Sequence[Candidate]
) -> tuple[ReplicaScore, ...]:
    """The replicas that can take the request, best first.

    One that is held back counts only where there is no other. The score is uncached prefill tokens
    (waiting there, and the request's own) times the sequences there, plus those sequences. A
    replica whose KV pool is predicted to be short (``output_tokens`` is the predicted output of one
    choice) comes after all others. Ties go to the one listed first.
    """
    live = [candidate for candidate in candidates if not candidate.held_back]
    scores = [_judge(request, output_tokens, candidate) for candidate in live or candidates]
    return tuple(sorted(scores, key=lambda judged: (not judged.kv_fits, judged.score)))


def _judge(request: Request, output_tokens: int, candidate: Candidate) -> ReplicaScore:
    uncached = candidate.prefill_tokens + len(request.prompt) - candidate.cached_tokens
    needed = blocks_needed(request, output_tokens, candidate.limits.block_size)
    return ReplicaScore(
        replica_id=candidate.replica_id,
        score=float(uncached * max(1, candidate.places) + candidate.places),
        uncached_tokens=uncached,
        places=candidate.places,
        kv_fits=candidate.blocks_used + needed <= candidate.limits.blocks_total,
    )
