"""Families: the tables of published models, one for each kind; see `Family`."""

from __future__ import annotations

from typing import Any

from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family import Family, UnknownError
from ranvier.models.hf.family_rope import Config, odd

_BODY = "model.layers.{i}."
_ATTENTION = {
    f"blocks.{{i}}.attention.{ours}": f"{_BODY}self_attn.{theirs}"
    for ours, theirs in (
        ("qkv.q", "q_proj"),
        ("qkv.k", "k_proj"),
        ("qkv.v", "v_proj"),
        ("q_norm", "q_norm"),
        ("k_norm", "k_norm"),
        ("o", "o_proj"),
    )
}
_QKV = "+".join(f"blocks.{{i}}.attention.qkv.{x}" for x in "qkv")
_MLP = {
    f"blocks.{{i}}.mlp.{ours}": f"{_BODY}mlp.{theirs}"
    for ours, theirs in (
        ("enter.gate", "gate_proj"),
        ("enter.up", "up_proj"),
        ("down", "down_proj"),
    )
}
_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def _norms(**theirs: str) -> dict[str, str]:
    return {f"blocks.{{i}}.{ours}": f"{_BODY}{name}" for ours, name in theirs.items()}


_BEFORE = _norms(norm1="input_layernorm", norm2="post_attention_layernorm")
_NAMES = {**_ENDS, **_BEFORE, **_ATTENTION, **_MLP}
_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "embed",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp",
    "vocab_size": "vocab",
    "max_position_embeddings": "max_seq",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tied",
}
_DEFAULT = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_ALL = ("qkv", "o")


def _experts(home: str, router: str, *theirs: str) -> dict[str, str]:
    """Names of a router, and of gates, ups and downs of experts, in a module of a block."""
    ours = ("router", "gate[e]", "up[e]", "down[e]")
    both = zip(ours, (router, *theirs), strict=True)
    return {f"blocks.{{i}}.mlp.{a}": f"{_BODY}{home}{b}" for a, b in both}


_APART = _experts("mlp.", "gate", *(f"experts.{{e}}.{one}_proj" for one in ("gate", "up", "down")))
_W = _experts("block_sparse_moe.", "gate", *(f"experts.{{e}}.{one}" for one in ("w1", "w3", "w2")))
_FUSED = {
    "blocks.{i}.mlp.router": f"{_BODY}mlp.gate",
    "blocks.{i}.mlp.gate[e]+blocks.{i}.mlp.up[e]": f"{_BODY}mlp.experts.gate_up_proj",
    "blocks.{i}.mlp.down[e]": f"{_BODY}mlp.experts.down_proj",
}
_REST = {**_ENDS, **_BEFORE, **_ATTENTION}
_MIXED = {"num_experts_per_tok": "experts_top", "router_aux_loss_coef": "balance"}

_FAMILIES = (
    Family(
        kind="llama",
        architecture="LlamaForCausalLM",
        token_ids=(1, 2, None),
        names=_NAMES,
        keys=_KEYS,
        default=_DEFAULT,
        biased={"attention_bias": _ALL, "mlp_bias": ("mlp",)},
    ),
    Family(
        kind="mistral",
        architecture="MistralForCausalLM",
        token_ids=(1, 2, None),
        names=_NAMES,
        keys=_KEYS,
        default={
            **_DEFAULT,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windows="all",
    ),
    Family(
        kind="qwen2",
        architecture="Qwen2ForCausalLM",
        names=_NAMES,
        keys=_KEYS,
        default={**_DEFAULT, **_QWEN},
        always={"biases": ("qkv",)},
        windows="first",
    ),
    Family(
        kind="qwen3",
        architecture="Qwen3ForCausalLM",
        names=_NAMES,
        keys=_KEYS,
        default={**_DEFAULT, **_QWEN, "head_dim": 128},
        always={"qk_norm": True},
        biased={"attention_bias": _ALL},
        windows="first",
    ),
    Family(
        kind="olmo2",
        architecture="Olmo2ForCausalLM",
        token_ids=(None, 50279, 1),
        names={
            **_ENDS,
            **_norms(after1="post_attention_layernorm", after2="post_feedforward_layernorm"),
            **_ATTENTION,
            **_MLP,
        },
        keys=_KEYS,
        default={**_DEFAULT, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        always={"qk_whole": True, "norms": "after"},
        biased={"attention_bias": _ALL},
    ),
    Family(
        kind="gemma2",
        architecture="Gemma2ForCausalLM",
        token_ids=(2, 1, 0),
        names={
            **_ENDS,
            **_norms(
                norm1="input_layernorm",
                after1="post_attention_layernorm",
                norm2="pre_feedforward_layernorm",
                after2="post_feedforward_layernorm",
            ),
            **_ATTENTION,
            **_MLP,
        },
        keys={
            **_KEYS,
            "query_pre_attn_scalar": "attention_scale",
            "attn_logit_softcapping": "attention_cap",
            "final_logit_softcapping": "logit_cap",
        },
        default={
            **_DEFAULT,
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        always={"norm_shift": 1.0, "norms": "both", "embed_scale": 0.0},
        biased={"attention_bias": _ALL},
        activation="hidden_activation",
        windows="even",
    ),
    Family(
        kind="phi3",
        architecture="Phi3ForCausalLM",
        token_ids=(1, 32000, 32000),
        names={
            **_ENDS,
            **_BEFORE,
            "+".join(
                f"blocks.{{i}}.attention.qkv.{x}" for x in "qkv"
            ): f"{_BODY}self_attn.qkv_proj",
            "blocks.{i}.attention.o": f"{_BODY}self_attn.o_proj",
            "blocks.{i}.mlp.enter.gate+blocks.{i}.mlp.enter.up": f"{_BODY}mlp.gate_up_proj",
            "blocks.{i}.mlp.down": f"{_BODY}mlp.down_proj",
        },
        keys=_KEYS,
        default={
            **_DEFAULT,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        only={"full_attn_mod": 1, "interpolate_factor": 1},
        windows="all",
        ropes=("default", "longrope"),
    ),
    Family(
        kind="mixtral",
        architecture="MixtralForCausalLM",
        token_ids=(1, 2, None),
        names={**_REST, **_W},
        fused={**_REST, **_FUSED},
        keys={**_KEYS, **_MIXED, "num_local_experts": "experts"},
        aliases={"num_experts": "num_local_experts"},
        default={
            **_DEFAULT,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        always={"router_norm": True},
        windows="all",
    ),
    Family(
        kind="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        names={**_NAMES, **_APART},
        fused={**_NAMES, **_FUSED},
        keys={
            **_KEYS,
            **_MIXED,
            "num_experts": "experts",
            "moe_intermediate_size": "expert_mlp",
            "norm_topk_prob": "router_norm",
        },
        aliases={"num_local_experts": "num_experts"},
        default={
            **_DEFAULT,
            **_QWEN,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "mlp_only_layers": [],
        },
        always={"qk_norm": True},
        only={"use_sliding_window": False},
        biased={"attention_bias": _ALL},
    ),
    Family(
        kind="olmoe",
        architecture="OlmoeForCausalLM",
        token_ids=(None, 50279, 1),
        names={**_REST, **_APART},
        fused={**_REST, **_FUSED},
        keys={
            **_KEYS,
            **_MIXED,
            "num_experts": "experts",
            "norm_topk_prob": "router_norm",
        },
        aliases={"num_local_experts": "num_experts"},
        default={
            **_DEFAULT,
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.01,
        },
        always={"qk_whole": True},
        only={"clip_qkv": None},
        biased={"attention_bias": _ALL},
    ),
    Family(
        kind="gpt2",
        architecture="GPT2LMHeadModel",
        token_ids=(50256, 50256, None),
        names={
            "embed": "transformer.wte",
            "position": "transformer.wpe",
            "blocks.{i}.norm1": "transformer.h.{i}.ln_1",
            _QKV: "transformer.h.{i}.attn.c_attn",
            "blocks.{i}.attention.o": "transformer.h.{i}.attn.c_proj",
            "blocks.{i}.norm2": "transformer.h.{i}.ln_2",
            "blocks.{i}.mlp.up": "transformer.h.{i}.mlp.c_fc",
            "blocks.{i}.mlp.down": "transformer.h.{i}.mlp.c_proj",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        keys={
            "n_layer": "layers",
            "n_embd": "embed",
            "n_head": "heads",
            "n_inner": "mlp",
            "vocab_size": "vocab",
            "n_positions": "max_seq",
            "layer_norm_epsilon": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tied",
        },
        default={
            "vocab_size": 50257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
        },
        always={"norm": "layer", "positions": "learned", "bias": True},
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation="activation_function",
        transposed=True,
        prefix="transformer.",
    ),
)
FAMILIES: dict[str, Family] = {family.kind: family for family in _FAMILIES}
"""A new family is one entry above."""


def family_of(config: Config | str) -> Family:
    """The family of a config.json, or of its model_type."""
    kind = config if isinstance(config, str) else config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnknownError(odd("model_type", kind, f"one of {', '.join(FAMILIES)}"))
    return FAMILIES[kind]


def fitting(config: DecoderConfig, first: str = "") -> tuple[Family, dict[str, Any]]:
    """The first family that can have a config of ours, and it as their config.json."""
    reasons = []
    names = sorted(FAMILIES, key=lambda kind: kind != first)
    for kind in names:
        try:
            theirs, family = FAMILIES[kind].write(config), FAMILIES[kind]
            family.tensors(config)
            return family, theirs
        except UnknownError as reason:
            reasons.append(str(reason).splitlines()[0])
    raise UnknownError("\n".join(["No family has such a model.", *reasons]))
