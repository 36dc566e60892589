"""Family: what published models call their settings and weights, and what we call them.

A family is one table (see `families`): their keys and ours, what it always has, what it takes a key
to be that is not given, and the names of its layers. `read` makes our config of theirs and refuses,
with key and value, whatever it does not know; `write` is its inverse; `tensors` says which of their
tensors holds which of ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ranvier.models.config import DecoderConfig
from ranvier.models.decoder import GATED, UNGATED, Decoder

Config = Mapping[str, Any]


class UnknownError(ValueError):
    """A config that cannot be one of ours; lines with key, value and rule."""


@dataclass(frozen=True)
class Entry:
    """One of their tensors, and those of ours that it holds, one after the other along dim 0."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Stored as (in, out)."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of published models."""

    kind: str
    """Their `model_type`."""
    architecture: str
    names: Mapping[str, str]
    """Our layers and parameters, and theirs; several of ours with + between them are packed."""
    keys: Mapping[str, str]
    """Their settings that are one of ours."""
    default: Config
    """What they take a key to be that is not given."""
    always: Config = field(default_factory=dict)
    """Ours that all models of the family have."""
    only: Config = field(default_factory=dict)
    """Their settings with the one value that can be ours."""
    biased: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Their settings that give biases, and to which of our layers."""
    activation: str = "hidden_act"
    """Their key of the activation."""
    windows: str = ""
    """How they say which layers have a window: "", "all", "first" or "even"."""
    transposed: bool = False
    """Linear layers are stored as (in, out)."""
    prefix: str = "model."
    """How names of the body begin; some publish without it."""
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    """Kinds of rotary positions that its own code knows."""

    @property
    def acts(self) -> Mapping[str, str]:
        """Their activations and ours."""
        gated = any("gate" in name for name in self.names)
        return ACTS_GATED if gated else ACTS

    def read(self, config: Config) -> DecoderConfig:
        """Our config of theirs; `UnknownError` names every key that has none."""
        theirs = {**self.default, **config}
        problems, ours = list(self._foreign(theirs)), dict(self.always)
        for key, name in self.keys.items():
            ours[name] = theirs.get(key)
        heads = ours["heads"] = _whole(theirs, self._key("heads"), problems)
        embed = ours["embed"] = _whole(theirs, self._key("embed"), problems)
        if ours.get("kv_heads") is None:
            ours["kv_heads"] = heads
        if ours.get("head_dim") is None:
            ours["head_dim"] = embed // heads if heads else 0
            if heads and embed % heads:
                problems.append(odd(self._key("embed"), embed, f"a multiple of the {heads} heads"))
        if ours.get("mlp") is None:
            ours["mlp"] = 4 * embed
        for name in ("layers", "kv_heads", "head_dim", "mlp", "vocab", "max_seq"):
            ours[name] = _whole({self._key(name): ours[name]}, self._key(name), problems)
        for name in ("norm_eps", "init_std"):
            ours[name] = _number(ours[name], self._key(name), problems)
        for name in ("attention_scale", "attention_cap", "logit_cap"):
            if name in ours:
                none = ours[name] is None and name != "attention_scale"
                ours[name] = 0.0 if none else _above(ours[name], self._key(name), problems)
        ours["tied"] = _flag(theirs, self._key("tied"), problems)
        given = [some for key, some in self.biased.items() if _flag(theirs, key, problems)]
        layers = sorted({layer for some in given for layer in some})
        ours["biases"] = tuple(layers or self.always.get("biases", ()))
        act = theirs.get(self.activation)
        act = act if isinstance(act, str) else repr(act)
        if act not in self.acts:
            problems.append(odd(self.activation, act, f"one of {', '.join(self.acts)}"))
        ours["activation"] = self.acts.get(act, "swiglu")
        if self.windows:
            ours |= _window(theirs, self.windows, problems)
        if ours.get("positions", "rope") == "rope":
            ours |= self._rope(theirs, ours, problems)
        if "embed_scale" in self.always:
            ours["embed_scale"] = float(embed) ** 0.5
        if problems:
            raise UnknownError("\n".join(problems))
        made = DecoderConfig(**ours)
        if made.problems():
            raise UnknownError("\n".join(made.problems()))
        return made

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        """Their config of ours; `UnknownError` names the fields that they cannot have."""
        ours = dataclasses.asdict(config)
        theirs: dict[str, Any] = {"model_type": self.kind, "architectures": [self.architecture]}
        theirs |= {key: ours[name] for key, name in self.keys.items()}
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in theirs:
                theirs[key] = theirs[key] or None
        if theirs.get("query_pre_attn_scalar") == 0.0:
            theirs["query_pre_attn_scalar"] = config.head_dim
        has = {layer for layer in LAYERS if config.has_bias(layer)}
        theirs |= {key: set(some) <= has for key, some in self.biased.items()}
        named = {ours: theirs for theirs, ours in reversed([*self.acts.items()])}
        theirs[self.activation] = named.get(config.activation)
        if self.windows:
            theirs |= _written_window(config, self.windows)
        if config.positions == "rope":
            theirs["rope_parameters"] = _written_rope(config)
            if config.rope == "longrope":
                theirs["original_max_position_embeddings"] = config.rope_original
        again = self.read(theirs) if theirs[self.activation] else None
        if config.norm == "rms" and again is not None:  # bias: that of all linear layers
            same = all(config.has_bias(layer) == again.has_bias(layer) for layer in LAYERS)
            ours |= {"bias": again.bias, "biases": again.biases} if same else {}
        lost = [f for f in ours if again is None or getattr(again, f) != ours[f]]
        lost = [f for f in lost if f not in FREE]
        if again is None or lost:
            words = ", ".join(f"{f}={ours[f]!r}" for f in lost if again is not None)
            raise UnknownError(
                f"{self.kind} has no {words or f'activation={config.activation!r}'}."
            )
        return theirs

    def tensors(self, config: DecoderConfig) -> list[Entry]:
        """All their tensors, in the order of the model."""
        found, present = [], set(shapes(config))
        for i in range(-1, config.layers):
            for ours, theirs in self.names.items():
                if ("{i}" in ours) != (i >= 0):
                    continue
                for end in ("weight", "bias"):
                    some = tuple(f"{one.format(i=i)}.{end}" for one in ours.split("+"))
                    if present.issuperset(some):
                        turned = self.transposed and end == "weight" and "blocks" in ours
                        turned = turned and "norm" not in ours and "after" not in ours
                        found.append(Entry(f"{theirs.format(i=i)}.{end}", some, turned))
        lost = present - {name for entry in found for name in entry.ours}
        if lost:
            raise UnknownError(f"{self.kind} has no place for {', '.join(sorted(lost)[:5])}.")
        return found

    def _key(self, name: str) -> str:
        return next((key for key, ours in self.keys.items() if ours == name), name)

    def _foreign(self, theirs: Config) -> list[str]:
        """What of their config has no meaning here and might change the model."""
        found = [
            odd(key, theirs[key], repr(value))
            for key, value in {**ALWAYS, **self.only}.items()
            if key in theirs and (theirs[key] != value or type(theirs[key]) is not type(value))
        ]
        known = {
            *self.keys,
            *self.only,
            *ALWAYS,
            *self.biased,
            *self.default,
            self.activation,
            *HARMLESS,
        }
        known |= {"sliding_window", "layer_types"} if self.windows else set()
        if "rope_theta" in self.default:
            known |= {"rope_parameters", "rope_scaling", "partial_rotary_factor"}
            known |= {"original_max_position_embeddings"}
        for key, value in theirs.items():
            empty = value is None or value in ([], {}, "")
            off = key in OFF and value in (False, 0)
            if key not in known and not key.startswith("_") and not empty and not off:
                found.append(
                    f"config.json has {key}={value!r:.80}, which is not known for {self.kind}. It "
                    "may change what the model computes. If it does not, take it out of a copy of "
                    "config.json."
                )
        return found

    def _rope(self, theirs: Config, ours: Config, problems: list[str]) -> dict[str, Any]:
        table = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        if not isinstance(table, Mapping):
            problems.append(odd("rope_parameters", table, "a table"))
            return {}
        kind = table.get("rope_type", table.get("type", "default"))
        kind = "longrope" if self.kind == "phi3" and kind in ("su", "yarn") else kind
        if kind not in self.ropes:
            rule = f"one of {', '.join(self.ropes)}"
            problems.append(odd("rope_parameters.rope_type", kind, rule))
            return {}
        for key, value in table.items():
            if key not in ROPE and value is not None:
                problems.append(odd(f"rope_parameters.{key}", value, "left out"))
        share = table.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
        if share != 1.0 and self.kind != "phi3":
            problems.append(odd("partial_rotary_factor", share, "1.0"))
        theta = table.get("rope_theta", theirs.get("rope_theta"))
        table = {**table, "rope_theta": theta, "partial_rotary_factor": share}
        if kind in ("llama3", "yarn", "longrope"):
            before = theirs.get("original_max_position_embeddings")
            before = before or table.get("original_max_position_embeddings") or ours["max_seq"]
            table["original_max_position_embeddings"] = before
        try:
            return _read_rope(kind, table, ours["max_seq"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            problems.append(odd("rope_parameters", dict(table), f"complete and sound ({error})"))
            return {}


LAYERS: tuple[Literal["qkv", "o", "mlp"], ...] = ("qkv", "o", "mlp")
FREE = ("dropout", "init_std")
"""Settings of training, which need not be the same."""
OFF = (
    *("use_mrope", "n_special", "rope_interleaved", "is_encoder_decoder", "torchscript"),
    *("tie_encoder_decoder", "remove_invalid_values", "use_bfloat16", "tf_legacy_loss"),
    *("output_scores", "return_dict_in_generate", "use_bidirectional_attention", "pruned_heads"),
    *("cross_attention_hidden_size", "exponential_decay_length_penalty", "add_cross_attention"),
)
"""Keys that leave a model as it is where they are off."""
ALWAYS = {"is_causal": True}
"""What all families must be where they say it."""
HARMLESS = (
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "pretraining_tp", "auto_map"),
    *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "task_specific_params", "is_decoder", "n_ctx"),
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams"),
    *("num_return_sequences", "length_penalty", "repetition_penalty", "prefix", "return_dict"),
    *("num_beam_groups", "diversity_penalty", "typical_p", "early_stopping", "num_labels"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "cache_implementation"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "gradient_checkpointing"),
    *("finetuning_task", "begin_suppress_tokens", "suppress_tokens", "name_or_path"),
    *("vocab_file", "tokenizer_class", "is_llama_config", "transformers.js_config"),
    *("sliding_window_size", "predict_special_tokens", "max_sequence_length"),
    *("unsloth_version", "unsloth_fixed"),
    "hidden_act",  # Gemma's own key counts, this one is older
)
"""Keys that do not change what a trained model computes."""
ACTS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
ACTS_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
    "gelu": "geglu_exact",
    "relu": "reglu",
}
ROPE = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim"),
)
assert set(ACTS.values()) <= set(UNGATED) and set(ACTS_GATED.values()) <= set(GATED)


def shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a decoder by name, a tied one once."""
    with torch.device("meta"):
        one = Decoder(dataclasses.replace(config, layers=1, window_layers=()))
    found: dict[str, tuple[int, ...]] = {}
    for name, param in one.named_parameters():
        inside = name.startswith("blocks.0.")
        for i in range(config.layers if inside else 1):
            found[name.replace("blocks.0.", f"blocks.{i}.", 1)] = tuple(param.shape)
    return found


def odd(key: str, value: object, rule: str) -> str:
    """A sentence on a key that cannot be as it is."""
    return f"config.json has {key}={value!r:.120}. It must be {rule}."


def _whole(theirs: Config, key: str, problems: list[str]) -> int:
    value = theirs.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        problems.append(odd(key, value, "a whole number from 1 and below 2^31"))
        return 0
    return value


def _flag(theirs: Config, key: str, problems: list[str]) -> bool:
    value = theirs.get(key)
    if value is not None and not isinstance(value, bool):
        problems.append(odd(key, value, "true or false"))
    return value is True


def _above(value: object, key: str, problems: list[str]) -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        problems.append(odd(key, value, "a number above 0"))
        return 1.0
    return float(value)


def _number(value: object, key: str, problems: list[str]) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        problems.append(odd(key, value, "a number from 0"))
        return 0.0
    return float(value)


# ---- windows ----------------------------------------------------------------------------


def _window(theirs: Config, how: str, problems: list[str]) -> dict[str, Any]:
    """Our window, and the layers that have it."""
    size, layers = theirs.get("sliding_window"), theirs.get("num_hidden_layers")
    if how == "first" and not theirs.get("use_sliding_window"):
        size = None
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        problems.append(odd("sliding_window", size, "a whole number from 1, or null"))
        return {}
    if not isinstance(layers, int):
        return {}
    kinds, given = theirs.get("layer_types"), theirs.get("layer_types") is not None
    if kinds is None and how == "first":
        first = theirs.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int):
            problems.append(odd("max_window_layers", first, "a whole number"))
            return {}
        kinds = [_KINDS[size is not None and i >= first] for i in range(layers)]
    elif kinds is None:
        kinds = [_KINDS[how == "all" or i % 2 == 0] for i in range(layers)]
    sound = isinstance(kinds, list) and all(kind in _KINDS for kind in kinds)
    if not sound or len(kinds) != layers:
        problems.append(odd("layer_types", kinds, f"{layers} times {' or '.join(_KINDS)}"))
        return {}
    if how == "all" and given and theirs.get("model_type") == "phi3":
        kinds = [_KINDS[1]] * layers  # its own code does not look at them
    if how == "all" and set(kinds) != {_KINDS[1]}:
        problems.append(odd("layer_types", kinds, f"all {_KINDS[1]}: others are another family"))
        return {}
    slide = tuple(i for i, kind in enumerate(kinds) if kind == _KINDS[1])
    if size is None or not slide:
        if slide and how != "all":
            problems.append(odd("sliding_window", size, "given where layer_types has windows"))
        return {"window": 0, "window_layers": ()}
    return {"window": size, "window_layers": () if len(slide) == layers else slide}


_KINDS = ("full_attention", "sliding_attention")


def _written_window(config: DecoderConfig, how: str) -> dict[str, Any]:
    size = config.window or None
    if how == "all":
        return {"sliding_window": size}
    slide = [config.window_of(i) > 0 for i in range(config.layers)]
    kinds = {"layer_types": [_KINDS[yes] for yes in slide]}
    if how == "first":
        return {"use_sliding_window": size is not None, "sliding_window": size, **kinds}
    return {"sliding_window": size or config.max_seq, **kinds}


# ---- rotary positions -------------------------------------------------------------------


def _read_rope(kind: str, table: Config, longest: int) -> dict[str, Any]:
    """Our settings of their rotary positions."""

    def number(key: str, most: float = math.inf) -> float:
        """A number above 0."""
        value = table[key]
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value <= most or value == math.inf:
            raise ValueError(f"{key}={value!r} is no number above 0{' up to 1' * (most == 1)}")
        return float(value)

    def given(key: str) -> bool:
        return table.get(key) is not None

    found: dict[str, Any] = {"rope_theta": number("rope_theta")}
    found["rope_share"] = number("partial_rotary_factor", 1)
    if kind == "default":
        return found
    found["rope"] = kind
    if kind == "linear":
        return found | {"rope_scale": number("factor")}
    before = found["rope_original"] = int(number("original_max_position_embeddings"))
    if kind == "llama3":
        turns = number("low_freq_factor"), number("high_freq_factor")
        return found | {"rope_turns": turns, "rope_scale": number("factor")}
    scale = number("factor") if given("factor") else longest / before
    if kind == "yarn":
        low = number("beta_slow") if table.get("beta_slow") else 1.0
        high = number("beta_fast") if table.get("beta_fast") else 32.0
        found |= {"rope_scale": scale, "rope_turns": (low, high)}
        both = table.get("mscale") and table.get("mscale_all_dim")
        above, below = (number("mscale"), number("mscale_all_dim")) if both else (1.0, 0.0)
        attention = _yarn(scale, above) / _yarn(scale, below)
    else:
        for name, key in _FACTORS.items():
            factors = tuple(map(float, table[key]))
            if not all(0 < factor < math.inf for factor in factors):
                raise ValueError(f"{key} has factors that are no numbers above 0")
            found[name] = factors
        attention = math.sqrt(1.0 + math.log(scale) / math.log(before)) if scale > 1.0 else 1.0
    return found | {
        "rope_attention": number("attention_factor") if given("attention_factor") else attention
    }


_FACTORS = {"rope_short": "short_factor", "rope_long": "long_factor"}


def _yarn(scale: float, weight: float) -> float:
    return 1.0 if scale <= 1.0 else 0.1 * weight * math.log(scale) + 1.0


def _written_rope(config: DecoderConfig) -> dict[str, Any]:
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_share != 1.0:
        table["partial_rotary_factor"] = config.rope_share
    if config.rope == "longrope":
        table |= {key: list(getattr(config, name)) for name, key in _FACTORS.items()}
    elif config.rope_scale != 1.0:
        table["factor"] = config.rope_scale
    else:
        return table
    table["rope_type"] = config.rope
    if config.rope != "linear":
        table["original_max_position_embeddings"] = config.rope_original
    low, high = config.rope_turns
    if config.rope == "llama3":
        table |= {"low_freq_factor": low, "high_freq_factor": high}
    elif config.rope == "yarn":
        table |= {"beta_slow": low, "beta_fast": high}
    if config.rope in ("yarn", "longrope"):
        table["attention_factor"] = config.rope_attention
    return table
