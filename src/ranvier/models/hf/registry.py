"""Registry of the supported Hugging Face families, with one table each; see `Family`."""

from __future__ import annotations

from typing import Any

from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family import Family, UnsupportedModelError
from ranvier.models.hf.family_rope import HFConfig, describe_bad_key
from ranvier.models.hf.huginn import HUGINN

_LAYER_PREFIX = "model.layers.{i}."
_ATTENTION = {
    f"blocks.{{i}}.attention.{ours}": f"{_LAYER_PREFIX}self_attn.{theirs}"
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
    f"blocks.{{i}}.mlp.{ours}": f"{_LAYER_PREFIX}mlp.{theirs}"
    for ours, theirs in (
        ("enter.gate", "gate_proj"),
        ("enter.up", "up_proj"),
        ("down", "down_proj"),
    )
}
_EMBED_NORM_HEAD = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def _norm_names(**theirs: str) -> dict[str, str]:
    return {f"blocks.{{i}}.{ours}": f"{_LAYER_PREFIX}{name}" for ours, name in theirs.items()}


_PRE_NORMS = _norm_names(norm1="input_layernorm", norm2="post_attention_layernorm")
_NAMES = {**_EMBED_NORM_HEAD, **_PRE_NORMS, **_ATTENTION, **_MLP}
# Keys and defaults that most families share; the same as in LlamaConfig of transformers.
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
    "tie_word_embeddings": "tie_embeddings",
}
_DEFAULTS = {
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
_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_ATTENTION_LAYERS = ("qkv", "o")


def _expert_names(home: str, router: str, *theirs: str) -> dict[str, str]:
    """Returns the names of router, gate, up and down of the experts in a module of a block."""
    ours = ("router", "gate[e]", "up[e]", "down[e]")
    both = zip(ours, (router, *theirs), strict=True)
    return {f"blocks.{{i}}.mlp.{a}": f"{_LAYER_PREFIX}{home}{b}" for a, b in both}


_SEPARATE_EXPERTS = _expert_names(
    "mlp.", "gate", *(f"experts.{{e}}.{one}_proj" for one in ("gate", "up", "down"))
)
_MIXTRAL_EXPERTS = _expert_names(
    # Mixtral's w1, w3 and w2 are gate, up and down.
    "block_sparse_moe.",
    "gate",
    *(f"experts.{{e}}.{one}" for one in ("w1", "w3", "w2")),
)
_FUSED_EXPERTS = {
    "blocks.{i}.mlp.router": f"{_LAYER_PREFIX}mlp.gate",
    # Gate and up are concatenated along their features, after the dim of experts.
    "blocks.{i}.mlp.gate[e]+blocks.{i}.mlp.up[e]": f"{_LAYER_PREFIX}mlp.experts.gate_up_proj",
    "blocks.{i}.mlp.down[e]": f"{_LAYER_PREFIX}mlp.experts.down_proj",
}
_NAMES_WITHOUT_MLP = {**_EMBED_NORM_HEAD, **_PRE_NORMS, **_ATTENTION}
_MOE_KEYS = {"num_experts_per_tok": "experts_per_token", "router_aux_loss_coef": "aux_loss_coeff"}

_FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        token_ids=(1, 2, None),
        layer_names=_NAMES,
        config_keys=_KEYS,
        default_config=_DEFAULTS,
        bias_keys={"attention_bias": _ATTENTION_LAYERS, "mlp_bias": ("mlp",)},
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        token_ids=(1, 2, None),
        layer_names=_NAMES,
        config_keys=_KEYS,
        default_config={
            **_DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        window_rule="all",
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        layer_names=_NAMES,
        config_keys=_KEYS,
        default_config={**_DEFAULTS, **_QWEN_DEFAULTS},
        # Qwen2 always has biases in q, k and v, without a key for them.
        fixed_settings={"biases": ("qkv",)},
        window_rule="first",
    ),
    Family(
        model_type="qwen2_parscale",
        architecture="Qwen2ParScaleForCausalLM",
        layer_names={
            **_NAMES,
            **{
                f"blocks.{{i}}.attention.core.{name}": f"{_LAYER_PREFIX}self_attn.{name}"
                for name in ("prefix_k", "prefix_v")
            },
            "aggregation.hidden": "model.aggregate_layer.0",
            "aggregation.scores": "model.aggregate_layer.2",
        },
        config_keys={
            **_KEYS,
            "parscale_n": "parscale_streams",
            "parscale_n_tokens": "parscale_prefix_tokens",
            "parscale_attn_smooth": "parscale_smoothing",
        },
        default_config={
            **_DEFAULTS,
            **_QWEN_DEFAULTS,
            "parscale_n": 1,
            "parscale_n_tokens": 48,
            "parscale_attn_smooth": 0.01,
        },
        fixed_settings={"biases": ("qkv",)},
        # Their window hides the prefix from later tokens; ours never does.
        required_values={"use_sliding_window": False},
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        layer_names=_NAMES,
        config_keys=_KEYS,
        default_config={**_DEFAULTS, **_QWEN_DEFAULTS, "head_dim": 128},
        fixed_settings={"qk_norm": "per_head"},
        bias_keys={"attention_bias": _ATTENTION_LAYERS},
        window_rule="first",
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        token_ids=(None, 50279, 1),
        layer_names={
            **_EMBED_NORM_HEAD,
            **_norm_names(after1="post_attention_layernorm", after2="post_feedforward_layernorm"),
            **_ATTENTION,
            **_MLP,
        },
        config_keys=_KEYS,
        default_config={**_DEFAULTS, "vocab_size": 50304, "rms_norm_eps": 1e-5},
        fixed_settings={"qk_norm": "full", "norm_position": "post"},
        bias_keys={"attention_bias": _ATTENTION_LAYERS},
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        token_ids=(2, 1, 0),
        layer_names={
            **_EMBED_NORM_HEAD,
            **_norm_names(
                norm1="input_layernorm",
                after1="post_attention_layernorm",
                norm2="pre_feedforward_layernorm",
                after2="post_feedforward_layernorm",
            ),
            **_ATTENTION,
            **_MLP,
        },
        config_keys={
            **_KEYS,
            "query_pre_attn_scalar": "query_pre_attn_scalar",
            "attn_logit_softcapping": "attn_logit_softcap",
            "final_logit_softcapping": "final_logit_softcap",
        },
        default_config={
            **_DEFAULTS,
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
        # embed_scale is a marker; `config_from_hf` replaces it by sqrt(hidden_size).
        fixed_settings={"norm_weight_offset": 1.0, "norm_position": "both", "embed_scale": 0.0},
        bias_keys={"attention_bias": _ATTENTION_LAYERS},
        activation_key="hidden_activation",
        window_rule="even",
    ),
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        token_ids=(1, 32000, 32000),
        layer_names={
            **_EMBED_NORM_HEAD,
            **_PRE_NORMS,
            "+".join(
                f"blocks.{{i}}.attention.qkv.{x}" for x in "qkv"
            ): f"{_LAYER_PREFIX}self_attn.qkv_proj",
            "blocks.{i}.attention.o": f"{_LAYER_PREFIX}self_attn.o_proj",
            "blocks.{i}.mlp.enter.gate+blocks.{i}.mlp.enter.up": f"{_LAYER_PREFIX}mlp.gate_up_proj",
            "blocks.{i}.mlp.down": f"{_LAYER_PREFIX}mlp.down_proj",
        },
        config_keys=_KEYS,
        default_config={
            **_DEFAULTS,
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        required_values={"full_attn_mod": 1, "interpolate_factor": 1},
        window_rule="all",
        rope_types=("default", "longrope"),
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        token_ids=(1, 2, None),
        layer_names={**_NAMES_WITHOUT_MLP, **_MIXTRAL_EXPERTS},
        fused_layer_names={**_NAMES_WITHOUT_MLP, **_FUSED_EXPERTS},
        config_keys={**_KEYS, **_MOE_KEYS, "num_local_experts": "experts"},
        # transformers has used both names for this key.
        key_aliases={"num_experts": "num_local_experts"},
        default_config={
            **_DEFAULTS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
        },
        fixed_settings={"router_norm": True},
        window_rule="all",
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        # Also with the names of a dense MLP, as some layers may be dense (mlp_only_layers).
        layer_names={**_NAMES, **_SEPARATE_EXPERTS},
        fused_layer_names={**_NAMES, **_FUSED_EXPERTS},
        config_keys={
            **_KEYS,
            **_MOE_KEYS,
            "num_experts": "experts",
            "moe_intermediate_size": "expert_mlp",
            "norm_topk_prob": "router_norm",
        },
        key_aliases={"num_local_experts": "num_experts"},
        default_config={
            **_DEFAULTS,
            **_QWEN_DEFAULTS,
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
        fixed_settings={"qk_norm": "per_head"},
        # Sliding windows of this family are not supported, so it has no window rule.
        required_values={"use_sliding_window": False},
        bias_keys={"attention_bias": _ATTENTION_LAYERS},
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        token_ids=(None, 50279, 1),
        layer_names={**_NAMES_WITHOUT_MLP, **_SEPARATE_EXPERTS},
        fused_layer_names={**_NAMES_WITHOUT_MLP, **_FUSED_EXPERTS},
        config_keys={
            **_KEYS,
            **_MOE_KEYS,
            "num_experts": "experts",
            "norm_topk_prob": "router_norm",
        },
        key_aliases={"num_local_experts": "num_experts"},
        default_config={
            **_DEFAULTS,
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
        fixed_settings={"qk_norm": "full"},
        # Clipping of q, k and v is not implemented here.
        required_values={"clip_qkv": None},
        bias_keys={"attention_bias": _ATTENTION_LAYERS},
    ),
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        token_ids=(50256, 50256, None),
        layer_names={
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
        config_keys={
            "n_layer": "layers",
            "n_embd": "embed",
            "n_head": "heads",
            "n_inner": "mlp",
            "vocab_size": "vocab",
            "n_positions": "max_seq",
            "layer_norm_epsilon": "norm_eps",
            "initializer_range": "init_std",
            "tie_word_embeddings": "tie_embeddings",
        },
        default_config={
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
        fixed_settings={"norm": "layer", "position_embedding": "learned", "bias": True},
        required_values={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        activation_key="activation_function",
        is_transposed=True,
        body_prefix="transformer.",
    ),
    HUGINN,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}
"""Families by model_type. A new family needs one entry above."""


def find_family(config: HFConfig | str) -> Family:
    """Returns the family of a config.json or of a model_type."""
    kind = config if isinstance(config, str) else config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UnsupportedModelError(
            describe_bad_key("model_type", kind, f"one of {', '.join(FAMILIES)}")
        )
    return FAMILIES[kind]


def find_fitting_family(config: DecoderConfig, first: str = "") -> tuple[Family, dict[str, Any]]:
    """Returns the first family that supports one of our configs, and the config in its format."""
    if config.residual != "serial":
        raise UnsupportedModelError(
            f"The model has residual={config.residual!r}. No architecture of Hugging Face has "
            "ladder residuals, and with serial ones its outputs would differ. Use it with ranvier, "
            "or export the run from which it was upcycled."
        )
    reasons = []
    # The sort is stable: `first` comes first, the others keep their order.
    names = sorted(FAMILIES, key=lambda kind: kind != first)
    for kind in names:
        try:
            theirs = FAMILIES[kind].config_to_hf(config)
            family = FAMILIES[kind]
            # Raises if none of their tensors contains one of our parameters.
            family.tensor_mappings(config)
            return family, theirs
        except UnsupportedModelError as reason:
            reasons.append(str(reason).splitlines()[0])
    raise UnsupportedModelError("\n".join(["No family supports this model.", *reasons]))
