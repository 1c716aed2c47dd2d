"""``sluice replay``: recorded traffic under the recorded and under other settings, side by side."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sluice.cli.options import WHOLE, BadInput, print_json, settings_options
from sluice.cli.simulate import load_ns
from sluice.cli.simulate_report import document, print_beside
from sluice.cli.telling import Told
from sluice.config.load import load_settings
from sluice.config.sections import SloSection
from sluice.config.settings import Settings
from sluice.config.sources import Override
from sluice.planner.faults import fault_named
from sluice.planner.names import CannotPlan
from sluice.planner.outcome import Outcome
from sluice.planner.recorded import Recorded, read_recorded
from sluice.planner.replaying import RecordedTraffic, outcome_of
from sluice.planner.simulation import SimulatedFleet, Span, simulate
from sluice.wiring.replaying import replay_fleet, settings_of
from sluice.workload.asks import BadWorkload

_EPILOG = """\b
Examples:
  sluice replay ~/.local/state/sluice/journal
  sluice replay journal -c sluice.toml --set models.small.headroom=0.1
  sluice replay journal --set models.small.source=sim:llama-3.1-8b@h100x1 --json

\b
recorded   what the journal says
replayed   the same traffic in virtual time under the recorded settings: how near
           it is to recorded says how much the next column can be trusted
changed    the same with --set

\b
Exit codes: 0 done, 2 bad input.
"""


@click.command(epilog=_EPILOG)
@click.argument("journal", type=click.Path(path_type=Path))
@settings_options
@click.option("--seed", type=WHOLE, default=1, show_default=True, help="Decides what is drawn.")
@click.option(
    "--fault", "faults", multiple=True, metavar="KIND@TIME[:…]", help="As for sluice simulate."
)
@click.option("--load-time", metavar="DURATION", help="Time that a replica needs to start again.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(*, journal: Path, as_json: bool, **asked: Any) -> None:
    """Play the traffic of a JOURNAL again: arrivals, lengths and classes as recorded, decisions
    made anew, with replicas as fast as they were or on other hardware.

    Settings come from -c as for sluice serve; what it does not name is taken from the journal.
    --set says what is to be different, and --fault what goes wrong then.
    """
    began_s = time.monotonic()
    try:
        outcomes, notes = _outcomes(journal, asked)
    except (BadWorkload, CannotPlan) as error:
        raise BadInput(str(error)) from None
    found: dict[str, Any] = {name: document(outcome) for name, outcome in outcomes.items()}
    found["notes"] = notes
    found["wall_s"] = time.monotonic() - began_s
    if as_json:
        print_json(found)
    else:
        print_beside({name: found[name] for name in outcomes}, notes)


def _outcomes(journal: Path, asked: Mapping[str, Any]) -> tuple[dict[str, Outcome], list[str]]:
    recorded = read_recorded(journal)
    starts_ns = load_ns(asked["load_time"])
    plain = settings_of(recorded, load_settings(asked["config"], (), secrets=False))
    fleet = replay_fleet(recorded, plain, plain, starts_ns)
    traffic = RecordedTraffic(recorded, plain.slo)
    outcomes = {
        "recorded": outcome_of(traffic, fleet),
        "replayed": _played(traffic, fleet, asked["seed"]),
    }
    overrides: Sequence[Override] = asked["overrides"]
    if overrides or asked["faults"]:
        other = settings_of(recorded, load_settings(asked["config"], overrides, secrets=False))
        changed = replay_fleet(recorded, plain, other, starts_ns)
        faults = tuple(fault_named(text, changed.replica_ids) for text in asked["faults"])
        changed = SimulatedFleet(changed.pools, changed.tenants, starts_ns, faults)
        outcomes["changed"] = _played(traffic, changed, asked["seed"])
    return outcomes, _notes(recorded, plain)


def _played(traffic: RecordedTraffic, fleet: SimulatedFleet, seed: int) -> Outcome:
    requests = len(traffic.recorded.requests)
    with Told(requests) as told:
        return simulate(traffic, fleet, seed=seed, span=Span(requests, told=told.at))


def _notes(recorded: Recorded, settings: Settings) -> list[str]:
    """What limits the comparison."""
    notes = list(recorded.problems)
    notes += [
        f"no targets are known of class {name}: give the settings of the server with -c"
        for name in sorted(recorded.classes_named)
        if settings.slo[name] == SloSection()
    ]
    unknown = sum(one.ended is None or one.ended.reason not in ("stop", "length")
                  for one in recorded.requests)  # fmt: skip
    if unknown:
        notes.append(
            f"{unknown} requests have no whole answer in the journal: they are replayed with "
            f"lengths that others of their class had"
        )
    return notes
