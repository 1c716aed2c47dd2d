"""Whether counts of numbers and of words for operations tell hard word problems from easy ones.

    python -m benchmarks.word_problems FOLDER

FOLDER has ``routellm_gsm8k.jsonl.gz``. A ridge regression on what the strong model adds, on counts
of each problem alone: its length, its numbers, its signs, and words for operations, time and money,
which were listed before any was looked at. Five folds by question, ten times with other folds;
beside it the order by length, with its interval by bootstrap. No n-grams, nothing of other tasks.
"""

import re
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice.complexity.measures import apgr_of, quality_of
from sluice.complexity.outcomes import read_outcomes

Numbers = NDArray[np.float64]
WORDS = (
    "each", "every", "per", "twice", "half", "third", "quarter", "double", "triple", "times",
    "percent", "%", "more", "less", "than", "total", "altogether", "left", "remaining",
    "rest", "average", "if", "then", "after", "before", "week", "day", "hour", "minute",
    "month", "year", "mile", "pound", "dollar", "cent", "$", "ratio", "fraction", "another",
    "same", "both", "first", "second", "only", "also", "but", "how",
)  # fmt: skip
PENALTIES = (300.0, 1000.0, 3000.0)
FOLDS, SPLITS = 5, 10


def counts(text: str) -> list[float]:
    """What is counted of a problem."""
    low = text.lower()
    words = low.split()
    numbers = [float(one.replace(",", "")) for one in re.findall(r"\d[\d,]*\.?\d*", low)]
    return [
        np.log1p(len(text)), len(text) / 300, np.log1p(len(words)),
        len(numbers), len(set(numbers)), np.log1p(max(numbers, default=0.0)),
        *(low.count(sign) for sign in ".,?%$/"),
        len(re.findall(r"\d\.\d", low)), len(set(words)) / max(1, len(words)),
        len(re.findall(r"[a-z]", low)) / max(1, len(words)),
        *(low.count(word) for word in WORDS),
        len(set(re.findall(r"\b[A-Z][a-z]+", text))),
    ]  # fmt: skip


def scored(known: Numbers, gains: Numbers, asked: Numbers, penalty: float) -> Numbers:
    """Scores of problems by a fit to others."""
    centre, spread = known.mean(axis=0), known.std(axis=0) + 1e-9
    near, far = (np.clip((one - centre) / spread, -3.0, 3.0) for one in (known, asked))
    inner = near.T @ near + penalty * np.eye(near.shape[1])
    found: Numbers = far @ np.linalg.solve(inner, near.T @ (gains - gains.mean()))
    return found


def split_apgr(table: Numbers, gains: Numbers, penalty: float, split: int) -> float:
    """APGR of scores by fits to the other folds of one split; each row is a question of its own."""
    folds = np.random.default_rng(split).permutation(len(gains)) % FOLDS
    scores = np.zeros(len(gains))
    for fold in range(FOLDS):
        out = folds == fold
        scores[out] = scored(table[~out], gains[~out], table[out], penalty)
    return apgr_of(scores, gains)


def main() -> None:
    rows = read_outcomes(Path(sys.argv[1]) / "routellm_gsm8k.jsonl.gz")
    if len({one.question for one in rows}) != len(rows):
        raise SystemExit("questions repeat: folds by row would split them")
    gains = np.array([one.gain for one in rows])
    table = np.array([counts(one.prompt) for one in rows])
    lengths = np.array([float(len(one.prompt)) for one in rows])
    length = quality_of(lengths, gains, list(range(len(rows)))).apgr
    print(f"length            {length.value:.3f} [{length.low:.3f}, {length.high:.3f}]")
    for penalty in PENALTIES:
        found = [split_apgr(table, gains, penalty, split) for split in range(SPLITS)]
        print(
            f"counts, {penalty:6.0f}    {np.mean(found):.3f} ({min(found):.3f} to {max(found):.3f})"
        )


if __name__ == "__main__":
    main()
