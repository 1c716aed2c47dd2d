"""What each number of a plan is: its formula, what went into it, and where that comes from.

``explained`` covers every number of the document of ``sluice plan --json`` by its path; a test
holds it to that. Nothing is estimated here that ``plan.py`` did not.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from sluice.planner.coefficients import fitted
from sluice.planner.memory import GIB
from sluice.planner.plan import Plan
from sluice.planner.predict import StepModel

Input = float | int | str


@dataclass(frozen=True, slots=True)
class Explanation:
    """One number: ``path`` is where it stands in the document."""

    path: str
    value: Input | None
    unit: str
    formula: str
    inputs: Mapping[str, Input]
    source: str


def explained(found: Plan) -> list[Explanation]:
    """Every number of the plan, in the order of the report."""
    return [
        *_rates(found),
        *_fleet(found),
        *_memory(found),
        *_steps(found),
        *_others(found),
    ]


def level_of(model: StepModel) -> str:
    """Which coefficients are in use, and what they were fitted to."""
    name, _ = model.level
    rows = model.fit.levels.rows.get(name, 0)
    return f"{name}, fitted to {rows:,} published rows ({model.fit.kind} fit of {model.fit.date})"


def measured_with(model: StepModel) -> str:
    """Versions of the engine that published rows are of, and when they were fitted."""
    engine = model.engine_name.split("-", maxsplit=1)[0]
    versions = [
        (tuple(map(int, re.findall(r"\d+", version)[:3])), version)
        for name, _, version in (text.partition(" ") for text in fitted()["engines"])
        if name.startswith((engine, "tensorrt" if engine == "trtllm" else engine))
        and re.match(r"\d+\.\d+", version)
    ]
    if not versions:
        return f"fit of {model.fit.date}"
    first, last = (version.split()[0] for _, version in (min(versions), max(versions)))
    return f"{engine} {first} to {last}, fit of {model.fit.date}"


def _residual_source(model: StepModel, leaned_on: tuple[str, ...]) -> str:
    if model.calibration is not None:
        return "; ".join(leaned_on)
    return f"nearest published rows, data sha256 {str(fitted()['sha256'])[:12]}"


def _rates(found: Plan) -> Iterator[Explanation]:
    replica, model, question = found.replica, found.model, found.question
    lengths, targets = question.load.lengths, question.targets
    at = replica.at_slo
    source = f"{level_of(model)}; {_residual_source(model, replica.residual.leaned_on)}"
    held = float(replica.sequences_max)
    full = model if found.saturated is None else found.saturated
    full_source = _residual_source(full, full.residual(lengths, held).leaned_on)
    step_s = held / (lengths.output * replica.capacity_rps.estimate)
    yield Explanation(
        "per_replica.capacity_rps",
        replica.capacity_rps.estimate,
        "req/s",
        "requests held / (output tokens x step time with so many), least over shorter prompts",
        {"requests_held": held, "output_tokens": lengths.output, "step_s": step_s},
        f"{level_of(full)}; {full_source}",
    )
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    share = f"p{targets.percentile:g}"
    yield Explanation(
        "per_replica.slo_rps",
        replica.slo_rps.estimate,
        "req/s",
        f"by simulation, share of requests within the targets: {found.simulation}"
        if found.simulation
        else "largest requests / (output tokens x step time) at which the percentile of each "
        "latency meets its target; the band repeats it with step times at the ends of their band",
        {
            "requests": at.concurrency,
            "output_tokens": lengths.output,
            f"tpot_{share}_s": at.tpot_s,
            f"ttft_{share}_s": at.ttft_s,
            "tpot_target_s": targets.tpot_s,
            "ttft_target_s": targets.ttft_s,
            "step_half_width_log": replica.residual.half_width,
        },
        source,
    )
    for path, moment in (("at_slo_rate", at), ("at_rate", found.at_forecast)):
        yield Explanation(
            path,
            moment.concurrency,
            "requests, s",
            f"mean requests in decode at that rate, and {share} of latencies: TPOT of a batch 0.86 "
            "deviations of Poisson above the mean; TTFT is dispatch + own prefill + M/D/1 wait + "
            "wait for a place; end-to-end is TTFT + (output - 1) x TPOT + retrieval",
            {
                "requests": moment.concurrency,
                "rate_rps": moment.rate_rps,
                "tpot_s": moment.tpot_s,
                "ttft_s": moment.ttft_s,
                "retrieval_s": targets.retrieval_s,
                "first_token_factor": model.first_token_factor,
            },
            source,
        )
    yield Explanation(
        "prefill_share",
        replica.prefill_share,
        "share of time",
        "1 - step time without prefill / step time, at the SLO rate",
        {"prompt_tokens_computed": lengths.computed, "chunk_tokens": model.chunk_tokens},
        source,
    )


def _fleet(found: Plan) -> Iterator[Explanation]:
    question, rate = found.question, found.replica.slo_rps
    inputs: dict[str, Input] = {
        "rate_rps": question.rate_rps,
        "headroom": question.headroom,
        "utilisation": question.utilisation,
        "spare": question.spare,
        "zones": question.zones,
    }
    formula = "ceil(rate x (1 + headroom) / utilisation / SLO rate), then what may fail on top"
    counts: tuple[tuple[str, int | None, float], ...] = (
        ("replicas", found.replicas, rate.estimate),
        ("replicas_low", found.replicas_low, rate.high),
        ("replicas_high", found.replicas_high, rate.low),
    )
    for path, count, slo in counts:
        yield Explanation(
            path, count, "replicas", formula, {**inputs, "slo_rps": slo}, "your options; SLO rate"
        )
    layout = found.model.deployment.layout
    yield Explanation(
        "gpus",
        found.devices,
        "GPUs",
        "replicas x tensor parallel x data parallel",
        {"replicas": found.replicas, "tensor": layout.tensor, "data": layout.groups},
        "replicas",
    )
    chosen = "asked for" if question.tensor is not None else "fewest GPUs of 1, 2, 4 and 8"
    for path, spread in (("tensor_parallel", layout.tensor), ("data_parallel", layout.groups)):
        yield Explanation(path, spread, "GPUs", chosen, {}, "your options")
    shares = {"rate_rps": question.rate_rps, "slo_rps": rate.estimate}
    for path, value, left in (
        ("planned_share_of_slo_rate", found.planned_share, found.replicas),
        (
            "planned_share_without_spare",
            found.share_without_spare,
            found.replicas - found.may_fail,
        ),
    ):
        yield Explanation(
            path,
            value,
            "share",
            "rate / (replicas x SLO rate)",
            {**shares, "replicas": left},
            "headroom and utilisation together, in whole replicas",
        )
    if found.cost_usd_per_hour is not None:
        device = question.accelerator
        low = device.usd_per_hour_low or 0.0
        yield Explanation(
            "cost_usd_per_hour",
            found.cost_usd_per_hour[0],
            "USD per hour",
            "GPUs x price of one, at the lowest and the highest price",
            {"gpus": found.devices, "low": low, "high": device.usd_per_hour_high or low},
            f"{device.price_source or 'table'}, {device.price_date or 'undated'}",
        )


def _memory(found: Plan) -> Iterator[Explanation]:
    deployment, replica = found.model.deployment, found.replica
    yield Explanation(
        "kv.bytes_per_token",
        found.kv_bytes_per_token,
        "bytes",
        "per class of layers: 2 x layers x KV heads x head size, or one compressed vector; x bytes "
        "of the KV format; one more token, all GPUs of a group",
        {
            "layers": deployment.shape.layers,
            "kv_format": deployment.precision.kv,
            "tensor": deployment.layout.tensor,
        },
        "shape of the model",
    )
    pool = replica.budget.pool_bytes
    yield Explanation(
        "kv.tokens_max",
        replica.kv_tokens_max,
        "tokens",
        "pool / KV of one request averaged over its life, x its tokens, x groups",
        {
            "pool_gib": pool / GIB,
            "resident_tokens": found.question.load.lengths.resident_tokens,
            "groups": deployment.layout.groups,
        },
        "memory",
    )
    yield Explanation(
        "kv.sequences_max",
        replica.sequences_max,
        "requests",
        "least of pool / KV of one request averaged over its life, and the batch limit",
        {
            "pool_gib": pool / GIB,
            "resident_tokens": found.question.load.lengths.resident_tokens,
            "batch_max": found.question.load.batch_max,
        },
        "memory; your options",
    )
    sources = {
        "device": "what the driver shows",
        "margin": f"1 - {found.model.memory_share:g} of the device is left alone",
        "weights": "sum of the tensors of the file"
        if deployment.file_bytes is not None
        else "weights by format, divided over the GPUs; embeddings in 16 bits",
        "buffers": "measured start-ups of vLLM: activations, runtime, graphs; the real load may "
        "differ, compare the KV pool that the engine logs",
        "left for KV": "device - all above",
    }
    for name, value in replica.budget.lines().items():
        yield Explanation(
            f"memory_gib.{name}",
            value / GIB,
            "GiB",
            sources.get(name, "given with --beside"),
            {},
            "hardware table" if name == "device" else "memory of one GPU",
        )


def _steps(found: Plan) -> Iterator[Explanation]:
    model, at = found.model, found.replica.at_slo
    assert at is not None  # noqa: S101 - a plan without a rate is refused
    state = model.steady(found.question.load.lengths, at.concurrency)
    name, coefficients = model.level
    for kind, work in (("decode_step_s", state.decode), ("prefill_step_s", state.mixed)):
        for part, seconds in coefficients.parts_s(work).items():
            yield Explanation(
                f"steps.{kind}.{part}",
                seconds,
                "s",
                "coefficients x time at the peak rates of the hardware table",
                {"requests": at.concurrency},
                level_of(model),
            )
    yield Explanation(
        "steps.prefill_step_share",
        state.mixed_share,
        "share of steps",
        "prompt tokens per step / tokens in one chunk",
        {"chunk_tokens": model.chunk_tokens},
        "lengths",
    )
    residual = model.residual(found.question.load.lengths, at.concurrency)
    yield Explanation(
        "steps.measured_over_calculated_log",
        residual.mean,
        "log",
        "best linear estimate from the nearest rows, or through your calibration",
        {"half_width_80": residual.half_width},
        "; ".join(residual.leaned_on),
    )
    for coefficient, value in asdict(coefficients).items():
        yield Explanation(
            f"coefficients.{coefficient}",
            value,
            "s" if coefficient.endswith("_s") else "times the peak time",
            "fitted, never negative",
            {},
            name,
        )


def _others(found: Plan) -> Iterator[Explanation]:
    yield Explanation(
        "knobs",
        None,
        "factor",
        "planned rate per GPU of the same estimate with this one change / that of the plan",
        {"planned_rps_per_gpu": found.planned_rps_per_device},
        "the same formulas",
    )
    yield Explanation(
        "alternatives",
        None,
        "as above",
        "the same estimate for other deployments; those that no cheaper one beats in TPOT",
        {},
        "the same formulas",
    )
