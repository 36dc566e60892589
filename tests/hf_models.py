"""Small Hugging Face models, callable like ours on one process: the reference for them on grids.

Nothing of the package is used here: the plain forward of transformers, an explicit mask of the
whole sequence, and PyTorch's cross-entropy. `parallelize` replaces this `forward` by its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {"embed": 16, "heads": 8, "kv_heads": 2, "mlp": 24, "vocab": 29}
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": 29,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "use_cache": False,
}
"""Large initial values, so that every part of the model matters."""


def forward(
    self: Any,
    tokens: Tensor,
    targets: Tensor | None = None,
    positions: Tensor | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """What our models compute, by transformers and PyTorch alone."""
    seq, device = tokens.shape[1], tokens.device
    seen = torch.ones(seq, seq, dtype=torch.bool, device=device).tril()
    seen = seen.expand(len(tokens), 1, seq, seq)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    mask: Any = seen
    if self.config._attn_implementation in ("eager", "reference"):
        dtype = next(self.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        mask = mask.masked_fill(~seen, torch.finfo(dtype).min)
    window = getattr(self.config, "sliding_window", None)
    if window:
        index = torch.arange(seq, device=device)
        far = index[:, None] - index >= window
        near = mask.masked_fill(far, False if mask.dtype == torch.bool else mask.min())
        both = {"full_attention": mask, "sliding_attention": near}
        # Mistral has no types of layers.
        mask = near if self.config.model_type == "mistral" else both
    if positions is None:
        positions = torch.arange(seq, device=device).unsqueeze(0)
    out = type(self).forward(self, tokens, attention_mask=mask, position_ids=positions)
    if targets is None:
        return out.logits
    return F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum")


def normalise(self: Any, x: Tensor) -> Tensor:
    """RMSNorm in the type of its input."""
    if type(self).__name__ == "Gemma2RMSNorm":
        weight, eps = 1.0 + self.weight, self.eps
    else:
        weight, eps = self.weight, self.variance_epsilon
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float,
    softcap: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with soft caps in the type of its input; that of transformers is in float32."""
    groups = module.num_key_value_groups
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(2, 3) * scaling / softcap) * softcap
    return ((scores + attention_mask).softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("reference", attend)


def serial(model: Any) -> nn.Module:
    """The model as reference.

    Norms of transformers compute in float32 whatever the model's type, ours in float64 where the
    model does: a comparison to 1e-12 would fail for the reference's rounding. So norms stay in
    their type here. Rotary angles, float32 too, are transformers' on both sides and equal.
    """
    model.forward = MethodType(forward, model)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(normalise, module)
    heads = model.config.num_attention_heads
    kv_heads = getattr(model.config, "num_key_value_heads", heads)
    model.sizes = SIZES | {"kv_heads": kv_heads}
    with torch.no_grad():  # norms and biases that are not all one or zero
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.3)
    return model


def llama(**changes: Any) -> nn.Module:
    """Grouped-query attention, a head of its own."""
    return serial(LlamaForCausalLM(LlamaConfig(**SHAPE | {"tie_word_embeddings": False} | changes)))


def llama_tied(**changes: Any) -> nn.Module:
    """Tied embeddings with a padding token."""
    return llama(**{"tie_word_embeddings": True, "pad_token_id": 3} | changes)


def qwen3(**changes: Any) -> nn.Module:
    """Norms of each head."""
    return serial(Qwen3ForCausalLM(Qwen3Config(**SHAPE | {"tie_word_embeddings": False} | changes)))


def mistral(**changes: Any) -> nn.Module:
    """A sliding window in all layers."""
    more = {"tie_word_embeddings": False, "sliding_window": 3}
    return serial(MistralForCausalLM(MistralConfig(**SHAPE | more | changes)))


def gemma2(**changes: Any) -> nn.Module:
    """Windows in every second layer, soft caps, scaled embeddings, norms with an offset."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    more = {"sliding_window": 3, "query_pre_attn_scalar": 7, "pad_token_id": None}
    config = Gemma2Config(**SHAPE | caps | more | {"attn_implementation": "reference"} | changes)
    return serial(Gemma2ForCausalLM(config))


def gpt2(**changes: Any) -> nn.Module:
    """LayerNorm, learned positions, biases, packed q, k, v; heads of 2 elements (embed / heads)."""
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    shape = {"n_embd": 16, "n_head": 8, "n_inner": 24, "n_layer": 2, "n_positions": 64}
    rest = {"vocab_size": 29, "initializer_range": 0.3, "use_cache": False}
    return serial(GPT2LMHeadModel(GPT2Config(**none | special | shape | rest | changes)))


HF_MODELS: dict[str, Callable[[], nn.Module]] = {
    "hf-llama": llama,
    "hf-llama-tied": llama_tied,
    "hf-qwen3": qwen3,
    "hf-gpt2": gpt2,
}
MODELS_OF_CORE: dict[str, Callable[[], nn.Module]] = {
    "hf-mistral": mistral,
    "hf-gemma2": gemma2,
}
"""Models whose attention our core computes on any grid."""
