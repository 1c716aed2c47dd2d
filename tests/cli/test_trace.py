"""``sluice trace``: a life as a waterfall and as JSON, and what an unknown id gets."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.main import run
from sluice.cli.trace import show
from sluice.telemetry.journal import Clocks, JournalLimits, JournalReader, JournalWriter
from sluice.telemetry.life import find_life
from sluice.telemetry.records import (
    AnyRecord,
    Chunk,
    FirstToken,
    RequestArrived,
    RequestDegraded,
    RequestDispatched,
    RequestEnded,
    RequestRefused,
    RequestRejected,
    Score,
    Step,
)

MS = 1_000_000


def write(folder: Path, *records: AnyRecord) -> None:
    writer = JournalWriter(folder, "gateway", Clocks(lambda: 0, lambda: 10**18), JournalLimits())
    for record in records:
        writer.append(record)
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scores = (Score("m-0", 12, 12, 0), Score("m-1", 99, 30, 3, kv_fits=False))
    write(
        tmp_path,
        RequestArrived(2 * MS, "req-1", "m", 0, 12, 20),
        RequestDispatched(3 * MS, "req-1", "m-0", 1, scores),
        Step(30 * MS, "m-0", 1, 18 * MS, 20 * MS, prefill=(Chunk("req-1", 0, 12, 0),)),
        FirstToken(31 * MS, "req-1", 31 * MS),
        *(
            Step((30 + 10 * i) * MS, "m-0", 1 + i, 9 * MS, 10 * MS, decode=(("req-1", 0), ("x", 0)))
            for i in range(1, 4)
        ),
        Step(70 * MS, "m-0", 5, 9 * MS, 0, decode=(("req-1", 0),), error="[bold]no cells"),
        RequestEnded(
            71 * MS, "req-1", "m", "failed", 0, "m-0", 1, 12, 0, 4,
            queue_ns=10 * MS, prefill_ns=20 * MS, decode_ns=41 * MS, error="no cells",
        ),
        RequestArrived(82 * MS, "req-2", "m", 80 * MS, 12, 20),
        RequestRejected(83 * MS, "req-2", "m", 429, "queue_full", 67, 66, 3.25),
        RequestArrived(92 * MS, "req-3", "m", 90 * MS, 12, 20),
    )  # fmt: skip
    return tmp_path


def trace(folder: Path, *arguments: str) -> int:
    return run(["trace", *arguments, "--journal", str(folder)])


def test_the_waterfall_names_every_phase_decision_and_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "req-1") == 0
    out = capsys.readouterr().out
    for words in (
        "req-1  m",
        "12 prompt tokens, at most 20 more",
        "dispatched to m-0; scores, lowest wins: m-0 12",
        "m-1 99 (30 uncached tokens, 3 places, KV short)",
        "queue",
        "prefill",
        "57.7 %",
        "prompt 0–12",
        "3 tokens",
        "failed: [bold]no cells",
        "first token after 31.0 ms; ended with failed after 71.0 ms",
        "12 prompt tokens (0 cached), 4 generated",
    ):
        assert words in out, words


@pytest.mark.parametrize(("slo_class", "told"), [("chat", True), ("", False)])
def test_only_a_request_of_a_class_is_said_to_be_inside_targets(tmp_path, capsys, slo_class, told):
    write(
        tmp_path,
        RequestArrived(2 * MS, "req-1", "m", 0, 12, 20, slo_class=slo_class),
        RequestEnded(9 * MS, "req-1", "m", "stop", 0, "m-0", 1, 12, 0, 4, outcome="met"),
    )
    assert trace(tmp_path, "req-1") == 0
    assert ("inside the targets" in capsys.readouterr().out) is told


def test_bars_of_the_waterfall_follow_one_another(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(folder, "req-1")
    lines = capsys.readouterr().out.splitlines()
    spans = {}
    for line in lines:
        if "█" in line:
            spans[line.split()[0]] = (line.index("█"), line.rindex("█") + 1)
    assert list(spans) == ["queue", "prefill", "decode"]
    assert spans["queue"][1] == spans["prefill"][0]
    assert spans["prefill"][1] == spans["decode"][0]


@pytest.mark.parametrize("width", [80, 110])
def test_no_line_is_wider_than_the_terminal_and_no_row_is_split(tmp_path: Path, width: int) -> None:
    long = (*(((f"x{n}", 0)) for n in range(31)), ("req-1", 0))
    write(
        tmp_path,
        RequestArrived(2 * MS, "req-1", "m", 0, 8192, 2000),
        RequestDispatched(3 * MS, "req-1", "m-0", 2),
        Step(
            1030 * MS, "m-0", 1, 900 * MS, 987 * MS, blocks_free=12345, decode=long[:-1],
            prefill=(Chunk("req-1", 0, 256, 7936), Chunk("y", 0, 1000, 0)),
        ),
        *(Step((1030 + i) * MS, "m-0", i, MS, MS, decode=long) for i in range(2, 1800)),
        RequestEnded(
            3000 * MS, "req-1", "m", "stop", 0, "m-0", 2, 8192, 0, 1798,
            admission_ns=MS // 10, queue_ns=30 * MS, prefill_ns=1000 * MS, decode_ns=1970 * MS,
        ),
    )  # fmt: skip
    life = find_life(JournalReader(tmp_path), "req-1")
    assert life is not None
    console = Console(width=width, record=True, file=io.StringIO())
    show(life, console)
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "dispatched to m-0 (attempt 2)" in text
    (row,) = [line for line in lines if line.startswith("prompt 7,936–8,192")]
    assert row.split()[-1] == "12,345"
    (row,) = [line for line in lines if line.startswith("1,798 tokens")]
    assert row.split()[-1] == "0"
    (admission,) = [line for line in lines if line.startswith("admission")]
    assert admission.rstrip().endswith("0.0 %")
    (queue,) = [line for line in lines if line.startswith("queue")]
    assert "█" not in queue or "1.0 %" in queue


def test_a_request_refused_before_it_became_a_call_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, RequestRefused(5 * MS, "id-9", 400, "invalid_request", "m", "mine"))
    for name in ("mine", "id-9"):
        assert trace(tmp_path, name) == 0
        out = capsys.readouterr().out
        assert "mine (id-9)  m" in out
        assert "refused with 400 invalid_request\n" in out


def test_a_refusal_is_told_with_its_numbers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "req-2") == 0
    out = capsys.readouterr().out
    assert "refused with 429 queue_full: measured 67, limit 66 places; retry after 3.2 s" in out


def test_a_request_without_an_ending_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "req-3") == 0
    out = capsys.readouterr().out
    assert "the journal has no ending" in out
    assert "less than 0.5 s ago, by which the journal can lag behind" in out


def test_json_is_one_document_with_the_same_facts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "req-1", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["id"] == "req-1"
    assert [phase["phase"] for phase in document["phases"]] == ["queue", "prefill", "decode"]
    assert document["decisions"][0]["scores"][1]["kv_fits"] is False
    assert len(document["steps"]) == 5
    assert document["ending"]["reason"] == "failed"


def test_an_unknown_id_fails_with_the_ids_that_look_like_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "req-9") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "has no request 'req-9'" in captured.err
    assert "req-1" in captured.err


def test_an_unknown_id_unlike_any_other_gets_the_latest(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(folder, "something") == 1
    assert "The latest are: req-3, req-2, req-1." in capsys.readouterr().err


def test_an_empty_journal_says_that_it_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(tmp_path, "req-1") == 1
    assert "no requests at all" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trace(tmp_path / "none", "req-1") == 2
    assert "there is no journal folder" in capsys.readouterr().err


def test_the_folder_comes_from_the_settings_if_not_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["trace", "req-1", "--set", f"journal.dir={folder}"]) == 0
    assert "req-1" in capsys.readouterr().out


def test_a_trace_needs_no_key_of_the_server(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text(
        f'[journal]\ndir = "{folder}"\n[server]\nlisten = "0.0.0.0:8000"\n'
        '[tenants.acme]\nkey_sha256_env = "ACME_KEYS_OF_THE_SERVER"\n'
    )
    assert run(["trace", "req-1", "-c", str(file)]) == 0
    assert "req-1" in capsys.readouterr().out


def test_what_was_done_under_overload_is_told_with_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path,
        RequestArrived(
            2 * MS,
            "req-1",
            "large",
            0,
            12,
            500,
            tier=2,
            slo_class="gold",
            overload=("shorten", "smaller", "queue"),
        ),
        RequestDegraded(3 * MS, "req-1", "shorten", output_tokens_max=64),
        RequestDegraded(4 * MS, "req-1", "smaller", None, "small", 1.25, 0.5),
        RequestDispatched(
            900 * MS, "req-1", "small-0", 1, predicted_wait_ns=950 * MS, waited_ns=896 * MS
        ),
        RequestEnded(1000 * MS, "req-1", "small", "length", 0, "small-0", 1, 12, 0, 64),
    )
    assert trace(tmp_path, "req-1") == 0
    out = capsys.readouterr().out
    for words in (
        "class gold, tier 2, ladder shorten > smaller > queue",
        "+3.0 ms shorten: at most 64 tokens",
        "+4.0 ms smaller: given to small: measured 1.25, limit 0.5",
        "dispatched to small-0 after waiting 896.0 ms, predicted 950.0 ms",
    ):
        assert words in out, words
    assert trace(tmp_path, "req-1", "--json") == 0
    shorten, smaller, dispatched = json.loads(capsys.readouterr().out)["decisions"]
    assert (shorten["rung"], shorten["output_tokens_max"]) == ("shorten", 64)
    assert (smaller["rung"], smaller["model"], smaller["measured"]) == ("smaller", "small", 1.25)
    assert (dispatched["predicted_wait_ns"], dispatched["waited_ns"]) == (950 * MS, 896 * MS)
