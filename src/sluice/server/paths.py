"""What a client is told that asked for a path where nothing is served.

Decides which served path was probably meant, and names what OpenAI's API has and this server does
not. Routes themselves are ``app``'s table.
"""

import difflib
from collections.abc import Mapping

from sluice.server.problems import Problem, unknown_path

# The beginning of paths that other servers have, and what they are for.
NOT_SUPPORTED = {
    "/v1/embeddings": "Embeddings are",
    "/v1/responses/": "Stored responses are",
    "/v1/chat/completions/": "Stored chat completions are",
    "/v1/conversations": "Stored conversations are",
    "/v1/moderations": "Moderations are",
    "/v1/audio": "Audio is",
    "/v1/images": "Images are",
    "/v1/files": "Files are",
    "/v1/batches": "Batches are",
    "/v1/fine_tuning": "Fine-tuning is",
    "/v1/assistants": "Assistants are",
    "/v1/threads": "Threads are",
    "/v1/vector_stores": "Vector stores are",
    "/v1/realtime": "Realtime sessions are",
    "/v1/messages": "The Messages API is",
    "/v1/rerank": "Reranking is",
    "/tokenize": "Tokenising is",
    "/detokenize": "Detokenising is",
}
# Longer paths are not searched for likeness, which takes time with the square of the length.
_SEARCHED_CHARS_MAX = 100
_LIKENESS_MIN = 0.75


def not_found(raw_path: bytes, served: Mapping[str, str]) -> Problem:
    """The answer for an unknown path; ``served`` has the method of each known one."""
    path = raw_path[: _SEARCHED_CHARS_MAX + 1].decode("ascii", "replace")
    there = ", ".join(
        f"{method} {known}" for known, method in served.items() if known.startswith("/v1/")
    )
    what = next((NOT_SUPPORTED[start] for start in NOT_SUPPORTED if path.startswith(start)), None)
    if what is not None and path.rstrip("/") not in served:
        return unknown_path(f"{what} not supported here. Served: {there}.")
    near = _near(path.rstrip("/"), served)
    if near is not None:
        return unknown_path(f"Nothing is served at this path; nearest: {served[near]} {near}.")
    return unknown_path(f"Nothing is served at this path. Served: {there}.")


def _near(path: str, served: Mapping[str, str]) -> str | None:
    """The served path that was probably meant, ``None`` if none was."""
    if path in {"", "/v1"} or len(path) > _SEARCHED_CHARS_MAX:
        return None
    for known in served:
        if path == known or known.endswith(path) or known.startswith(path + "/"):
            return known
    close = difflib.get_close_matches(path, served, n=1, cutoff=_LIKENESS_MIN)
    return close[0] if close else None
