"""What fits into a device, and the nearest that would."""

import json
from dataclasses import replace

import pytest

from sluice.planner.formats import precision_named
from sluice.planner.memory import (
    GIB,
    budget_of,
    sequences_max,
)
from sluice.planner.names import CannotPlan
from sluice.planner.tables import own_tables
from sluice.planner.weight_files import weights_bytes
from sluice.planner.work import Deployment, Layout
from tests.runtime.gguf_files import gguf_bytes


def deployment(model="llama-3.1-70b", gpu="h100", precision="fp8", tensor=2):
    tables = own_tables()
    return Deployment(
        tables.model(model), tables.accelerator(gpu), precision_named(precision), Layout(tensor)
    )


def test_d26_each_line_is_shown_and_extra_files_count():
    plain = deployment()
    with_encoder = replace(plain, beside=(("vision encoder", 2.0 * GIB),))
    lines = budget_of(with_encoder).lines()
    assert list(lines) == [
        "device",
        "margin",
        "weights",
        "buffers",
        "vision encoder",
        "left for KV",
    ]
    assert budget_of(plain).pool_bytes - lines["left for KV"] == pytest.approx(2 * GIB)


@pytest.mark.parametrize(
    ("model", "tensor", "weights_gib", "pool_gib"),
    # Measured by the llm-d planner at the start of vLLM on an H100 with 0.9 of the memory.
    [
        ("llama-3.1-70b", 2, 33.88, 32.0),
        ("llama-3.1-8b", 1, 14.99, 51.38),
        ("qwen3-32b", 1, 61.03, 4.45),
        ("qwen3-32b", 2, 30.59, 34.49),
        ("gpt-oss-20b", 1, 13.47, 50.28),
    ],
)
def test_measured_start_up_memory_is_predicted(model, tensor, weights_gib, pool_gib):
    precision = {"llama-3.1-70b": "fp8", "gpt-oss-20b": "mxfp4"}.get(model, "bf16")
    budget = budget_of(deployment(model, "h100", precision, tensor))
    assert budget.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.05)
    assert budget.pool_bytes / GIB == pytest.approx(pool_gib, abs=1.2)


def test_more_devices_hold_more_sequences():
    held = [
        sequences_max(each, budget_of(each), 4000.0)
        for each in (deployment(tensor=tensor) for tensor in (1, 2, 4, 8))
    ]
    assert held == sorted(held)


def test_d25_weights_of_a_file_are_the_sum_of_its_tensors(tmp_path):
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F16", "shape": [10], "data_offsets": [0, 20]},
            "b": {"dtype": "U8", "shape": [7], "data_offsets": [20, 27]},
        }
    ).encode()
    for name in ("one", "two"):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(27))
    assert weights_bytes(tmp_path / "one.safetensors") == 27
    assert weights_bytes(tmp_path) == 54


def test_d25_weights_of_a_gguf_file_are_those_of_its_tensors_without_the_header(tmp_path):
    file = tmp_path / "w.gguf"
    file.write_bytes(gguf_bytes({"general.architecture": "llama"}, tensor_elements=640))
    assert weights_bytes(file) == 4 * 640
    assert weights_bytes(tmp_path) == 4 * 640


def test_d25_a_file_decides_the_size_of_the_weights_and_not_parameters_times_bits():
    plain = deployment()
    assert replace(plain, file_bytes=40e9).weights_bytes == 20e9
    assert (
        budget_of(replace(plain, file_bytes=40e9)).weights_bytes != budget_of(plain).weights_bytes
    )


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_a_damaged_file_of_weights_is_refused_in_words(tmp_path, content):
    file = tmp_path / "w.safetensors"
    file.write_bytes(content)
    with pytest.raises(CannotPlan, match=r"w\.safetensors is not a file of weights"):
        weights_bytes(file)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CannotPlan, match="holds no"):
        weights_bytes(tmp_path)
