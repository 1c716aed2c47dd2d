"""One budget for a path of several stages: retrieval, queue, prefill and decode.

Pure arithmetic on predicted times, asked by the gateway before it retrieves (``split``) and when
that is done (``passages_that_fit``). The stages after retrieval cannot choose how long they take,
so they get what is predicted for them and retrieval what is left; a part is kept back for what
nobody predicted. Whether a request is accepted is ``door``'s business: this module refuses
nothing.
"""

from dataclasses import dataclass

# Share of a budget that no stage is given.
RESERVE = 0.1


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a model is predicted to take at this moment.

    ``queue_ns`` passes before a newcomer's prefill begins. ``prefill_token_ns`` is the time of one
    uncached prompt token, ``None`` where no replica has told or shown its speed; ``token_ns`` that
    between two tokens of an answer, of which ``output_tokens`` are usual. Of the prompt that it was
    asked for, ``cached_tokens`` are probably cached where it goes.
    """

    queue_ns: int
    prefill_token_ns: float | None
    token_ns: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """Time left until the first and until the last token are due, ``None`` for no such target."""

    first_ns: int | None
    whole_ns: int | None


@dataclass(frozen=True, slots=True)
class Path:
    """What is to be done: own tokens of the prompt, and those that each retrieved passage adds.

    ``cached_tokens`` of all of them need no prefill.
    """

    prompt_tokens: int
    passage_tokens: int
    output_tokens_max: int | None = None
    cached_tokens: int = 0

    def decode_ns(self, predicted: Predicted) -> int:
        """Time from the first to the last token of an answer of the usual length."""
        limit = self.output_tokens_max
        tokens = predicted.output_tokens if limit is None else min(limit, predicted.output_tokens)
        return max(0, tokens - 1) * predicted.token_ns

    def prefill_ns(self, predicted: Predicted, passages: int) -> int:
        """Time from the start of prefill to the first token with so many passages in the prompt."""
        tokens = self.prompt_tokens + passages * self.passage_tokens
        tokens = max(1, tokens - self.cached_tokens)
        return round(tokens * (predicted.prefill_token_ns or 0.0)) + predicted.token_ns


@dataclass(frozen=True, slots=True)
class Shares:
    """The budget by stage. ``retrieval_ns`` is ``None`` where nothing is due, and 0 where the
    other stages leave nothing for it."""

    retrieval_ns: int | None
    queue_ns: int
    prefill_ns: int
    decode_ns: int


def split(budget: Budget, path: Path, predicted: Predicted) -> Shares:
    """Shares for a path whose retrieval is worth waiting for as long as one passage still fits.

    Where the speed of prefill is not known, retrieval gets half of what the queue leaves.
    """
    prefill_ns, decode_ns = path.prefill_ns(predicted, 1), path.decode_ns(predicted)
    left_ns = _left_ns(budget, predicted.queue_ns, decode_ns)
    if left_ns is not None:
        left_ns = left_ns // 2 if predicted.prefill_token_ns is None else left_ns - prefill_ns
        left_ns = max(0, left_ns)
    return Shares(left_ns, predicted.queue_ns, prefill_ns, decode_ns)


def passages_that_fit(budget: Budget, path: Path, predicted: Predicted, passages: int) -> int:
    """How many of the passages leave the first and the last token on time, from none to all."""
    while passages and not on_time(budget, path, predicted, passages):
        passages -= 1
    return passages


def on_time(budget: Budget, path: Path, predicted: Predicted, passages: int) -> bool:
    """Whether so many passages leave the first and the last token on time, as far as is known."""
    left_ns = _left_ns(budget, predicted.queue_ns, path.decode_ns(predicted))
    if left_ns is None or predicted.prefill_token_ns is None:
        return True
    return path.prefill_ns(predicted, passages) <= left_ns


def _left_ns(budget: Budget, queue_ns: int, decode_ns: int) -> int | None:
    """What the queue, and decode where the last token is due, leave of the tighter target."""
    left = []
    if budget.first_ns is not None:
        left.append(round(budget.first_ns * (1.0 - RESERVE)) - queue_ns)
    if budget.whole_ns is not None:
        left.append(round(budget.whole_ns * (1.0 - RESERVE)) - queue_ns - decode_ns)
    return min(left, default=None)
