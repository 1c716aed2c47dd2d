"""Goodput beyond capacity: ``python benchmarks/overload.py --live|--virtual SCENARIO...``.

An open-loop load generator over raw HTTP and server-sent events, against sluice (policies ``slo``,
``fcfs`` and ``static``), vLLM's processor build and llama.cpp's server, each a process of its own;
or the same plans in virtual time with the speed that the live runs measured. Scenarios:

- ``capacity``: requests per second of a saturated engine; the others are in multiples of it;
- ``goodput``: good requests per second (TTFT and TPOT inside their targets; a refusal is not good)
  at 0.75 to 4 times capacity, Poisson arrivals and the Azure conversation trace;
- ``long``: 4,000-token prompts beside ten chat streams;
- ``fairness``: a tenant beside one that sends ten times its share;
- ``retry``: clients that come back when they were told to;
- ``policies``: static, fcfs and slo at the same load (from the runs of ``goodput``);
- ``knobs``: throughput against p99 for each setting (virtual);
- ``agree``: the live runs of ``goodput`` again in virtual time (virtual);
- ``summary``: what must hold beside what was measured, from the runs of the others.

Runs are kept in ``--runs``: what was interrupted continues, and tables of all engines come from
several calls. ``--fresh`` measures again. ``--install`` makes the peers' environments.
"""

import sys
from pathlib import Path


def main() -> None:
    """Run the command line, with the modules beside this file."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.load.cli import main as run  # noqa: PLC0415

    run(__doc__ or "")


if __name__ == "__main__":
    main()
