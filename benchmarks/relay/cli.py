"""The command line of ``gateway.py``: gateways in turn, scenarios on each, tables."""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.relay.policy import policy_table
from benchmarks.relay.programs import LOAD_CORE, Programs, put_first
from benchmarks.relay.scenarios import ONCE, SCENARIOS, Bench, Figures, prepare
from benchmarks.relay.systems import PEERS, System, free_ports, has, install, start
from benchmarks.relay.tables import DIRECT, OURS, table, targets

Results = dict[str, dict[str, list[Figures]]]


def main(description: str) -> None:
    """Measure what is asked for and print tables."""
    options = _options(description)
    if options.install:
        install(options.peers)
        return
    began_s = time.monotonic()
    document: dict[str, object] = {}
    scenarios = [name for name in options.scenario if name in SCENARIOS]
    if scenarios:
        results, errors = _measure(options, scenarios)
        document |= {"results": results, "errors": errors}
        for name, rounds in results.items():
            print(table(name, rounds), end="\n\n")
        print(targets(results), end="\n\n")
        failed = "; ".join(f"{count} of {what}" for what, count in errors.items())
        print("answers that failed: " + (failed or "none"))
    if "policy" in options.scenario:
        text, figures = policy_table()
        document["policy"] = figures
        print(text)
    load, took_s = os.getloadavg()[0], time.monotonic() - began_s
    print(f"{took_s:.0f} s, load average {load:.1f}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps({**document, "took_s": took_s}, indent=1) + "\n")


def _measure(
    options: argparse.Namespace, scenarios: Sequence[str]
) -> tuple[Results, dict[str, int]]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all is stopped
    os.sched_setaffinity(0, {LOAD_CORE})
    put_first(os.getpid())
    results: Results = {name: {} for name in scenarios}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        programs = Programs(folder)
        bench, systems = Bench(programs, {}), list[System]()
        try:
            prepare(programs)
            engines = free_ports(2)
            programs.start_upstream(engines)
            systems.append(System(DIRECT, engines[0]))
            for name in options.systems:
                if has(name, options.peers):
                    systems.append(start(name, options.peers, folder, engines))
                    systems[-1].send(signal.SIGSTOP)
                else:
                    sys.stderr.write(f"{name} is not installed below {options.peers}; left out\n")
            for number in range(options.rounds):
                sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
                for scenario in scenarios:
                    for system in systems:
                        if not number or scenario not in ONCE:
                            figures = SCENARIOS[scenario](bench, system)
                            results[scenario].setdefault(system.name, []).append(figures)
        finally:
            for system in systems:
                system.stop()
            programs.stop()
    return results, bench.errors


def _options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*SCENARIOS, "policy"]
    parser.add_argument("scenario", nargs="*", metavar="SCENARIO", help=f"of {', '.join(names)}")
    parser.add_argument("--systems", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="the peers' folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--install", action="store_true", help="install the peers and stop")
    options = parser.parse_args()
    options.scenario = options.scenario or names
    if unknown := [name for name in options.scenario if name not in names]:
        parser.error(f"there is no scenario {unknown[0]}; there are {', '.join(names)}")
    return options
