"""Autoscaling policies on published traces: ``python benchmarks/autoscale.py --traces FOLDER``.

sluice's policy, with parts of it left out, beside the laws of Kubernetes' autoscaler, KEDA on
waiting requests, Knative, Ray Serve and Dynamo's last value, and an oracle that knows what will
come. All decide for the same fleet in virtual time, with its admission, under the same requests and
the same cold starts; a refused request has missed its targets. What is scaled is in
``scaling/scenes.py``.

Prints attainment, replica-hours (of starting, warm, serving and draining replicas), direction
changes and refusals of each run, and what of it holds against the best other law: as many requests
in time for at most 0.85 of its hours. ``--runs`` keeps results, so that what was interrupted goes
on; ``--tables`` prints the tables of docs/benchmarks.md from them, ``--plots`` draws.
``--decision`` measures the time of one decision instead.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

COLD_S = (30.0, 180.0, 600.0)
Row = Mapping[str, Any]


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder with the traces")
    parser.add_argument("--runs", type=Path, default=Path("/tmp/sluice-autoscale"))  # noqa: S108
    parser.add_argument("--scene", action="append", help="only this one; may be given again")
    parser.add_argument("--policy", action="append", help="only this one, or those that begin so")
    parser.add_argument("--cold", type=float, action="append", help="only this cold start, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plots", type=Path, help="folder for the plots")
    parser.add_argument("--tables", action="store_true", help="print Markdown")
    parser.add_argument("--decision", action="store_true", help="time of a decision")
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if asked.decision:
        from benchmarks.scaling.decision import measure  # noqa: PLC0415

        measure()
        return
    if asked.traces is not None:
        _run(asked)
    rows = [row for row in _kept(asked.runs) if row["seed"] == asked.seed]
    if asked.tables:
        from benchmarks.scaling.tables import comparison, left_out  # noqa: PLC0415

        print(comparison(rows), left_out(rows), sep="\n\n")
    else:
        _print(rows)
    if asked.plots is not None:
        from benchmarks.scaling.plots import write  # noqa: PLC0415

        write(rows, asked.plots)


def _run(asked: argparse.Namespace) -> None:
    from benchmarks.scaling.runs import kept, policies, run  # noqa: PLC0415
    from benchmarks.scaling.scenes import SCENES, Part  # noqa: PLC0415

    done = {(row["scene"], row["cold_s"], row["policy"], row["seed"]) for row in _kept(asked.runs)}
    names = [policy.name for policy in policies()]
    wanted = {
        name
        for one in asked.policy or [""]
        for name in ([one] if one in names else names)
        if name.startswith(one)
    }
    chosen = [policy for policy in policies() if policy.name in wanted]
    for scene in SCENES:
        if asked.scene and scene.name not in asked.scene:
            continue
        part = Part(scene, asked.traces, asked.seed)
        for cold_s in asked.cold or COLD_S:
            for policy in chosen:
                if (scene.name, cold_s, policy.name, asked.seed) in done:
                    continue
                part = kept(part, asked.runs)
                row = {**asdict(run(part, cold_s, policy, asked.seed)), "seed": asked.seed}
                with (asked.runs / f"{scene.name}.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(_line(row), file=sys.stderr, flush=True)


def _kept(folder: Path) -> list[Row]:
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def _line(row: Row) -> str:
    return (
        f"{row['scene']:<15} {row['cold_s']:>4.0f} s  {row['policy']:<21} "
        f"{row['attainment']:>7.2%} {row['hours']:>7.2f} {row['warm_hours']:>6.2f} "
        f"{row['flips']:>5} {row['refused']:>6} {row['least']:>3}-{row['most']:<3} "
        f"{row['starts']:>4}"
    )


def _print(rows: Sequence[Row]) -> None:
    print("scene            cold  policy                  in time   hours (warm) flips refused "
          "replicas starts")  # fmt: skip
    from benchmarks.scaling.tables import groups, verdict  # noqa: PLC0415

    for (scene, cold_s), group in groups(rows).items():
        for row in group.values():
            print(_line(row))
        judged = verdict(group)
        if judged is not None:
            print(f"{scene:<15} {cold_s:>4.0f} s  {judged}\n")


if __name__ == "__main__":
    main()
