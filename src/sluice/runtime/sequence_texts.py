"""The text side of the sequences on one replica: what their tokens mean and who breaks off.

``realtime`` opens a sequence here, shows each sampled token, and asks for the text once the policy
has taken the token. What goes wrong with one request's text is kept to that request and becomes its
ending. What a single output does is in ``output``; nothing is decided here about order or memory.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from sluice.core.errors import RequestError
from sluice.core.request import COMPLETE, EndReason, SequenceId
from sluice.core.sampling import SampledLogprobs
from sluice.core.step import Sampled
from sluice.executors.base import TokenMask
from sluice.runtime.generation import Delta, Fault
from sluice.runtime.messages import Text
from sluice.runtime.output import OutputRules, SequenceOutput

_log = logging.getLogger(__name__)


class Outputs(Protocol):
    """Makes the text side of sequences for one model."""

    def open(
        self, choice: int, rules: OutputRules, grammar: str | None
    ) -> tuple[SequenceOutput, TokenMask | None]:
        """Start the text of one sequence, and the mask of its grammar where it has one.

        Raises ``RequestError`` for a grammar that cannot be followed.
        """
        ...


class Breakage(NamedTuple):
    """Why the text side of a request cannot go on."""

    error: str
    fault: Fault


class SequenceTexts:
    """Outputs of the sequences that are open, and the requests that broke."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs
        self._open: dict[SequenceId, SequenceOutput] = {}
        self._certain: dict[SequenceId, Delta] = {}
        self._broken: dict[str, Breakage] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._certain) + len(self._broken)

    def open(
        self, sequence: SequenceId, rules: OutputRules, grammar: str | None
    ) -> TokenMask | None:
        """Start a sequence; what its sampling has to ask. Raises ``RequestError``."""
        output, mask = self._outputs.open(sequence.choice, rules, grammar)
        self._open[sequence] = output
        return mask

    def look(
        self, sampled: Sequence[Sampled], logprobs: Mapping[SequenceId, SampledLogprobs]
    ) -> tuple[Sampled, ...]:
        """Look at the text of each token: what can be sent, and whether its sequence must stop."""
        return tuple(self._look(token, logprobs.get(token.sequence)) for token in sampled)

    def _look(self, token: Sampled, logprobs: SampledLogprobs | None) -> Sampled:
        output = self._open.get(token.sequence)
        if output is None:
            return token
        stop = None
        with self.alone(token.sequence.request_id):
            delta, stop = output.push(token.token, logprobs)
            if delta is not None:
                self._certain[token.sequence] = delta
        return token if stop is None else Sampled(token.sequence, token.token, stop)

    def take(self, sampled: Sequence[Sampled]) -> list[Text]:
        """The text that became certain with tokens that are still wanted."""
        texts = []
        for token in sampled:
            delta = self._certain.pop(token.sequence, None)
            if delta is not None:
                texts.append(Text(token.sequence.request_id, delta))
        return texts

    def finish(self, sequence: SequenceId, reason: EndReason) -> list[Text]:
        """End a sequence; the text that was held back, where its answer is whole."""
        output = self._open.get(sequence)
        rest = None
        if output is not None and reason in COMPLETE:
            with self.alone(sequence.request_id):
                rest = output.finish()
        self.forget(sequence)
        return [] if rest is None else [Text(sequence.request_id, rest)]

    def forget(self, sequence: SequenceId) -> None:
        """Drop a sequence and what it had to say."""
        self._open.pop(sequence, None)
        self._certain.pop(sequence, None)

    # --------------------------------------------------------------------------------- what breaks

    @contextmanager
    def alone(self, request_id: str) -> Iterator[None]:
        """Let what goes wrong with one request's text end that request and no other."""
        try:
            yield
        except RequestError as error:
            self._broken[request_id] = Breakage(error.message, Fault.REQUEST)
        except Exception as error:  # noqa: BLE001 - boundary: one request
            _log.exception("the text side of request %s failed", request_id)
            words = f"the text side of the request failed: {error}"
            self._broken[request_id] = Breakage(words, Fault.ENGINE)

    @property
    def broken(self) -> tuple[str, ...]:
        """The requests that cannot go on and have not ended."""
        return tuple(self._broken)

    def breakage(self, request_id: str) -> Breakage | None:
        """Why the request cannot go on, ``None`` if it can; forgotten by this call."""
        return self._broken.pop(request_id, None)
