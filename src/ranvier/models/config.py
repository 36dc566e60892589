"""Configurations of models and adapters, and named model sizes; does not import torch.

Used by code that only needs the sizes of a model (config, planner, command line).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from ranvier.setting import setting

Activation = Literal["swiglu", "geglu", "geglu_exact", "reglu", "gelu", "gelu_exact", "relu"]
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_exact", "reglu")
"""Activations of gated MLPs, down(f(gate(x)) · up(x))."""


SIZE_LIMITS = {
    "layers": 10_000,
    "embed": 2**20,
    "heads": 2**16,
    "kv_heads": 2**16,
    "head_dim": 2**16,
    "mlp": 2**22,
    "vocab": 2**24,
    "max_seq": 2**31 - 1,
    "experts": 2**14,
    "experts_per_token": 2**14,
    "expert_mlp": 2**22,
    "parscale_streams": 2**10,
    "parscale_prefix_tokens": 2**16,
}
"""Maximum sizes of a published model. They are far above all existing models, and small enough that
each layer can be checked."""
MAX_TOTAL_EXPERTS = 2**17
"""Maximum number of experts in all layers together."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding; a part of `DecoderConfig`."""

    rope_theta: float = setting(10000.0, minimum=1.0)
    """Base of the rotary frequencies."""
    rope: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    """How rotary frequencies are reduced for long sequences: llama3 (low frequencies, as in
    Llama 3.1), linear (all frequencies), yarn (YaRN) or longrope (LongRoPE, which uses rope_short
    and rope_long instead of rope_scale). Without effect if rope_scale is 1, except for longrope."""
    rope_scale: float = setting(1.0, minimum=1.0)
    """Factor by which rotary frequencies are reduced; 1 keeps them."""
    original_max_position: int = setting(8192, minimum=1, unit="tokens")
    """Sequence length of the original training."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer rotations than this in original_max_position tokens are divided by
    rope_scale (llama3; beta_slow in yarn)."""
    high_freq_factor: float = 4.0
    """Frequencies with more rotations than this in original_max_position tokens do not change;
    frequencies between the two factors are interpolated (llama3; beta_fast in yarn)."""
    rope_short: tuple[float, ...] = ()
    """Divisor of each frequency for sequences of up to original_max_position tokens (longrope)."""
    rope_long: tuple[float, ...] = ()
    """Divisor of each frequency for longer sequences (longrope)."""
    attention_factor: float = setting(1.0, minimum=1e-06)
    """Factor of cosines and sines (yarn, longrope)."""
    partial_rotary_factor: float = setting(1.0, minimum=0.0)
    """Fraction of each head that is rotated."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture-of-experts layers and their routing; a part of `DecoderConfig`."""

    experts: int = 0
    """Number of experts per MoE layer; 0 makes all layers dense."""
    experts_per_token: int = 2
    """Number of experts that each token is routed to."""
    expert_mlp: int = 0
    """Hidden size of an expert; 0 uses mlp."""
    shared_expert_mlp: int = 0
    """Hidden size of the shared expert, which processes all tokens; 0 disables it."""
    moe_layer_interval: int = 1
    """The last of every moe_layer_interval layers has experts: 1 for all layers, 2 for every second
    layer."""
    dense_first_layers: int = 0
    """Number of dense layers before the first MoE layer."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores: softmax over all experts, or sigmoid per
    expert."""
    router_norm: bool = True
    """Normalize the weights of the chosen experts to a sum of 1."""
    router_scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    router_logit_scale: float = 1.0
    """Factor of the router logits; initial router weights are divided by it. With a value below 1,
    optimizer steps change the routing less."""
    router_jitter: float = 0.0
    """Multiply router logits by random numbers in [1 - jitter, 1 + jitter) in training; 0 disables
    it."""
    capacity_factor: float = 0.0
    """Each expert accepts only the first ceil(capacity_factor · tokens · experts_per_token /
    experts) tokens of a sequence and drops the others; 0 disables the limit."""
    aux_loss_coeff: float = 0.0
    """Coefficient of the load-balancing loss E · Σ f·P of a sequence, with the fraction f of its
    choices and the mean score P of each of the E experts."""
    z_loss_coeff: float = 0.0
    """Coefficient of the router z-loss mean(logsumexp(logits)²) of a sequence."""
    expert_bias_update_rate: float = 0.0
    """Update per step of a bias that is added to the scores when experts are chosen: it increases
    for experts with fewer tokens than the mean and decreases for the others. 0 disables the
    bias."""

    def find_expert_problems(self) -> list[str]:
        """Returns the inconsistent settings, each with value, rule and remedy."""
        if self.experts == 0:
            return []
        found = []
        if not 1 <= self.experts_per_token <= self.experts:
            found.append(
                f"experts_per_token={self.experts_per_token} is invalid for "
                f"experts={self.experts}. A token must be routed to at least 1 and at most all "
                f"experts. Use experts_per_token={min(max(self.experts, 1), 2)}."
            )
        if self.moe_layer_interval < 1 or self.dense_first_layers < 0:
            found.append(
                f"moe_layer_interval={self.moe_layer_interval} and "
                f"dense_first_layers={self.dense_first_layers} are invalid. moe_layer_interval "
                "must be at least 1 and dense_first_layers at least 0. Use e.g. 1 and 0."
            )
        if self.router_logit_scale <= 0.0:
            found.append(
                f"router_logit_scale={self.router_logit_scale} is invalid. It must be greater "
                "than 0. Use e.g. 1."
            )
        amounts = (
            "router_jitter",
            "capacity_factor",
            "aux_loss_coeff",
            "z_loss_coeff",
            "expert_bias_update_rate",
        )
        for name in amounts:
            if getattr(self, name) < 0.0:
                found.append(
                    f"{name}={getattr(self, name)} is invalid. It must not be negative. Use 0 to "
                    "disable it, or a positive number."
                )
        return found


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig:
    """Recurrent depth (Geiping et al. 2025, Huginn); a part of `DecoderConfig`.

    The layers are a prelude, a core that runs several times, and a coda:
    e = prelude(embed(x)), s_i = core(A_s s_{i-1} + A_e e), logits = head(norm(coda(norm(s_r)))).
    """

    prelude_layers: int = setting(0, minimum=0, maximum=10000)
    """Layers before the recurrent core."""
    core_layers: int = setting(0, minimum=0, maximum=10000)
    """Layers of the recurrent core, which a pass runs several times with the same weights. 0: the
    model is not recurrent, and all layers run once."""
    coda_layers: int = setting(0, minimum=0, maximum=10000)
    """Layers after the recurrent core."""
    mean_recurrence: int = setting(0, minimum=0, maximum=10000)
    """Iterations of the core in evaluation. Each training step draws its iterations from seed and
    step: Poisson(LogNormal(log(mean_recurrence) - 1/8, 1/2)) + 1."""
    backprop_depth: int = setting(0, minimum=0, maximum=10000)
    """Last iterations of the core that have gradients, at most; the others keep nothing for
    backward. If fewer iterations are drawn, all of them have gradients."""

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has a recurrent core."""
        return self.core_layers > 0

    def find_recurrence_problems(self, layers: int) -> list[str]:
        """Returns the inconsistent settings, each with value, rule and remedy."""
        parts = {
            name: getattr(self, name) for name in ("prelude_layers", "core_layers", "coda_layers")
        }
        given = ", ".join(f"{name}={value}" for name, value in parts.items())
        depths = {name: getattr(self, name) for name in ("mean_recurrence", "backprop_depth")}
        found = []
        if not self.is_recurrent:
            changed = [f"{name}={value}" for name, value in {**parts, **depths}.items() if value]
            if changed:
                found.append(
                    f"{', '.join(changed)} with core_layers=0. Only a recurrent core has a prelude "
                    "and a coda, and iterations. Use core_layers=1 or more, or remove these "
                    "settings."
                )
            return found
        for name, value in depths.items():
            if value < 1:
                found.append(
                    f"{name}={value} with core_layers={self.core_layers}. The core of a recurrent "
                    "model runs at least once, and its last iteration has gradients. Use "
                    f"{name}={8 if name == 'backprop_depth' else 32}."
                )
        if sum(parts.values()) != layers:
            found.append(
                f"layers={layers} with {given}. The layers of a recurrent model are those of its "
                f"parts. Use layers={sum(parts.values())}."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ResidualConfig:
    """When outputs are added to the residual stream; a part of `DecoderConfig`."""

    residual: Literal["serial", "ladder"] = "serial"
    """Input of attention and MLP: the sum of all outputs before (serial), or a sum without the last
    output (ladder residual), whose reduction over ranks overlaps with the module."""
    ladder_layers: tuple[int, ...] = ()
    """Layers with a ladder residual, counted from 0; empty for all layers."""

    def find_residual_problems(self, layers: int, norm_position: str) -> list[str]:
        """Returns the inconsistent settings, each with value, rule and remedy."""
        found = []
        if self.ladder_layers and self.residual != "ladder":
            found.append(
                f"ladder_layers={list(self.ladder_layers)} has no effect with "
                f"residual={self.residual!r}. Only a ladder residual has ladder layers. Use "
                "residual='ladder', or remove ladder_layers."
            )
        if any(not 0 <= layer < layers for layer in self.ladder_layers):
            found.append(
                f"ladder_layers={list(self.ladder_layers)} contains an invalid layer. Layers are "
                f"numbered from 0 to {layers - 1}. Use these numbers."
            )
        if self.residual == "ladder" and norm_position not in ("pre", "post", "both"):
            found.append(
                f"residual='ladder' is not supported with norm_position={norm_position!r}. A "
                "ladder residual adds an output after the next module has read the stream, so no "
                "norm can follow the sum. Use norm_position='pre'."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class ParScaleConfig:
    """Parallel streams of each sample (ParScale, Chen et al. 2025); a part of `DecoderConfig`."""

    parscale_streams: int = setting(0, minimum=0, maximum=2**10)
    """Number of streams: copies of each sample, which differ in a learned prefix of every layer and
    are averaged before the head with learned weights (ParScale); 0 or 1 disables it."""
    parscale_prefix_tokens: int = setting(48, minimum=1, maximum=2**16, unit="tokens")
    """Number of learned keys and values that the tokens of a stream attend to in each layer."""
    parscale_smoothing: float = setting(0.01, fraction=True, usual=0.01)
    """Part of the weights of streams that is equal for all of them, so that all streams are
    trained."""

    @property
    def streams(self) -> int:
        """Samples inside the model of each sample of a batch."""
        return max(self.parscale_streams, 1)

    def find_stream_problems(self, is_recurrent: bool) -> list[str]:
        """Returns the inconsistent settings, each with value, rule and remedy."""
        if self.streams > 1 and is_recurrent:
            return [
                f"parscale_streams={self.parscale_streams} with a recurrent core. Its iterations "
                "have no prefixes of streams. Use core_layers=0, or parscale_streams=0."
            ]
        return []


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(RotaryConfig, ExpertConfig, RecurrenceConfig, ResidualConfig, ParScaleConfig):
    """Configuration of a decoder: its sizes, norms, attention, positions, experts and recurrence.

    `MODEL_SIZES` has the configurations of published models by name. The fields are also the
    settings `model.*` of a run.
    """

    layers: int = setting(2, minimum=1, maximum=10000)
    """Number of blocks."""
    embed: int = setting(64, minimum=1, maximum=2**24)
    """Width of the residual stream (hidden size)."""
    heads: int = setting(4, minimum=1, maximum=2**24)
    """Number of query heads."""
    kv_heads: int = setting(2, minimum=1, maximum=2**24)
    """Number of key and value heads. Fewer than heads gives grouped-query attention."""
    head_dim: int = setting(16, minimum=1, maximum=2**24)
    """Elements per head."""
    mlp: int = setting(160, minimum=1, maximum=2**24)
    """Hidden size of the MLP (intermediate size)."""
    vocab: int = setting(256, minimum=1, maximum=2**31, unit="tokens")
    """Vocabulary size."""
    max_seq: int = setting(2048, minimum=1, unit="tokens")
    """Maximum sequence length: the number of learned positions. Rotary positions can be extended
    later."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm (rms) or LayerNorm (layer)."""
    norm_eps: float = setting(1e-5, minimum=0.0)
    """Epsilon that norms add to the variance."""
    norm_weight_offset: float = setting(0.0, minimum=0.0)
    """Constant that is added to the weights of RMSNorm (1 for Gemma)."""
    norm_position: Literal["pre", "post", "both", "sandwich"] = "pre"
    """Whether norms are applied to the inputs of attention and MLP (pre), to their outputs (post),
    to both, or to their inputs and to the residual stream after each addition (sandwich, as in
    Huginn)."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """Rotary or learned positions."""
    qk_norm: Literal["none", "per_head", "full"] = "none"
    """RMSNorm of queries and keys: none, per head, or over all heads of a token (full, as in
    OLMo 2)."""
    query_pre_attn_scalar: float = setting(0.0, minimum=0.0)
    """Attention scores are divided by the square root of this value; 0 uses head_dim."""
    attn_logit_softcap: float = setting(0.0, minimum=0.0)
    """Soft-cap attention logits with cap * tanh(x / cap); 0 disables it."""
    sliding_window: int = setting(0, minimum=0, unit="tokens")
    """Number of tokens that each token attends to, including itself; 0 attends to all previous
    tokens."""
    window_layers: tuple[int, ...] = ()
    """Layers with a sliding window, counted from 0; empty for all layers."""
    activation: Activation = "swiglu"
    """Activation of the MLP: gated SiLU (swiglu), gated GELU (geglu with the tanh approximation, or
    geglu_exact), gated ReLU (reglu), or gelu, gelu_exact or relu without a gate."""
    bias: bool = False
    """Use biases in all linear layers and in LayerNorm."""
    biases: tuple[Literal["qkv", "o", "mlp"], ...] = ()
    """Linear layers with biases, if bias is false."""
    qk_bias: bool = False
    """Use biases in the projections to queries and keys, but not to values, if bias is false."""
    tie_embeddings: bool = False
    """Use the embedding table as the weight of the head."""
    embed_scale: float = setting(1.0, minimum=1e-06)
    """Factor of the embeddings."""
    final_logit_softcap: float = setting(0.0, minimum=0.0)
    """Soft-cap logits with cap * tanh(x / cap); 0 disables it."""
    dropout: float = setting(0.0, fraction=True, usual=0.1)
    """Dropout probability for embeddings and for the outputs of attention and MLP."""
    init_std: float = setting(0.02, minimum=0.0)
    """Standard deviation of initial weights. For the output projections of attention and MLP it is
    divided by sqrt(2 · layers); the layers of a recurrent core count mean_recurrence times."""

    def has_bias(self, layers: Literal["qkv", "o", "mlp"]) -> bool:
        """Whether these linear layers have biases."""
        return self.bias or layers in self.biases

    @property
    def unrolled_layers(self) -> int:
        """Number of layers that a token passes through, with the mean recurrence."""
        return self.layers + self.core_layers * max(self.mean_recurrence - 1, 0)

    def window_of_layer(self, layer: int) -> int:
        """Returns the sliding window of a layer in tokens; 0 means no window."""
        here = not self.window_layers or layer in self.window_layers
        if here:
            return self.sliding_window
        return 0

    def is_ladder_layer(self, layer: int) -> bool:
        """Whether a layer has a ladder residual."""
        chosen = not self.ladder_layers or layer in self.ladder_layers
        return self.residual == "ladder" and chosen

    def receives_addend(self, layer: int) -> bool:
        """Whether a layer adds the MLP output of the layer before it, which does not add it."""
        return 0 < layer < self.layers and self.is_ladder_layer(layer)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        after = layer - self.dense_first_layers
        # After the dense layers, the last layer of every `moe_layer_interval` layers has experts.
        return (
            self.experts > 0
            and after >= 0
            and after % self.moe_layer_interval == self.moe_layer_interval - 1
        )

    @property
    def expert_width(self) -> int:
        """Hidden size of an expert."""
        return self.expert_mlp or self.mlp

    @property
    def dim_units(self) -> dict[str, int]:
        """Number of units of each named dim; with experts also their number and hidden sizes."""
        names = ("embed", "heads", "kv_heads", "mlp", "vocab")
        found = {name: int(getattr(self, name)) for name in names}
        if self.experts:
            found |= {"expert": self.experts, "expert_mlp": self.expert_width}
            found |= {"shared_mlp": self.shared_expert_mlp} if self.shared_expert_mlp else {}
        return found

    def find_problems(self) -> list[str]:
        """Returns the inconsistent settings, each with value, rule and remedy."""
        # Number of elements of a head that are rotated.
        turned = int(self.head_dim * self.partial_rotary_factor)
        found = self.find_expert_problems() + self.find_recurrence_problems(self.layers)
        found += self.find_residual_problems(self.layers, self.norm_position)
        if self.is_recurrent and self.residual == "ladder":
            found.append(
                f"residual='ladder' is not supported with core_layers={self.core_layers}. A "
                "recurrent core starts each iteration from a complete stream. Use "
                "residual='serial', or core_layers=0."
            )
        found += self.find_stream_problems(self.is_recurrent)
        # Limits the number of tensors that a config from a file can require to list.
        if self.experts * self.layers > MAX_TOTAL_EXPERTS:
            found.append(
                f"experts={self.experts} in each of layers={self.layers} is too many. A model can "
                f"have at most {MAX_TOTAL_EXPERTS:,} experts in total. Use fewer experts or layers."
            )
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            found.append(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Each kv head must "
                "be shared by the same number of query heads. Use a divisor of "
                f"{self.heads}."
            )
        if turned % 2 and self.position_embedding == "rope":
            share = f" · partial_rotary_factor={self.partial_rotary_factor} = {turned}" * (
                self.partial_rotary_factor != 1.0
            )
            if self.partial_rotary_factor == 1.0:
                even = f"{self.head_dim + 1}"
            else:
                even = "values with an even product"
            found.append(
                f"head_dim={self.head_dim}{share} is odd. Rotary positions rotate pairs of "
                f"elements. Use {even}."
            )
        for name in ("rope_short", "rope_long"):
            count = len(getattr(self, name))
            # One factor per rotated pair.
            if self.rope == "longrope" and count != turned // 2:
                found.append(
                    f"{name} has {count} factors. longrope needs one factor for each of the "
                    f"{turned // 2} rotated pairs of a head. Give {turned // 2} factors."
                )
        if not self.low_freq_factor < self.high_freq_factor:
            found.append(
                f"low_freq_factor={self.low_freq_factor} is not less than "
                f"high_freq_factor={self.high_freq_factor}. Frequencies between the two are "
                "interpolated. Use e.g. 1 and 4."
            )
        if any(not 0 <= layer < self.layers for layer in self.window_layers):
            found.append(
                f"window_layers={list(self.window_layers)} contains an invalid layer. Layers are "
                f"numbered from 0 to {self.layers - 1}. Use these numbers."
            )
        if self.qk_bias and self.has_bias("qkv"):
            found.append(
                "qk_bias=True with biases of queries, keys and values. One of the two settings "
                "says which projections have biases. Use qk_bias=False."
            )
        if self.is_recurrent and self.experts:
            found.append(
                f"core_layers={self.core_layers} with experts={self.experts}. The auxiliary losses "
                "of experts are not defined for layers that run several times. Use experts=0."
            )
        if self.norm_weight_offset != 0.0 and self.norm != "rms":
            found.append(
                f"norm_weight_offset={self.norm_weight_offset} is not supported with "
                f"norm={self.norm!r}. Only RMSNorm has an offset. Use norm='rms'."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Configuration of LoRA and DoRA adapters.

    The fields are also the settings `lora.*` of a run.
    """

    rank: int = setting(0, minimum=0, maximum=2**16)
    """Rank of the adapters; 0 disables them, and all weights are trained."""
    alpha: float = setting(16.0, minimum=0.0)
    """The output of an adapter is multiplied by alpha / rank."""
    dropout: float = setting(0.0, fraction=True, usual=0.05)
    """Dropout probability for the input of an adapter."""
    target_modules: tuple[str, ...] = ("heads", "kv_heads", "mlp")
    """Layers with adapters, by their dims (heads: q and o; kv_heads: k and v; mlp: gate, up and
    down) or by their names (q, k, v, o, gate, up, down)."""
    layers: tuple[int, ...] = ()
    """Blocks with adapters, counted from 0; empty for all blocks."""
    dora: bool = False
    """Also train the magnitude of each row of the adapted weight (DoRA)."""
    rslora: bool = False
    """Multiply the output of an adapter by alpha / sqrt(rank) instead (rsLoRA)."""
    shared: bool = False
    """Use one matrix A for all layers with the same input (q, k, v; gate, up), as in PEFT for
    models that pack them into one layer."""

    @property
    def scale(self) -> float:
        """Factor of the output of an adapter."""
        # Rank 0 means no adapters; `max` only avoids a division by zero.
        return self.alpha / (math.sqrt(self.rank) if self.rslora else max(self.rank, 1))


GPT2 = {
    "norm": "layer",
    "position_embedding": "learned",
    "activation": "gelu",
    "bias": True,
    "tie_embeddings": True,
}
_LLAMA3 = {"kv_heads": 8, "vocab": 128256, "max_seq": 8192, "rope_theta": 500000.0}
_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "max_seq": 40960} | {
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
    "qk_norm": "per_head",
}
# Values for the small test model: caps and window must have an effect at its size.
GEMMA2 = {
    "norm_weight_offset": 1.0,
    "norm_position": "both",
    "activation": "geglu",
    "embed_scale": 4.0,
} | {
    "attn_logit_softcap": 5.0,
    "final_logit_softcap": 3.0,
    "query_pre_attn_scalar": 8.0,
    "sliding_window": 3,
    "window_layers": (0,),
}


_MOE_TINY = {"experts": 16, "experts_per_token": 4, "expert_mlp": 64, "shared_expert_mlp": 256} | {
    # Σ w = experts_per_token: initially the output has the scale of an MLP with the total width of
    # the chosen experts.
    "router_scale": 4.0,
    "router_logit_scale": 0.1,
    "expert_bias_update_rate": 0.001,
    "aux_loss_coeff": 0.1,
}
_MIXTRAL = {
    "experts": 8,
    "kv_heads": 8,
    "vocab": 32000,
    "max_seq": 32768,
    "aux_loss_coeff": 0.02,
} | {"rope_theta": 1000000.0}
_QWEN3_MOE = {"kv_heads": 4, "experts": 128, "experts_per_token": 8, "expert_mlp": 768} | {
    "aux_loss_coeff": 0.001
}
_DEEPSEEK = {
    "experts": 64,
    "experts_per_token": 6,
    "expert_mlp": 1408,
    "shared_expert_mlp": 2816,
} | {
    "dense_first_layers": 1,
    "router_norm": False,
    "aux_loss_coeff": 0.001,
    "vocab": 102400,
    "max_seq": 4096,
    "norm_eps": 1e-6,
}
# The model of DeepSpeed-TED (Singh et al. 2023) has experts in every second layer, top-1 routing.
_TED = {
    "experts": 16,
    "experts_per_token": 1,
    "moe_layer_interval": 2,
    "router_norm": False,
    "aux_loss_coeff": 0.01,
}


# Huginn (Geiping et al. 2025). Initial weights have the std sqrt(2 / (5 · embed)), and embeddings
# are multiplied by sqrt(embed), so that they and the initial state have the variance 2/5.
_HUGINN = {
    "norm_position": "sandwich",
    "norm_eps": 1e-6,
    "qk_bias": True,
    "rope_theta": 50000.0,
    "tie_embeddings": True,
}


def _build_recurrent(
    prelude: int, core: int, coda: int, embed: int, heads: int, mlp: int, **rest: object
) -> DecoderConfig:
    """Returns the config of a recurrent model with these numbers of layers."""
    parts = {"prelude_layers": prelude, "core_layers": core, "coda_layers": coda}
    scales = {"embed_scale": embed**0.5, "init_std": math.sqrt(2 / (5 * embed))}
    return _build_size(
        prelude + core + coda, embed, heads, mlp, **{**_HUGINN, **parts, **scales, **rest}
    )


def _build_size(layers: int, embed: int, heads: int, mlp: int, **rest: object) -> DecoderConfig:
    shape = {"layers": layers, "embed": embed, "heads": heads, "mlp": mlp}
    return DecoderConfig(**{"kv_heads": heads, "head_dim": embed // heads, **shape, **rest})  # type: ignore[arg-type]


MODEL_SIZES: dict[str, DecoderConfig] = {
    "tiny": _build_size(4, 192, 8, 512, kv_heads=2, vocab=4096),
    "gpt2": _build_size(12, 768, 12, 3072, vocab=50257, max_seq=1024, **GPT2),
    "llama3-1b": _build_size(16, 2048, 32, 8192, tie_embeddings=True, rope_scale=32.0, **_LLAMA3),
    "llama3-8b": _build_size(32, 4096, 32, 14336, **_LLAMA3),
    "llama3-70b": _build_size(80, 8192, 64, 28672, **_LLAMA3),
    "llama3-405b": _build_size(126, 16384, 128, 53248, rope_scale=8.0, **_LLAMA3),
    "qwen3-0.6b": _build_size(28, 1024, 16, 3072, tie_embeddings=True, **_QWEN3),
    "qwen3-8b": _build_size(36, 4096, 32, 12288, **_QWEN3),
    "moe-tiny": _build_size(4, 192, 8, 512, kv_heads=2, vocab=4096, **_MOE_TINY),
    "mixtral-8x7b": _build_size(32, 4096, 32, 14336, **_MIXTRAL),
    "qwen3-30b-a3b": _build_size(48, 2048, 32, 6144, **(_QWEN3 | _QWEN3_MOE)),
    "deepseek-moe-16b": _build_size(28, 2048, 16, 10944, **_DEEPSEEK),
    "ted-6.7b-16e": _build_size(32, 4096, 32, 16384, vocab=50257, **(GPT2 | _TED)),
    "recurrent-tiny": _build_recurrent(
        1, 2, 1, 128, 4, 352, vocab=4096, mean_recurrence=4, backprop_depth=2
    ),
    "recurrent-0.5b": _build_recurrent(
        2, 4, 2, 2048, 16, 5632, vocab=65536, max_seq=4096, mean_recurrence=16, backprop_depth=8
    ),
    "huginn-3.5b": _build_recurrent(
        2, 4, 2, 5280, 55, 17920, vocab=65536, max_seq=4096, mean_recurrence=32, backprop_depth=8
    ),
}


GEMSTONE_PREFIX = "gemstone-"
"""Start of the names of the models that `gemstone_size` builds from their width and depth."""
GEMSTONE_HEAD_DIM = 128


def gemstone_size(name: str) -> DecoderConfig:
    """Returns the decoder `gemstone-WxD` of width W and depth D, of the Gemstones suite.

    Heads of 128 elements, two query heads per key/value head, a gated GELU of 4 W, RMSNorm and
    separate head and embedding: D (15 W² + 2 W) + (2 · 50304 + 1) W parameters. Weights begin with
    the standard deviation 1 / sqrt(W), and those of output projections with it / sqrt(2 D).

    Raises ValueError with value, rule and remedy.
    """
    match = re.fullmatch(rf"{GEMSTONE_PREFIX}([1-9]\d{{0,8}})x([1-9]\d{{0,8}})", name)
    if match is None:
        raise ValueError(
            f"model.size={name!r} is not a width and a depth. Models of this suite are named "
            "gemstone-WxD, with the width W and the number of layers D. Use e.g. gemstone-256x23."
        )
    width = int(match[1])
    depth = int(match[2])
    if width % GEMSTONE_HEAD_DIM:
        near = max(round(width / GEMSTONE_HEAD_DIM), 1) * GEMSTONE_HEAD_DIM
        raise ValueError(
            f"model.size={name!r} has the width {width}. A width must be a multiple of "
            f"{GEMSTONE_HEAD_DIM}, the size of a head. Use gemstone-{near}x{depth}."
        )
    if width > SIZE_LIMITS["embed"] or depth > SIZE_LIMITS["layers"]:
        raise ValueError(
            f"model.size={name!r} is too large. A model has a width of at most "
            f"{SIZE_LIMITS['embed']:,} and at most {SIZE_LIMITS['layers']:,} layers. Use a smaller "
            "width or depth."
        )
    heads = width // GEMSTONE_HEAD_DIM
    # An odd number of heads has no two per key/value head; as many as divide it, like the suite's
    # models of width 384, which have one key/value head for three.
    kv_heads = next(n for n in range(max(heads // 2, 1), 0, -1) if heads % n == 0)
    return _build_size(
        depth,
        width,
        heads,
        4 * width,
        kv_heads=kv_heads,
        vocab=50304,
        max_seq=2048,
        activation="geglu",
        init_std=1.0 / math.sqrt(width),
    )


def find_model_size(name: str) -> DecoderConfig | None:
    """Returns the model of a name: one of `MODEL_SIZES`, or gemstone-WxD; None if it is unknown.

    Raises ValueError if the name is of the form gemstone-WxD with a wrong width or depth.
    """
    if name.startswith(GEMSTONE_PREFIX):
        return gemstone_size(name)
    return MODEL_SIZES.get(name)
