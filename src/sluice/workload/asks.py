"""What a client will ask for and when: the values that all workloads yield, in order of time.

Made by ``synthetic.py`` and ``traces.py``; played by whoever holds a fleet. Nothing is sent here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BadWorkload(ValueError):
    """A workload that cannot be played: the message says where it is wrong and what to change."""


class Part(NamedTuple):
    """The first ``tokens`` tokens of text number ``text``. Equal parts are equal text."""

    text: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``at_ns`` counts from the start of the workload; ``read_ns`` is how long before
    that its first byte came, where reading it took time.

    ``prompt`` is its text in parts. Its answer ends by itself after ``output_tokens``;
    ``output_tokens_max`` is the limit that the client sets, ``None`` where it sets none. Empty
    names leave the choice to whoever serves it. ``tier``, ``deadline_ns`` (after ``at_ns``) and
    ``may_degrade`` are wishes of the client's own beside those of its class. The client leaves
    ``leaves_ns`` after ``at_ns`` where it has no whole answer by then.
    """

    number: int
    at_ns: int
    prompt: tuple[Part, ...]
    output_tokens: int
    output_tokens_max: int | None = None
    model: str = ""
    slo_class: str = ""
    tenant: str = ""
    choices: int = 1
    tier: int | None = None
    deadline_ns: int | None = None
    may_degrade: bool = True
    leaves_ns: int | None = None
    read_ns: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return sum(part.tokens for part in self.prompt)


class Workload(Protocol):
    """Something that can be played."""

    def asks(self, seed: int) -> Iterator[Ask]:
        """The requests by time, one after the other; the same for the same seed.

        Workloads that differ in one figure draw the same random numbers for the rest, so that they
        can be compared. Raises ``BadWorkload``, also while requests are taken.
        """
        ...


# Text numbers: even ones are shared by whoever names them, odd ones belong to one request.


def shared_text(number: int) -> int:
    """The number of a text that several requests may have."""
    return 2 * number


def own_text(number: int) -> int:
    """The number of the text that only request ``number`` has."""
    return 2 * number + 1
