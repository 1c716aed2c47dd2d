"""Two simulated models under more load than they take, for tests of what shows it."""

import json
import random
import threading
import time
from typing import Self

from tests.e2e.clients import COMPLETIONS, Target, ask

SETTINGS = """
[models.llama]
source = "sim:llama-3.1-8b@h100x1"
sequences_max = 3
queue_requests_max = 8
smaller = "qwen"
slo = "chat"
replicas = { min = 2 }
[models.qwen]
source = "sim:qwen2.5-7b@h100x1"
sequences_max = 2
slo = "batch"
[slo.chat]
ttft = "250ms"
tpot = "20ms"
overload = ["shorten", "smaller", "queue", "refuse"]
shorten_tokens = 100
[slo.batch]
ttft = "2s"
tier = 3
"""


class Load:
    """Clients that come at random, more of them every other half minute, until stopped."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._chance = random.Random(1)
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(n,)) for n in range(24)]
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _client(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stopped.wait(chance.expovariate(1.0)):
            elapsed_s = time.monotonic() - self._began_s
            if number >= 10 and elapsed_s % 60 > 30:
                continue
            prompt = [chance.randrange(1000) for _ in range(chance.choice((60, 300, 900)))]
            body = {
                "model": "llama" if chance.random() < 0.8 else "qwen",
                "prompt": prompt,
                "max_tokens": chance.choice((20, 80, 150, 300)),
            }
            headers = {"content-type": "application/json"}
            ask(self._target, "POST", COMPLETIONS, json.dumps(body).encode(), headers)
