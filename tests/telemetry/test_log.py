"""Log lines in both forms, one per event whatever the message holds."""

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator

import pytest

from sluice.telemetry.log import Format, Level, set_up, unhandled


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


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_words_of_an_exception_are_left_out_since_they_may_quote_a_prompt(form: Format) -> None:
    log, stream = logged(form)
    words = "a prompt"
    try:
        try:
            raise KeyError(words)
        except KeyError as cause:
            raise ValueError(f"cannot read '{words}'") from cause
    except ValueError:
        log.exception("request %s failed", "r1")
    written = stream.getvalue()
    assert "cannot read 'a" not in written
    assert "KeyError: " not in written
    assert written.index("KeyError") < written.index("ValueError")
    assert "test_log.py" in written


def test_what_nobody_waits_for_in_an_event_loop_is_written_without_its_words() -> None:
    _, stream = logged("text")
    words = "a prompt"

    async def forget() -> None:
        asyncio.get_running_loop().set_exception_handler(unhandled)

        async def fail() -> None:
            raise ValueError(words)

        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        del task
        gc.collect()

    asyncio.run(forget())
    assert "Task exception was never retrieved" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert "a prompt" not in stream.getvalue()
