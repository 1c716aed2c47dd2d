"""Replays: what they are fitted to, and that one which is off is no evidence."""

import numpy as np
import pytest

from sluice.core.costmodel import Coefficients, Load
from sluice.doctor.diagnosis import Verdict, Wanted, diagnose
from sluice.doctor.reading import read_journal
from sluice.doctor.speeds import Speeds
from sluice.doctor.windows import Window, Windows
from sluice.doctor.world import world_of
from sluice.telemetry import records
from tests.doctor.journals import S, request, written

TRUE = Coefficients(5e6, 10e3, 20e3, 30.0, 1.0)
WINDOWS = Windows(Window(30.0 * S, 60.0 * S), Window(0.0, 30.0 * S), found=False)


def ready():
    return records.ReplicaChanged(
        0, "chat-0", "chat", "ready", context_tokens_max=32768, block_size=16, blocks_total=4000,
        sequences_max=16,
    )  # fmt: skip


def step(number, at_s, past, tokens, rows=2, factor=1.0):
    """A step with one chunk, that takes what ``TRUE`` says, up to a little noise."""
    noise = 1.0 + 0.02 * np.sin(number)
    # Contexts of decode rows fill whole blocks.
    load = Load(rows, rows, 16 * 40 * rows, 0).with_chunk(past, tokens)
    measured = int(TRUE.predict_ns(load) * noise * factor)
    return records.Step(
        int(at_s * S), "chat-0", number, measured, measured,
        tuple((f"d{row}", 0) for row in range(rows)), (records.Chunk("r1", 0, tokens, past),),
        blocks_free=4000 - 40 * rows,
    )  # fmt: skip


@pytest.mark.parametrize("slower", [1.0, 1.8])
def test_time_of_long_prompts_is_learned_from_the_steps_that_had_them(tmp_path, slower):
    found = [ready(), *request(1, 1.0)]
    for number in range(300):
        at_s = 0.1 + 0.19 * number
        late = at_s >= 30.0
        factor = slower if late else 1.0
        if late and number % 3 == 0:
            found.append(step(number, at_s, 512 * (number % 20), 512, factor=factor))
        else:
            found.append(step(number, at_s, 0, 100 + number * 37 % 300, number % 5, factor))
    speeds = Speeds.of(read_journal(written(tmp_path, found)), WINDOWS)
    deep = Load(2, 2, 16 * 80, 0).with_chunk(9000, 512)
    assert speeds.coefficients.predict_ns(deep) == pytest.approx(TRUE.predict_ns(deep), rel=0.1)
    assert speeds.ratio[speeds.end_ns >= 30.0 * S].mean() == pytest.approx(slower, rel=0.05)


def grown(folder):
    """Prompts and first tokens that grow together, on steps which say that all was quick."""
    found = [ready()]
    for number in range(600):
        late = number >= 300
        _, *answered = request(number, 0.1 * number, 0.6 if late else 0.1)
        at_ns, name = number * S // 10, f"r{number}"
        tokens = (400 if late else 100) + number * 31 % 40
        found.append(records.RequestArrived(at_ns, name, "chat", at_ns, tokens, 64))
        found += [*answered, step(number, 0.1 * number + 0.05, 0, tokens)]
    return written(folder, found)


def test_a_replay_that_is_off_gives_no_share(tmp_path):
    found = diagnose(
        read_journal(grown(tmp_path)), Wanted(metric="ttft", incident=WINDOWS.incident)
    )
    assert found.spike.confirmed
    assert not found.shares.usable
    first = found.causes[0]
    assert (first.name, first.verdict, first.share) == ("longer_context", Verdict.LIKELY, None)
    assert any("off, so none tells its share" in line for line in first.against)


def test_what_could_wait_is_what_the_refused_were_told(tmp_path):
    found = [ready()]
    for number in range(100):
        found += [*request(number, 0.6 * number), step(number, 0.6 * number + 0.05, 0, 100)]
    for number, (reason, threshold) in enumerate([("queue_full", 26.0), ("concurrency", 4.0)]):
        at_ns, name = 40 * S + number, f"refused{number}"
        found.append(records.RequestArrived(at_ns, name, "chat", at_ns, 100, 64))
        found.append(
            records.RequestRejected(at_ns, name, "chat", 429, reason, threshold + 1, threshold)
        )
    journal = read_journal(written(tmp_path / "b", found))
    model = journal.requests.of["model"].index("chat")
    world = world_of(journal, WINDOWS, model, Speeds.of(journal, WINDOWS))
    assert world is not None
    assert world.queue_places_max == 10  # beside the 16 that may run
    names = [journal.requests.ids[row] for row in world.rows[~world.kept]]
    assert names == ["refused1"]  # its tenant's own limit kept it out
