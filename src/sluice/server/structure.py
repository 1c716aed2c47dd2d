"""How much structure a JSON body has, found out before it is decoded.

Decoding takes memory and time by the number of objects, lists and members rather than by bytes, and
is one step that no thread can interrupt. ``wire`` asks here first; what the body means is not
looked at.
"""

# A chat of 10,000 messages has 30,000, a thousand tools with long schemas about 150,000. So many
# are decoded in less than 0.1 s.
STRUCTURE_MAX = 200_000
_MARKS = (b"{", b"[", b":")
_SLICE_BYTES = 256 * 1024


def has_too_much(body: bytes) -> bool:
    """Whether a body has more objects, lists and members than ``STRUCTURE_MAX``."""
    if len(body) <= STRUCTURE_MAX or _count(body) <= STRUCTURE_MAX:
        return False
    return _count_outside_strings(body) > STRUCTURE_MAX


def _count(text: bytes) -> int:
    return sum(text.count(mark) for mark in _MARKS)


def _count_outside_strings(body: bytes) -> int:
    """The marks that are not part of a string, in slices that let other threads go on."""
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, inside = 0, 0
    for start in range(0, len(body), _SLICE_BYTES):
        parts = body[start : start + _SLICE_BYTES].split(b'"')
        count += _count(b"".join(parts[inside::2]))
        if count > STRUCTURE_MAX:
            break
        inside = (inside + len(parts) - 1) % 2
    return count
