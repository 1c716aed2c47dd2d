"""How well replicas predict their own steps: ``python benchmarks/steps.py JOURNAL...``.

With ``--record`` the one journal is made first: ``--seconds`` of the embedded engine with
SmolLM2-135M under a mixed load of ``--clients`` from loopback, each of which asks again within a
second of its answer. Prompts are 16 to 600 random tokens, answers 8 to 120, the same in every run.
It says something only on a machine that does nothing else.

Each step in a journal has its time as predicted before it ran, by the speed that the replica had
learned until then, and as measured. The error is ``|predicted / measured - 1|``. The first
``--learning`` steps of each replica, in which it learns, are left out; a step that the machine
held up (beyond three times the prediction) counts like any other.
"""

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sluice.telemetry.journal import JournalReader
from sluice.telemetry.records import Step

SETTINGS = ("models.m.source=smollm2-135m-instruct", "models.m.sequences_max=32")
HEADER = ("steps", "number", "median error", "p90 error", "median predicted / measured")


def steps_of(folder: Path, learning: int) -> Iterator[Step]:
    """Steps of all replicas in a journal after the first ones of each."""
    seen: dict[str, int] = {}
    for entry in JournalReader(folder).entries():
        match entry.record:
            case Step(error="") as step if step.measured_ns:
                seen[step.replica] = seen.get(step.replica, 0) + 1
                if seen[step.replica] > learning:
                    yield step
            case _:
                pass


def row(title: str, steps: Sequence[Step]) -> Sequence[str]:
    """Errors of some steps, as cells."""
    if len(steps) < 2:
        return (title, str(len(steps)), "–", "–", "–")
    ratios = [one.predicted_ns / one.measured_ns for one in steps]
    errors = [abs(ratio - 1.0) for ratio in ratios]
    return (
        title,
        f"{len(steps):,}",
        f"{statistics.median(errors):.1%}",
        f"{statistics.quantiles(errors, n=10)[-1]:.1%}",
        f"{statistics.median(ratios):.3f}",
    )


async def ask(host: str, port: int, draws: random.Random, until_s: float) -> None:
    """One client: asks, reads the answer, waits, until the time is over."""
    while time.monotonic() < until_s:
        prompt = [draws.randrange(49_000) for _ in range(round(16 * 37.5 ** draws.random()))]
        asked = {"model": "m", "prompt": prompt, "max_tokens": draws.randint(8, 120)}
        body = json.dumps({**asked, "stream": True, "ignore_eos": True}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode().strip())
        while await reader.read(65536):
            pass
        writer.close()
        await asyncio.sleep(draws.random())


async def ask_all(host: str, port: int, clients: int, seconds: float) -> None:
    """All clients together."""
    until_s = time.monotonic() + seconds
    await asyncio.gather(*(ask(host, port, random.Random(n), until_s) for n in range(clients)))


def record(journal: Path, seconds: float, clients: int) -> None:
    """Write the journal of a server under load."""
    command = [sys.executable, "-m", "sluice", "serve", "--listen", "127.0.0.1:0"]
    for one in (*SETTINGS, f"journal.dir={journal}"):
        command += ["--set", one]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = next((line.split()[1] for line in server.stderr if line.startswith("API")), None)
        if address is None:
            raise RuntimeError("the server did not start")
        host, _, port = address.removeprefix("http://").removesuffix("/v1").partition(":")
        threading.Thread(target=server.stderr.read, daemon=True).start()
        asyncio.run(ask_all(host, int(port), clients, seconds))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def main() -> None:
    """Print a table for each journal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("journals", nargs="+", type=Path)
    parser.add_argument("--learning", type=int, default=100, help="steps left out at the beginning")
    parser.add_argument("--record", action="store_true", help="make the journal first")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load")
    parser.add_argument("--clients", type=int, default=12)
    options = parser.parse_args()
    if options.record:
        (journal,) = options.journals
        record(journal, options.seconds, options.clients)
    for folder in options.journals:
        steps = list(steps_of(folder, options.learning))
        print(f"\n{folder.name}")
        for cells in (
            HEADER,
            ("---",) * len(HEADER),
            row("all", steps),
            row("decode only", [one for one in steps if not one.prefill]),
            row("with prompts", [one for one in steps if one.prefill]),
        ):
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
