"""The model folder: everything the rest of sluice knows about a model before it is loaded.

Decides which folders are models and what their facts are. Two kinds are read: folders written by
``prepare`` (they carry ``sluice.json``) and OpenVINO IR folders as Optimum writes them. Nothing
here opens weights or runs a tokenizer; the gateway and the replica both call it.
"""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sluice.core.errors import ModelLoadError

FACTS_FILE = "sluice.json"
TOKENIZER_FILE = "tokenizer.json"
GRAPH_FILE = "openvino_model.xml"
WEIGHTS_FILE = "openvino_model.bin"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that its files state.

    ``end_tokens`` end an answer: end of sequence and end of turn. ``chat_template_tools`` is a
    second template for requests that offer tools, where the model has one. ``source_sha256``
    identifies the weights, empty where nobody computed it. ``made_up`` says that there are no
    weights: its text means nothing, and no token has a probability.
    """

    name: str
    architecture: str
    context_tokens_max: int
    vocab_size: int
    bos_token: int | None = None
    eos_token: int | None = None
    end_tokens: tuple[int, ...] = ()
    bos_text: str = ""
    eos_text: str = ""
    add_bos: bool = False
    chat_template: str | None = None
    chat_template_tools: str | None = None
    source_sha256: str = ""
    made_up: bool = False


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder that holds a model."""

    path: Path
    facts: ModelFacts

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer, in the format of the HF ``tokenizers`` package."""
        return self.path / TOKENIZER_FILE

    @property
    def version(self) -> str:
        """Tells versions of the weights apart: their source's SHA-256, else graph and size."""
        if self.facts.source_sha256:
            return self.facts.source_sha256
        size = (self.path / WEIGHTS_FILE).stat().st_size
        return f"{hashlib.sha256(self.graph_path.read_bytes()).hexdigest()}-{size}"

    @property
    def graph_path(self) -> Path:
        """The OpenVINO graph."""
        return self.path / GRAPH_FILE


def read_model_folder(path: Path) -> ModelFolder:
    """Read the facts of the folder; raises ``ModelLoadError`` naming the file at fault."""
    if not path.is_dir():
        raise ModelLoadError(f"{path} is not a folder")
    missing = [n for n in (GRAPH_FILE, WEIGHTS_FILE, TOKENIZER_FILE) if not (path / n).is_file()]
    if missing:
        raise ModelLoadError(
            f"{path} is not a model folder: {', '.join(missing)} missing. A model folder holds an"
            " OpenVINO IR and a tokenizer.json"
        )
    if (path / FACTS_FILE).is_file():
        return ModelFolder(path, _decode(path / FACTS_FILE, ModelFacts))
    return ModelFolder(path, _optimum_facts(path))


def write_facts(facts: ModelFacts, folder: Path) -> None:
    """Write ``sluice.json`` into the folder."""
    (folder / FACTS_FILE).write_bytes(
        msgspec.json.format(msgspec.json.encode(asdict(facts)), indent=1)
    )


# --------------------------------------------------------------------- folders written by Optimum


class _Config(msgspec.Struct):
    vocab_size: int
    max_position_embeddings: int
    model_type: str = "unknown"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    name: str = msgspec.field(default="", name="_name_or_path")


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenText(msgspec.Struct):
    content: str


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _TokenText | None = None
    eos_token: str | _TokenText | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The small part of a tokenizer.json that states facts; the vocabulary is skipped over."""

    added_tokens: list[_AddedToken] = []
    post_processor: dict[str, Any] | None = None


def _optimum_facts(path: Path) -> ModelFacts:
    config = _decode(path / "config.json", _Config)
    generation = _decode_if_there(path / "generation_config.json", _GenerationConfig)
    texts = _decode_if_there(path / "tokenizer_config.json", _TokenizerConfig)
    tokenizer = _decode(path / TOKENIZER_FILE, _TokenizerFile)
    ids = {token.content: token.id for token in tokenizer.added_tokens}
    bos_text, eos_text = _content(texts.bos_token), _content(texts.eos_token)
    ends = [*_ids(config.eos_token_id), *_ids(generation.eos_token_id)]
    if eos_text in ids:
        ends.insert(0, ids[eos_text])
    bos = ids.get(bos_text, config.bos_token_id)
    add_bos = texts.add_bos_token
    if add_bos is None:
        add_bos = bool(bos_text) and _adds(tokenizer.post_processor, bos_text)
    template, template_tools = _templates(path, texts.chat_template)
    return ModelFacts(
        name=Path(config.name).name or path.name,
        architecture=config.model_type,
        context_tokens_max=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        bos_token=bos,
        eos_token=ends[0] if ends else None,
        end_tokens=tuple(dict.fromkeys(ends)),
        bos_text=bos_text,
        eos_text=eos_text,
        add_bos=add_bos and bos is not None,
        chat_template=template,
        chat_template_tools=template_tools,
    )


def _templates(
    path: Path, in_config: str | list[_NamedTemplate] | None
) -> tuple[str | None, str | None]:
    """The template for plain chats and the one for chats with tools."""
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text("utf-8"), None
    if isinstance(in_config, list):
        by_name = {named.name: named.template for named in in_config}
        return by_name.get("default"), by_name.get("tool_use")
    return in_config, None


def _adds(post_processor: Any, bos_text: str) -> bool:
    """Whether the tokenizer's own template puts the token in front of a text."""
    if not isinstance(post_processor, dict):
        return False
    parts = post_processor.get("processors")
    if isinstance(parts, list):
        return any(_adds(part, bos_text) for part in parts)
    single = post_processor.get("single")
    if not isinstance(single, list) or not single or not isinstance(single[0], dict):
        return False
    token = single[0].get("SpecialToken")
    return isinstance(token, dict) and token.get("id") == bos_text


def _content(token: str | _TokenText | None) -> str:
    if token is None:
        return ""
    return token if isinstance(token, str) else token.content


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else value


def _decode_if_there(path: Path, kind: type[T]) -> T:
    return _decode(path, kind) if path.is_file() else kind()


def _decode(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} does not hold what is expected: {error}") from error
