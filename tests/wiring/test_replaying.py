"""Journal and settings to the fleet of a replay: what is recorded, set, and changed."""

from dataclasses import replace

import pytest

from sluice.config.load import load_settings
from sluice.config.sections import SloSection
from sluice.config.sources import parse_override
from sluice.core.costmodel import Coefficients
from sluice.core.errors import ConfigError
from sluice.core.events import ReplicaLimits
from sluice.core.roster import BatchingLimits
from sluice.planner.measured import Speed
from sluice.planner.recorded import Recorded, RecordedReplica, RecordedRequest
from sluice.telemetry.records import RequestArrived, RequestEnded
from sluice.wiring.replaying import replay_fleet, settings_of

LIMITS = ReplicaLimits(4096, 32, 512, 8)
BATCHING = BatchingLimits(4096, 32, 512, sequences_max=8, chunk_tokens_max=128)
SPEED = Speed(Coefficients(), [0], [1.5])
CHAT = SloSection(ttft_s=1.0, tpot_s=0.05, tier=0)


def recorded(speed=SPEED):
    requests = tuple(
        RecordedRequest(
            RequestArrived(n, f"r{n}", "m", n, 100, 50, slo_class="chat"),
            RequestEnded(n + 9, f"r{n}", "m", "stop", n, completion_tokens=20),
        )
        for n in range(2)
    )
    replica = RecordedReplica("m", LIMITS, BATCHING, None, speed)
    return Recorded(requests, {"m-0": replica, "m-1": replica}, {"chat": CHAT}, ())


def settings(*texts, file=None):
    loaded = load_settings(file, [parse_override(text) for text in texts], {}, secrets=False)
    return settings_of(recorded(), loaded)


def test_what_the_settings_do_not_name_is_as_recorded(tmp_path):
    plain = settings()
    assert plain.models["m"].replicas.min == 2
    assert plain.slo == {"chat": CHAT}
    file = tmp_path / "c.toml"
    file.write_text('[models.m]\nreplicas = { min = 3 }\n[slo.chat]\nttft = "2s"\n')
    given = settings(file=file)
    assert given.models["m"].replicas.min == 3
    assert given.slo["chat"] == SloSection(ttft_s=2.0, tpot_s=0.05, tier=0)


def test_classes_of_unknown_targets_have_none():
    nothing = replace(recorded(), classes={})
    plain = settings_of(nothing, load_settings(None, [], {}, secrets=False))
    assert plain.slo == {"chat": SloSection()}


def test_replicas_batch_as_recorded_but_for_what_is_changed():
    plain = settings()
    (pool,) = replay_fleet(recorded(), plain, plain, 0).pools
    assert pool.batching == BATCHING
    assert pool.limits.replica_ids == ("m-0", "m-1")
    assert pool.ratio is not None
    assert pool.ratio(5) == 1.5
    changed = settings("models.m.policy=fcfs", "models.m.sequences_max=4", "models.m.headroom=0.1")
    (pool,) = replay_fleet(recorded(), plain, changed, 0).pools
    assert (pool.batching.policy, pool.batching.sequences_max) == ("fcfs", 4)
    assert pool.batching.chunk_tokens_max == 128
    assert pool.limits.headroom == 0.1


def test_other_hardware_has_its_own_speed_and_limits():
    plain = settings()
    other = settings("models.m.source=sim:llama-3.1-8b@h100")
    (pool,) = replay_fleet(recorded(), plain, other, 0).pools
    assert pool.ratio is None
    assert pool.batching.blocks_total > 10 * 512 * 32 // pool.batching.block_size


def test_a_model_of_unknown_speed_needs_hardware():
    plain = settings()
    with pytest.raises(ConfigError, match="source=sim:MODEL@GPUxN"):
        replay_fleet(recorded(speed=None), plain, plain, 0)
