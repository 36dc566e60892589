"""Shapes of models and their adapters as numbers, and named model sizes; without torch.

For code that only needs to know how large a model is (config, planner, command line).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ranvier.setting import setting

Activation = Literal["swiglu", "geglu", "geglu_exact", "reglu", "gelu", "gelu_exact", "relu"]
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu_exact", "reglu")
"""Activations with which one half of the hidden layer gates the other."""


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
}
"""Largest accepted sizes of a published model: far above any existing one, and small enough that
checking it layer by layer is feasible."""
MAX_TOTAL_EXPERTS = 2**17
"""Maximum number of experts of all layers together."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """How positions turn the heads; part of a decoder's config."""

    rope_theta: float = setting(10000.0, minimum=1.0)
    """Base of the rotary frequencies."""
    rope: Literal["llama3", "linear", "yarn", "longrope"] = "llama3"
    """How low rotary frequencies are slowed where rope_scale is not 1: that of Llama 3.1, all
    alike, YaRN, or (whatever rope_scale is) LongRoPE by its lists of factors."""
    rope_scale: float = setting(1.0, minimum=1.0)
    """By how much they are slowed; 1 is not at all."""
    original_max_position: int = setting(8192, minimum=1, unit="tokens")
    """Tokens that the model was first trained on."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns in original_max_position tokens are divided by rope_scale
    (llama3; yarn calls it beta_slow)."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns in original_max_position tokens are kept; those between the two
    factors are interpolated (llama3; yarn calls it beta_fast)."""
    rope_short: tuple[float, ...] = ()
    """Factor of each frequency in texts of up to original_max_position tokens (longrope)."""
    rope_long: tuple[float, ...] = ()
    """The same in longer texts."""
    attention_factor: float = setting(1.0, minimum=1e-06)
    """What cosines and sines are multiplied by (yarn, longrope)."""
    partial_rotary_factor: float = setting(1.0, minimum=0.0)
    """Share of a head that is turned; the rest of it knows no position."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Which layers are mixtures of experts, and how tokens find theirs; part of a decoder's."""

    experts: int = 0
    """Experts of a layer; 0: all layers are dense."""
    experts_per_token: int = 2
    """Experts that a token goes to."""
    expert_mlp: int = 0
    """Width of the hidden layer of an expert; 0: mlp."""
    shared_expert_mlp: int = 0
    """Width of the hidden layer of the expert that all tokens go to; 0: there is none."""
    moe_layer_interval: int = 1
    """Of so many layers the last has experts: 1: all, 2: every second."""
    dense_first_layers: int = 0
    """Layers at the start that are dense in any case."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of logits: over all experts, or of each alone."""
    router_norm: bool = True
    """Weights of the chosen experts are divided by their sum."""
    router_scale: float = 1.0
    """What they are multiplied by."""
    router_logit_scale: float = 1.0
    """What logits are multiplied by; initial weights of the router are divided by it. Below 1 steps
    of the optimizer change routes less."""
    router_jitter: float = 0.0
    """In training logits are multiplied by random numbers in 1 ± jitter; 0: they are not."""
    capacity_factor: float = 0.0
    """An expert takes the first ceil(capacity_factor · tokens · experts_per_token / experts) tokens
    of a sequence; 0: no limit, nothing is dropped."""
    aux_loss_coeff: float = 0.0
    """Factor of the loss E · Σ f·P of a sequence: share f of its choices and mean score P of each
    of the E experts."""
    z_loss_coeff: float = 0.0
    """Factor of the loss mean(logsumexp(logits)²) of a sequence."""
    expert_bias_update_rate: float = 0.0
    """By how much a step moves the bias with which experts are chosen (not weighted): up for those
    that got fewer than the mean, down for the others; 0: there is none."""

    def find_expert_problems(self) -> list[str]:
        """Inconsistent settings, each with value, rule and remedy."""
        if self.experts == 0:
            return []
        found = []
        if not 1 <= self.experts_per_token <= self.experts:
            found.append(
                f"experts_per_token={self.experts_per_token} of experts={self.experts}. A token "
                f"goes to one expert at least and to all at most. Use 1 to {self.experts}."
            )
        if self.moe_layer_interval < 1 or self.dense_first_layers < 0:
            found.append(
                f"moe_layer_interval={self.moe_layer_interval} and "
                f"dense_first_layers={self.dense_first_layers}. One layer in each interval has "
                "experts, the first layers have none. Use 1 or more, and 0 or more."
            )
        if self.router_logit_scale <= 0.0:
            found.append(
                f"router_logit_scale={self.router_logit_scale} is not above 0. Use 1, or less."
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
                found.append(f"{name}={getattr(self, name)} is negative. Use 0 (off) or more.")
        return found


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(RotaryConfig, ExpertConfig):
    """The shape of a decoder."""

    layers: int = setting(2, minimum=1, maximum=10000)
    """Blocks."""
    embed: int = setting(64, minimum=1, maximum=2**24)
    """Width of the residual stream."""
    heads: int = setting(4, minimum=1, maximum=2**24)
    """Query heads."""
    kv_heads: int = setting(2, minimum=1, maximum=2**24)
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: int = setting(16, minimum=1, maximum=2**24)
    """Elements of a head."""
    mlp: int = setting(160, minimum=1, maximum=2**24)
    """Width of the hidden layer of the MLP."""
    vocab: int = setting(256, minimum=1, maximum=2**31, unit="tokens")
    """Tokens the model knows."""
    max_seq: int = setting(2048, minimum=1, unit="tokens")
    """Longest sequence (rows of learned positions; rotary ones can be extended at any time)."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: float = setting(1e-5, minimum=0.0)
    """Added to the variance."""
    norm_weight_offset: float = setting(0.0, minimum=0.0)
    """Added to the weights of RMSNorms (Gemma: 1)."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Whether attention and MLP get a normalised input, give a normalised output, or both."""
    position_embedding: Literal["rope", "learned"] = "rope"
    """Rotary or learned positions."""
    qk_norm: Literal["none", "per_head", "full"] = "none"
    """RMSNorm of queries and keys: none, over each head, or over all heads of a token (OLMo 2)."""
    query_pre_attn_scalar: float = setting(0.0, minimum=0.0)
    """Scores are divided by its root; 0: head_dim."""
    attn_logit_softcap: float = setting(0.0, minimum=0.0)
    """Soft-cap attention logits with cap * tanh(x / cap); 0 disables it."""
    sliding_window: int = setting(0, minimum=0, unit="tokens")
    """Tokens that a token sees, itself included; 0: all before it."""
    window_layers: tuple[int, ...] = ()
    """Layers, from 0, to which the window applies; empty: all."""
    activation: Activation = "swiglu"
    """Gated SiLU, GELU (by tanh, or exact) or ReLU; or GELU or ReLU without a gate."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    biases: tuple[Literal["qkv", "o", "mlp"], ...] = ()
    """Linear layers that have biases where not all do."""
    tie_embeddings: bool = False
    """The head is the embedding."""
    embed_scale: float = setting(1.0, minimum=1e-06)
    """What embeddings are multiplied by."""
    final_logit_softcap: float = setting(0.0, minimum=0.0)
    """Soft-cap logits with cap * tanh(x / cap); 0 disables it."""
    dropout: float = setting(0.0, fraction=True, usual=0.1)
    """Dropped share of embeddings and of what blocks add to the residual stream."""
    init_std: float = setting(0.02, minimum=0.0)
    """Deviation of initial weights; layers that leave a block divide it by sqrt(2 · layers)."""

    def has_bias(self, layers: Literal["qkv", "o", "mlp"]) -> bool:
        """Whether these linear layers have biases."""
        return self.bias or layers in self.biases

    def window_of_layer(self, layer: int) -> int:
        """Tokens that a token sees in a layer; 0: all."""
        here = not self.window_layers or layer in self.window_layers
        if here:
            return self.sliding_window
        return 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        after = layer - self.dense_first_layers
        # After the dense first layers, the last layer of every group of `moe_layer_interval` has
        # experts.
        return (
            self.experts > 0
            and after >= 0
            and after % self.moe_layer_interval == self.moe_layer_interval - 1
        )

    @property
    def expert_width(self) -> int:
        """Width of the hidden layer of an expert."""
        return self.expert_mlp or self.mlp

    @property
    def dim_units(self) -> dict[str, int]:
        """Units of each named dim; with experts also the widths of their layers."""
        names = ("embed", "heads", "kv_heads", "mlp", "vocab")
        found = {name: int(getattr(self, name)) for name in names}
        if self.experts:
            found |= {"expert": self.experts, "expert_mlp": self.expert_width}
            found |= {"shared_mlp": self.shared_expert_mlp} if self.shared_expert_mlp else {}
        return found

    def find_problems(self) -> list[str]:
        """Inconsistent settings, each with value, rule and remedy."""
        # Elements of a head that are rotated.
        turned = int(self.head_dim * self.partial_rotary_factor)
        found = self.find_expert_problems()
        # Bounds the number of tensors that a config from a file can make us enumerate.
        if self.experts * self.layers > MAX_TOTAL_EXPERTS:
            found.append(
                f"experts={self.experts} in each of layers={self.layers}. A model has at most "
                f"{MAX_TOTAL_EXPERTS:,} of them in all. Use fewer of one."
            )
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            found.append(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}. Each kv head "
                f"serves the same number of heads. Use a divisor of {self.heads}."
            )
        if turned % 2 and self.position_embedding == "rope":
            share = f" · partial_rotary_factor={self.partial_rotary_factor} = {turned}" * (
                self.partial_rotary_factor != 1.0
            )
            if self.partial_rotary_factor == 1.0:
                even = f"{self.head_dim + 1}"
            else:
                even = "another of the two"
            found.append(
                f"head_dim={self.head_dim}{share} is odd. Rotary positions turn pairs. Use {even}."
            )
        for name in ("rope_short", "rope_long"):
            count = len(getattr(self, name))
            # One factor per rotated pair.
            if self.rope == "longrope" and count != turned // 2:
                found.append(
                    f"{name} has {count} factors. longrope has one for each of the {turned // 2} "
                    "pairs of a head. Give as many."
                )
        if not self.low_freq_factor < self.high_freq_factor:
            found.append(
                f"low_freq_factor={self.low_freq_factor} and "
                f"high_freq_factor={self.high_freq_factor}. Frequencies between the two are "
                "interpolated. The first must be smaller, such as 1 and 4."
            )
        if any(not 0 <= layer < self.layers for layer in self.window_layers):
            found.append(
                f"window_layers={list(self.window_layers)}. Layers are numbered from 0 to "
                f"{self.layers - 1}. Use these numbers."
            )
        if self.norm_weight_offset != 0.0 and self.norm != "rms":
            found.append(
                f"norm_weight_offset={self.norm_weight_offset} with norm={self.norm!r}. Use "
                "norm='rms'."
            )
        return found


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which layers get adapters, and of what kind."""

    rank: int = setting(0, minimum=0, maximum=2**16)
    """Features between A and B; 0: no adapters, all weights are trained."""
    alpha: float = setting(16.0, minimum=0.0)
    """What an adapter adds is multiplied by alpha / rank."""
    dropout: float = setting(0.0, fraction=True, usual=0.05)
    """Dropped share of what an adapter reads."""
    target_modules: tuple[str, ...] = ("heads", "kv_heads", "mlp")
    """Layers by their dims (heads: q and o; kv_heads: k and v; mlp: gate, up and down) or by their
    names (q, k, v, o, gate, up, down)."""
    layers: tuple[int, ...] = ()
    """Blocks that get adapters, counted from 0; empty: all."""
    dora: bool = False
    """Train the length of each row of the adapted weight, too (DoRA)."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    shared: bool = False
    """Layers that read the same value (q, k, v; gate, up) have one A in common: so it is in PEFT
    where a family packs them into one layer."""

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
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
# Numbers for the small test model: caps and window must take effect at its size.
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
    # Σ w = experts_per_token: the mixture starts with the output scale of an MLP of all chosen
    # widths.
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
# The model of DeepSpeed-TED (Singh et al. 2023): every second layer has experts, top-1 routing.
_TED = {
    "experts": 16,
    "experts_per_token": 1,
    "moe_layer_interval": 2,
    "router_norm": False,
    "aux_loss_coeff": 0.01,
}


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
}
