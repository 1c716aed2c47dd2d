"""What the gateway process and a replica process say to each other.

Values only: framing and sockets live in ``cluster``, meaning lives in ``realtime`` (replica side)
and ``cluster.fleet_driver``. Both ends run the same version of sluice, so there is no negotiation;
a frame that does not decode ends the connection.
"""

import msgspec

from sluice.core.events import ReplicaLimits, Report
from sluice.core.request import EndReason, PhaseTimes, Request, Usage
from sluice.core.sampling import Sampling
from sluice.runtime.generation import Delta, Fault
from sluice.runtime.output import OutputRules


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Generate this. ``grammar`` holds the output of each choice to a format."""

    request: Request
    sampling: Sampling
    rules: OutputRules
    grammar: str | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop the request; no answer is expected beyond its ``RequestEnded``."""

    request_id: str


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Nothing more will be submitted. Finish by ``deadline_ns``, then end what is left and exit."""

    deadline_ns: int


ToReplica = Submit | Cancel | Drain


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model is loaded, ``load_ns`` after that began.

    Of these ``compile_ns`` were spent on compiling it and on trying what was compiled.
    """

    limits: ReplicaLimits
    load_ns: int
    compile_ns: int = 0


class LoadFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model cannot be served by this process.

    ``permanent`` says that trying again cannot help.
    """

    error: str
    permanent: bool = True


class Text(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """New text of one choice. ``delta.tool_calls`` is always empty here."""

    request_id: str
    delta: Delta


class ChoiceDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One choice is complete."""

    request_id: str
    choice: int
    reason: EndReason


class RequestEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The request holds nothing any more. Exactly one for each ``Submit``.

    ``fault`` is set where the reason is ``FAILED``. ``is_estimated`` says that a remote engine told
    no usage, ``engine_ttft_ns`` is what it calls its own time to first token, and
    ``silent`` that nothing came of the stream that it was asked for.
    """

    request_id: str
    reason: EndReason
    usage: Usage
    phases: PhaseTimes
    preemptions: int
    error: str
    fault: Fault | None = None
    is_estimated: bool = False
    engine_ttft_ns: int | None = None
    silent: bool = False


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The replica's own view of its load."""

    report: Report


class DrainDone(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Everything has ended; the process exits."""


FromReplica = Ready | LoadFailed | Text | ChoiceDone | RequestEnded | Load | DrainDone
