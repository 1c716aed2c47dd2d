"""Opens each new grammar once in a process of its own, before a replica has to.

Some grammars take seconds and gigabytes to open, and nothing can interrupt the engine while it
does. The gateway therefore tries a grammar in a child process that may be killed; one that takes
too long, or too much memory, is refused. Run as a program, this module is that child: it needs the
grammar engine and no model, since the cost lies in the grammar and not in the vocabulary.
"""

import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from struct import Struct
from typing import BinaryIO

import llguidance

from sluice.core.errors import InvalidRequest
from sluice.runtime.grammar_limits import parser_limits

# Processor time that opening may take. The largest ordinary schemas take a quarter of it.
OPEN_S_MAX = 0.3
# What the child may use before the system ends it.
CHILD_MEMORY_BYTES_MAX = 512 * 1024**2
# How long the child is waited for, on a machine that is busy otherwise.
ANSWER_S_MAX = 5.0
# Verdicts remembered.
VERDICTS_MAX = 256

_LENGTH = Struct("<I")
_MARKER = re.compile(r"<\[\d+\]>")
_END_TOKEN = 256
_TOO_MUCH = "opening it takes too long or too much memory; ask for less at once"


class GrammarTrial:
    """Tries grammars, one at a time. For use by any thread; ``check`` blocks."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()

    def check(self, grammar: str, param: str) -> None:
        """Raises ``InvalidRequest`` where the grammar cannot be opened or costs too much."""
        key = _key(grammar)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._first_verdict(key, grammar)
        if verdict:
            raise InvalidRequest(f"the schema cannot be followed: {verdict}", param=param)

    def knows(self, grammar: str) -> bool:
        """Whether ``check`` would answer at once."""
        return _key(grammar) in self._verdicts

    def close(self) -> None:
        """End the child; a later ``check`` starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _first_verdict(self, key: bytes, grammar: str) -> str:
        with self._turn:
            verdict = self._verdicts.get(key)
            if verdict is None:
                verdict = self._verdicts[key] = self._ask(grammar)
                if len(self._verdicts) > VERDICTS_MAX:
                    self._verdicts.popitem(last=False)
            return verdict

    def _ask(self, grammar: str) -> str:
        """What is wrong with the grammar, empty if nothing is."""
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        text = _without_vocabulary(grammar).encode("utf-8", "replace")
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(_LENGTH.pack(len(text)) + text)
            self._child.stdin.flush()
            answer = _line(self._child, time.monotonic() + ANSWER_S_MAX)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            return _TOO_MUCH
        told: str = json.loads(answer)
        return told


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "replace")).digest()


def _without_vocabulary(grammar: str) -> str:
    """The grammar with the child's end token for special tokens of a model.

    They stand only in the first line of a grammar for tool calls, which holds nothing of a client.
    """
    head, newline, rest = grammar.partition("\n")
    if not head.startswith("start: "):
        return grammar
    return _MARKER.sub(f"<[{_END_TOKEN}]>", head) + newline + rest


def _line(child: subprocess.Popen[bytes], by_s: float) -> bytes | None:
    """A line that the child prints, ``None`` where it ends or the time does."""
    assert child.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([child.stdout], [], [], max(0.0, by_s - time.monotonic()))
        part = os.read(child.stdout.fileno(), 65536) if ready else b""
        if not part:
            return None
        line += part
    return line


# ------------------------------------------------------------------------------------- the child


class _Bytes:
    """A vocabulary of all bytes and an end token, in the shape that llguidance asks for."""

    eos_token_id = _END_TOKEN
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")
    special_token_ids = (_END_TOKEN,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def opened(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    """Open a grammar and say what is wrong with it, empty if nothing is."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return matcher.get_error().strip().partition("\n<")[0][:300]
    return ""


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the gateway closes its end. The system ends the process at its limits."""
    wrapper = llguidance.TokenizerWrapper(_Bytes())
    tokenizer = llguidance.LLTokenizer(wrapper, eos_token=[_END_TOKEN])
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES_MAX,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := requests.read(_LENGTH.size):
        (length,) = _LENGTH.unpack(head)
        grammar = requests.read(length).decode()
        # What the timer sends ends the process, which nothing else could while the engine works.
        signal.setitimer(signal.ITIMER_PROF, OPEN_S_MAX)
        verdict = opened(tokenizer, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(verdict).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
