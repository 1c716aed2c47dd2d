"""Case D-10 against a served model: one long prompt does not freeze the streams beside it.

Exact numerics, so that every text must equal its solo run. They take seconds for the prompt used
here; ``tests/simulation`` computes the 8,000 tokens of the case in virtual time.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import pytest

from tests.e2e.clients import Stream, open_stream, stream_text
from tests.e2e.conftest import KV_BYTES_PER_TOKEN_F32
from tests.e2e.processes import ServerProcess, eventually

pytestmark = [pytest.mark.model, pytest.mark.slow]

LONG_TOKENS = 600
CHUNK_TOKENS_MAX = 64
STEP_S_MAX = 0.08
STREAMS = [[1000 + 37 * number + i for i in range(20)] for number in range(3)]
SHORTS = [[5000 + 91 * number + i for i in range(12)] for number in range(3)]
LONG = [2000 + 7 * i % 9000 for i in range(LONG_TOKENS)]
STREAM_OUTPUT, SHORT_OUTPUT, LONG_OUTPUT = 56, 6, 6
STEADY_TOKENS = 15


@pytest.fixture(scope="module")
def exact(smollm2_folder, tmp_path_factory) -> Iterator[ServerProcess]:
    settings = [
        f"models.tiny.source={smollm2_folder}",
        "models.tiny.numerics=exact",
        "models.tiny.context_tokens_max=2048",
        f"models.tiny.prefill_chunk_tokens_max={CHUNK_TOKENS_MAX}",
        "models.tiny.sequences_max=8",
        "models.tiny.prefix_cache=false",
        f"models.tiny.step_max={int(STEP_S_MAX * 1000)}ms",
        f"models.tiny.kv_bytes={4096 * KV_BYTES_PER_TOKEN_F32}",
    ]
    arguments = [part for one in settings for part in ("--set", one)]
    running = ServerProcess(tmp_path_factory.mktemp("server"), arguments)
    try:
        yield running.wait_ready()
        assert running.stop() == 0, running.output
    finally:
        running.destroy()


@dataclass
class Reading:
    """One stream, read in a thread; times are those of the machine's clock."""

    stream: Stream
    events: list[object] = field(default_factory=list)

    def read(self) -> "Reading":
        self.events = self.stream.rest()
        return self

    @property
    def text(self) -> str:
        return stream_text(self.events)

    @property
    def at_s(self) -> list[float]:
        """When its tokens came: every event but usage, if any, and the terminator."""
        return [self.stream.start_s + s for s in self.stream.times_s[:-1]]


@dataclass(frozen=True)
class Solo:
    """What each prompt gives alone, and the long one's time to its first token."""

    texts: list[str]
    ttft_s: float


def begun(server: ServerProcess, prompt: list[int], output: int) -> Reading:
    stream = open_stream(server.target, "tiny", prompt, max_tokens=output, ignore_eos=True)
    assert stream.status == 200, stream.response.read()
    return Reading(stream)


@dataclass
class Scene:
    """Three streams, a long prompt and three short ones right behind it, all read to their ends."""

    streams: list[Reading]
    long: Reading
    shorts: list[Reading]
    long_sent_s: float


@pytest.fixture(scope="module")
def solo(exact: ServerProcess) -> Solo:
    wanted = [(prompt, STREAM_OUTPUT) for prompt in STREAMS]
    wanted += [(prompt, SHORT_OUTPUT) for prompt in SHORTS]
    texts = [begun(exact, *one).read().text for one in wanted]
    long = begun(exact, LONG, LONG_OUTPUT).read()
    return Solo([*texts, long.text], long.stream.times_s[0])


@pytest.fixture(scope="module")
def scene(exact: ServerProcess, solo: Solo) -> Scene:
    def whole(prompt: list[int], output: int) -> Reading:
        return begun(exact, prompt, output).read()

    with ThreadPoolExecutor(7) as pool:
        streams = [begun(exact, prompt, STREAM_OUTPUT) for prompt in STREAMS]
        reads = [pool.submit(one.read) for one in streams]
        eventually(lambda: all(len(one.stream.times_s) >= STEADY_TOKENS for one in streams))
        sent_s = time.monotonic()
        long = pool.submit(whole, LONG, LONG_OUTPUT)
        eventually(lambda: exact.metric("requests_in_flight", "model=tiny") == 4)
        shorts = [pool.submit(whole, prompt, SHORT_OUTPUT) for prompt in SHORTS]
        done = [read.result() for read in reads]
        return Scene(done, long.result(), [one.result() for one in shorts], sent_s)


def tolerated_s(limit_s: float) -> float:
    """A limit on a measured time, with the tolerance that the cases allow."""
    return limit_s + max(0.2 * limit_s, 0.25)


def first_token_s(scene: Scene) -> float:
    """Seconds from sending the long prompt to its first token."""
    return scene.long.at_s[0] - scene.long_sent_s


def gaps_s(scene: Scene, start_s: float, end_s: float) -> list[float]:
    """Gaps between tokens of the streams that lie within this time, rising."""
    return sorted(
        later - earlier
        for one in scene.streams
        for earlier, later in pairwise(one.at_s)
        if start_s <= earlier and later <= end_s
    )


def test_d10_streams_go_on_while_a_long_prompt_is_computed(
    scene: Scene, solo: Solo, record_property
):
    chunk_s = solo.ttft_s / (LONG_TOKENS / CHUNK_TOKENS_MAX)
    sent_s, first_s = scene.long_sent_s, scene.long.at_s[0]
    steady_s = median(gaps_s(scene, 0.0, sent_s))
    beside = gaps_s(scene, sent_s, first_s)
    p99_s = beside[int(0.99 * len(beside))]
    record_property("steady_p99_and_chunk_s", (steady_s, p99_s, chunk_s))
    assert p99_s <= tolerated_s(max(chunk_s, STEP_S_MAX) + 2 * steady_s)
    for one in scene.streams:
        tokens = sum(sent_s <= at_s <= first_s for at_s in one.at_s)
        assert tokens >= LONG_TOKENS / CHUNK_TOKENS_MAX


def test_d10_the_long_prompt_is_hardly_slower_than_alone(scene: Scene, solo: Solo, record_property):
    record_property("ttft_alone_and_beside_s", (solo.ttft_s, first_token_s(scene)))
    assert first_token_s(scene) <= tolerated_s(1.5 * solo.ttft_s)


def test_d10_short_prompts_behind_the_long_one_start_before_it(scene: Scene):
    for short in scene.shorts:
        assert short.stream.start_s > scene.long.stream.start_s
        assert short.at_s[0] < scene.long.at_s[0]


def test_d10_all_texts_are_those_of_solo_runs(scene: Scene, solo: Solo):
    everything = [*scene.streams, *scene.shorts, scene.long]
    assert [one.text for one in everything] == solo.texts


def test_d10_the_chunk_size_is_shown():
    arguments = [f"models.tiny.{one}" for one in ("source=x", "prefill_chunk_tokens_max=64")]
    command = [sys.executable, "-m", "sluice", "config", "explain"]
    for one in arguments:
        command += ["--set", one]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert re.search(
        r"^models\.tiny\.prefill_chunk_tokens_max += 64 +# --set$", shown, re.MULTILINE
    )
