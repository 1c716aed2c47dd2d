"""The complexity classifier: quality by cross-validation beside its baselines, and serving speed.

    python benchmarks/route.py FOLDER [--only SET] [--skip-speed]

FOLDER has the files ``routellm_mmlu.jsonl.gz``, ``routellm_gsm8k.jsonl.gz``,
``zeroeval_{gsm,crux,math_l5}.jsonl.gz``, ``llmrouter_multi.jsonl.gz`` and
``gsm8k_gpt3_pairs.jsonl.gz``. RouteLLM's best published
figures (arXiv 2406.18665, table 2 and 3) stand beside ours; they are of the whole sets.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sluice.complexity.evaluation import cross_validated
from sluice.complexity.measures import Estimate, Quality, quality_of
from sluice.complexity.model_file import default_model
from sluice.complexity.outcomes import Outcome, read_outcomes

SMALL, LARGE = "Meta-Llama-3.1-8B-Instruct", "Meta-Llama-3.1-70B-Instruct"
# Llama 3.1 8B and the larger model of its family. On MATH that is 405B: the outcomes of 70B there
# do not agree with their publisher's own table.
MODERN = {
    "zeroeval_gsm": (SMALL, LARGE),
    "zeroeval_crux": (SMALL, LARGE),
    "zeroeval_math_l5": (SMALL, "Llama-3.1-405B-Inst"),
    "llmrouter_multi": ("llama-3.1-8b-instruct", "llama-3.1-nemotron-51b-instruct"),
}
SETS: dict[str, dict[str, tuple[str, str] | None]] = {
    "MMLU": {"routellm_mmlu": None},
    "GSM8K": {"routellm_gsm8k": None},
    "modern pairs": {**MODERN},
}
PUBLISHED = {"MMLU": "0.603  35.4  70.3", "GSM8K": "0.622  33.6  63.3"}
LENGTHS_CHARS = (280, 4_000, 100_000)
CALLS = 2_000


def outcomes_of(folder: Path, files: dict[str, tuple[str, str] | None]) -> list[Outcome]:
    found: list[Outcome] = []
    for name, pair in files.items():
        found += read_outcomes(folder / f"{name}.jsonl.gz", pair)
    return found


def untold(_stage: str, _done: int, _total: int) -> None:
    """Nobody watches."""


def print_quality(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        began_s = time.process_time()
        found = cross_validated(outcomes_of(folder, SETS[name]), (), untold).evaluation
        print(
            f"\n{name}: {found.review.rows} rows, {found.questions} questions, weak "
            f"{found.weak:.3f}, strong {found.strong:.3f}, "
            f"{time.process_time() - began_s:.0f} s of processor time"
        )
        for row, quality in {"classifier": found.quality, **found.baselines}.items():
            print(f"  {row:11} {shown(quality)}")
        if name in PUBLISHED:
            print(f"  RouteLLM, best: APGR, CPT(50), CPT(80)  {PUBLISHED[name]}")
        print(
            f"  over length {estimate(found.lead, 3)}, calibration error "
            f"{found.calibration.error:.3f}"
        )


def shown(quality: Quality) -> str:
    return (
        f"APGR {estimate(quality.apgr, 3)}  CPT(50) {estimate(quality.cpt50, 1)}  "
        f"CPT(80) {estimate(quality.cpt80, 1)}"
    )


def estimate(found: Estimate, digits: int) -> str:
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def print_ceiling(folder: Path) -> None:
    """What an order of GSM8K is worth that no router can have: by how many of 47 other systems fail
    the very question."""
    fails: dict[str, list[float]] = {}
    for name in ("zeroeval_gsm", "gsm8k_gpt3_pairs"):
        with gzip.open(folder / f"{name}.jsonl.gz", "rt") as lines:
            for row in map(json.loads, lines):
                fails.setdefault(row["qid"], []).extend(1 - one for one in row["scores"].values())
    rows = outcomes_of(folder, SETS["GSM8K"])
    scores = np.array([np.mean(fails[one.question]) for one in rows])
    gains = np.array([one.gain for one in rows])
    found = quality_of(scores, gains, list(range(len(rows)))).apgr
    print(f"\nGSM8K by how many of 47 other systems fail the question: APGR {estimate(found, 3)}")


def print_speed(folder: Path) -> None:
    """Wall time, and processor time of the thread, which other work disturbs less."""
    model = default_model()
    text = " ".join(one.prompt for one in outcomes_of(folder, SETS["GSM8K"]))
    print("\nserving, ms            wall p50    p99   processor p50    p99")
    for length in LENGTHS_CHARS:
        # Each prompt is another one, so that no cache of text or weights is warm by chance.
        prompts = [text[start : start + length] for start in range(0, 20 * CALLS, 20)]
        walls, processors = [], []
        for prompt in prompts:
            wall, processor = time.perf_counter_ns(), time.thread_time_ns()
            model.judged(prompt)
            processors.append((time.thread_time_ns() - processor) / 1e6)
            walls.append((time.perf_counter_ns() - wall) / 1e6)
        print(
            f"{length:8} characters     {np.percentile(walls, 50):8.3f} "
            f"{np.percentile(walls, 99):6.3f}        {np.percentile(processors, 50):8.3f} "
            f"{np.percentile(processors, 99):6.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=SETS, action="append")
    parser.add_argument("--skip-speed", action="store_true")
    asked = parser.parse_args()
    print_quality(asked.folder, asked.only or SETS)
    if not asked.only or "GSM8K" in asked.only:
        print_ceiling(asked.folder)
    if not asked.skip_speed:
        print_speed(asked.folder)


if __name__ == "__main__":
    main()
