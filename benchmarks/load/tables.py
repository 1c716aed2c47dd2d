"""Tables of what the stored runs show, one function for each scenario."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from benchmarks.load.facts import quantile
from benchmarks.load.measures import (
    first_tokens_s,
    gaps_s,
    goodput,
    growth,
    jain,
    present,
    retries,
    token_rate,
    tokens_served,
)
from benchmarks.load.outcomes import Outcome, Run
from benchmarks.load.scenarios import (
    LIVE_STEPS,
    MIXES,
    ROUND_STEPS,
    ROUNDS,
    VIRTUAL_STEPS,
    Settings,
    requests_per_s,
    round_key,
)
from benchmarks.load.store import Share, Store, Table
from benchmarks.load.sweeps import AGREE_STEPS, KNOB_LOADS, KNOBS, knob_key

Cell = str | float | None
LABELS = {
    "slo": "sluice slo", "fcfs": "sluice fcfs", "static": "sluice static",
    "vllm": "vLLM", "llama": "llama.cpp",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Where tables find runs. Engines without a run are left out of a table."""

    store: Store
    settings: Settings
    world: str
    engines: tuple[str, ...]

    def run(self, engine: str, what: str) -> Run | None:
        """A run, where it was made."""
        return self.store.get(self.settings.key(self.world, engine, what))

    def loads(self, engine: str, mix: str) -> Iterator[tuple[float, Run]]:
        """The goodput runs of an engine, by load."""
        steps = LIVE_STEPS[engine][mix] if self.world == "live" else VIRTUAL_STEPS
        for step in steps:
            run = self.run(engine, f"goodput-{mix}-{step:g}x")
            if run is not None:
                yield step, run

    def other(self, world: str) -> "Source":
        """The same in another world."""
        return replace(self, world=world)


class MakeTables(Protocol):
    """Reads the store and gives tables."""

    def __call__(self, source: Source) -> list[Table]:
        """Empty where nothing was run."""
        ...


def capacity_tables(source: Source) -> list[Table]:
    """What each engine can do at most."""
    rows: list[tuple[Cell, ...]] = []
    for engine in source.engines:
        for mix in MIXES:
            run = source.run(engine, f"capacity-{mix}")
            if run is None:
                continue
            level = source.run(engine, "level") if mix == "poisson" else None
            rate = requests_per_s(run, mix, source.settings)
            grown = growth(level) if level is not None else None
            rows.append((LABELS[engine], mix, rate, token_rate(run), grown))
    columns = ("engine", "mix", "capacity, req/s", "output tokens/s", "TTFT end/begin at 0.9×")
    return _table(f"Capacity ({source.world})", columns, rows)


def goodput_tables(source: Source) -> list[Table]:
    """Goodput by offered load.

    The peak is the best at a load or any lower one: more load must not cost goodput. Beyond that
    more of it may be good the more is offered, where requests differ in length and there are more
    short ones to choose from, so the prompt and output tokens of the good ones are given too.
    """
    tables = []
    columns = (
        "engine", "load", "offered, req/s", "good, req/s", "of own peak", "good, tokens/s",
        "of own peak in tokens", "met of admitted", "refused", "TTFT p50, s", "TTFT p99, s",
        "TPOT p99, s", "refused after a wait", "refusal at the door p99, ms: client", "server",
        "preemptions", "send lag p99, ms", "client, of a core", "engine, output tokens/s",
    )  # fmt: skip
    for mix in MIXES:
        rows: list[tuple[Cell, ...]] = []
        for engine in source.engines:
            figures = [
                (step, run, goodput(run, source.settings.targets))
                for step, run in source.loads(engine, mix)
            ]
            peak = peak_tokens = 1e-9
            for step, run, one in figures:
                peak, peak_tokens = max(peak, one.good), max(peak_tokens, one.good_tokens)
                refused = one.refuse_s_p99 * 1e3 if one.refuse_s_p99 > 1e-6 else None
                rows.append(
                    (
                        LABELS[engine], f"{step:g}×", one.offered, one.good,
                        Share(one.good / peak), one.good_tokens,
                        Share(one.good_tokens / peak_tokens), Share(one.met),
                        Share(one.refused), one.ttft_s_p50 or None, one.ttft_s_p99 or None,
                        one.tpot_s_p99 or None, Share(one.refused_waiting), refused,
                        run.facts.get("refuse_ms_p99"),
                        _whole(run.facts.get("preemptions")), one.lag_s_p99 * 1e3,
                        run.facts.get("client_cpu_share"), run.facts.get("output_tokens_per_s"),
                    )
                )  # fmt: skip
        tables += _table(f"Goodput, {mix} ({source.world})", columns, rows)
    return tables


def policy_tables(source: Source) -> list[Table]:
    """Three ways to batch at the same load."""
    columns = (
        "load", "policy", "good, req/s", "TTFT p50, s", "TTFT p99, s", "TPOT p50, s", "TPOT p99, s",
        "busy", "rows in a step", "output tokens/s",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for step in VIRTUAL_STEPS:
        for engine in ("static", "fcfs", "slo"):
            run = source.run(engine, f"goodput-azure-{step:g}x")
            if run is None:
                continue
            one = goodput(run, source.settings.targets)
            tpot_s = present(each.tpot_s for each in run.counted)
            middle = quantile(tpot_s, 0.5) if tpot_s else None
            rows.append(
                (
                    f"{step:g}×", engine, one.good, one.ttft_s_p50, one.ttft_s_p99, middle,
                    one.tpot_s_p99, run.facts.get("busy_share"), run.facts.get("rows_mean"),
                    run.facts.get("output_tokens_per_s"),
                )
            )  # fmt: skip
    return _table(f"Static, fcfs and slo at the same load, azure ({source.world})", columns, rows)


def long_tables(source: Source) -> list[Table]:
    """Long prompts beside chat.

    Chats need a decode step of their rows once per gap that they may have, which is twice their
    p99 alone; prefill may have the rest, so a long prompt is allowed its time alone over that rest.
    """
    columns = (
        "engine", "ITL p50 alone, s", "ITL p99 alone, s", "ITL p99 beside, s", "ratio", "worst, s",
        "TTFT long alone, s", "beside, s", "beside, worst, s", "allowed, s", "ratio to allowed",
        "chats and long prompts served beside",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for engine in source.engines:
        chats, alone, beside = (
            source.run(engine, f"long-{what}") for what in ("chats", "alone", "beside")
        )
        if chats is None or alone is None or beside is None:
            continue
        quiet_s, busy_s = gaps_s(chats, _slo(engine, "stream")), _beside_gaps_s(beside)
        alone_s = first_tokens_s(alone, alone.outcomes)
        waits_s = first_tokens_s(beside, _longs(beside.outcomes))
        if not quiet_s or not busy_s or not alone_s or not waits_s:
            rows.append((LABELS[engine], *[None] * (len(columns) - 1)))
            continue
        answered = [one for one in beside.outcomes if one.text_s]
        longs_served = len(_longs(answered))
        chats_served = len(answered) - longs_served
        limit_s = 2 * quantile(quiet_s, 0.99)
        allowed_s = median(alone_s) / (1 - median(quiet_s) / limit_s)
        rows.append(
            (
                LABELS[engine], median(quiet_s), quantile(quiet_s, 0.99), quantile(busy_s, 0.99),
                quantile(busy_s, 0.99) / quantile(quiet_s, 0.99), max(busy_s), median(alone_s),
                median(waits_s), max(waits_s), allowed_s, median(waits_s) / allowed_s,
                f"{chats_served} and {longs_served}",
            )
        )  # fmt: skip
    return _table(f"4,000-token prompts beside 10 chat streams ({source.world})", columns, rows)


def _slo(engine: str, name: str) -> str:
    """The class of such requests: only the ``slo`` policy is told one."""
    return name if engine == "slo" else ""


def _longs(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.id.startswith("long-")]


def _beside_gaps_s(run: Run) -> list[float]:
    chats = replace(run, outcomes=tuple(o for o in run.outcomes if not o.id.startswith("long-")))
    return gaps_s(chats, chats.outcomes[0].slo)


def fairness_tables(source: Source) -> list[Table]:
    """One tenant beside another that sends ten times its share."""
    rows: list[tuple[Cell, ...]] = []
    for engine in source.engines:
        alone, beside = (source.run(engine, f"fairness-{what}") for what in ("alone", "beside"))
        if alone is None or beside is None:
            continue
        quiet_s = first_tokens_s(alone, tenant_of(alone, "modest"))
        busy_s = first_tokens_s(beside, tenant_of(beside, "modest"))
        served = [tokens_served(beside, tenant) for tenant in ("modest", "greedy")]
        refused = [
            sum(not one.served for one in beside.counted if one.tenant == tenant)
            / max(1, sum(one.tenant == tenant for one in beside.counted))
            for tenant in ("modest", "greedy")
        ]
        pairs: list[Cell] = []
        for share in (0.5, 0.99):
            if quiet_s and busy_s:
                quiet, busy = quantile(quiet_s, share), quantile(busy_s, share)
                pairs += [quiet, busy, busy / quiet]
            else:
                pairs += [None] * 3
        rows.append(
            (
                LABELS[engine], *pairs, *(count / beside.counted_s for count in served),
                *map(Share, refused), jain(served),
            )
        )  # fmt: skip
    columns = (
        "engine", "TTFT p50 alone, s", "p50 beside, s", "p50 ratio", "TTFT p99 alone, s",
        "p99 beside, s", "p99 ratio", "tokens/s modest", "greedy", "refused modest",
        "refused greedy", "Jain",
    )  # fmt: skip
    return _table(f"A tenant beside one that sends 10× its share ({source.world})", columns, rows)


def retry_tables(source: Source) -> list[Table]:
    """Clients that wait as told."""
    columns = (
        "engine", "refused", "told and back", "served at first retry", "peak/mean, 1 s",
        "at random", "peak/mean, 5 s", "told wait p50, s", "longest, s", "good, req/s",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for engine in source.engines:
        run = source.run(engine, "retry")
        if run is None:
            continue
        one = retries(run)
        good = goodput(run, source.settings.targets).good
        rows.append(
            (
                LABELS[engine], one.refused, one.told, Share(one.first), one.peak,
                one.peak_poisson, one.peak_5s,
                one.wait_s_p50, one.wait_s_max, good,
            )
        )  # fmt: skip
    return _table(f"Clients that come back when told to ({source.world})", columns, rows)


def rounds_tables(source: Source) -> list[Table]:
    """Goodput of each round over the best of that round at this load or a lower one."""
    goods: dict[float, list[float]] = {step: [] for step in ROUND_STEPS}
    shares: dict[float, list[float]] = {step: [] for step in ROUND_STEPS}
    for number in range(ROUNDS):
        peak = 1e-9
        for step in ROUND_STEPS:
            run = source.run("slo", round_key(number, step))
            if run is None:
                return []
            good = goodput(run, source.settings.targets).good
            peak = max(peak, good)
            goods[step].append(good)
            shares[step].append(good / peak)
    columns = ("load", "good, req/s, median", "least", "greatest", "of own peak, median", "least")
    rows: list[tuple[Cell, ...]] = [
        (
            f"{step:g}×", median(goods[step]), min(goods[step]), max(goods[step]),
            Share(median(shares[step])), Share(min(shares[step])),
        )
        for step in ROUND_STEPS
    ]  # fmt: skip
    return _table(f"Goodput, poisson, in {ROUNDS} rounds ({source.world})", columns, rows)


def knob_tables(source: Source) -> list[Table]:
    """Throughput against p99, setting by setting. Of tenants, the TTFT is the modest one's."""
    columns = (
        "setting", "requests", "value", "load", "good, req/s", "output tokens/s",
        "met of admitted", "refused", "TTFT p99, s", "TPOT p99, s", "ITL p99, s", "preemptions",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, knob in KNOBS.items():
        for value in knob.values:
            for load in KNOB_LOADS:
                run = source.run("slo", knob_key(name, value, load))
                if run is None:
                    continue
                one = goodput(run, source.settings.targets)
                rows.append(
                    (
                        knob.label, knob.requests, value, f"{load:g}×", one.good,
                        run.facts["output_tokens_per_s"], Share(one.met), Share(one.refused),
                        knob_ttft_s(run), one.tpot_s_p99, knob_gap_s(run),
                        _whole(run.facts["preemptions"]),
                    )
                )  # fmt: skip
    return _table("Settings (virtual)", columns, rows)


def tenant_of(run: Run, tenant: str) -> list[Outcome]:
    """The counted requests of a tenant."""
    return [one for one in run.counted if one.tenant == tenant]


def knob_ttft_s(run: Run) -> float | None:
    """TTFT p99, of the modest tenant where there are two."""
    tenant = "modest" if any(one.tenant for one in run.outcomes) else ""
    ttft_s = first_tokens_s(run, tenant_of(run, tenant))
    return quantile(ttft_s, 0.99) if ttft_s else None


def knob_gap_s(run: Run) -> float | None:
    """ITL p99."""
    between_s = gaps_s(run, "chat")
    return quantile(between_s, 0.99) if between_s else None


def agree_tables(source: Source) -> list[Table]:
    """The same plans live and in virtual time."""
    columns = (
        "mix", "load", "good live, req/s", "good virtual, req/s", "virtual/live",
        "TTFT p50 live, s", "p50 virtual, s", "TTFT p99 live, s", "p99 virtual, s",
        "refused live", "refused virtual",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for mix in MIXES:
        for step in AGREE_STEPS:
            virtual = source.other("virtual").run("slo", f"agree-{mix}-{step:g}x")
            live = source.other("live").run("slo", f"goodput-{mix}-{step:g}x")
            if virtual is None or live is None:
                continue
            a, b = (goodput(run, source.settings.targets) for run in (live, virtual))
            rows.append(
                (
                    mix, f"{step:g}×", a.good, b.good, b.good / a.good if a.good else None,
                    a.ttft_s_p50, b.ttft_s_p50, a.ttft_s_p99, b.ttft_s_p99, Share(a.refused),
                    Share(b.refused),
                )
            )  # fmt: skip
    return _table("Live against virtual time, the same requests", columns, rows)


TABLES: Mapping[str, MakeTables] = {
    "capacity": capacity_tables,
    "goodput": goodput_tables,
    "long": long_tables,
    "fairness": fairness_tables,
    "retry": retry_tables,
    "rounds": rounds_tables,
    "policies": policy_tables,
    "knobs": knob_tables,
    "agree": agree_tables,
}


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]]) -> list[Table]:
    return [Table(title, tuple(columns), tuple(rows))] if rows else []


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
