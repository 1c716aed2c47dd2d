"""What a model is to the planner: its layers by class, its weights, its KV bytes per token.

Pure values. ``model_config.py`` makes them from a ``config.json``; ``work.py`` counts bytes and
operations with them. KV is counted per class of layers, because they differ in what they keep and
in what tensor parallelism divides:

- full attention keeps every token; the KV heads are divided, and replicated below one per device;
- a window keeps its last ``window`` tokens;
- latent attention (MLA) keeps one compressed vector per token, which no device can do without;
- linear layers keep one state per sequence, whatever its length.
"""

from dataclasses import dataclass
from math import ceil, fsum
from typing import assert_never


@dataclass(frozen=True, slots=True)
class HeadLayers:
    """Layers with query, key and value heads; ``window`` tokens are kept, all where it is None."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """Multi-head latent attention: keys and values come from one vector of rank + rope values."""

    layers: int
    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Linear attention: a state of key x value per value head, for each sequence."""

    layers: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int


AttentionLayers = HeadLayers | LatentLayers | StateLayers


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts layers: how many, and how large one expert is, and those that every
    token uses together."""

    layers: int
    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer by its sizes.

    ``dense_layers`` have a gated feed-forward of ``intermediate``. ``attention_weights`` is the
    format of the weights outside the experts where a quantised model leaves them alone.
    ``approximate`` says which sizes are not exact, in words. ``published`` is the precision of its
    published weights where they are quantised.
    """

    name: str
    hidden: int
    vocabulary: int
    attention: tuple[AttentionLayers, ...]
    dense_layers: int
    intermediate: int
    experts: Experts | None = None
    tied_embeddings: bool = False
    context_tokens_max: int | None = None
    attention_weights: str | None = None
    approximate: str | None = None
    published: str | None = None

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(each.layers for each in self.attention)

    @property
    def latent_layers(self) -> int:
        """Layers with latent attention."""
        return sum(each.layers for each in self.attention if isinstance(each, LatentLayers))

    @property
    def state_layers(self) -> int:
        """Layers with linear attention."""
        return sum(each.layers for each in self.attention if isinstance(each, StateLayers))

    @property
    def attention_params(self) -> int:
        """Weights of all attention projections."""
        return sum(each.layers * _params_per_layer(each, self.hidden) for each in self.attention)

    @property
    def feed_forward_params(self) -> int:
        """Weights of dense feed-forward layers and shared experts."""
        params = self.dense_layers * 3 * self.hidden * self.intermediate
        if self.experts is not None:
            shared = 3 * self.hidden * self.experts.shared_intermediate
            params += self.experts.layers * (shared + self.hidden * self.experts.count)
        return params

    @property
    def head_params(self) -> int:
        """Weights of the language-model head, read in every step."""
        return self.vocabulary * self.hidden

    @property
    def expert_params(self) -> int:
        """Weights of all routed experts together."""
        if self.experts is None:
            return 0
        each = 3 * self.hidden * self.experts.intermediate
        return self.experts.layers * self.experts.count * each

    @property
    def params(self) -> int:
        """All weights, embeddings included."""
        embeddings = 0 if self.tied_embeddings else self.head_params
        dense = self.attention_params + self.feed_forward_params
        return dense + self.head_params + embeddings + self.expert_params

    def kv_values(self, tokens: float, tensor_parallel: int = 1) -> float:
        """Values that one device keeps for a sequence of ``tokens``."""
        return fsum(_kv_values(each, tokens, tensor_parallel) for each in self.attention)

    def prefill_attention_flops(self, past: float, tokens: float) -> float:
        """Operations of the attention scores and sums of a chunk behind ``past`` tokens."""
        return fsum(_score_flops(each, past, tokens) for each in self.attention)


def _params_per_layer(kind: AttentionLayers, hidden: int) -> int:
    match kind:
        case HeadLayers():
            return hidden * kind.head_dim * (2 * kind.heads + 2 * kind.kv_heads)
        case LatentLayers():
            query = kind.heads * (kind.nope_dim + kind.rope_dim)
            if kind.query_rank is None:
                query_params = hidden * query
            else:
                query_params = kind.query_rank * (hidden + query)
            up = kind.rank * kind.heads * (kind.nope_dim + kind.value_dim)
            out = kind.heads * kind.value_dim * hidden
            return query_params + hidden * (kind.rank + kind.rope_dim) + up + out
        case StateLayers():
            keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
            return hidden * (2 * keys + 3 * values)
        case _:
            assert_never(kind)


def _kv_values(kind: AttentionLayers, tokens: float, tensor_parallel: int) -> float:
    match kind:
        case HeadLayers():
            kept = tokens if kind.window is None else min(tokens, float(kind.window))
            heads = ceil(kind.kv_heads / tensor_parallel)
            return 2.0 * kind.layers * heads * kind.head_dim * kept
        case LatentLayers():
            return kind.layers * (kind.rank + kind.rope_dim) * tokens
        case StateLayers():
            heads = ceil(kind.value_heads / tensor_parallel)
            return float(kind.layers * heads * kind.key_dim * kind.value_dim)
        case _:
            assert_never(kind)


def _score_flops(kind: AttentionLayers, past: float, tokens: float) -> float:
    match kind:
        case HeadLayers():
            seen = past + tokens / 2
            if kind.window is not None:
                seen = min(seen, float(kind.window))
            return 4.0 * kind.layers * kind.heads * kind.head_dim * tokens * seen
        case LatentLayers():
            width = kind.nope_dim + kind.rope_dim + kind.value_dim
            return 2.0 * kind.layers * kind.heads * width * tokens * (past + tokens / 2)
        case StateLayers():
            state = kind.value_heads * kind.key_dim * kind.value_dim
            return 6.0 * kind.layers * state * tokens
        case _:
            assert_never(kind)
