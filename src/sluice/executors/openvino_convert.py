"""The process that converts one GGUF file to OpenVINO IR: ``python -m ... SOURCE FOLDER``.

Decided here: how OpenVINO GenAI is made to write IR. Started by ``openvino_ir``; leaves the IR and
OpenVINO's own tokenizer in FOLDER, which nobody reads before the process has ended with code 0.
What GenAI does to weights is corrected in ``openvino_weights``.
"""

import sys
from pathlib import Path

import openvino_genai

from sluice.executors.openvino_weights import restore_weights


def convert(source: Path, folder: Path) -> None:
    """Write the IR of ``source`` into ``folder``."""
    write_genai_ir(source, folder)
    restore_weights(folder, source)


def write_genai_ir(source: Path, folder: Path) -> None:
    """Write what GenAI makes of ``source`` into ``folder``.

    GenAI writes beside the file that it reads, therefore the file is linked into the folder first.
    """
    link = folder / "model.gguf"
    link.symlink_to(source)
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    finally:
        link.unlink()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
