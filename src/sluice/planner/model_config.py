"""Model shapes from the keys of a ``config.json``, the published one or an entry of our table.

An unknown model type is no obstacle as long as the keys that decide memory and work are there. A
missing key, or a layer type of which the KV is not known, is refused: a guess would be wrong by
factors.
"""

from collections.abc import Mapping
from typing import Any

from sluice.planner.names import CannotPlan
from sluice.planner.shapes import (
    AttentionLayers,
    Experts,
    HeadLayers,
    LatentLayers,
    ModelShape,
    StateLayers,
)

# Keys that say the same in different families, in order of preference.
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_LAYER_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "window",
    "linear_attention": "state",
}
# Where a window is given without saying which layers have it: families in which all of them do, and
# those in which every so manieth has not.
_ALL_WINDOWED = frozenset(("mistral", "mixtral", "ministral", "phi3", "phimoe", "starcoder2"))
_FULL_EVERY = {"gemma2": 2}
# Keys that change what is kept per token in ways that are not modelled.
_NOT_MODELLED = (
    "hybrid_override_pattern",
    "mamba_num_heads",
    "mamba_d_state",
    "ssm_state_size",
    "attn_layer_period",
    "num_kv_shared_layers",
)


class _Keys:
    """The keys of one configuration; a missing one is an error that names it."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self.config = config

    def optional(self, *keys: str) -> int | None:
        """The first of ``keys`` that is there, as a whole number."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise CannotPlan(
                    f"cannot estimate {self.name}: {key} is {value!r}, not a whole number"
                )
            return value
        return None

    def needed(self, *keys: str) -> int:
        """As ``optional``; missing or zero is refused."""
        value = self.optional(*keys)
        if not value:
            raise CannotPlan(
                f"cannot estimate {self.name}: its configuration has no {' or '.join(keys)}"
            )
        return value


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that the keys of a ``config.json`` describe.

    Raises ``CannotPlan`` where a key that decides memory or work is missing or not understood.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and "num_hidden_layers" in text:
        config = {**config, **text}
    unknown = [key for key in _NOT_MODELLED if config.get(key)]
    if unknown:
        raise CannotPlan(
            f"cannot estimate {name}: {', '.join(unknown)} is a kind of layer that is not modelled"
        )
    keys = _Keys(name, config)
    layers = keys.needed("num_hidden_layers", "n_layer")
    experts = _experts(keys, layers)
    dense_layers = layers if experts is None else layers - experts.layers
    if config.get("dense_beside_experts"):
        dense_layers = layers
    intermediate = keys.needed("intermediate_size", "n_inner") if dense_layers else 0
    return ModelShape(
        name=name,
        hidden=keys.needed("hidden_size", "n_embd"),
        vocabulary=keys.needed("vocab_size"),
        attention=_attention(keys, layers),
        dense_layers=dense_layers,
        intermediate=intermediate,
        experts=experts,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        context_tokens_max=keys.optional("max_position_embeddings", "n_positions"),
        attention_weights=config.get("attention_weights"),
        approximate=config.get("approximate") or _not_understood(config),
        published=_published(config),
    )


def _not_understood(config: Mapping[str, Any]) -> str | None:
    """A quantisation of which the size of the weights is not known."""
    if config.get("quantization_config") and _published(config) is None:
        return "its quantization_config is not understood; give --precision or --weights"
    return None


def _experts(keys: _Keys, layers: int) -> Experts | None:
    count = keys.optional(*_EXPERTS)
    if not count or count == 1:
        return None
    step = keys.optional("interleave_moe_layer_step", "moe_layer_freq", "decoder_sparse_step") or 1
    first = keys.optional("first_k_dense_replace") or 0
    intermediate = keys.needed("moe_intermediate_size", "intermediate_size")
    shared = keys.optional("shared_expert_intermediate_size")
    if shared is None:
        shared = intermediate * (keys.optional("n_shared_experts", "num_shared_experts") or 0)
    return Experts(
        layers=(layers - first) // step,
        count=count,
        per_token=keys.needed(*_PER_TOKEN),
        intermediate=intermediate,
        shared_intermediate=shared,
    )


def _attention(keys: _Keys, layers: int) -> tuple[AttentionLayers, ...]:
    if keys.optional("kv_lora_rank"):
        return (_latent(keys, layers),)
    counts = _layer_counts(keys, layers)
    heads = keys.needed("num_attention_heads", "n_head")
    kv_heads = keys.optional("num_key_value_heads", "num_kv_heads") or heads
    head_dim = keys.optional("head_dim")
    if head_dim is None:
        head_dim = keys.needed("hidden_size", "n_embd") // heads
    kinds: list[AttentionLayers] = []
    if counts["full"]:
        kinds.append(HeadLayers(counts["full"], heads, kv_heads, head_dim))
    if counts["window"]:
        window = keys.needed("sliding_window", "attention_chunk_size")
        kinds.append(HeadLayers(counts["window"], heads, kv_heads, head_dim, window))
    if counts["state"]:
        kinds.append(
            StateLayers(
                counts["state"],
                keys.needed("linear_num_key_heads"),
                keys.needed("linear_key_head_dim"),
                keys.needed("linear_num_value_heads"),
                keys.needed("linear_value_head_dim"),
            )
        )
    return tuple(kinds)


def _latent(keys: _Keys, layers: int) -> LatentLayers:
    return LatentLayers(
        layers,
        keys.needed("num_attention_heads"),
        keys.needed("kv_lora_rank"),
        keys.needed("qk_rope_head_dim"),
        keys.needed("qk_nope_head_dim"),
        keys.needed("v_head_dim"),
        keys.optional("q_lora_rank"),
    )


def _windowed(keys: _Keys, layers: int) -> dict[str, int]:
    """Layers by kind where a window is given and nothing lists the layers that have it."""
    kind = keys.config.get("model_type")
    whole = keys.optional("max_position_embeddings")
    if whole is not None and keys.needed("sliding_window") >= whole:
        return {"full": layers}
    first = keys.optional("max_window_layers")
    if first is not None:
        return {"full": min(first, layers), "window": layers - min(first, layers)}
    if kind in _FULL_EVERY:
        full = layers // _FULL_EVERY[kind]
        return {"full": full, "window": layers - full}
    if kind in _ALL_WINDOWED:
        return {"window": layers}
    raise CannotPlan(
        f"cannot estimate {keys.name}: it has a sliding_window and does not say in which layers; "
        f"add layer_types or sliding_window_pattern to its configuration"
    )


def _published(config: Mapping[str, Any]) -> str | None:
    """The precision in which the weights are published, where they are quantised."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return None
    method = str(quantised.get("quant_method", "")).lower()
    algorithm = str(quantised.get("quant_algo", "")).lower()
    bits = quantised.get("bits", 4 if quantised.get("load_in_4bit") else 8)
    if method in {"awq", "gptq", "bitsandbytes"}:
        return "int4" if bits == 4 else "int8"
    if "nvfp4" in algorithm:
        return "nvfp4"
    if "fp8" in method or "fp8" in algorithm:
        return "fp8"
    return "mxfp4" if method == "mxfp4" else None


def _layer_counts(keys: _Keys, layers: int) -> dict[str, int]:
    """How many layers of each kind: listed one by one, by an interval, or all alike."""
    counts = {"full": 0, "window": 0, "state": 0}
    listed = keys.config.get("layer_types")
    if listed is not None:
        for each in listed:
            if each not in _LAYER_KINDS:
                raise CannotPlan(
                    f"cannot estimate {keys.name}: layer type {each!r} is not known; known are "
                    f"{', '.join(_LAYER_KINDS)}"
                )
            counts[_LAYER_KINDS[each]] += 1
        return counts
    kind = "window"
    interval = keys.optional("full_attention_interval")
    if interval is not None:
        kind = "state"
    elif keys.config.get("sliding_window") is not None:
        interval = keys.optional("sliding_window_pattern")
        if interval is None and keys.config.get("use_sliding_window", True):
            return {**counts, **_windowed(keys, layers)}
    elif keys.optional("attention_chunk_size"):
        interval = keys.needed("no_rope_layer_interval")
    if not interval:
        return {**counts, "full": layers}
    full = layers // interval
    return {**counts, "full": full, kind: layers - full}
