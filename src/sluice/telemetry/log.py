"""Set-up of the standard library's logging: lines of text or of JSON on standard error.

Called once per process by ``wiring`` and by the replica process. Modules log facts with
``logging.getLogger(__name__)``; prompt and output text is never passed to a logger. The words of an
exception may quote them, so that only its type and its place are written; what the system says of a
file or a socket is.
"""

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

_log = logging.getLogger(__name__)

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

# Attributes that every log record has; what else is there was passed as ``extra``.
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "taskName"}


class TextLines(logging.Formatter):
    """``time LEVEL source logger: message key=value``, and below it the traceback, if any."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """One log record as text. Line breaks in the message are escaped: it stays one line."""
        extras = "".join(f" {key}={value}" for key, value in _extras(record).items())
        message = f"{record.getMessage()}{extras}".replace("\r", "\\r").replace("\n", "\\n")
        name = record.name.removeprefix("sluice.")
        line = f"{_time(record)} {record.levelname:<7} {self._source} {name}: {message}"
        return line + "".join("\n" + text.rstrip("\n") for text in _traceback(record))


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        """One log record as a JSON object with ``time``, ``level``, ``source`` and ``message``."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "source": self._source,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["traceback"] = "".join(_traceback(record))
        return json.dumps(line, default=str)


def set_up(
    source: str, *, level: Level = "info", form: Format = "text", stream: TextIO | None = None
) -> None:
    """Send all log records of this process to standard error.

    ``source`` names the process: ``gateway``, or a replica's id. Replaces an earlier set-up.
    """
    lines = JsonLines(source) if form == "json" else TextLines(source)
    output = logging.StreamHandler(sys.stderr if stream is None else stream)
    output.setFormatter(lines)
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level.upper())
    # Requests are in the journal and the metrics, starts and stops are told by the command.
    for chatty in ("uvicorn", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """What was passed with it; libraries add attributes of their own with an underscore."""
    return {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and not key.startswith("_")
    }


def _traceback(record: logging.LogRecord) -> list[str]:
    return list(_places(record.exc_info[1])) if record.exc_info else []


def _places(error: BaseException | None) -> Iterator[str]:
    """Where an exception came from and of which type it is, after those that it came from."""
    if error is None:
        return
    if error.__cause__ is not None or not error.__suppress_context__:
        yield from _places(error.__cause__ or error.__context__)
    yield "Traceback (most recent call last):\n"
    yield from traceback.format_list(traceback.extract_tb(error.__traceback__))
    yield type(error).__name__ + (f": {error}" if isinstance(error, OSError) else "") + "\n"


def unhandled(_loop: object, context: Mapping[str, Any]) -> None:
    """Write what an event loop could not give to anybody; for ``loop.set_exception_handler``.

    The loop's own way would write the words of the exception.
    """
    _log.error("in the event loop: %s", context.get("message"), exc_info=context.get("exception"))
