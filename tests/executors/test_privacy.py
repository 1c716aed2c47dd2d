"""Nothing is told to anyone by importing the engine."""

import os
import subprocess
import sys
from pathlib import Path

_IMPORT = """
import sys
import sluice.executors.openvino, sluice.executors.openvino_convert
import openvino_genai
assert sys.modules.get("openvino_telemetry") is None
assert not any(name.startswith("openvino_telemetry.") for name in sys.modules)
"""


def test_importing_the_engine_reports_to_nobody_and_leaves_no_client_id(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _IMPORT], env=environment, check=True)
    assert not list(tmp_path.iterdir())
