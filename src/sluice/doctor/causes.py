"""The declared causes: what each is called, where its time shows, and which check looks for it.

``diagnosis`` runs them all; the page of the docs and the tests go by this table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sluice.doctor import engine_checks, outside_checks, remote_checks, traffic_checks
from sluice.doctor.scene import Finding, Scene


@dataclass(frozen=True, slots=True)
class Cause:
    """``phases`` are those in which its time shows, by metric; the check finds its mechanism."""

    title: str
    phases: tuple[str, ...]
    check: Callable[[Scene], Finding]


_ENGINE = ("fleet_queue", "queue", "prefill", "decode", "preempted")

CAUSES: Mapping[str, Cause] = {
    "noisy_tenant": Cause(
        "one tenant sends much more than before", _ENGINE, traffic_checks.noisy_tenant
    ),
    "long_prompts": Cause(
        "others wait for the prefill of very long prompts", _ENGINE, traffic_checks.long_prompts
    ),
    "longer_context": Cause(
        "prompts became longer, as after a change of template or default context",
        _ENGINE,
        traffic_checks.longer_context,
    ),
    "output_length": Cause("answers became longer", _ENGINE, traffic_checks.output_length),
    "cache_hits": Cause(
        "less of the prompts is found in the prefix cache", _ENGINE, traffic_checks.cache_hits
    ),
    "queue_backed_up": Cause(
        "more requests came than replicas keep up with", _ENGINE, traffic_checks.queue_backed_up
    ),
    "engine_slowdown": Cause(
        "the engine is slower at the same work", _ENGINE, engine_checks.engine_slowdown
    ),
    "engine_queue": Cause(
        "requests wait inside an engine elsewhere", _ENGINE, remote_checks.engine_queue
    ),
    "host_cpu": Cause(
        "the host leaves replicas no processor time",
        ("admission", *_ENGINE),
        engine_checks.host_cpu,
    ),
    "cold_start": Cause("a replica was away or loading", _ENGINE, engine_checks.cold_start),
    "admission_limits": Cause(
        "limits let fewer requests run than before", _ENGINE, engine_checks.admission_limits
    ),
    "preemption": Cause(
        "KV memory is full: requests wait for it or are preempted",
        _ENGINE,
        engine_checks.preemption,
    ),
    "imbalance": Cause(
        "one replica gets more work than the others", _ENGINE, engine_checks.imbalance
    ),
    "vendor_throttling": Cause(
        "a vendor throttles", ("admission",), outside_checks.vendor_throttling
    ),
    "upstream_failover": Cause(
        "an upstream fails and requests go elsewhere",
        ("admission",),
        outside_checks.upstream_failover,
    ),
    "slow_retrieval": Cause(
        "documents are found more slowly", ("retrieval",), outside_checks.slow_retrieval
    ),
    "slow_clients": Cause(
        "clients read their answers slowly", ("decode",), outside_checks.slow_clients
    ),
    "journal_pressure": Cause(
        "journal or exporter do not keep up", (), outside_checks.journal_pressure
    ),
}
