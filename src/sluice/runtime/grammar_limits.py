"""How much work a schema may ask of the grammar engine.

Decides which schemas are refused because following them would take too long or too much memory
although they are short: numbers whose multiples are followed digit by digit, patterns that repeat
often. Looks at the schema alone; how long a grammar really takes is measured by ``grammar_trial``.
"""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import llguidance

from sluice.core.errors import InvalidRequest

# The engine keeps a state for each remainder: 10,000 of them take about 40 ms and 5 MB to make.
REMAINDERS_MAX = 10_000
# Characters of a pattern with its repetitions written out; the engine gives up at about twice that.
PATTERN_SIZE_MAX = 10_000

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def parser_limits() -> llguidance.LLParserLimits:
    """What following a grammar may take: a lexer state 1-2 kB, a mask 5-10 ms."""
    return llguidance.LLParserLimits(
        max_lexer_states=25_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        verbose_errors=False,
    )


def check_schema(schema: Any, param: str) -> None:
    """Refuse a schema that asks for too much. Raises ``InvalidRequest`` naming ``param``."""
    divisors: list[int] = []
    intersects = False
    for key, value in _entries(schema):
        if key == "multipleOf" and isinstance(value, (int, float)):
            divisors.append(_remainders(value))
        elif key == "allOf":
            intersects = True
        elif key == "pattern" and isinstance(value, str):
            _check_pattern(value, param)
        elif key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(pattern, param)
    remainders = sum(divisors)
    if intersects and remainders <= REMAINDERS_MAX:
        # Which of them meet in one number is not looked into: any may.
        remainders = max(remainders, math.lcm(*divisors))
    if remainders > REMAINDERS_MAX:
        raise InvalidRequest(
            "the schema cannot be followed: its values of multipleOf are too large together"
            f" (those in allOf multiply); at most {REMAINDERS_MAX} is accepted",
            param=param,
        )


def _entries(schema: Any) -> Iterator[tuple[str, Any]]:
    """All keys with their values, however deep."""
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            yield from item.items()
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)


def _remainders(divisor: float) -> int:
    """The divisor without its decimal point, at most one more than is accepted."""
    try:
        sign_digits_exponent = Decimal(repr(divisor)).normalize().as_tuple()
    except (InvalidOperation, ValueError):
        return REMAINDERS_MAX + 1
    exponent = sign_digits_exponent.exponent
    if not isinstance(exponent, int) or len(sign_digits_exponent.digits) + max(0, exponent) > 9:
        return REMAINDERS_MAX + 1
    digits = int("".join(map(str, sign_digits_exponent.digits)))
    return int(min(REMAINDERS_MAX + 1, digits * 10 ** max(0, exponent)))


def _check_pattern(pattern: str, param: str) -> None:
    size = pattern_size(pattern)
    if size > PATTERN_SIZE_MAX:
        raise InvalidRequest(
            f"the schema cannot be followed: the pattern {pattern[:60]!r} repeats too much;"
            f" written out it may have at most {PATTERN_SIZE_MAX} parts",
            param=param,
        )


def pattern_size(pattern: str) -> int:
    """About how many parts a pattern has with its repetitions written out.

    Bounded a little above ``PATTERN_SIZE_MAX``. A pattern that is wrong gets a number too.
    """
    bound = PATTERN_SIZE_MAX + 1
    groups, last, at = [0], 0, 0
    while at < len(pattern):
        length, size = 1, 1
        match pattern[at]:
            case "\\":
                length = 2
            case "[":
                found = _CLASS.match(pattern, at)
                length = len(found[0]) if found else 1
            case "(":
                groups.append(0)
                size = 0
            case ")" if len(groups) > 1:
                size = max(1, groups.pop())
            case "{" if count := _COUNT.match(pattern, at):
                length = len(count[0])
                times = count[2] or count[1]
                size = last * (int(times) if len(times) < 9 else bound) - last
        groups[-1] = min(bound, groups[-1] + size)
        last = size
        at += length
    return min(bound, sum(groups))
