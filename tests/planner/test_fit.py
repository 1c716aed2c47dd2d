"""The fit finds what made the rows, and the shipped one is what the product reads."""

import csv
import gzip
import math
from dataclasses import replace

import numpy as np
import pytest

from sluice.planner.coefficients import Coefficients, fitted, levels_from_json
from sluice.planner.predict import own_fit
from sluice.planner.steady import steady_state
from tools.planner_fit import (
    FIELD_START,
    Agreement,
    fit_levels,
    fit_model,
    grouped,
    left_out_errors,
    residuals,
)
from tools.planner_rows import FILE, capacity_rows, closed_loop_rows, fold_of

# fmt: off
HEADER = [
    "source", "url_or_repo_path", "date", "model", "params", "gpu", "n_gpus", "tensor_parallel",
    "precision", "engine", "scenario", "mode", "metric", "value", "unit", "slo", "isl", "osl",
    "concurrency", "pipeline_parallel", "attention_dp", "expert_parallel", "submitter", "license",
    "notes",
]
# fmt: on
TRUE = Coefficients(layer_s=9e-5, dense_read=1.4, kv_read=1.6, dense_prefill=2.2)


def row(**values):
    base = {
        "source": "S",
        "model": "meta-llama/Llama-3.1-70B",
        "gpu": "h200_sxm",
        "n_gpus": 4,
        "tensor_parallel": 4,
        "precision": "fp8",
        "engine": "vllm 0.18.0",
        "mode": "online closed-loop",
        "metric": "TPOT",
        "value": 20.0,
        "unit": "ms",
        "isl": 1024,
        "osl": 1024,
        "concurrency": 16,
    }
    return dict.fromkeys(HEADER, "") | base | values


def folder_with(tmp_path, rows):
    with gzip.open(tmp_path / FILE, "wt", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, HEADER)
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def synthetic(tmp_path):
    """Rows that the formula itself made, on two devices and two layouts."""
    asked = [
        row(gpu=gpu, tensor_parallel=tensor, n_gpus=tensor, concurrency=batch, isl=isl, osl=osl)
        for gpu in ("h200_sxm", "b200_sxm")
        for tensor in (2, 8)
        for batch in (4, 16, 64)
        for isl, osl in ((1024, 1024), (8192, 1024))
    ]
    folder = folder_with(tmp_path, asked)
    rows = closed_loop_rows(folder)
    return [
        replace(
            each,
            value=steady_state(each.deployment, each.lengths, each.concurrency).step_s(TRUE),
        )
        for each in rows
    ]


def test_the_fit_reproduces_rows_that_the_formula_made(tmp_path):
    rows = synthetic(tmp_path)
    levels = fit_levels(rows, saturated=False, prior=Coefficients())
    assert np.abs(residuals(rows, levels, saturated=False)).max() < 0.05


def test_a_level_needs_enough_rows_and_the_parent_stands_in(tmp_path):
    rows = synthetic(tmp_path)[:10]
    levels = fit_levels(rows, saturated=False, prior=Coefficients())
    assert set(levels.levels) == {"*/*"}
    assert levels.best("vllm", "hopper")[0] == "*/*"


def test_left_out_errors_are_those_of_a_fit_without_the_group(tmp_path):
    rows = synthetic(tmp_path)
    values = np.array([math.sin(3.0 * place) / 10 for place in range(len(rows))])
    agreement = Agreement([each.case for each in rows])
    groups = grouped([each.curve for each in rows])
    errors, _ = left_out_errors(agreement, FIELD_START, values, groups)
    whole = agreement.covariance(FIELD_START)
    for places in groups:
        kept = np.setdiff1d(np.arange(len(rows)), places)
        noisy = whole[np.ix_(kept, kept)] + FIELD_START.noise**2 * np.eye(len(kept))
        mean = whole[np.ix_(places, kept)] @ np.linalg.solve(noisy, values[kept])
        assert errors[places] == pytest.approx(values[places] - mean, abs=1e-8)


def test_the_band_of_a_fit_holds_four_of_five_of_its_left_out_rows(tmp_path):
    rows = synthetic(tmp_path)
    model = fit_model(rows, FIELD_START, saturated=False)
    assert 0.0 < model.field.spread < 1.3
    assert len(model.field.rows) == len(rows)


def test_doubtful_rows_and_unknown_layouts_are_left_out_and_duplicates_are_one(tmp_path):
    folder = folder_with(
        tmp_path,
        [
            row(value=20),
            row(value=30),
            row(value=70),
            row(notes="suspect: x", concurrency=32),
            row(n_gpus=36, tensor_parallel=36, concurrency=8),
            row(tensor_parallel="", concurrency=4),
        ],
    )
    (one,) = closed_loop_rows(folder)
    assert one.value == pytest.approx(0.030)
    assert one.lengths.prompt == pytest.approx(0.9 * 1024)


def test_no_more_run_at_once_than_the_kv_pool_holds(tmp_path):
    few, many = closed_loop_rows(
        folder_with(
            tmp_path,
            [row(tensor_parallel=1, n_gpus=1, isl=8192, concurrency=batch) for batch in (16, 128)],
        )
    )
    assert few.concurrency == 16
    assert 16 < many.concurrency < 64
    assert many.case.concurrency == many.concurrency


def test_throughput_of_a_system_becomes_that_of_a_device(tmp_path):
    asked = row(
        source="TensorRT-LLM v1.0 perf overview",
        mode="max-throughput",
        metric="output token throughput (system)",
        unit="tok/s",
        value=8000,
        model="Llama 3.3 70B",
        gpu="H200",
        engine="TensorRT-LLM 1.0",
        concurrency="",
        notes="1000 requests queued at once",
    )
    (one,) = capacity_rows(folder_with(tmp_path, [asked]))
    assert one.value == 2000.0
    assert one.case.engine_name == "trtllm-1.0"
    assert 100 < one.concurrency <= 1000


def test_folds_do_not_depend_on_what_is_fitted():
    assert [fold_of(name, 10) for name in ("a", "b", "c")] == [9, 5, 8]


def test_the_shipped_fit_is_dated_and_names_its_sources():
    document = fitted()
    assert document["date"] >= "2026-01-01"
    assert len(document["sha256"]) == 64
    for kind in ("closed_loop", "capacity"):
        assert len(own_fit(kind).field.rows) > 500
        assert document[kind]["residual"]["sources"]
        levels = levels_from_json(document[kind]["levels"])
        assert levels.as_json() == document[kind]["levels"]
