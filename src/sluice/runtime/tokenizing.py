"""Text to token ids and back.

Decides how prompts are tokenised: which special tokens are recognised, when a beginning-of-sequence
token is put in front, and how few tokens a text of some size can have. The gateway encodes, the
replica decodes; both load the same ``tokenizer.json``. Encoding does not change the object, so that
large prompts can be encoded on another thread.
"""

import json
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from sluice.core.errors import InvalidRequest, ModelLoadError
from sluice.runtime.detokenizing import TokenTable
from sluice.runtime.model_folder import ModelFacts, ModelFolder

# NFC composes at most three code points of three bytes into one of three.
_NFC_SHRINK = 3
# Ways to cut a text into words that keep all of it.
_KEEPING_CUTS = frozenset({"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"})


class TextTokens(Protocol):
    """What the gateway asks of the tokenizer of a model; see ``Tokenizer``."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def special_tokens(self) -> frozenset[int]: ...
    @property
    def table(self) -> TokenTable: ...
    def encode_text(self, text: str) -> tuple[int, ...]: ...
    def encode_chat(self, rendered: str) -> tuple[int, ...]: ...
    def tokens_min(self, text_bytes: int) -> int: ...
    def token_id(self, text: str) -> int | None: ...


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(self, rust: tokenizers.Tokenizer, facts: ModelFacts) -> None:
        # Files may carry the truncation and padding of a training run.
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._facts = facts
        self._bos = (facts.bos_token,) if facts.add_bos and facts.bos_token is not None else ()
        added = rust.get_added_tokens_decoder()
        self.special_tokens = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._special_texts = tuple(added[i].content for i in sorted(self.special_tokens))

    @classmethod
    def load(cls, folder: ModelFolder) -> "Tokenizer":
        """Read the tokenizer of a model folder; raises ``ModelLoadError``."""
        path = folder.tokenizer_path
        try:
            # Bytes, not the path: the message for a missing file then names it.
            rust = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ModelLoadError(f"{path} is not a tokenizer: {error}") from error
        return cls(rust, folder.facts)

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model the tokenizer belongs to."""
        return self._facts

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows; a model's logits may be padded beyond it."""
        return max(
            self._rust.get_vocab_size(with_added_tokens=True), max(self._added, default=0) + 1
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokenise text of a client; special tokens in it are text like any other."""
        has_special = any(special in text for special in self._special_texts)
        return self._bos + _encode(self._plain if has_special else self._rust, text)

    def encode_chat(self, rendered: str) -> tuple[int, ...]:
        """Tokenise what a chat template rendered; its special tokens are recognised.

        A beginning-of-sequence token is put in front where the model wants one and the template
        gave none.
        """
        ids = _encode(self._rust, rendered)
        return ids if ids[:1] == self._bos else self._bos + ids

    def decode(self, tokens: tuple[int, ...]) -> str:
        """The text of the tokens without special ones; invalid UTF-8 becomes U+FFFD."""
        shown = self.table.shown
        text = b"".join(shown[token] for token in tokens).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.table.strips_first_space else text

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written so, ``None`` where there is none."""
        token: int | None = self._rust.token_to_id(text)
        return token

    @cached_property
    def table(self) -> TokenTable:
        """The bytes of each token id; those that only pad the model's logits have none."""
        bytes_of = _byte_level_bytes if self._byte_level else _sentencepiece_bytes
        raw: list[bytes] = []
        for token in range(max(self.vocab_size, self._facts.vocab_size)):
            text = self._added.get(token)
            if text is None:
                raw.append(bytes_of(self._rust.id_to_token(token) or ""))
            else:
                raw.append(text.encode("utf-8", "surrogatepass"))
        return TokenTable(tuple(raw), self.special_tokens, self._strips_first_space)

    def tokens_min(self, text_bytes: int) -> int:
        """A lower bound on the tokens of a text of that many UTF-8 bytes, without looking at it.

        0 where the tokenizer may drop or shorten text without limit.
        """
        longest = self._text_bytes_per_token_max
        return 0 if longest is None else -(-text_bytes // longest)

    @cached_property
    def _text_bytes_per_token_max(self) -> int | None:
        complete = self._byte_level or bool(getattr(self._rust.model, "byte_fallback", False))
        strips = any(
            token.lstrip or token.rstrip for token in self._rust.get_added_tokens_decoder().values()
        )
        cuts = _steps(self._rust.pre_tokenizer, "pretokenizers")
        keeps = all(
            step.get("type") in _KEEPING_CUTS and step.get("behavior") != "Removed" for step in cuts
        )
        shrinks = [_shrink(step) for step in _steps(self._rust.normalizer, "normalizers")]
        if strips or not complete or not keeps or None in shrinks:
            return None
        longest = max(map(len, self.table.raw))
        return longest * max((shrink for shrink in shrinks if shrink is not None), default=1)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that takes special tokens as text, made when needed: it takes as much memory."""
        plain = tokenizers.Tokenizer.from_str(self._rust.to_str())
        plain.encode_special_tokens = True
        return plain

    @property
    def _strips_first_space(self) -> bool:
        return any(
            step.get("type") == "Metaspace"
            or (step.get("type") == "Strip" and step.get("content") == " " and step.get("start"))
            for step in _steps(self._rust.decoder, "decoders")
        )

    @property
    def _byte_level(self) -> bool:
        return any(s.get("type") == "ByteLevel" for s in _steps(self._rust.decoder, "decoders"))


def _encode(rust: tokenizers.Tokenizer, text: str) -> tuple[int, ...]:
    # The batch call lets other threads run meanwhile and keeps no offsets, which halves its time.
    try:
        (encoding,) = rust.encode_batch_fast([text], add_special_tokens=False)
    except TypeError as error:
        # What tokenizers raises for a string that is not valid Unicode (half of a surrogate pair).
        raise InvalidRequest("the text is not valid Unicode: a surrogate stands alone") from error
    return tuple(encoding.ids)


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normaliser or decoder as JSON objects."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state.get(key) or [state]
    return steps


def _shrink(normalizer: dict[str, Any]) -> int | None:
    """By what factor a normaliser can shorten a text at most, ``None`` for no limit."""
    match normalizer:
        case {"type": "NFC"}:
            return _NFC_SHRINK
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case _:
            return None


def _byte_of_character() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte.

    Bytes that print as themselves in Latin-1 stand for themselves; the others are numbered upward
    from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_of_character()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:
        # Not in the alphabet: a token that stands for its own text.
        return piece.encode("utf-8", "surrogatepass")


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode("utf-8", "surrogatepass")
