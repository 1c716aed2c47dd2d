"""Small GGUF files with real structure, made from values."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from sluice.executors.gguf import Gguf
from sluice.runtime.gguf_tokenizer import gguf_facts, tokenizer_json
from sluice.runtime.model_folder import ModelFacts
from sluice.runtime.tokenizing import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def gguf_bytes(values: Mapping[str, Any], tensor_elements: int = 64, version: int = 3) -> bytes:
    """A GGUF with one f32 tensor."""
    entries = b"".join(_text(key) + _value(value) for key, value in values.items())
    tensor = _text("weights") + struct.pack("<IQIQ", 1, tensor_elements, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(values)) + entries + tensor
    head += bytes(-len(head) % 32)
    return head + bytes(4 * tensor_elements)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            body = b"".join(_text(text) for text in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + body
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise AssertionError(value)


def byte_alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, in the order of bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_values(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """A byte-level BPE model: 256 bytes, a few merges, three control tokens, one user-defined."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    types = [NORMAL] * len(tokens)
    tokens += ["<|start|>", "<|im_end|>", "<|pad|>", "<tool_call>"]
    types += [CONTROL, CONTROL, CONTROL, USER_DEFINED]
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 263,
        "tokenizer.ggml.eos_token_id": 265,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|im_end|>"
        "{% endfor %}",
        **more,
    }


def sentencepiece_values(**more: Any) -> dict[str, Any]:
    """A SentencePiece BPE model with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>"]
    types = [UNKNOWN, CONTROL, CONTROL]
    scores = [0.0, 0.0, 0.0]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [BYTE] * 256
    scores += [0.0] * 256
    pieces = ["▁h", "el", "▁hel", "lo", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]
    singles = ["▁", "h", "e", "l", "o", "w", "r", "d", "a"]
    tokens += [*pieces, *singles]
    types += [NORMAL] * (len(pieces) + len(singles))
    scores += [-float(i) for i in range(len(pieces) + len(singles))]
    return {
        "general.architecture": "llama",
        "general.name": "tiny-sp",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def tokenizer_of(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of such a model, without a file."""
    gguf = Gguf(Path("tiny.gguf"), values)
    rust = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(gguf)))
    return Tokenizer(rust, facts_of(values))


def facts_of(values: Mapping[str, Any]) -> ModelFacts:
    """The facts of such a model."""
    return gguf_facts(Gguf(Path("tiny.gguf"), values), "")
