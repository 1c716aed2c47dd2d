"""What holds of sluice's policy beside the other laws, from the kept results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Group = Mapping[str, Row]

OURS, ORACLE = "sluice", "oracle"
HPAS = ("hpa 50%", "hpa 70%")
HOURS_SHARE = 0.85
IN_TIME = 0.995
FLIPS_SHARE = 0.5
COLUMNS = (
    "trace", "cold start", "sluice", "best other", "of its hours", "cheapest as good", "oracle",
    "held", "direction changes, HPA's", "halved",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """``best`` is the other law with the most requests in time, ``cheapest`` the one with as many
    in time as ours for the fewest hours, ``None`` where none has as many."""

    ours: Row
    best: Row
    cheapest: Row | None
    oracle: Row | None
    hpa_flips: int

    @property
    def hours_share(self) -> float:
        """Our hours over those of the best."""
        return float(self.ours["hours"] / self.best["hours"])

    @property
    def held(self) -> bool:
        """As many in time as the best for at most 0.85 of its hours, or 99.5 % where the oracle has
        as many."""
        better = self.ours["attainment"] >= self.best["attainment"]
        allowed = self.oracle is not None and self.oracle["attainment"] >= IN_TIME
        return (better and self.hours_share <= HOURS_SHARE) or (
            allowed and self.ours["attainment"] >= IN_TIME
        )

    @property
    def steady(self) -> bool:
        """Whether it turned at most half as often as the HPA that turned less."""
        return bool(self.ours["flips"] <= FLIPS_SHARE * self.hpa_flips)

    def __str__(self) -> str:
        words = [f"best other: {named(self.best)}, {self.hours_share:.2f} of its hours"]
        if self.cheapest is None:
            words.append("no other law has as many in time")
        if self.oracle is not None:
            words.append(f"oracle {share_and_hours(self.oracle)}")
        words.append(f"{self.ours['flips']} direction changes, HPA {self.hpa_flips}")
        return f"{'held' if self.held else 'not held'}: " + "; ".join(words)


def groups(rows: Sequence[Row]) -> dict[tuple[str, float], dict[str, Row]]:
    """The results of each scene and cold start, by policy; the last one of each counts."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["scene"], row["cold_s"]), {})[row["policy"]] = row
    return dict(sorted(found.items()))


def verdict(group: Group) -> Verdict | None:
    """``None`` where there is nothing to compare."""
    ours = group.get(OURS)
    others = [row for name, row in group.items() if not name.startswith(OURS) and name != ORACLE]
    if ours is None or not others:
        return None
    best = max(others, key=lambda row: (row["attainment"], -row["hours"]))
    reached = [row for row in others if row["attainment"] >= ours["attainment"]]
    return Verdict(
        ours,
        best,
        min(reached, key=lambda row: float(row["hours"]), default=None),
        group.get(ORACLE),
        min((group[name]["flips"] for name in HPAS if name in group), default=0),
    )


def comparison(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each scene and cold start."""
    lines = [_line(COLUMNS), "|---|---:|---|---|---:|---|---|---|---|---|"]
    for (scene, cold_s), group in groups(rows).items():
        one = verdict(group)
        if one is None:
            continue
        cells = (
            scene,
            f"{cold_s:.0f} s",
            share_and_hours(one.ours),
            named(one.best),
            f"{one.hours_share:.2f}",
            "none" if one.cheapest is None else named(one.cheapest),
            "" if one.oracle is None else share_and_hours(one.oracle),
            _yes(one.held),
            f"{one.ours['flips']}, {one.hpa_flips}",
            _yes(one.steady),
        )
        lines.append(_line(cells))
    return "\n".join(lines)


def left_out(rows: Sequence[Row]) -> str:
    """A Markdown table with what our policy does without its parts."""
    names = sorted({row["policy"] for row in rows if row["policy"].startswith(OURS)})
    lines = [
        _line(("trace", "cold start", *names)),
        f"|---|---:|{'---|' * len(names)}",
    ]
    for (scene, cold_s), group in groups(rows).items():
        cells = [
            f"{share_and_hours(group[name])}, {group[name]['flips']}" if name in group else ""
            for name in names
        ]
        lines.append(_line((scene, f"{cold_s:.0f} s", *cells)))
    return "\n".join(lines)


def named(row: Row) -> str:
    """A law with what it reached."""
    return f"{row['policy']} {share_and_hours(row)}"


def share_and_hours(row: Row) -> str:
    """Requests in time, and replica-hours."""
    return f"{row['attainment']:.2%}, {row['hours']:.2f} h"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(held: bool) -> str:  # noqa: FBT001
    return "yes" if held else "**no**"
