"""Asks the server what it makes of prompts before anything is measured.

Which model it serves, what tokens it counts for words, whether it answers to the full length. What
cannot work at all is told here, in words, before a run begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sluice.executors.facts import read_facts
from sluice.executors.stream import Reply
from sluice.loadtest.asking import ask
from sluice.loadtest.reading import reason_in
from sluice.loadtest.texts import WORDS, Vocabulary
from sluice.loadtest.trial import CannotMeasure
from sluice.loadtest.wire import Api, Target

# Requests that finding words may take.
_REQUESTS_MAX = 60
_REPEATED = 8
_OUTPUT_TOKENS = 16
# What makes engines answer to the full length; vendors refuse members that they do not know.
_FULL_LENGTH = {"ignore_eos": True}
_FIRST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the server said. ``target`` has the members that it takes.

    ``usage``: it counts tokens. ``full_length``: answers are as long as asked for; otherwise their
    lengths float, and the report says so.
    """

    target: Target
    vocabulary: Vocabulary
    usage: bool
    full_length: bool
    models: tuple[str, ...]
    notes: tuple[str, ...]


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def model_of(target: Target) -> str:
    """The one model that the server has. Raises ``CannotMeasure`` where there are more."""
    models = _models(target)
    if len(models) == 1:
        return models[0]
    if not models:
        raise CannotMeasure(f"{target.netloc} does not list its models; name one with --model")
    raise CannotMeasure(f"{target.netloc} serves {', '.join(models)}; name one with --model")


def calibrated(target: Target) -> Calibration:
    """Ask the server. Raises ``CannotMeasure``."""
    models = _models(target)
    target = replace(target, extra={**_FULL_LENGTH, **target.extra})
    reply = _asked(target, WORDS[:1], _OUTPUT_TOKENS)
    if reply.status in {400, 422}:
        plain = {k: v for k, v in target.extra.items() if k not in _FULL_LENGTH}
        target = replace(target, extra=plain)
        reply = _asked(target, WORDS[:1], _OUTPUT_TOKENS)
    _refuse(target, reply, models)
    usage = _usage(reply)
    notes = []
    if usage is None or usage.prompt_tokens is None:
        notes.append(
            "the server reports no usage: token lengths are estimates, TPOT cannot be measured"
        )
        return Calibration(
            target, Vocabulary(), usage=False, full_length=False, models=models, notes=tuple(notes)
        )
    full_length = usage.completion_tokens == _OUTPUT_TOKENS
    if not full_length:
        notes.append(
            f"asked for {_OUTPUT_TOKENS} output tokens the server gave {usage.completion_tokens}: "
            f"output lengths are not what was planned"
        )
    vocabulary = _vocabulary(target)
    if vocabulary is None:
        notes.append("no words of one token were found: prompt lengths are not exact")
        vocabulary = Vocabulary()
    return Calibration(
        target, vocabulary, usage=True, full_length=full_length, models=models, notes=tuple(notes)
    )


def _models(target: Target) -> tuple[str, ...]:
    reply = ask(target, f"{target.path}/models")
    _refuse_key(target, reply)
    return read_facts([reply.body]).models if reply.status == 200 else ()


def _asked(target: Target, words: Sequence[str], output_tokens: int) -> Reply:
    text = "".join(f" {word}" for word in words)
    body: dict[str, Any] = {"model": target.model, "max_tokens": output_tokens, "temperature": 0}
    if target.api is Api.CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    return ask(target, target.route, {**body, **target.extra}, _FIRST_TIMEOUT_S)


def _refuse_key(target: Target, reply: Reply) -> None:
    if reply.status in {401, 403}:
        given = "the key was refused" if target.keys else "a key is needed: give --key-env NAME"
        raise CannotMeasure(f"{target.netloc}: {given} (status {reply.status})")


def _refuse(target: Target, reply: Reply, models: Sequence[str]) -> None:
    if reply.status == 200:
        return
    _refuse_key(target, reply)
    words = reason_in(reply.body)
    if models and target.model not in models:
        raise CannotMeasure(
            f"{target.netloc} does not serve {target.model!r}; it serves {', '.join(models)}"
        )
    raise CannotMeasure(
        f"{target.netloc}{target.route} refused a request of one word, status {reply.status}: "
        f"{words}"
    )


def _usage(reply: Reply) -> _Usage | None:
    try:
        return msgspec.json.decode(reply.body, type=_Answer).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CannotMeasure(
            f"the server's answer is no JSON of a completion: {reason_in(reply.body)}"
        ) from None


class _Counter:
    """Counts tokens of words by asking; a bounded number of times."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.left = _REQUESTS_MAX

    def tokens(self, words: Sequence[str]) -> int | None:
        """Prompt tokens with the template's, ``None`` where the server does not answer."""
        if self.left <= 0:
            return None
        self.left -= 1
        reply = _asked(self._target, words, 1)
        usage = _usage(reply) if reply.status == 200 else None
        return None if usage is None else usage.prompt_tokens


def _vocabulary(target: Target) -> Vocabulary | None:
    """Words of one token each, and what the template adds to them."""
    counter = _Counter(target)
    for word in WORDS[:4]:
        twice, once = counter.tokens([word] * 2 * _REPEATED), counter.tokens([word] * _REPEATED)
        if twice is not None and once is not None and twice - once == _REPEATED:
            frame_tokens = once - _REPEATED
            words = _single(counter, WORDS, frame_tokens)
            if len(words) > 1:
                return Vocabulary(tuple(words), frame_tokens)
            return None
    return None


def _single(counter: _Counter, words: Sequence[str], frame_tokens: int) -> list[str]:
    """Those of the words that are one token each: halves are asked for where a group is not."""
    tokens = counter.tokens(words)
    if tokens is None:
        return []
    if tokens - frame_tokens == len(words):
        return list(words)
    if len(words) <= 2:
        return []
    half = len(words) // 2
    return [
        *_single(counter, words[:half], frame_tokens),
        *_single(counter, words[half:], frame_tokens),
    ]
