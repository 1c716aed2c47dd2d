"""Writes ``src/sluice/planner/tables/fit.json`` from a folder of published measurements.

Run with ``python -m tools.fit_planner FOLDER``; a laptop needs two minutes. With ``--search`` the
covariance of the residuals is searched again, which takes some minutes more; without, the one of
the last fit is kept.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sluice.planner.residual import Field, field_as_json, field_from_json
from tools.planner_fit import FIELD_START, fit_model, search_field
from tools.planner_rows import Measured, capacity_rows, closed_loop_rows, file_hash

TARGET = Path(__file__).parents[1] / "src/sluice/planner/tables/fit.json"


def last_field(kind: str) -> Field:
    """The covariance of the last fit, or the start of a first one; without its rows."""
    if not TARGET.exists():
        return FIELD_START
    document = json.loads(TARGET.read_text(encoding="utf-8"))
    if kind not in document:
        return FIELD_START
    return field_from_json({**document[kind]["residual"], "rows": []})


def section(kind: str, rows: list[Measured], *, search: bool) -> dict[str, Any]:
    """One kind of rows, fitted."""
    saturated = kind == "capacity"
    field = search_field(rows, saturated=saturated) if search else last_field(kind)
    model = fit_model(rows, field, saturated=saturated)
    return {"levels": model.levels.as_json(), "residual": field_as_json(model.field)}


def main() -> None:
    """Read, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--search", action="store_true")
    arguments = parser.parse_args()
    kinds = {
        "closed_loop": closed_loop_rows(arguments.folder),
        "capacity": capacity_rows(arguments.folder),
    }
    versions = sorted({row.engine_version for rows in kinds.values() for row in rows})
    document: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "sha256": file_hash(arguments.folder),
        "licences": "rows derived from sources under Apache-2.0, named in `sources`",
        "engines": versions,
    }
    for kind, rows in kinds.items():
        document[kind] = section(kind, rows, search=arguments.search)
        print(f"{kind}: {len(rows)} rows, levels {', '.join(document[kind]['levels'])}")
    TARGET.write_text(_written(document), encoding="utf-8")
    print(f"wrote {TARGET} ({TARGET.stat().st_size:,} bytes)")


def _written(document: dict[str, Any]) -> str:
    """JSON with one measurement per line, so that a refit shows in a diff."""
    text = json.dumps(document, separators=(",", ":"))
    return text.replace("],[", "],\n[").replace('},"', '},\n"') + "\n"


if __name__ == "__main__":
    main()
