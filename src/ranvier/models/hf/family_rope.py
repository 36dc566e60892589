"""Converts sliding windows and rotary embeddings from the Hugging Face format to ours, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ranvier.models.config import DecoderConfig

HFConfig = Mapping[str, Any]


def describe_bad_key(key: str, value: object, rule: str) -> str:
    """Returns the error message for a key with an invalid value."""
    return f"config.json has {key}={value!r:.120}. It must be {rule}."


# ---- windows ----------------------------------------------------------------------------


def read_window(theirs: HFConfig, how: str, problems: list[str]) -> dict[str, Any]:
    """Returns our sliding_window and window_layers.

    how: which layers have a window: "all", "first" (all except the first max_window_layers), or
    "even" (layers with even numbers).
    """
    size = theirs.get("sliding_window")
    layers = theirs.get("num_hidden_layers")
    # Qwen configs have a window size even if use_sliding_window disables it.
    if how == "first" and not theirs.get("use_sliding_window"):
        size = None
    if size is not None and (type(size) is not int or not 1 <= size < 2**31):
        problems.append(
            describe_bad_key("sliding_window", size, "an integer from 1 to 2^31 - 1, or null")
        )
        return {}
    if not isinstance(layers, int):
        return {}
    # An explicit list of layer types takes precedence over the rule of the family.
    kinds = theirs.get("layer_types")
    given = theirs.get("layer_types") is not None
    if kinds is None and how == "first":
        first = theirs.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int):
            problems.append(describe_bad_key("max_window_layers", first, "an integer"))
            return {}
        kinds = [_LAYER_TYPES[size is not None and i >= first] for i in range(layers)]
    elif kinds is None:
        kinds = [_LAYER_TYPES[how == "all" or i % 2 == 0] for i in range(layers)]
    sound = isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds)
    if not sound or len(kinds) != layers:
        problems.append(
            describe_bad_key(
                "layer_types", kinds, f"a list of {layers} times {' or '.join(_LAYER_TYPES)}"
            )
        )
        return {}
    if how == "all" and given and theirs.get("model_type") == "phi3":
        # The Phi-3 code ignores layer_types.
        kinds = [_LAYER_TYPES[1]] * layers
    if how == "all" and set(kinds) != {_LAYER_TYPES[1]}:
        problems.append(
            describe_bad_key(
                "layer_types", kinds, f"{_LAYER_TYPES[1]} for all layers in this family"
            )
        )
        return {}
    slide = tuple(i for i, kind in enumerate(kinds) if kind == _LAYER_TYPES[1])
    if size is None or not slide:
        if slide and how != "all":
            problems.append(
                describe_bad_key("sliding_window", size, "set, as layer_types has windows")
            )
        return {"sliding_window": 0, "window_layers": ()}
    return {"sliding_window": size, "window_layers": () if len(slide) == layers else slide}


_LAYER_TYPES = ("full_attention", "sliding_attention")


def write_window(config: DecoderConfig, how: str) -> dict[str, Any]:
    """Returns their keys for our window; the inverse of `read_window`."""
    size = config.sliding_window or None
    if how == "all":
        return {"sliding_window": size}
    slide = [config.window_of_layer(i) > 0 for i in range(config.layers)]
    kinds = {"layer_types": [_LAYER_TYPES[yes] for yes in slide]}
    if how == "first":
        return {"use_sliding_window": size is not None, "sliding_window": size, **kinds}
    return {"sliding_window": size or config.max_seq, **kinds}


# ---- rotary positions -------------------------------------------------------------------


def read_rope(kind: str, table: HFConfig, longest: int) -> dict[str, Any]:
    """Returns our settings for their rotary parameters; raises ValueError if they are invalid."""

    def number(key: str, most: float = math.inf) -> float:
        """Returns a number greater than 0."""
        value = table[key]
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value <= most or value > 1e30:
            if most < math.inf:
                upto = f" and at most {most:.0f}"
            else:
                upto = ""
            raise ValueError(f"{key}={value!r:.80} is not a number greater than 0{upto}")
        return float(value)

    def given(key: str) -> bool:
        return table.get(key) is not None

    found: dict[str, Any] = {"rope_theta": number("rope_theta")}
    found["partial_rotary_factor"] = number("partial_rotary_factor", 1)
    if kind == "default":
        return found
    found["rope"] = kind
    if kind == "linear":
        return found | {"rope_scale": number("factor")}
    before = found["original_max_position"] = int(number("original_max_position_embeddings", 2**31))
    if kind == "llama3":
        found |= {key: number(key) for key in ("low_freq_factor", "high_freq_factor")}
        return found | {"rope_scale": number("factor")}
    # Without a factor, the scale is the ratio of the new to the original length.
    if given("factor"):
        scale = number("factor")
    else:
        scale = longest / before
    if kind == "yarn":
        if table.get("beta_slow"):
            # The defaults 1 and 32 are from the YaRN paper.
            low = number("beta_slow")
        else:
            low = 1.0
        if table.get("beta_fast"):
            high = number("beta_fast")
        else:
            high = 32.0
        found |= {"rope_scale": scale, "low_freq_factor": low, "high_freq_factor": high}
        # The same default of attention_factor as in transformers.
        both = table.get("mscale") and table.get("mscale_all_dim")
        above, below = (number("mscale"), number("mscale_all_dim")) if both else (1.0, 0.0)
        attention = _yarn_mscale(scale, above) / _yarn_mscale(scale, below)
    else:
        for name, key in _ROPE_FACTOR_KEYS.items():
            factors = tuple(map(float, table[key]))
            if not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"{key} has factors that are not numbers greater than 0")
            found[name] = factors
        if scale > 1.0:
            # The default attention factor of LongRoPE.
            attention = math.sqrt(1.0 + math.log(scale) / math.log(before))
        else:
            attention = 1.0
    return found | {
        "attention_factor": number("attention_factor") if given("attention_factor") else attention
    }


_ROPE_FACTOR_KEYS = {"rope_short": "short_factor", "rope_long": "long_factor"}


def _yarn_mscale(scale: float, weight: float) -> float:
    if scale <= 1.0:
        return 1.0
    return 0.1 * weight * math.log(scale) + 1.0


def write_rope(config: DecoderConfig) -> dict[str, Any]:
    """Returns their rotary parameters for our settings; the inverse of `read_rope`."""
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.partial_rotary_factor != 1.0:
        table["partial_rotary_factor"] = config.partial_rotary_factor
    if config.rope == "longrope":
        table |= {key: list(getattr(config, name)) for name, key in _ROPE_FACTOR_KEYS.items()}
    elif config.rope_scale != 1.0:
        table["factor"] = config.rope_scale
    else:
        return table
    table["rope_type"] = config.rope
    if config.rope != "linear":
        table["original_max_position_embeddings"] = config.original_max_position
    low = config.low_freq_factor
    high = config.high_freq_factor
    if config.rope == "llama3":
        table |= {"low_freq_factor": low, "high_freq_factor": high}
    elif config.rope == "yarn":
        table |= {"beta_slow": low, "beta_fast": high}
    if config.rope in ("yarn", "longrope"):
        table["attention_factor"] = config.attention_factor
    return table
