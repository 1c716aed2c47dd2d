"""What is remembered of one call until its ending, for metrics and journal.

Filled and read by ``observer`` alone.
"""

from dataclasses import dataclass, field

from sluice.core.request import Request, Rung
from sluice.runtime.generation import Delta
from sluice.telemetry.metrics import StreamSeries
from sluice.telemetry.records import RequestText

# Most of a prompt, and of the outputs of one call, that a journal with text holds.
TEXT_CHARS_MAX = 65_536


class CallTexts:
    """Prompt and output of one call, for a journal that is told to hold them."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt[:TEXT_CHARS_MAX]
        self._outputs: dict[int, list[str]] = {}
        self._room = TEXT_CHARS_MAX

    def add(self, delta: Delta) -> None:
        """Keep a piece of output as far as there is room."""
        text = delta.text[: self._room]
        self._room -= len(text)
        self._outputs.setdefault(delta.choice, []).append(text)

    def record(self, now_ns: int, request: Request) -> RequestText:
        """All of it as one record."""
        outputs = {choice: "".join(parts) for choice, parts in sorted(self._outputs.items())}
        if request.choices == 1:
            output = outputs.get(0, "")
        else:
            output = "\n".join(f"[choice {choice}]\n{text}" for choice, text in outputs.items())
        return RequestText(now_ns, request.id, self._prompt, output)


@dataclass(slots=True)
class CallTiming:
    """Times of one call's text. TPOT is over the whole call: it is undefined for one chunk.

    ``arrived_ns`` is when the call came to the fleet, for its model or for a smaller one;
    ``stream`` is where its chunks are counted, but for ``uncounted`` tokens, those of the first
    chunks of further choices;
    ``whole`` says that a remote engine answers in one piece, so that nobody sees a first token.
    ``cold_ns`` is when it was given to a replica as its first since that was loaded.
    ``handed_over_by`` is the model that did not take it, until a replica of the other one does, and
    ``handed_over`` the rung by which it goes.
    """

    model: str
    arrived_ns: int
    stream: StreamSeries
    slo_class: str = ""
    handed_over_by: str = ""
    handed_over: Rung = Rung.SMALLER
    replica: str = ""
    attempts: int = 0
    first_ns: int | None = None
    last_ns: int = 0
    first_tokens: int = 0
    tokens: int = 0
    uncounted: int = 0
    choice_ns: dict[int, int] = field(default_factory=dict)
    texts: CallTexts | None = None
    whole: bool = False
    cold_ns: int | None = None

    @property
    def counted_tokens(self) -> int:
        """Tokens that its ``stream`` was told of."""
        return self.tokens - self.uncounted

    def tpot_ns(self, choices: int) -> int | None:
        """(last - first) / (N - tokens in the first chunk), per choice; ``None`` if undefined."""
        later = self.tokens - self.first_tokens
        if self.first_ns is None or later <= 0:
            return None
        return (self.last_ns - self.first_ns) * choices // later
