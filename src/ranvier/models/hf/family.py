"""Family: maps the settings and weights of published models to ours.

In this module "their" settings and tensors are in the Hugging Face format and "our" settings are in
`DecoderConfig`. A family is one table (see `registry`): pairs of their keys and ours, fixed
settings, defaults of missing keys, and layer names. `config_from_hf` converts their config to ours
and rejects all unknown keys with their values; `config_to_hf` is its inverse; `tensor_mappings`
lists which of our tensors each of their tensors contains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ranvier.models.config import SIZE_LIMITS, DecoderConfig
from ranvier.models.decoder import Decoder
from ranvier.models.feed_forward import GATED_FUNCTIONS, UNGATED_FUNCTIONS
from ranvier.models.hf.family_rope import (
    HFConfig,
    describe_bad_key,
    read_rope,
    read_window,
    write_rope,
    write_window,
)
from ranvier.models.recurrent_decoder import RecurrentDecoder

WIDTH_SETTINGS = ("mlp", "expert_mlp", "dense_first_layers", "moe_layer_interval")
"""Settings with several combinations that describe the same layers."""


def read_moe_layers(theirs: HFConfig, problems: list[str]) -> dict[str, Any]:
    """Returns dense_first_layers and moe_layer_interval.

    In their config every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`.
    """
    layers = theirs.get("num_hidden_layers")
    step = theirs.get("decoder_sparse_step")
    dense = theirs.get("mlp_only_layers") or []
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        problems.append(describe_bad_key("decoder_sparse_step", step, "an integer of at least 1"))
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
        rule = "a pattern of dense first layers, then experts in every n-th layer"
        problems.append(describe_bad_key("mlp_only_layers", dense, rule))
        return {}
    return {"dense_first_layers": found[0], "moe_layer_interval": found[1]}


def _fit_layer_pattern(have: Sequence[int], layers: int) -> tuple[int, int] | None:
    """Returns (dense_first_layers, moe_layer_interval) for these MoE layers, or None."""
    # No layer has experts: all layers are dense first layers.
    if not have:
        return layers, 1
    for every in range(1, have[0] + 2):
        if [*range(have[0], layers, every)] == [*have]:
            return have[0] - every + 1, every
    return None


def write_moe_layers(config: DecoderConfig) -> dict[str, Any]:
    """Returns their keys for our MoE layers; the inverse of `read_moe_layers`."""
    dense = [i for i in range(config.layers) if not config.has_experts(i)]
    # Dense layers at the start shift the pattern, which decoder_sparse_step cannot express.
    if config.dense_first_layers == 0:
        return {"decoder_sparse_step": config.moe_layer_interval, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def has_same_widths(one: DecoderConfig, other: DecoderConfig) -> bool:
    """Whether the layers of two models have equal widths, even if their settings differ."""
    mine, others = ([_layer_width(c, i) for i in range(c.layers)] for c in (one, other))
    return mine == others


def _layer_width(config: DecoderConfig, layer: int) -> tuple[int, int]:
    """Returns the number of experts and the width of a layer."""
    if config.has_experts(layer):
        return config.experts, config.expert_width
    return 0, config.mlp


class UnsupportedModelError(ValueError):
    """A config cannot be converted. The message has one line per problem: key, value, rule."""


SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Their keys of the tokens that begin, end and pad a text. Our models do not use them; they are
copied when a config.json is written."""


@dataclass(frozen=True)
class TensorMapping:
    """One of their tensors, and our tensors that it contains, concatenated along a dim."""

    name: str
    our_names: tuple[str, ...]
    is_transposed: bool = False
    """Whether it is stored as (in, out)."""
    expert_index: int = -1
    """The only expert that it contains; -1 for all."""
    concat_dim: int = 0
    """Dim along which our tensors are concatenated; 1 if dim 0 is the expert."""
    rotary_dims: tuple[int, ...] = ()
    """For each of our tensors the elements of a head, if their rotary pairs are neighbours
    (2i, 2i + 1) where ours are halves (i, i + k/2), or 0; empty if the order is the same."""
    stored_shape: tuple[int, ...] = ()
    """Shape in which the concatenated tensors are stored, if it is another one."""
    num_interleaved: int = 1
    """Number of inputs whose columns alternate, h_1[0], h_2[0], ..., h_1[1], ...; ours follow each
    other."""

    def rotary_dim(self, name: str) -> int:
        """Returns the elements of a head of one of our tensors that is reordered; otherwise 0."""
        return dict(zip(self.our_names, self.rotary_dims, strict=False)).get(name, 0)

    def compute_shape(self, ours: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the shape of their tensor from the shapes of ours."""
        if self.stored_shape:
            return self.stored_shape
        parts = [ours[name] for name in self.our_names]
        if self.expert_index >= 0:
            return parts[0][1:]
        if self.num_interleaved > 1:
            rows, count, columns = parts[0]
            return rows, count * columns
        whole = list(parts[0])
        whole[self.concat_dim] = sum(one[self.concat_dim] for one in parts)
        return tuple(whole[::-1] if self.is_transposed else whole)

    def separate_inputs(self, theirs: torch.Tensor) -> torch.Tensor:
        """Returns the columns of each input `[out, P, in]`, of alternating ones `[out, in · P]`."""
        if self.num_interleaved == 1:
            return theirs
        separate: torch.Tensor = theirs.unflatten(1, (-1, self.num_interleaved))
        return separate.transpose(1, 2)

    def interleave_inputs(self, ours: torch.Tensor) -> torch.Tensor:
        """Returns alternating columns `[out, in · P]`; the inverse of `separate_inputs`."""
        if self.num_interleaved == 1:
            return ours
        return ours.transpose(1, 2).flatten(1)


def rotary_halves(x: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of each head from neighbouring pairs to halves; x: `[h·k, ...]`."""
    halves: Tensor = x.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    return halves


def rotary_neighbours(x: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of each head from halves to neighbouring pairs; x: `[h·k, ...]`."""
    pairs: Tensor = x.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
    return pairs


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of published models, identified by its `model_type`."""

    model_type: str
    """Their `model_type`."""
    architecture: str
    layer_names: Mapping[str, str]
    """Names of our layers and theirs. Several of our layers joined by + are packed into one tensor.
    [e] marks a parameter with all experts of a layer; their name with {e} contains one expert."""
    config_keys: Mapping[str, str]
    """Their keys, and our settings with the same meaning."""
    default_config: HFConfig
    """Defaults of their keys that are missing in a config."""
    fixed_settings: HFConfig = field(default_factory=dict)
    """Our settings that are the same for all models of the family."""
    required_values: HFConfig = field(default_factory=dict)
    """Their keys for which only this value is supported."""
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Their keys that enable biases, and our layers that get them."""
    activation_key: str = "hidden_act"
    """Their key for the activation."""
    window_rule: str = ""
    """Layers that have a window by default: "" (none), "all", "first" or "even"; see
    `read_window`."""
    is_transposed: bool = False
    """Whether linear layers are stored as (in, out)."""
    body_prefix: str = "model."
    """Prefix of the names of the body; some checkpoints are published without it."""
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    """Types of RoPE that the code of the family supports."""
    fused_layer_names: Mapping[str, str] = field(default_factory=dict)
    """Layer names of checkpoints in which one tensor contains all experts of a layer."""
    key_aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative names of some of their keys."""
    token_ids: tuple[int | None, int | None, int | None] = (None, None, None)
    """Their default token ids for SPECIAL_TOKEN_KEYS."""

    @property
    def activation_names(self) -> Mapping[str, str]:
        """Names of their activations, and ours."""
        gated = any("gate" in name for name in self.layer_names)
        if gated:
            return HF_GATED_ACTIVATIONS
        return HF_ACTIVATIONS

    def config_from_hf(self, config: HFConfig) -> DecoderConfig:
        """Converts their config to ours; raises `UnsupportedModelError` with all invalid keys."""
        config = {self.key_aliases.get(key, key): value for key, value in config.items()}
        theirs = {**self.default_config, **config}
        problems = list(self._find_unknown_keys(theirs))
        ours = dict(self.fixed_settings)
        for key, name in self.config_keys.items():
            ours[name] = theirs.get(key)
        # Sizes first, as defaults of other keys depend on heads and embed.
        heads = ours["heads"] = read_size(theirs, self._hf_key("heads"), "heads", problems)
        embed = ours["embed"] = read_size(theirs, self._hf_key("embed"), "embed", problems)
        if ours.get("kv_heads") is None:
            ours["kv_heads"] = heads
        if ours.get("head_dim") is None:
            if heads:
                ours["head_dim"] = embed // heads
            else:
                ours["head_dim"] = 0
            if heads and embed % heads:
                problems.append(
                    describe_bad_key(
                        self._hf_key("embed"), embed, f"a multiple of the {heads} heads"
                    )
                )
        if ours.get("mlp") is None:
            ours["mlp"] = 4 * embed
        for name in ("layers", "kv_heads", "head_dim", "mlp", "vocab", "max_seq"):
            ours[name] = read_size(
                {self._hf_key(name): ours[name]}, self._hf_key(name), name, problems
            )
        # Windows and experts are checked per layer, which needs a valid number of layers.
        if not ours["layers"]:
            raise UnsupportedModelError("\n".join(problems))
        for name in ("norm_eps", "init_std"):
            ours[name] = _read_nonnegative(ours[name], self._hf_key(name), problems)
        for name in ("query_pre_attn_scalar", "attn_logit_softcap", "final_logit_softcap"):
            if name in ours:
                # null disables a soft cap, but is not valid for an attention scale.
                none = ours[name] is None and name != "query_pre_attn_scalar"
                if none:
                    ours[name] = 0.0
                else:
                    ours[name] = _read_positive(ours[name], self._hf_key(name), problems)
        if "experts" in ours:
            ours |= self._read_moe(theirs, ours, problems)
        if "parscale_streams" in ours:
            ours |= self._read_streams(theirs, ours, problems)
        ours["tie_embeddings"] = _read_flag(theirs, self._hf_key("tie_embeddings"), problems)
        given = [some for key, some in self.bias_keys.items() if _read_flag(theirs, key, problems)]
        layers = sorted({layer for some in given for layer in some})
        ours["biases"] = tuple(layers or self.fixed_settings.get("biases", ()))
        act = theirs.get(self.activation_key)
        if not isinstance(act, str):
            act = repr(act)
        if act not in self.activation_names:
            problems.append(
                describe_bad_key(
                    self.activation_key, act, f"one of {', '.join(self.activation_names)}"
                )
            )
        ours["activation"] = self.activation_names.get(act, "swiglu")
        if self.window_rule:
            ours |= read_window(theirs, self.window_rule, problems)
        if ours.get("position_embedding", "rope") == "rope":
            ours |= self._read_rope(theirs, ours, problems)
        if "embed_scale" in self.fixed_settings:
            # 0.0 in the table is a marker: Gemma scales embeddings by sqrt(hidden_size).
            ours["embed_scale"] = float(embed) ** 0.5
        if problems:
            raise UnsupportedModelError("\n".join(problems))
        # Consistency between settings is checked last, on the complete config.
        made = DecoderConfig(**ours)
        if made.find_problems():
            raise UnsupportedModelError("\n".join(made.find_problems()))
        return made

    def config_to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        """Converts our config to theirs; raises `UnsupportedModelError` if that is impossible."""
        ours = dataclasses.asdict(config)
        theirs: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
        }
        theirs |= {key: ours[name] for key, name in self.config_keys.items()}
        if "parscale_streams" in self.config_keys.values():
            theirs[self._hf_key("parscale_streams")] = config.streams
        # Some families use the key of the MLP for the width of experts.
        if config.experts and "experts" in self.config_keys.values():
            if "expert_mlp" in self.config_keys.values():
                own = "expert_mlp"
            else:
                own = "mlp"
            theirs[self._hf_key(own)] = config.expert_width
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if key in theirs:
                theirs[key] = theirs[key] or None
        # transformers accepts only an integer here.
        if "query_pre_attn_scalar" in theirs:
            scale = config.query_pre_attn_scalar or config.head_dim
            if scale == int(scale):
                theirs["query_pre_attn_scalar"] = int(scale)
            else:
                theirs["query_pre_attn_scalar"] = scale
        has = {layer for layer in BIAS_LAYERS if config.has_bias(layer)}
        theirs |= {key: set(some) <= has for key, some in self.bias_keys.items()}
        # Reversed, so that the first of several names for the same activation is used.
        named = {ours: theirs for theirs, ours in reversed([*self.activation_names.items()])}
        theirs[self.activation_key] = named.get(config.activation)
        if self.window_rule:
            theirs |= write_window(config, self.window_rule)
        if "mlp_only_layers" in self.default_config:
            theirs |= write_moe_layers(config)
        if config.position_embedding == "rope":
            theirs["rope_parameters"] = write_rope(config)
            if config.rope == "longrope":
                theirs["original_max_position_embeddings"] = config.original_max_position
        # Round trip: a setting that changes in the conversion back is not supported by the family.
        if theirs[self.activation_key]:
            again = self.config_from_hf(theirs)
        else:
            again = None
        # With RMSNorm `bias` applies only to linear layers, so `bias` and `biases` may mean the
        # same; with LayerNorm it also applies to the norms.
        if config.norm == "rms" and again is not None:
            same = all(config.has_bias(layer) == again.has_bias(layer) for layer in BIAS_LAYERS)
            ours |= {"bias": again.bias, "biases": again.biases} if same else {}
        if again is not None and has_same_widths(config, again):
            ours |= {name: getattr(again, name) for name in WIDTH_SETTINGS}
        lost = [f for f in ours if again is None or getattr(again, f) != ours[f]]
        lost = [f for f in lost if f not in TRAINING_SETTINGS]
        if again is None or lost:
            words = ", ".join(f"{f}={ours[f]!r}" for f in lost if again is not None)
            raise UnsupportedModelError(
                f"{self.model_type} does not support "
                f"{words or f'activation={config.activation!r}'}."
            )
        return theirs

    def tensor_mappings(self, config: DecoderConfig, *, fused: bool = False) -> list[TensorMapping]:
        """Returns their tensors, in model order. fused: one tensor has all experts of a layer."""
        found: list[TensorMapping] = []
        present = set(parameter_shapes(config))
        # -1 stands for the layers outside of the blocks.
        for i in range(-1, config.layers):
            for ours, theirs in (self.fused_layer_names if fused else self.layer_names).items():
                if ("{i}" not in ours) == (i < 0):
                    found += self._layer_mappings(i, ours, theirs, config, present)
        lost = present - {name for entry in found for name in entry.our_names}
        if lost:
            raise UnsupportedModelError(
                f"{self.model_type} has no tensors for {', '.join(sorted(lost)[:5])}."
            )
        return found

    def _layer_mappings(
        self, i: int, ours: str, theirs: str, config: DecoderConfig, present: set[str]
    ) -> Iterator[TensorMapping]:
        """Yields the tensors of one of their layers, or of all experts of a block."""
        some = tuple(one.removesuffix("[e]").format(i=i) for one in ours.split("+"))
        if ours.endswith("[e]"):
            if not present.issuperset(some):
                return
            if "{e}" not in theirs:
                yield TensorMapping(theirs.format(i=i), some, concat_dim=1)
            for e in range(config.experts if "{e}" in theirs else 0):
                yield TensorMapping(f"{theirs.format(i=i, e=e)}.weight", some, expert_index=e)
            return
        # The prefixes of streams are parameters, not layers with a weight.
        if ".prefix_" in ours and present.issuperset(some):
            yield TensorMapping(theirs.format(i=i), some)
        for end in ("weight", "bias"):
            held = tuple(f"{one}.{end}" for one in some)
            if present.issuperset(held):
                # In GPT-2 only linear layers inside of blocks are transposed (Conv1D).
                turned = self.is_transposed and end == "weight" and "blocks" in ours
                turned = turned and "norm" not in ours and "after" not in ours
                # The average of streams reads all of them, feature by feature.
                packed = config.streams if held == ("aggregation.hidden.weight",) else 1
                yield TensorMapping(
                    f"{theirs.format(i=i)}.{end}", held, turned, num_interleaved=packed
                )

    def _hf_key(self, name: str) -> str:
        return next((key for key, ours in self.config_keys.items() if ours == name), name)

    def _find_unknown_keys(self, theirs: HFConfig) -> list[str]:
        """Returns problems for unknown keys of their config that might change the model."""
        found = [
            describe_bad_key(key, theirs[key], repr(value))
            for key, value in {**REQUIRED_VALUES, **self.required_values}.items()
            if key in theirs and (theirs[key] != value or type(theirs[key]) is not type(value))
        ]
        known = {
            *self.config_keys,
            *self.required_values,
            *REQUIRED_VALUES,
            *self.bias_keys,
            *self.default_config,
            self.activation_key,
            *HARMLESS_KEYS,
        }
        # Keys that other methods of this class read.
        known |= {"sliding_window", "layer_types"} if self.window_rule else set()
        if "rope_theta" in self.default_config:
            known |= {"rope_parameters", "rope_scaling", "partial_rotary_factor"}
            known |= {"original_max_position_embeddings"}
        for key, value in theirs.items():
            empty = value is None or value in ([], {}, "")
            off = key in HARMLESS_WHEN_OFF and value in (False, 0)
            if key not in known and not key.startswith("_") and not empty and not off:
                found.append(
                    f"config.json has {key}={value!r:.80}, which is unknown for "
                    f"{self.model_type}. It may change the results of the model. If it does not, "
                    "remove it from a copy of config.json."
                )
        return found

    def _read_moe(self, theirs: HFConfig, ours: HFConfig, problems: list[str]) -> dict[str, Any]:
        """Returns the settings of experts and router, and of the layers that have experts."""
        found: dict[str, Any] = {}
        for name in ("experts", "experts_per_token", "expert_mlp"):
            if name in ours:
                found[name] = read_size(theirs, self._hf_key(name), name, problems)
        if "router_norm" not in self.fixed_settings:
            found["router_norm"] = _read_flag(theirs, self._hf_key("router_norm"), problems)
        found["aux_loss_coeff"] = _read_nonnegative(
            ours["aux_loss_coeff"], self._hf_key("aux_loss_coeff"), problems
        )
        if "mlp_only_layers" in self.default_config:
            found |= read_moe_layers(theirs, problems)
        return found

    def _read_streams(
        self, theirs: HFConfig, ours: HFConfig, problems: list[str]
    ) -> dict[str, Any]:
        """Returns the settings of the streams of a sample (ParScale)."""
        names = ("parscale_streams", "parscale_prefix_tokens", "parscale_smoothing")
        if theirs.get(self._hf_key("parscale_streams")) == 1:
            # A model with one stream is dense; its prefix may have no tokens.
            return {name: getattr(DecoderConfig, name) for name in names}
        found: dict[str, Any] = {
            name: read_size(theirs, self._hf_key(name), name, problems) for name in names[:2]
        }
        key = self._hf_key("parscale_smoothing")
        found["parscale_smoothing"] = _read_nonnegative(ours["parscale_smoothing"], key, problems)
        if found["parscale_smoothing"] >= 1.0:
            problems.append(describe_bad_key(key, ours["parscale_smoothing"], "below 1"))
        return found

    def _read_rope(self, theirs: HFConfig, ours: HFConfig, problems: list[str]) -> dict[str, Any]:
        table = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        if not isinstance(table, Mapping):
            problems.append(describe_bad_key("rope_parameters", table, "a table"))
            return {}
        kind = table.get("rope_type", table.get("type", "default"))
        # Older Phi-3 configs use these names for LongRoPE.
        if self.model_type == "phi3" and kind in ("su", "yarn"):
            kind = "longrope"
        if kind not in self.rope_types:
            rule = f"one of {', '.join(self.rope_types)}"
            problems.append(describe_bad_key("rope_parameters.rope_type", kind, rule))
            return {}
        for key, value in table.items():
            if key not in ROPE_KEYS and value is not None:
                problems.append(describe_bad_key(f"rope_parameters.{key}", value, "absent"))
        share = table.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
        if share != 1.0 and self.model_type != "phi3":
            problems.append(describe_bad_key("partial_rotary_factor", share, "1.0"))
        theta = table.get("rope_theta", theirs.get("rope_theta"))
        table = {**table, "rope_theta": theta, "partial_rotary_factor": share}
        if kind in ("llama3", "yarn", "longrope"):
            # The top-level key first, then the table, then the maximum length of the model.
            before = theirs.get("original_max_position_embeddings")
            before = before or table.get("original_max_position_embeddings") or ours["max_seq"]
            table["original_max_position_embeddings"] = before
        try:
            return read_rope(kind, table, ours["max_seq"])
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            problems.append(
                describe_bad_key("rope_parameters", dict(table), f"complete and valid ({error})")
            )
            return {}


MAX_CONFIG_NUMBER = 1e30
"""Maximum of a number in a config that is not a size."""
BIAS_LAYERS: tuple[Literal["qkv", "o", "mlp"], ...] = ("qkv", "o", "mlp")
TRAINING_SETTINGS = ("dropout", "init_std", "aux_loss_coeff", "z_loss_coeff", "router_jitter")
"""Settings of training, which a round trip may change."""
HARMLESS_WHEN_OFF = (
    *("use_mrope", "n_special", "rope_interleaved", "is_encoder_decoder", "torchscript"),
    *("tie_encoder_decoder", "remove_invalid_values", "use_bfloat16", "tf_legacy_loss"),
    *("output_scores", "return_dict_in_generate", "use_bidirectional_attention", "pruned_heads"),
    *("cross_attention_hidden_size", "exponential_decay_length_penalty", "add_cross_attention"),
)
"""Keys that do not change a model if they are off."""
REQUIRED_VALUES = {"is_causal": True}
"""Values that these keys must have in all families, if they are given."""
HARMLESS_KEYS = (
    *("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "use_cache"),
    *(*SPECIAL_TOKEN_KEYS, "unk_token_id", "sep_token_id"),
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
    # An older key: Gemma reads hidden_activation, other families have hidden_act in their table.
    "hidden_act",
)
"""Keys that do not change the results of a trained model."""
HF_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
HF_GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
    "gelu": "geglu_exact",
    "relu": "reglu",
}
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
    *("mscale", "mscale_all_dim"),
)
assert set(HF_ACTIVATIONS.values()) <= set(UNGATED_FUNCTIONS) and set(
    HF_GATED_ACTIVATIONS.values()
) <= set(GATED_FUNCTIONS)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all parameters of a decoder by name; a tied parameter appears once.

    Packed dims are unpacked, as in a checkpoint.
    """
    found: dict[str, tuple[int, ...]] = {}
    if config.is_recurrent:
        with torch.device("meta"):
            return {n: tuple(p.shape) for n, p in RecurrentDecoder(config).named_parameters()}
    # One dense and one MoE block on the meta device represent all blocks: a config from a file may
    # have up to 10,000 layers.
    for mixed in (False, True):
        layers = [i for i in range(config.layers) if config.has_experts(i) == mixed]
        changes: Any = {
            "layers": 1,
            "window_layers": (),
            "dense_first_layers": 0,
            "moe_layer_interval": 1,
        }
        changes |= {} if mixed else {"experts": 0}
        if not layers:
            continue
        with torch.device("meta"):
            one = Decoder(dataclasses.replace(config, **changes))
        for name, param in one.named_parameters():
            for i in layers if name.startswith("blocks.0.") else (0,):
                found[name.replace("blocks.0.", f"blocks.{i}.", 1)] = tuple(param.shape)
    if config.streams > 1:
        # The inputs of the average are the streams of a token.
        found["aggregation.hidden.weight"] = (config.embed, config.streams, config.embed)
    return found


def read_size(theirs: HFConfig, key: str, name: str, problems: list[str]) -> int:
    """Returns a size within its limit. name: our setting, which determines the limit."""
    value = theirs.get(key)
    most = SIZE_LIMITS[name]
    # In Python a bool is an int, so it is excluded explicitly (here and below).
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        problems.append(describe_bad_key(key, value, f"an integer from 1 to {most:,}"))
        return 0
    return value


def _read_flag(theirs: HFConfig, key: str, problems: list[str]) -> bool:
    value = theirs.get(key)
    if value is not None and not isinstance(value, bool):
        problems.append(describe_bad_key(key, value, "true or false"))
    return value is True


def _read_positive(value: object, key: str, problems: list[str]) -> float:
    """Returns a number greater than 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= MAX_CONFIG_NUMBER
    ):
        problems.append(describe_bad_key(key, value, "a number greater than 0"))
        return 1.0
    return float(value)


def _read_nonnegative(value: object, key: str, problems: list[str]) -> float:
    if value is None:
        return 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value <= MAX_CONFIG_NUMBER
    ):
        problems.append(describe_bad_key(key, value, "a number of at least 0"))
        return 0.0
    return float(value)
