"""The two commands that the README begins with do what it says."""

import json
import re
import shlex
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sluice.catalog.file_lock import free_lock
from sluice.config.load import load_settings
from tests.e2e.processes import ServerProcess

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.mark.model
def test_the_first_start_and_the_first_request_of_the_readme(smollm2_gguf, tmp_path):
    text = README.read_text(encoding="utf-8")
    start, request, *_ = re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    install, serve = start.split(" && ")
    assert install == "pip install -e ."
    program, command, *arguments = shlex.split(serve)
    assert (program, command) == ("sluice", "serve")
    server = ServerProcess(tmp_path, arguments)
    try:
        server.wait_ready()
        answer = json.loads(curl(request, server.url))
        assert answer["choices"][0]["message"]["content"]
        assert some_prepared_model_is_held()
        assert server.stop() == 0, server.output
    finally:
        server.destroy()


def some_prepared_model_is_held():
    """Whether ``sluice models rm`` would find a model in use."""
    locks = load_settings().settings.catalogue.prepared_dir.glob("*.lock")
    with ExitStack() as held:
        return not all(held.enter_context(free_lock(lock)) for lock in locks)


def curl(command, address):
    """What the ``curl`` line fetches, from this address instead; curl itself need not be here."""
    program, url, *options = shlex.split(command.replace("\\\n", " "))
    assert (program, options[::2]) == ("curl", ["-H", "-d"])
    name, value = options[1].split(": ")
    request = urllib.request.Request(
        address + urlsplit(url).path, data=options[3].encode(), headers={name: value}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()
