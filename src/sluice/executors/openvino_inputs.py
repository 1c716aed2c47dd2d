"""How a plan's rows become the input tensors of the step graph.

Used by ``openvino`` once per step. What the inputs mean is OpenVINO's paged attention; which rows a
step has is decided elsewhere.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from sluice.core.step import Row
from sluice.executors.base import StepError
from sluice.executors.openvino_graph import BLOCK_SIZE, SAMPLED_ROWS


def check_tokens(rows: Sequence[Row], vocab_size: int) -> None:
    """Refuse what would be read from beyond the embedding table. Raises ``StepError``."""
    for row in rows:
        if min(row.tokens) < 0 or max(row.tokens) >= vocab_size:
            raise StepError(
                f"a token id is outside the vocabulary of {vocab_size}", (row.sequence,)
            )


class StepInputs:
    """The input tensors of one infer request, set once and reshaped in place for each step."""

    _TYPES = (
        ("input_ids", "i64"),
        ("position_ids", "i64"),
        ("past_lens", "i32"),
        ("subsequence_begins", "i32"),
        ("block_indices", "i32"),
        ("block_indices_begins", "i32"),
        (SAMPLED_ROWS, "i64"),
    )

    def __init__(self, request: Any, capacity: int = 4096) -> None:
        """Reserve ``capacity`` elements per input; a larger step makes OpenVINO enlarge them."""
        self._tensors: dict[str, Any] = {}
        for name, kind in self._TYPES:
            tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape([capacity]))
            self._tensors[name] = tensor
            request.set_tensor(name, tensor)
        self._context_len = ov.Tensor(ov.Type.i32, ov.Shape([]))
        request.set_tensor("max_context_len", self._context_len)

    def fill(self, rows: Sequence[Row]) -> None:
        """Write a step. Steps that sample nothing get one row's logits, which nobody reads."""
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        pasts = np.array([row.past_tokens for row in rows], np.int64)
        begins = np.zeros(len(rows) + 1, np.int64)
        counts.cumsum(out=begins[1:])
        total = int(begins[-1])
        lasts = begins[1:] - 1
        blocks_needed = (pasts + counts + (BLOCK_SIZE - 1)) // BLOCK_SIZE
        block_begins = np.zeros(len(rows) + 1, np.int64)
        blocks_needed.cumsum(out=block_begins[1:])
        sampled = lasts[[row.sample for row in rows]]
        self._put("input_ids", np.fromiter(chain.from_iterable(r.tokens for r in rows), np.int64))
        self._put("position_ids", np.arange(total) + np.repeat(pasts - begins[:-1], counts))
        self._put("past_lens", pasts)
        self._put("subsequence_begins", begins)
        tables = (r.blocks[:n] for r, n in zip(rows, blocks_needed.tolist(), strict=True))
        self._put("block_indices", np.fromiter(chain.from_iterable(tables), np.int32))
        self._put("block_indices_begins", block_begins)
        self._put(SAMPLED_ROWS, sampled if sampled.size else lasts[-1:])
        self._context_len.data[...] = int((pasts + counts).max())

    def _put(self, name: str, values: npt.NDArray[Any]) -> None:
        tensor = self._tensors[name]
        tensor.shape = [values.size]
        tensor.data[:] = values
