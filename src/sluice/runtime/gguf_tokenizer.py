"""The tokenizer of a GGUF file, written in the format of the HF ``tokenizers`` package.

Decides how the vocabulary, merges and pre-tokenizer name of a GGUF map to a ``tokenizer.json``, and
which facts about the text side go to ``ModelFacts``. Pure: values in, values out. A tokenizer that
is not in the tables is an error, since a wrong split gives wrong answers without any sign of it.
"""

from dataclasses import dataclass
from typing import Any

from sluice.core.errors import ModelLoadError
from sluice.executors.gguf import Gguf
from sluice.runtime.model_folder import ModelFacts

JsonDict = dict[str, Any]

# Token types of the GGUF format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# Control tokens that end a turn, whatever the file says about end of sequence. Many files name only
# one end token while the chat template ends turns with another.
_END_OF_TURN = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    "<|end_of_turn|>", "<|end|>", "<EOT>", "</s>",
})  # fmt: skip

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{c}|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{c}"
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _alternatives(*patterns: str) -> str:
    return "|".join(patterns)


@dataclass(frozen=True, slots=True)
class _Split:
    """How text is cut before byte-pair merging.

    ``pattern`` ``None`` is the pattern of GPT-2, which ``tokenizers`` has built in.
    """

    pattern: str | None = None
    digits_alone: bool = False
    nfc: bool = False
    whole_words_first: bool = False


_GPT2 = _Split()
_DIGITS = _Split(digits_alone=True)
_LLAMA3 = _Split(_alternatives(_CONTRACTIONS, _WORDS, r"\p{N}{1,3}", _REST), whole_words_first=True)
_DBRX = _Split(_LLAMA3.pattern)
_QWEN2 = _Split(_alternatives(_CONTRACTIONS, _WORDS, r"\p{N}", _REST), nfc=True)
_QWEN2_PLAIN = _Split(_QWEN2.pattern)
_GPT4O = _Split(
    _alternatives(_CASED.replace("{c}", _CONTRACTIONS + "?"), r"\p{N}{1,3}", _CASED_REST)
)
_TEKKEN = _Split(
    _alternatives(_CASED.replace("{c}", ""), r"\p{N}", _CASED_REST), whole_words_first=True
)

# Value of ``tokenizer.ggml.pre`` -> split.
_SPLITS = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2, "granite-docling": _GPT2,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "dbrx": _DBRX, "smaug-bpe": _DBRX,
    "qwen2": _QWEN2, "stablelm2": _QWEN2_PLAIN, "deepseek-r1-qwen": _QWEN2_PLAIN,
    "gpt-4o": _GPT4O, "llama4": _GPT4O, "tekken": _TEKKEN,
}  # fmt: skip


def gguf_facts(gguf: Gguf, source_sha256: str) -> ModelFacts:
    """What the file states about the model; ``ModelLoadError`` where needed facts are missing."""
    architecture = gguf.text("general.architecture")
    if architecture is None:
        raise ModelLoadError(f"{gguf.path} does not name its architecture (general.architecture)")
    context = gguf.number(f"{architecture}.context_length")
    if context is None or context < 1:
        raise ModelLoadError(f"{gguf.path} has no {architecture}.context_length")
    tokens = _tokens(gguf)
    bos = _token_id(gguf, "bos", len(tokens))
    eos = _token_id(gguf, "eos", len(tokens))
    named = [_token_id(gguf, key, len(tokens)) for key in ("eos", "eot", "eom")]
    turn = [
        i
        for i, kind in enumerate(_types(gguf, len(tokens)))
        if kind == _CONTROL and tokens[i] in _END_OF_TURN
    ]
    ends = tuple(dict.fromkeys([*(i for i in named if i is not None), *turn]))
    split = _SPLITS.get(gguf.text("tokenizer.ggml.pre") or "", _GPT2)
    # Files leave the flag out where it is the rule of their kind of tokenizer.
    usual = gguf.text("tokenizer.ggml.model") == "llama" or split.whole_words_first
    return ModelFacts(
        name=gguf.text("general.name") or gguf.path.stem,
        architecture=architecture,
        context_tokens_max=context,
        vocab_size=len(tokens),
        bos_token=bos,
        eos_token=eos,
        end_tokens=ends,
        bos_text="" if bos is None else tokens[bos],
        eos_text="" if eos is None else tokens[eos],
        add_bos=bos is not None and bool(gguf.values.get("tokenizer.ggml.add_bos_token", usual)),
        chat_template=gguf.text("tokenizer.chat_template"),
        chat_template_tools=gguf.text("tokenizer.chat_template.tool_use"),
        source_sha256=source_sha256,
    )


def tokenizer_json(gguf: Gguf) -> JsonDict:
    """The tokenizer as the content of a ``tokenizer.json``.

    Raises ``ModelLoadError`` for a tokenizer kind or pre-tokenizer that is not known.
    """
    kind = gguf.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(gguf)
    if kind == "llama":
        return _sentencepiece(gguf)
    raise ModelLoadError(
        f"{gguf.path} has a tokenizer of kind {kind!r}; kinds that are read: gpt2 (byte-level BPE)"
        " and llama (SentencePiece BPE)"
    )


def _byte_level(gguf: Gguf) -> JsonDict:
    name = gguf.text("tokenizer.ggml.pre")
    split = _SPLITS.get(name or "")
    if split is None:
        raise ModelLoadError(
            f"{gguf.path} uses the pre-tokenizer {name!r}, which is not known; known are"
            f" {', '.join(sorted(_SPLITS))}. An OpenVINO IR folder with a tokenizer.json works too"
        )
    merges = gguf.values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise ModelLoadError(f"{gguf.path} has no merges (tokenizer.ggml.merges)")
    tokens = _tokens(gguf)
    model = _bpe(tokens, [list(_merge_pair(merge)) for merge in merges])
    model["ignore_merges"] = split.whole_words_first
    return {
        **_frame(_added(gguf, tokens)),
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": _pre_tokenizer(split),
        "decoder": _byte_level_step(use_regex=True),
        "model": model,
    }


def _pre_tokenizer(split: _Split) -> JsonDict:
    if split.pattern is not None:
        cut = {
            "type": "Split",
            "pattern": {"Regex": split.pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        return {"type": "Sequence", "pretokenizers": [cut, _byte_level_step(use_regex=False)]}
    if split.digits_alone:
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _byte_level_step(use_regex=True)]}
    return _byte_level_step(use_regex=True)


def _byte_level_step(*, use_regex: bool) -> JsonDict:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _merge_pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(gguf: Gguf) -> JsonDict:
    tokens = _tokens(gguf)
    scores = gguf.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{gguf.path} has no score for each token (tokenizer.ggml.scores)")
    types = _types(gguf, len(tokens))
    model = _bpe(tokens, _merges_of_scores(tokens, scores, types))
    unknown = gguf.number("tokenizer.ggml.unknown_token_id")
    if unknown is not None and unknown < len(tokens):
        model["unk_token"] = tokens[unknown]
        model["fuse_unk"] = True
    model["byte_fallback"] = _BYTE in types
    prefix = bool(gguf.values.get("tokenizer.ggml.add_space_prefix", True))
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, spaces] if prefix else [spaces]
    decode: list[JsonDict] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decode.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        **_frame(_added(gguf, tokens)),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decode},
        "model": model,
    }


def _merges_of_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[list[str]]:
    """Merges in the order of SentencePiece: the pair whose result has the best score."""
    ids = {t: i for i, t in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[i], ids[left], ids[right], left, right))
    ranked.sort()
    return [[left, right] for *_, left, right in ranked]


def _bpe(tokens: list[str], merges: list[list[str]]) -> JsonDict:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }


def _frame(added: list[JsonDict]) -> JsonDict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
    }


def _added(gguf: Gguf, tokens: list[str]) -> list[JsonDict]:
    """Tokens found in the text before it is split: control tokens, and those a user defined."""
    added: list[JsonDict] = []
    for i, kind in enumerate(_types(gguf, len(tokens))):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and tokens[i]:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": i, "content": tokens[i], **flags, "special": kind != _USER_DEFINED})
    return added


def _tokens(gguf: Gguf) -> list[str]:
    tokens = gguf.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError(f"{gguf.path} has no vocabulary (tokenizer.ggml.tokens)")
    return tokens


def _types(gguf: Gguf, count: int) -> list[int]:
    types = gguf.values.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != count:
        return [_NORMAL] * count
    return types


def _token_id(gguf: Gguf, name: str, count: int) -> int | None:
    token = gguf.number(f"tokenizer.ggml.{name}_token_id")
    return token if token is not None and 0 <= token < count else None
