"""Request bodies as typed structs, and decoding errors that name the field at fault.

Types and spellings are OpenAI's, decoded strictly (``"10"`` and ``true`` are no numbers). Unknown
fields are accepted, because clients send fields of other vendors. Ranges and rules between fields
are ``options``' and ``messages``' business. Nothing after the routes sees these structs.
"""

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

from sluice.core.errors import InvalidRequest
from sluice.server.structure import STRUCTURE_MAX, has_too_much

Json = dict[str, Any]
# Most entries of the lists and objects that are worked on one by one.
MESSAGES_MAX = 10_000
ENTRIES_MAX = 1000
TOKEN_IDS_MAX = 1024
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Messages = Annotated[list[Json], msgspec.Meta(max_length=MESSAGES_MAX)]
Entries = Annotated[list[Json], msgspec.Meta(max_length=ENTRIES_MAX)]
Names = Annotated[list[str], msgspec.Meta(max_length=ENTRIES_MAX)]

# ``null`` means absent for every field that may be absent.
Whole = int | None
Number = float | None
Flag = bool | None
Text = str | None

# Searching a malformed body for the field at fault takes a second parse in Python, which must not
# hold up the event loop.
_SEARCHED_BYTES_MAX = 64 * 1024


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: Flag = None


class Options(msgspec.Struct, kw_only=True):
    """Fields that chat and text completions share, vLLM's names for its additions included."""

    model: str
    stream: Flag = None
    stream_options: StreamOptions | None = None
    max_tokens: Whole = None
    temperature: Number = None
    top_p: Number = None
    n: Whole = None
    stop: str | list[str] | None = None
    seed: Whole = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=TOKEN_IDS_MAX)] | None = None
    user: Text = None
    service_tier: Text = None
    priority: Whole = None
    top_k: Whole = None
    min_p: Number = None
    repetition_penalty: Number = None
    ignore_eos: Flag = None
    min_tokens: Whole = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=TOKEN_IDS_MAX)] | None = None


class ResponseFormat(msgspec.Struct):
    """``response_format``; ``json_schema`` is checked where it is used."""

    type: str
    json_schema: Json | None = None


class ChatRequest(Options, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Whole = None
    logprobs: Flag = None
    top_logprobs: Whole = None
    response_format: ResponseFormat | None = None
    tools: Entries | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: Flag = None
    functions: Entries | None = None
    modalities: Names | None = None
    chat_template_kwargs: Annotated[Json, msgspec.Meta(max_length=ENTRIES_MAX)] | None = None


class CompletionRequest(Options, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int | str | list[TokenId]]
    logprobs: Whole = None
    echo: Flag = None
    suffix: Text = None
    best_of: Whole = None


class ResponseText(msgspec.Struct):
    """``text`` of a response request."""

    format: Json | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``."""

    model: str
    input: str | Messages
    instructions: Text = None
    stream: Flag = None
    max_output_tokens: Whole = None
    temperature: Number = None
    top_p: Number = None
    top_logprobs: Whole = None
    include: Names | None = None
    text: ResponseText | None = None
    tools: Entries | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: Flag = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=ENTRIES_MAX)] | None = None
    user: Text = None
    service_tier: Text = None
    priority: Whole = None
    store: Flag = None
    background: Flag = None
    previous_response_id: Text = None
    conversation: str | Json | None = None
    prompt: Json | None = None
    truncation: Text = None


Decoded = TypeVar("Decoded")

decode_chat = msgspec.json.Decoder(ChatRequest)
decode_completion = msgspec.json.Decoder(CompletionRequest)
decode_responses = msgspec.json.Decoder(ResponsesRequest)


def decode(decoder: msgspec.json.Decoder[Decoded], body: bytes) -> Decoded:
    """Decode a body. Raises ``InvalidRequest`` whose ``param`` names the field at fault."""
    if not body.strip():
        raise InvalidRequest("The body is empty; send JSON.", param="body")
    if has_too_much(body):
        message = f"The body has more than {STRUCTURE_MAX} objects, lists and members together."
        raise InvalidRequest(message, param="body")
    try:
        body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except UnicodeDecodeError as error:
        message = f"The body is not valid UTF-8 (byte {error.start})."
        raise InvalidRequest(message, param="body") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", param="body") from None
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


def _wrong_type(told: str) -> InvalidRequest:
    """An error with ``param``, from words such as ``Expected `int`, got `str` - at `$.n` ``."""
    told = told.replace(" | null", "")
    what, _, where = told.partition(" - at ")
    place = re.search(r"\$([^`]*)", where)
    param = place.group(1).replace("[...]", "").lstrip(".") if place is not None else ""
    missing = re.search(r"missing required field `([^`]+)`", what)
    if missing is not None:
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequest(f"{param} is missing.", param=param)
    what = what.replace("`", "")
    return InvalidRequest(
        f"{param or 'The body'}: {what[:1].lower()}{what[1:]}.", param=param or "body"
    )


class _NotANumber:
    """Stands for NaN or an infinity while a malformed body is searched."""

    def __init__(self, text: str) -> None:
        self.text = text


def _malformed(body: bytes, told: str) -> InvalidRequest:
    """JSON has no NaN and no infinities, and clients in Python send them as bare words."""
    if len(body) <= _SEARCHED_BYTES_MAX:
        try:
            found = _find("", json.loads(body, parse_constant=_NotANumber))
        except (ValueError, RecursionError):
            found = None
        if found is not None:
            param, text = found
            return InvalidRequest(f"{param}: {text} is not a number in JSON.", param=param)
    return InvalidRequest(f"The body is not valid JSON: {told}.", param="body")


def _find(path: str, value: object) -> tuple[str, str] | None:
    if isinstance(value, _NotANumber):
        return path or "body", value.text
    children: list[tuple[str, object]] = []
    if isinstance(value, dict):
        children = [(f"{path}.{key}" if path else str(key), child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(value)]
    for child_path, child in children:
        found = _find(child_path, child)
        if found is not None:
            return found
    return None
