"""MoE layers of published models: which layers have experts, and which widths count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family_rope import HFConfig, describe_bad_key

WIDTH_SETTINGS = ("mlp", "expert_mlp", "moe_first", "moe_every")
"""Settings that can express the same layers in several ways."""


def read_moe_layers(theirs: HFConfig, problems: list[str]) -> dict[str, Any]:
    """Our moe_first and moe_every: every step-th layer has experts, except those listed."""
    layers = theirs.get("num_hidden_layers")
    step = theirs.get("decoder_sparse_step")
    dense = theirs.get("mlp_only_layers") or []
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        problems.append(describe_bad_key("decoder_sparse_step", step, "a whole number from 1"))
        return {}
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        problems.append(describe_bad_key("mlp_only_layers", dense, "a list of layers"))
        return {}
    if isinstance(layers, bool) or not isinstance(layers, int):
        return {}
    # A set, as the list comes from an untrusted file and may be long.
    left_out = set(dense)
    have = [i for i in range(layers) if (i + 1) % step == 0 and i not in left_out]
    found = _fit_layer_pattern(have, layers)
    if found is None:
        rule = "such that, after some dense layers, the last of every few has experts"
        problems.append(describe_bad_key("mlp_only_layers", dense, rule))
        return {}
    return {"moe_first": found[0], "moe_every": found[1]}


def _fit_layer_pattern(have: Sequence[int], layers: int) -> tuple[int, int] | None:
    """(moe_first, moe_every) that give exactly these layers; None: there is no such pattern."""
    # No layer has experts: all `layers` layers are dense first layers.
    if not have:
        return layers, 1
    for every in range(1, have[0] + 2):
        if [*range(have[0], layers, every)] == [*have]:
            return have[0] - every + 1, every
    return None


def write_moe_layers(config: DecoderConfig) -> dict[str, Any]:
    """Inverse of `read_moe_layers`."""
    dense = [i for i in range(config.layers) if not config.has_experts(i)]
    # Dense layers at the start shift the pattern, which a step alone cannot express.
    if config.moe_first == 0:
        return {"decoder_sparse_step": config.moe_every, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def has_same_widths(one: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether the layers of two models have equal widths, however the settings express it."""
    mine, others = ([_layer_width(c, i) for i in range(c.layers)] for c in (one, other))
    return mine == others


def _layer_width(config: DecoderConfig, layer: int) -> tuple[int, int]:
    """Number of experts and width of a layer."""
    if config.has_experts(layer):
        return config.experts, config.expert_width
    return 0, config.mlp
