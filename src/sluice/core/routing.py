"""Which replica gets a request: filter, score, pick.

Called by ``core/fleet.py`` with what is known of each replica of one model. Nothing is changed here
except a ``PrefixMemory``, by its own ``add``.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluice.core.admission import never_runs
from sluice.core.events import ReplicaLimits, ReplicaScore
from sluice.core.request import Request


class PrefixMemory:
    """Which prompt prefixes a replica has probably cached, from what was dispatched to it.

    Keeps one entry per full block of prompt, the least recently used dropped first, as many as the
    replica has blocks. An estimate: the replica's own prefix cache decides what is reused.
    """

    def __init__(self, limits: ReplicaLimits) -> None:
        self._block_size = limits.block_size
        self._blocks_max = limits.blocks_total
        self._chains: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, prompt: tuple[int, ...]) -> int:
        """Length of the longest known prefix of ``prompt``."""
        blocks = 0
        for chain in self._chain(prompt):
            if chain not in self._chains:
                break
            blocks += 1
        return blocks * self._block_size

    def add(self, prompt: tuple[int, ...]) -> None:
        """Note that ``prompt`` is computed on this replica."""
        for chain in self._chain(prompt):
            self._chains[chain] = None
            self._chains.move_to_end(chain)
        while len(self._chains) > self._blocks_max:
            self._chains.popitem(last=False)

    def _chain(self, prompt: tuple[int, ...]) -> Iterator[int]:
        size = self._block_size
        chain = 0
        for start in range(0, len(prompt) - size + 1, size):
            chain = hash((chain, prompt[start : start + size]))
            yield chain


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
    """The replicas that can take the request at once, best first.

    A replica qualifies when it can ever run the request and has as many free places as the request
    takes; one that is held back only where no other qualifies. The score is uncached prefill tokens
    (waiting there, and the request's own) times the sequences there, plus those sequences. A
    replica whose KV pool is predicted to be short (``output_tokens`` is the predicted output of one
    choice) comes after all others. Ties go to the one listed first.
    """
    able = [
        candidate
        for candidate in candidates
        if candidate.places + request.choices <= candidate.limits.sequences_max
        and never_runs(request, candidate.limits) is None
    ]
    live = [candidate for candidate in able if not candidate.held_back]
    scores = [_judge(request, output_tokens, candidate) for candidate in live or able]
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
