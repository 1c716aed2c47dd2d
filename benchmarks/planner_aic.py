"""AIConfigurator's estimates for cases of ``benchmarks/planner.py``; runs in its own environment.

Reads a JSON list of cases from standard input and writes one JSON object per line, the case's
number with the predicted seconds per token or the error. It imports nothing of sluice: install
``aiconfigurator`` from PyPI into an environment of its own and pass its python as ``--aic``.
"""

import json
import logging
import sys
from typing import Any

from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

# How its options say the precision of a benchmark; tried in order, the last leaves it to the tool.
FORMATS: dict[str, list[dict[str, str]]] = {
    "fp8": [
        {"gemm_quant_mode": "fp8", "moe_quant_mode": "fp8", "kvcache_quant_mode": "fp8"},
        {"gemm_quant_mode": "fp8_block", "moe_quant_mode": "fp8_block"},
        {},
    ],
    "fp4": [
        {"gemm_quant_mode": "nvfp4", "moe_quant_mode": "nvfp4", "kvcache_quant_mode": "fp8"},
        {},
    ],
}
OWN_FORMATS = ("gpt-oss", "DeepSeek", "FP8")  # published in the format that is measured


def layouts(case: dict[str, Any]) -> list[dict[str, int]]:
    """Ways to divide the experts over the devices, in the order that engines prefer."""
    if not case["experts"]:
        return [{}]
    tensor, groups = case["tensor"], case["data"]
    if groups > 1:
        return [{"moe_tp_size": 1, "moe_ep_size": tensor * groups}]
    return [
        {"moe_tp_size": tensor, "moe_ep_size": 1},
        {"moe_tp_size": 1, "moe_ep_size": tensor},
    ]


def estimate(case: dict[str, Any]) -> float:
    """Seconds per token that it predicts for one case: the first spelling that it accepts."""
    formats = FORMATS.get(case["precision"], [{}])
    if case["precision"] == "fp8" and any(part in case["model"] for part in OWN_FORMATS):
        formats = [{}]
    if "gpt-oss" in case["model"]:
        formats = [{}]
    failure: Exception | None = None
    for chosen in formats:
        for layout in layouts(case):
            try:
                result = cli_estimate(
                    case["model"],
                    case["device"],
                    backend_name=case["engine"],
                    database_mode="HYBRID",
                    isl=round(case["prompt"]),
                    osl=round(case["output"]),
                    batch_size=max(1, round(case["concurrency"] / case["data"])),
                    tp_size=case["tensor"],
                    attention_dp_size=case["data"],
                    **chosen,
                    **layout,
                )
                return float(result.tpot) / 1e3
            except Exception as error:  # noqa: BLE001 - the next spelling may be accepted
                failure = error
    assert failure is not None
    raise failure


def main() -> None:
    """Answer every case, in order."""
    logging.disable(logging.CRITICAL)
    for number, case in enumerate(json.load(sys.stdin)):
        answer: dict[str, Any] = {"case": number}
        try:
            answer["step_s"] = estimate(case)
        except Exception as error:  # noqa: BLE001 - whatever it raises is its answer
            answer["error"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
