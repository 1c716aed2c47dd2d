"""What the operator reads when everything is loaded."""

from dataclasses import replace

from sluice.cli.welcome import further_names, welcome
from sluice.config.pipeline_sections import PipelineSection
from sluice.config.routes import RouteSection
from sluice.config.sections import ModelSection
from sluice.config.settings import Settings
from sluice.core.events import ReplicaLimits
from sluice.core.fleet_replica import FleetReplica
from sluice.core.pool_view import PoolView
from sluice.core.scaling import Decision

LIMITS = ReplicaLimits(8192, 32, 1024, 32, block_bytes=1 << 20)


def pool(limits: ReplicaLimits | None, replicas: int = 1) -> PoolView:
    views = tuple(FleetReplica(f"tiny-{n}", "tiny").view(0) for n in range(replicas))
    return PoolView("tiny", 0, 0, 0, 0, limits, views)


def test_sizes_and_counts_are_told_in_words():
    text = welcome([pool(LIMITS)], "http://127.0.0.1:8000", needs_key=False)
    assert text.startswith(
        "tiny: context 8,192 tokens, KV pool 32,768 tokens (1.0 GiB), 32 sequences at once, "
        "1 replica\n"
    )
    assert "note:" not in text
    assert "curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type" in text


def test_several_replicas_and_a_key():
    small = replace(LIMITS, block_bytes=1 << 16)
    text = welcome([pool(small, replicas=2)], "http://127.0.0.1:8000", needs_key=True)
    assert "(64 MiB)" in text
    assert "2 replicas\n" in text
    assert "Authorization: Bearer $KEY" in text


def test_a_pool_smaller_than_the_context_is_noted_with_what_a_request_can_have():
    text = welcome([pool(replace(LIMITS, blocks_total=64))], "http://[::1]:1", needs_key=False)
    assert "note: tiny:" in text
    assert "at most 2,048 tokens" in text


def test_a_remote_model_is_told_by_its_engines_and_not_by_memory():
    text = welcome([pool(LIMITS, 2)], "http://x", frozenset({"tiny"}), needs_key=False)
    assert text.startswith(
        "tiny: remote, 2 engines, context 8,192 tokens, at most 32 requests at an engine\n"
    )


def test_a_remote_model_that_does_not_answer_yet_is_noted():
    text = welcome([pool(None)], "http://x", frozenset({"tiny"}), needs_key=False)
    assert text.startswith("note: tiny: remote, 1 engine; none answers yet")


def test_a_number_that_follows_the_load_is_told_with_the_most_and_rest_as_such():
    scaled = replace(pool(LIMITS, 3), scaling=Decision(1, 2, "least", most=3))
    assert "1 replica, 3 at most\n" in welcome([scaled], "http://x", needs_key=False)
    resting = replace(pool(None), scaling=Decision(0, 0, "asked", most=3))
    text = welcome([resting], "http://x", needs_key=False)
    assert text.startswith("tiny: no replica; the first request starts one\n")


def test_routes_and_pipelines_are_told_beside_models():
    settings = Settings(
        models={"tiny": ModelSection(source="tiny")},
        routes={"auto": RouteSection(simple="tiny", complex="large", share=30.0)},
        pipelines={"handbook": PipelineSection()},
    )
    text = welcome([pool(LIMITS)], "http://x", further=further_names(settings), needs_key=False)
    assert "\nauto: route, tiny for simple prompts, large for complex ones\n" in text
    assert "\nhandbook: pipeline, embedded retrieval before tiny\n" in text
