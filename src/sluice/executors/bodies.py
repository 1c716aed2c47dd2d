"""Fields of ours in a caller's JSON body, without decoding or rewriting the rest of it.

The gateway uses this for what engines want to be told in the body: an id to abort by, a priority in
the engine's own direction, that usage is wanted. It has decoded the body once and knows what is in
it.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

_WHITESPACE = b" \t\r\n"


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The same object with fields added; every other byte stays as it is.

    The fields must not be in it already: of two with one name some parsers take the first, some the
    last, and some refuse both. Raises ``ValueError`` for a body that is no JSON object.
    """
    if not fields:
        return body
    whole = body.strip(_WHITESPACE)
    if len(whole) < 2 or not (whole.startswith(b"{") and whole.endswith(b"}")):
        raise ValueError("the body is not a JSON object")
    # Whether it is empty shows in the last byte before the brace, mostly near by.
    before = whole[-64:-1].rstrip(_WHITESPACE) or whole[:-1].rstrip(_WHITESPACE)
    comma = b"" if before == b"{" else b","
    return b"".join((whole[:-1], comma, msgspec.json.encode(fields)[1:]))
