"""Log lines in both forms, one per event whatever the message holds."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from sluice.telemetry.log import Format, Level, set_up


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def logged(form: Format, *, level: Level = "info") -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    set_up("gateway", level=level, form=form, stream=stream)
    return logging.getLogger("sluice.cluster.local"), stream


def test_text_lines_have_time_level_source_and_extras() -> None:
    log, stream = logged("text")
    log.warning("replica %s was lost", "m-0", extra={"losses": 2})
    line = stream.getvalue()
    assert line.endswith(" WARNING gateway cluster.local: replica m-0 was lost losses=2\n")
    assert line[:2] == "20"


def test_a_message_with_line_breaks_stays_one_line() -> None:
    log, stream = logged("text")
    log.info("first\nsecond\r")
    assert stream.getvalue().count("\n") == 1
    assert "first\\nsecond\\r" in stream.getvalue()


def test_json_lines_parse_and_carry_tracebacks() -> None:
    log, stream = logged("json")
    try:
        raise OSError("disk\nfull")
    except OSError:
        log.exception("writing failed", extra={"path": object()})
    (line,) = stream.getvalue().splitlines()
    parsed = json.loads(line)
    assert (parsed["level"], parsed["source"], parsed["logger"]) == (
        "error",
        "gateway",
        "sluice.cluster.local",
    )
    assert parsed["message"] == "writing failed"
    assert "OSError: disk" in parsed["traceback"]
    assert parsed["path"].startswith("<object")


def test_text_lines_have_the_traceback_below() -> None:
    log, stream = logged("text")
    try:
        raise OSError("full")
    except OSError:
        log.exception("writing failed")
    assert stream.getvalue().splitlines()[-1] == "OSError: full"


def test_levels_are_kept_and_a_second_set_up_replaces_the_first() -> None:
    _, first = logged("text")
    log, second = logged("text", level="warning")
    log.info("hidden")
    log.error("shown")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
