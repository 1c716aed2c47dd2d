"""A Parquet file with a row for each request of all trials, for whoever wants to look closer.

pyarrow is large and needed here only, so it comes with the extra ``parquet``.
"""

from pathlib import Path
from typing import Any

from sluice.loadtest.trial import CannotMeasure, RequestOutcome, TrialOutcome

_FLOATS = (
    "at_s", "begun_s", "sent_s", "head_s", "first_s", "shown_s", "last_s", "end_s", "ttft_s",
    "tpot_s", "e2e_s", "lag_s", "gap_s_max", "retry_after_s",
)  # fmt: skip
_COUNTS = (
    "number", "status", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens",
    "first_tokens", "chunks", "choices",
)  # fmt: skip
_TEXTS = ("ending", "finish", "reason", "tenant", "slo_class")


class RowsFile:
    """Rows are written trial by trial; the file has its name once it is whole."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa  # noqa: PLC0415 - an extra
            from pyarrow import parquet  # noqa: PLC0415
        except ImportError:
            raise CannotMeasure(
                "--rows needs pyarrow: pip install 'sluice[parquet]', or leave the option out"
            ) from None
        self._table = pa.Table
        self._path = path
        # A device stays one.
        is_file = path.is_file() or not path.exists()
        self._partial = path.with_name(f".{path.name}.partial") if is_file else path
        kinds = [("trial", pa.int64()), ("counted", pa.bool_())]
        kinds += [(name, pa.int64()) for name in _COUNTS]
        kinds += [(name, pa.float64()) for name in _FLOATS]
        kinds += [(name, pa.string()) for name in _TEXTS]
        kinds.append(("gaps_s", pa.list_(pa.float64())))
        self._schema = pa.schema(kinds)
        self._open = parquet.ParquetWriter
        self._writer: Any = None

    def add(self, outcome: TrialOutcome, trial: int) -> None:
        """Write the requests of a trial. Raises ``OSError``."""
        if self._writer is None:
            self._writer = self._open(self._partial, self._schema, compression="zstd")
        from_s, to_s = outcome.plan.span.from_s, outcome.plan.span.to_s
        rows = [_row(one, trial, from_s <= one.at_s < to_s) for one in outcome.requests]
        self._writer.write_table(self._table.from_pylist(rows, self._schema))

    def close(self) -> None:
        """Give the file its name. Raises ``OSError``."""
        if self._writer is None:
            return
        try:
            self._writer.close()
            if self._partial != self._path:
                self._partial.replace(self._path)
        finally:
            self._writer = None
            if self._partial != self._path:
                self._partial.unlink(missing_ok=True)


def _row(one: RequestOutcome, trial: int, counted: object) -> dict[str, Any]:
    names = (*_COUNTS, *_FLOATS, *_TEXTS)
    row = {name: getattr(one, name) for name in names}
    return {**row, "trial": trial, "counted": bool(counted), "gaps_s": list(one.gaps_s)}
