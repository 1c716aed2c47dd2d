"""``sluice bench``: what an endpoint can do, measured from outside."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import click

from sluice.cli.bench_compare import compare
from sluice.cli.bench_options import (
    OUTPUT_TOKENS,
    bench_options,
    numbers_wanted,
    objectives_wanted,
    span_wanted,
    target_wanted,
    traffic_wanted,
)
from sluice.cli.bench_outputs import Outputs, output_options, outputs_wanted
from sluice.cli.bench_progress import BenchProgress
from sluice.cli.bench_report import print_result, trials_of
from sluice.cli.bench_search import (
    budget_wanted_s,
    client_known,
    name_of,
    search_options,
    search_wanted,
    searched,
)
from sluice.cli.options import BadInput, json_option, print_json
from sluice.loadtest.calibration import Calibration, calibrated, model_of
from sluice.loadtest.client_limit import client_limit
from sluice.loadtest.crew import PROCESSES_MAX, LagRule, LiveRunner, Texts
from sluice.loadtest.document import manifest, trial_document
from sluice.loadtest.null_server import null_server
from sluice.loadtest.plan_file import read_plan, write_plan
from sluice.loadtest.plans import CachePolicy, Traffic, cached_share_max, priming
from sluice.loadtest.search import Wish
from sluice.loadtest.signals import Page, page_of
from sluice.loadtest.texts import texts_of
from sluice.loadtest.trial import (
    CannotMeasure,
    ClosedLoop,
    Metric,
    Objective,
    OpenLoop,
    TrialOutcome,
    TrialPlan,
    Void,
    VoidCause,
    Watch,
)
from sluice.loadtest.wire import Target
from sluice.workload.asks import BadWorkload

MET, MISSED, INVALID = 0, 1, 2
# A cached share that is so much above what the plan allows was not made by the trial.
_CACHED_SHARE_OVER = 0.05

_EPILOG = """\b
Examples:
  sluice bench http://127.0.0.1:8000 --model small --ttft 1s --tpot 60ms
  sluice bench http://127.0.0.1:8000 --ttft 1s --quick --resume trials.jsonl --html bench.html
  sluice bench http://127.0.0.1:8000 --model small --rate 5 --duration 60s
  sluice bench http://127.0.0.1:8000 --rate 2,4,8 --ttft 1s --tpot 60ms --html bench.html
  sluice bench http://127.0.0.1:8000 --concurrency 1,2,4,8 --duration 30s --json
  sluice bench https://host/v1 --model m --key-env API_KEY --trace azure-conv --rate 3
  sluice bench http://127.0.0.1:8000 --rate 5 --spike rate=20,from=20s,for=10s
  sluice bench http://127.0.0.1:8000 --rate 5 --adversary rate=2,input=4000,output=16
  sluice bench compare before.json after.json

\b
Every latency counts from the time at which a request was planned, and there is no limit on
requests in flight: a server that falls behind cannot slow the load down. A trial in which the
client itself was late is void.

\b
Exit codes: 0 all targets met or a rate certified, 1 a target missed, too many failures or no rate
certified, 2 a trial is void or nothing could be said, or bad input.
"""


class _Bench(click.Command):
    """Takes a URL, or ``compare`` and the files of results; ``inner`` are such commands."""

    inner: ClassVar[Sequence[click.Command]] = (compare,)

    def make_context(self, *given: Any, **extra: Any) -> click.Context:
        name, words, *rest = given
        if words[:1] == [compare.name]:
            return compare.make_context(f"{name} {compare.name}", words[1:], *rest, **extra)
        return super().make_context(*given, **extra)


@click.command(cls=_Bench, epilog=_EPILOG)
@click.argument("url")
@bench_options
@search_options
@click.option(
    "--processes",
    type=click.IntRange(1, PROCESSES_MAX),
    default=1,
    show_default=True,
    help="Processes that send.",
)
@click.option(
    "--lag-max",
    metavar="DURATION",
    help="How late the client may be at p99. Default: 1 ms, or 1 % of the tightest of --ttft and "
    "--e2e, and of a whole answer with other targets only.",
)
@output_options
@json_option
def command(*, url: str, as_json: bool, **asked: Any) -> None:
    """Measure an OpenAI-compatible endpoint under load.

    With --rate or --concurrency, one trial for each; without, a search for the capacity and for
    the SLO rate, the highest at which the targets are met.
    """
    try:
        outputs = outputs_wanted(asked)
        budget_wanted_s(asked)
        session = _session(url, asked)
        given = asked["rates"] or asked["concurrencies"] or asked["plan_file"]
        measure = _measured if given else _searched
        result = measure(session, asked, outputs)
    except (CannotMeasure, BadWorkload) as error:
        raise BadInput(str(error)) from None
    outputs.write(result)
    if as_json:
        print_json(result)
    else:
        print_result(result)
    click.get_current_context().exit(exit_code(result))


@dataclass(frozen=True, slots=True)
class Session:
    """What a run is made of, once the server has been asked."""

    calibration: Calibration
    traffic: Traffic
    objectives: Sequence[Objective]
    texts: Texts
    metrics: Page | None


def _session(url: str, asked: Mapping[str, Any]) -> Session:
    """Check all that was asked for, then the server."""
    target = target_wanted(url, asked)
    objectives, traffic = objectives_wanted(asked), traffic_wanted(asked)
    own = () if asked["prompts"] is None else tuple(texts_of(asked["prompts"]))
    if not target.model:
        target = replace(target, model=model_of(target))
    calibration = calibrated(target)
    texts = Texts(calibration.vocabulary, own)
    return Session(calibration, traffic, objectives, texts, page_of(target))


def _plans(session: Session, asked: Mapping[str, Any]) -> Iterator[tuple[str, TrialPlan]]:
    """The trials that are asked for, with their names."""
    span, seed, traffic = span_wanted(asked), asked["seed"], session.traffic
    if asked["plan_file"] is not None:
        plan = read_plan(asked["plan_file"])
        yield _name_of(plan), plan
        return
    for rate in numbers_wanted("--rate", asked["rates"]):
        plan = traffic.open_loop(rate, span, seed)
        yield _name_of(plan), plan
    for clients in numbers_wanted("--concurrency", asked["concurrencies"]):
        if clients != int(clients):
            raise CannotMeasure(f"--concurrency must be whole numbers, not {clients:g}")
        plan = traffic.closed_loop(int(clients), span, seed)
        yield _name_of(plan), plan


def _name_of(plan: TrialPlan) -> str:
    match plan.load:
        case OpenLoop(rate_rps):
            return f"{rate_rps:g} requests/s"
        case ClosedLoop(concurrency):
            return f"{concurrency} client{'s' if concurrency > 1 else ''}"


def _measured(session: Session, asked: Mapping[str, Any], outputs: Outputs) -> dict[str, Any]:
    plans = _plans(session, asked)
    first = next(plans, None)
    if first is None:
        raise CannotMeasure("what load? Give --rate, --concurrency or --plan")
    trials: list[dict[str, Any]] = []
    with _runner(session, asked) as runner, BenchProgress() as progress:
        for note in session.calibration.notes:
            progress.say(f"note: {note}")
        for name, plan in _with(first, plans):
            if asked["save_plan"] is not None:
                write_plan(_numbered(asked["save_plan"], len(trials)), plan)
            outcome = _play(session, runner, progress, (name, plan))
            trials.append(trial_document(outcome, session.objectives, asked["failures_max"]))
            outputs.add_rows(outcome, len(trials) - 1)
            if outcome.void is not None and outcome.void.cause is VoidCause.INTERRUPTED:
                break
    return _result(session, asked, trials)


def _searched(session: Session, asked: Mapping[str, Any], outputs: Outputs) -> dict[str, Any]:
    """The search, after the client has been measured against a server that does nothing."""
    if asked["save_plan"] is not None:
        raise CannotMeasure("--save-plan belongs to --rate: a search has a plan for each trial")
    with _runner(session, asked) as runner, BenchProgress() as progress:
        for note in session.calibration.notes:
            progress.say(f"note: {note}")
        target = session.calibration.target
        of = {"url": f"{target.netloc}{target.path}", "model": target.model}
        wanted = client_known(
            search_wanted({**asked, **of}, session.objectives),
            asked["processes"],
            lambda: _client_rps(session, asked, progress),
            progress,
        )

        def play(wish: Wish, plan: TrialPlan, watch: Watch) -> TrialOutcome:
            outcome = _play(session, runner, progress, (name_of(wish), plan), watch)
            outputs.add_rows(outcome, wish.number)
            return outcome

        def describe(outcome: TrialOutcome) -> Mapping[str, Any]:
            return trial_document(outcome, session.objectives, asked["failures_max"])

        found = searched(wanted, play, session.traffic, describe, progress)
    return {**_context(session, asked), **found}


def _client_rps(
    session: Session, asked: Mapping[str, Any], progress: BenchProgress
) -> float | None:
    """The rate up to which the client alone keeps its schedule."""
    chunks = max(1, round(asked["output"] or OUTPUT_TOKENS))
    with null_server(chunks) as port:
        target = replace(
            session.calibration.target, host="127.0.0.1", port=port, tls=False, keys={}
        )
        with _runner(session, asked, target) as runner:
            return client_limit(
                runner,
                session.traffic,
                asked["seed"],
                lambda rate: progress.say(f"the client alone, {rate:.0f} requests/s"),
            )


def _with(
    first: tuple[str, TrialPlan], rest: Iterator[tuple[str, TrialPlan]]
) -> Iterator[tuple[str, TrialPlan]]:
    yield first
    yield from rest


def _numbered(path: Path, number: int) -> Path:
    """The first plan has the name that was asked for."""
    return path.with_name(f"{path.name}.{number}") if number else path


@contextmanager
def _runner(
    session: Session, asked: Mapping[str, Any], target: Target | None = None
) -> Iterator[LiveRunner]:
    limits_s = [
        each.limit_s for each in session.objectives if each.metric in {Metric.TTFT, Metric.E2E}
    ]
    lag_s_max = None
    if asked["lag_max"] is not None:
        lag_s_max = span_wanted({**asked, "patience": asked["lag_max"]}).patience_s
    with LiveRunner(
        target or session.calibration.target,
        session.texts,
        processes=asked["processes"],
        lag=LagRule(
            min(limits_s, default=None), lag_s_max, paced=bool(session.objectives) and not limits_s
        ),
        metrics=session.metrics if target is None else None,
    ) as runner:
        yield runner


def _play(
    session: Session,
    runner: LiveRunner,
    progress: BenchProgress,
    named: tuple[str, TrialPlan],
    watch: Watch = lambda _: False,
) -> TrialOutcome:
    name, plan = named
    if session.traffic.cache is CachePolicy.WARM:
        runner.run(priming(plan), progress.trial(f"{name}, warming the cache", plan))
    showing = progress.trial(name, plan)
    outcome = runner.run(plan, lambda standing: showing(standing) or watch(standing))
    if outcome.void is None and session.traffic.cache is CachePolicy.COLD and not session.texts.own:
        outcome = replace(outcome, void=_warmer(session, outcome))
    return outcome


def _warmer(session: Session, outcome: TrialOutcome) -> Void | None:
    """That a cache knew prompts which nobody had sent before."""
    counted = [one for one in outcome.counted if one.cached_tokens and one.prompt_tokens]
    cached = sum(one.cached_tokens or 0 for one in counted)
    prompt = sum(one.prompt_tokens or 0 for one in outcome.counted)
    most = cached_share_max(outcome.plan, session.texts.vocabulary.frame_tokens)
    if not prompt or cached / prompt <= most + _CACHED_SHARE_OVER:
        return None
    return Void(
        VoidCause.CACHE_MOVED,
        f"the server took {cached / prompt:.0%} of the prompt tokens from its cache, where prompts "
        f"that it cannot know allow {most:.0%}; give --cache as-is to measure it so",
    )


def _result(
    session: Session, asked: Mapping[str, Any], trials: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    rest = _context(session, asked)
    if len(trials) == 1:
        return {**trials[0], **rest}
    valid = [trial for trial in trials if trial["valid"]]
    return {"valid": bool(valid), "trials": list(trials), **rest}


def _context(session: Session, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader needs beside figures."""
    target = session.calibration.target
    server = {
        "address": target.netloc,
        "route": target.route,
        "model": target.model,
        "engine": None if session.metrics is None else session.metrics.dialect.name,
        "usage": session.calibration.usage,
        "full_length": session.calibration.full_length,
        "frame_tokens": session.calibration.vocabulary.frame_tokens,
        "extra": target.extra,
    }
    options = {k: str(v) if isinstance(v, Path) else v for k, v in asked.items() if v is not None}
    return {
        "notes": list(session.calibration.notes),
        "manifest": manifest(sys.argv[1:], options, server),
    }


def exit_code(result: Mapping[str, Any]) -> int:
    """0 where all trials met their targets, or a search has certified a rate or had no targets; 1
    where one did not; 2 where one is void, or nothing could be said."""
    if "capacity_rps" in result:
        if not result["valid"]:
            return INVALID
        slo = result["slo_rps"]
        return MET if slo is None or slo["certified"] is not None else MISSED
    trials = trials_of(result)
    if not all(each["valid"] for each in trials):
        return INVALID
    return MET if all(each["meets_slo"] for each in trials) else MISSED
