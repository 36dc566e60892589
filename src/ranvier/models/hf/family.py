"""Family: what published models call their settings and weights, and what we call them.

A family is one table (see `families`): their keys and ours, what it always has, what it takes a key
to be that is not given, and the names of its layers. `read` makes our config of theirs and refuses,
with key and value, whatever it does not know; `write` is its inverse; `tensors` says which of their
tensors holds which of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ranvier.models.config import LIMITS, DecoderConfig
from ranvier.models.decoder import Decoder
from ranvier.models.feed_forward import GATED, UNGATED
from ranvier.models.hf.family_moe import WIDTHS, mixed_layers, same_widths, written_layers
from ranvier.models.hf.family_rope import Config, odd, rope, window, written_rope, written_window


class UnknownError(ValueError):
    """A config that cannot be one of ours; lines with key, value and rule."""


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Their keys of the tokens that begin, end and fill a text. No model of ours has them, but they go
from one config.json to the next."""


@dataclass(frozen=True)
class Entry:
    """One of their tensors, and those of ours that it holds, one after the other along a dim."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Stored as (in, out)."""
    expert: int = -1
    """It holds only this expert of ours; -1: all there is."""
    dim: int = 0
    """Along which ours lie in it: 1 where dim 0 counts experts."""

    def shape(self, ours: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Its shape by those of ours."""
        parts = [ours[name] for name in self.ours]
        if self.expert >= 0:
            return parts[0][1:]
        whole = list(parts[0])
        whole[self.dim] = sum(one[self.dim] for one in parts)
        return tuple(whole[::-1] if self.transposed else whole)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of published models."""

    kind: str
    """Their `model_type`."""
    architecture: str
    names: Mapping[str, str]
    """Our layers and theirs; several of ours with + between them are packed. [e]: a parameter that
    holds all experts of a layer, of which theirs with {e} holds one."""
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
    fused: Mapping[str, str] = field(default_factory=dict)
    """The names instead where one tensor holds all experts of a layer."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other words for some of their keys."""
    token_ids: tuple[int | None, int | None, int | None] = (None, None, None)
    """What they take the ids of `TOKENS` to be where none are given."""

    @property
    def acts(self) -> Mapping[str, str]:
        """Their activations and ours."""
        gated = any("gate" in name for name in self.names)
        return ACTS_GATED if gated else ACTS

    def read(self, config: Config) -> DecoderConfig:
        """Our config of theirs; `UnknownError` names every key that has none."""
        config = {self.aliases.get(key, key): value for key, value in config.items()}
        theirs = {**self.default, **config}
        problems, ours = list(self._foreign(theirs)), dict(self.always)
        for key, name in self.keys.items():
            ours[name] = theirs.get(key)
        heads = ours["heads"] = _whole(theirs, self._key("heads"), "heads", problems)
        embed = ours["embed"] = _whole(theirs, self._key("embed"), "embed", problems)
        if ours.get("kv_heads") is None:
            ours["kv_heads"] = heads
        if ours.get("head_dim") is None:
            ours["head_dim"] = embed // heads if heads else 0
            if heads and embed % heads:
                problems.append(odd(self._key("embed"), embed, f"a multiple of the {heads} heads"))
        if ours.get("mlp") is None:
            ours["mlp"] = 4 * embed
        for name in ("layers", "kv_heads", "head_dim", "mlp", "vocab", "max_seq"):
            ours[name] = _whole({self._key(name): ours[name]}, self._key(name), name, problems)
        if not ours["layers"]:  # windows and experts are looked at layer by layer
            raise UnknownError("\n".join(problems))
        for name in ("norm_eps", "init_std"):
            ours[name] = _number(ours[name], self._key(name), problems)
        for name in ("attention_scale", "attention_cap", "logit_cap"):
            if name in ours:
                none = ours[name] is None and name != "attention_scale"
                ours[name] = 0.0 if none else _above(ours[name], self._key(name), problems)
        if "experts" in ours:
            ours |= self._mixture(theirs, ours, problems)
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
            ours |= window(theirs, self.windows, problems)
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
        if config.experts and "experts" in self.keys.values():  # some have no key but that of mlp
            own = "expert_mlp" if "expert_mlp" in self.keys.values() else "mlp"
            theirs[self._key(own)] = config.expert_width
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in theirs:
                theirs[key] = theirs[key] or None
        if "query_pre_attn_scalar" in theirs:  # transformers takes a whole number only
            scale = config.attention_scale or config.head_dim
            theirs["query_pre_attn_scalar"] = int(scale) if scale == int(scale) else scale
        has = {layer for layer in LAYERS if config.has_bias(layer)}
        theirs |= {key: set(some) <= has for key, some in self.biased.items()}
        named = {ours: theirs for theirs, ours in reversed([*self.acts.items()])}
        theirs[self.activation] = named.get(config.activation)
        if self.windows:
            theirs |= written_window(config, self.windows)
        if "mlp_only_layers" in self.default:
            theirs |= written_layers(config)
        if config.positions == "rope":
            theirs["rope_parameters"] = written_rope(config)
            if config.rope == "longrope":
                theirs["original_max_position_embeddings"] = config.rope_original
        again = self.read(theirs) if theirs[self.activation] else None
        if config.norm == "rms" and again is not None:  # bias: that of all linear layers
            same = all(config.has_bias(layer) == again.has_bias(layer) for layer in LAYERS)
            ours |= {"bias": again.bias, "biases": again.biases} if same else {}
        if again is not None and same_widths(config, again):
            ours |= {name: getattr(again, name) for name in WIDTHS}
        lost = [f for f in ours if again is None or getattr(again, f) != ours[f]]
        lost = [f for f in lost if f not in FREE]
        if again is None or lost:
            words = ", ".join(f"{f}={ours[f]!r}" for f in lost if again is not None)
            raise UnknownError(
                f"{self.kind} has no {words or f'activation={config.activation!r}'}."
            )
        return theirs

    def tensors(self, config: DecoderConfig, *, fused: bool = False) -> list[Entry]:
        """All their tensors, in the order of the model. fused: all experts are in one."""
        found: list[Entry] = []
        present = set(shapes(config))
        for i in range(-1, config.layers):
            for ours, theirs in (self.fused if fused else self.names).items():
                if ("{i}" not in ours) == (i < 0):
                    found += self._entries(i, ours, theirs, config.experts, present)
        lost = present - {name for entry in found for name in entry.ours}
        if lost:
            raise UnknownError(f"{self.kind} has no place for {', '.join(sorted(lost)[:5])}.")
        return found

    def _entries(
        self, i: int, ours: str, theirs: str, experts: int, present: set[str]
    ) -> Iterator[Entry]:
        """The tensors of a layer of theirs, or of all experts of a block."""
        some = tuple(one.removesuffix("[e]").format(i=i) for one in ours.split("+"))
        if ours.endswith("[e]"):
            if not present.issuperset(some):
                return
            if "{e}" not in theirs:
                yield Entry(theirs.format(i=i), some, dim=1)
            for e in range(experts if "{e}" in theirs else 0):
                yield Entry(f"{theirs.format(i=i, e=e)}.weight", some, expert=e)
            return
        for end in ("weight", "bias"):
            held = tuple(f"{one}.{end}" for one in some)
            if present.issuperset(held):
                turned = self.transposed and end == "weight" and "blocks" in ours
                turned = turned and "norm" not in ours and "after" not in ours
                yield Entry(f"{theirs.format(i=i)}.{end}", held, turned)

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

    def _mixture(self, theirs: Config, ours: Config, problems: list[str]) -> dict[str, Any]:
        """Experts, how tokens find theirs, and the layers that have them."""
        found: dict[str, Any] = {}
        for name in ("experts", "experts_top", "expert_mlp"):
            if name in ours:
                found[name] = _whole(theirs, self._key(name), name, problems)
        if "router_norm" not in self.always:
            found["router_norm"] = _flag(theirs, self._key("router_norm"), problems)
        found["balance"] = _number(ours["balance"], self._key("balance"), problems)
        if "mlp_only_layers" in self.default:
            found |= mixed_layers(theirs, problems)
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
            return rope(kind, table, ours["max_seq"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            problems.append(odd("rope_parameters", dict(table), f"complete and sound ({error})"))
            return {}


LARGEST = 1e30
"""The largest number in a config that is no size."""
LAYERS: tuple[Literal["qkv", "o", "mlp"], ...] = ("qkv", "o", "mlp")
FREE = ("dropout", "init_std", "balance", "router_z", "router_jitter")
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
    *(*TOKENS, "unk_token_id", "sep_token_id"),
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
    *("unsloth_version", "unsloth_fixed", "output_router_logits", "router_jitter_noise"),
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
    found: dict[str, tuple[int, ...]] = {}
    for mixed in (False, True):
        layers = [i for i in range(config.layers) if config.has_experts(i) == mixed]
        changes: Any = {"layers": 1, "window_layers": (), "moe_first": 0, "moe_every": 1}
        changes |= {} if mixed else {"experts": 0}
        if not layers:
            continue
        with torch.device("meta"):
            one = Decoder(dataclasses.replace(config, **changes))
        for name, param in one.named_parameters():
            for i in layers if name.startswith("blocks.0.") else (0,):
                found[name.replace("blocks.0.", f"blocks.{i}.", 1)] = tuple(param.shape)
    return found


def _whole(theirs: Config, key: str, name: str, problems: list[str]) -> int:
    """A size that some model could have. name: ours, whose limit holds."""
    value, most = theirs.get(key), LIMITS[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        problems.append(odd(key, value, f"a whole number from 1 to {most:,}"))
        return 0
    return value


def _flag(theirs: Config, key: str, problems: list[str]) -> bool:
    value = theirs.get(key)
    if value is not None and not isinstance(value, bool):
        problems.append(odd(key, value, "true or false"))
    return value is True


def _above(value: object, key: str, problems: list[str]) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST:
        problems.append(odd(key, value, "a number above 0"))
        return 1.0
    return float(value)


def _number(value: object, key: str, problems: list[str]) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        problems.append(odd(key, value, "a number from 0"))
        return 0.0
    return float(value)
