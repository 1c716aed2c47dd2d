"""Settings become the limits that the policies hold to, one for one."""

from dataclasses import fields

from sluice.config.sections import ModelSection, TenantSection
from sluice.core.events import ReplicaLimits
from sluice.core.limits import PoolLimits, TenantLimits
from sluice.core.roster import BatchingLimits, BatchingPolicy
from sluice.wiring.gateway import pool_limits, tenant_limits
from sluice.wiring.replica_life import batching_limits

S = 1_000_000_000


def test_the_settings_of_a_model_become_the_limits_of_its_pool():
    section = ModelSection(
        source="m",
        queue_requests_max=5,
        queue_wait_s_max=2.5,
        queue_tokens_max=6,
        queue_bytes_max=7,
        smaller="s",
        utilisation=0.5,
        headroom=0.3,
        aging_s=4.0,
    )
    expected = PoolLimits("m", ("m-0", "m-1"), 5, 5 * S // 2, 6, 7, "s", 0.5, 0.3, 4 * S)
    assert pool_limits("m", section, ["m-0", "m-1"]) == expected
    assert pool_limits("m", ModelSection("m", aging_s=None), ["m-0"]).aging_ns is None


def test_defaults_of_settings_and_limits_agree():
    """So that what is simulated without settings is what is served without them."""
    made, plain = pool_limits("m", ModelSection("m"), ["m-0"]), PoolLimits("m", ("m-0",))
    bounded = {"queue_tokens_max", "queue_bytes_max"}
    for field in fields(PoolLimits):
        if field.name not in bounded:
            assert getattr(made, field.name) == getattr(plain, field.name), field.name
    limits = ReplicaLimits(100, 4, 50, 32)
    batching, default = batching_limits(ModelSection("m"), limits), BatchingLimits(100, 4, 50)
    for name in ("prefill_share", "kv_headroom", "chunk_tokens_max", "policy"):
        assert getattr(batching, name) == getattr(default, name), name


def test_the_settings_of_a_model_become_the_limits_of_its_replicas():
    section = ModelSection("m", policy="fcfs", prefill_share=0.6, kv_headroom=0.1)
    limits = batching_limits(section, ReplicaLimits(100, 4, 50, 3))
    assert (limits.prefill_share, limits.kv_headroom) == (0.6, 0.1)
    assert (limits.policy, limits.sequences_max) == (BatchingPolicy.FCFS, 3)


def test_the_settings_of_tenants_become_their_limits():
    section = TenantSection(
        slo="gold", requests_per_minute=1, tokens_per_minute=2, concurrency=3, weight=4.0
    )
    assert tenant_limits({"acme": section, "plain": TenantSection()}) == [
        TenantLimits("acme", 1, 2, 3, 4.0),
        TenantLimits("plain"),
    ]
