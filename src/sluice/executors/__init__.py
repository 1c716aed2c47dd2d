"""Ways to compute steps. Each module is the only importer of its library."""

import sys

# OpenVINO's Python package reports every import to a web analytics service through this package and
# does without where it cannot be imported. A server must not tell others that it was started.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
