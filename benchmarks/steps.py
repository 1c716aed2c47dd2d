"""How well replicas predict their own steps: ``python benchmarks/steps.py JOURNAL...``.

Each step in a journal has its time as predicted before it ran, by the speed that the replica had
learned until then, and as measured. The error is ``|predicted / measured - 1|``. The first
``--learning`` steps of each replica, in which it learns, are left out; a step that the machine
held up (beyond three times the prediction) counts like any other.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import Step

HEADER = ("steps", "number", "median error", "p90 error", "median predicted / measured")


def steps_of(folder: Path, learning: int) -> Iterator[Step]:
    """Steps of all replicas in a journal after the first ones of each."""
    seen: dict[str, int] = {}
    for entry in JournalReader(folder).entries():
        match entry.record:
            case Step(error="") as step if step.measured_ns:
                seen[step.replica] = seen.get(step.replica, 0) + 1
                if seen[step.replica] > learning:
                    yield step
            case _:
                pass


def row(title: str, steps: Sequence[Step]) -> Sequence[str]:
    """Errors of some steps, as cells."""
    if len(steps) < 2:
        return (title, str(len(steps)), "–", "–", "–")
    ratios = [one.predicted_ns / one.measured_ns for one in steps]
    errors = [abs(ratio - 1.0) for ratio in ratios]
    return (
        title,
        f"{len(steps):,}",
        f"{statistics.median(errors):.1%}",
        f"{statistics.quantiles(errors, n=10)[-1]:.1%}",
        f"{statistics.median(ratios):.3f}",
    )


def main() -> None:
    """Print a table for each journal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("journals", nargs="+", type=Path)
    parser.add_argument("--learning", type=int, default=100, help="steps left out at the beginning")
    options = parser.parse_args()
    for folder in options.journals:
        steps = list(steps_of(folder, options.learning))
        print(f"\n{folder.name}")
        for cells in (
            HEADER,
            ("---",) * len(HEADER),
            row("all", steps),
            row("decode only", [one for one in steps if not one.prefill]),
            row("with prompts", [one for one in steps if one.prefill]),
        ):
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
