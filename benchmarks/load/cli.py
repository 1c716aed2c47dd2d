"""The command line of ``overload.py``: engines in turn, scenarios on each, tables and plots."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import sluice.core
from benchmarks.load.backends import LiveBackend, VirtualBackend
from benchmarks.load.engines import PEERS, SLUICE, Engine, Places, default_gguf, start
from benchmarks.load.facts import calibrate, read_records
from benchmarks.load.install import install
from benchmarks.load.outcomes import Targets
from benchmarks.load.plots import draw
from benchmarks.load.scenarios import MEASURE, SLO_ONLY, Session, Settings
from benchmarks.load.store import Store
from benchmarks.load.summary import summary_tables
from benchmarks.load.sweeps import measure_agree, measure_knobs
from benchmarks.load.tables import TABLES, MakeTables, Source

ALL_TABLES: Mapping[str, MakeTables] = {**TABLES, "summary": summary_tables}
VIRTUAL_ONLY = {"knobs": measure_knobs, "agree": measure_agree}
TRACE = "azure2023_conv_first60pct.csv.gz"


def main(description: str) -> None:
    """Measure what is asked for and print tables."""
    options = _options(description)
    places = Places(options.peers, options.gguf or default_gguf(), options.runs / "engines")
    if options.install:
        install(places)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that engines are stopped
    began_s = time.monotonic()
    world = "live" if options.live else "virtual"
    store = Store(options.runs)
    settings = Settings(
        options.trace,
        options.seed,
        {"live": options.live_seconds, "virtual": options.virtual_seconds},
        options.length_scale,
        Targets(options.ttft, options.tpot, options.stream_tpot),
        f"{store.calibration().name}-{_code_version()}",
    )
    engines = [one for one in options.engines if world == "live" or one in SLUICE]
    if options.fresh:
        kinds = [kind for one in options.scenario for kind in _kinds(one)]
        store.forget(f"{world}-{engine}-{kind}" for engine in engines for kind in kinds)
    for engine in [] if options.tables else engines:
        wanted = [one for one in options.scenario if engine == "slo" or one not in SLO_ONLY]
        if world == "live":
            _live(engine, wanted, store, settings, places)
        else:
            backend = VirtualBackend(engine, store.calibration(), settings.targets, settings.seed)
            _measure(Session(world, engine, backend, store, settings), wanted)
    source = Source(store, settings, world, (*SLUICE, *PEERS))
    tables = [table for name in options.scenario for table in ALL_TABLES[name](source)]
    for table in tables:
        print(table.text())
    if options.plots:
        draw(options.scenario, source, options.plots)
    took_s = time.monotonic() - began_s
    print(f"{took_s:.0f} s, load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    if options.json:
        document = {"tables": [table.to_json() for table in tables], "took_s": took_s}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _live(
    name: str, scenarios: Sequence[str], store: Store, settings: Settings, places: Places
) -> None:
    """Measure one engine in one process of it. One that cannot be started is left out."""
    if not places.has(name):
        sys.stderr.write(f"{name} is not installed below {places.peers}; left out\n")
        return
    backend = LiveBackend(lambda: _started(name, places, settings))
    try:
        _measure(Session("live", name, backend, store, settings), scenarios)
        if name == "slo" and backend.engine is not None and backend.engine.journal is not None:
            store.keep_calibration(calibrate(read_records(backend.engine.journal)))
    except (RuntimeError, ValueError) as error:
        sys.stderr.write(f"{name}: {error}\n")
    finally:
        backend.stop()


def _started(name: str, places: Places, settings: Settings) -> Engine:
    engine = start(name, places, settings.targets)
    sys.stderr.write(f"{name} is ready after {engine.started_s:.1f} s\n")
    return engine


def _measure(session: Session, scenarios: Sequence[str]) -> None:
    MEASURE["capacity"](session)
    for name in scenarios:
        if name == "policies":
            name = "goodput"  # noqa: PLW2901 - the same runs
        if name in MEASURE:
            MEASURE[name](session)
        elif name in VIRTUAL_ONLY and session.world == "virtual" and session.engine == "slo":
            VIRTUAL_ONLY[name](session)


def _code_version() -> str:
    """Text that differs where the policy's source does."""
    folder = Path(sluice.core.__file__).parent
    source = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return f"{crc32(source):08x}"


def _kinds(scenario: str) -> tuple[str, ...]:
    """How the keys of a scenario's runs begin."""
    kinds = {"capacity": ("capacity", "level"), "policies": ("goodput",), "knobs": ("knob",)}
    return kinds.get(scenario, (scenario,))


def _options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    world = parser.add_mutually_exclusive_group(required=True)
    world.add_argument("--live", action="store_true", help="against processes")
    world.add_argument("--virtual", action="store_true", help="in virtual time")
    world.add_argument("--install", action="store_true", help="install the peers and stop")
    parser.add_argument("scenario", nargs="*", choices=[*ALL_TABLES, []], metavar="SCENARIO")
    parser.add_argument(
        "--engines", nargs="+", choices=[*SLUICE, *PEERS], default=list(SLUICE), metavar="ENGINE",
        help=f"of {', '.join([*SLUICE, *PEERS])}; default: sluice's",
    )  # fmt: skip
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="the peers' folder")
    parser.add_argument("--gguf", type=Path, help="a model's file; default: the catalogue's model")
    parser.add_argument(
        "--runs", type=Path, default=Path(tempfile.gettempdir()) / "sluice-overload",
        help="folder in which runs are kept",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, default=Path(TRACE), help="the Azure trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live-seconds", type=float, default=30.0, help="counted part of a run")
    parser.add_argument("--virtual-seconds", type=float, default=120.0, help="the same")
    parser.add_argument("--length-scale", type=float, default=0.25, help="of the trace's lengths")
    parser.add_argument("--ttft", type=float, default=2.0, help="target in seconds")
    parser.add_argument("--tpot", type=float, default=0.2, help="target in seconds")
    parser.add_argument(
        "--stream-tpot", type=float, default=0.06,
        help="target in seconds of streams beside long prompts: 1.7 times their p99 alone",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG files")
    parser.add_argument("--tables", action="store_true", help="measure nothing, print what is kept")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    return parser.parse_args()
