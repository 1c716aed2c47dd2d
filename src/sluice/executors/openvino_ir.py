"""Making OpenVINO IR of a GGUF file, in a process of its own.

Decided here: where a conversion happens and when its result may be seen. Called by ``wiring``
before replicas start, in a process that must stay small: neither OpenVINO nor numpy may be imported
here.
The conversion itself is in ``openvino_convert``, which the child process runs, so that its memory
and its crashes end with it. Caching by content and the tokenizer side of a model folder are in
``runtime/prepare``.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sluice.core.errors import ModelLoadError

_CONVERTER = "sluice.executors.openvino_convert"

# A model of 8 billion parameters takes some minutes; nothing that ends takes half an hour.
_CONVERSION_S_MAX = 1800

# Lines of the child's error output that go into the message.
_ERROR_LINES_MAX = 8


def prepare_ir(source: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Write the IR of the GGUF file ``source`` into the folder ``out_dir``.

    Files appear whole, ``openvino_model.xml`` last, so a folder that has it is complete.
    ``progress`` is told in words what is being done. Raises ``ModelLoadError`` with the converter's
    words when it fails, is killed or does not end.
    """
    if not source.is_file():
        raise ModelLoadError(f"{source} does not exist; give a GGUF file")
    out_dir.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=out_dir))
    try:
        progress(f"converting {source.name} to OpenVINO IR")
        _convert(source, unfinished)
        files = sorted(unfinished.iterdir(), key=lambda file: file.name == "openvino_model.xml")
        for file in files:
            file.rename(out_dir / file.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(source: Path, folder: Path) -> None:
    command = [sys.executable, "-m", _CONVERTER, str(source.resolve()), str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_CONVERSION_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(
            f"converting {source} did not end within {_CONVERSION_S_MAX} s"
        ) from None
    if done.returncode == 0 and (folder / "openvino_model.xml").is_file():
        return
    if done.returncode < 0:
        raise ModelLoadError(
            f"the conversion of {source} was ended by signal {-done.returncode}; "
            f"if that is 9, free memory was too little: a conversion takes several times the file"
        )
    lines = done.stdout.decode(errors="replace").strip().splitlines()[-_ERROR_LINES_MAX:]
    raise ModelLoadError(f"OpenVINO cannot convert {source}: " + "\n".join(lines))
