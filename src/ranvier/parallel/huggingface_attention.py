"""Attention of Hugging Face models, computed by the attention core of our models.

transformers looks up the attention function of a model in a registry, by a name in its config. A
model gets our name there, and each of its attention modules a core (`models.decoder.AttentionCore`,
`nn.attention.AttentionCore` on a grid) with the window, the soft cap and the scale of the module.
The core gets keys of other ranks of context, and handles packed documents, windows and soft caps
without a mask of all scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ranvier.models.decoder import AttentionCore
from ranvier.models.document_attention import Documents
from ranvier.nn.context_documents import ContextDocuments

TYPES_WITH_CORE = ("llama", "qwen3", "mistral", "gemma2")
"""Model types whose attention can be computed by our core."""
ATTENTION_NAME = "ranvier"
"""Name of our attention in the registry of transformers."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Types of rotary embeddings that transformers derives from the largest position of a batch."""


def needs_core(model: Any, context: int) -> bool:
    """Whether attention of a model needs our core: over context, or for windows and soft caps."""
    if model.config.model_type not in TYPES_WITH_CORE:
        return False
    modules = _attention_modules(model)
    return context > 1 or any(_window(module) or _soft_cap(module) for _, module in modules)


def find_context_problems(model: Any, context: int) -> Iterator[str]:
    """Yields the reasons why the tokens of a model cannot be split over context."""
    name = type(model).__name__
    kind = model.config.model_type
    if context == 1:
        return
    if kind not in TYPES_WITH_CORE:
        yield (
            f"{name} has model_type {kind!r}, which does not support context={context}. Attention "
            f"over context is available for {', '.join(TYPES_WITH_CORE)}. Use context=1 and a "
            "larger row."
        )
        return
    rope = getattr(getattr(model.base_model, "rotary_emb", None), "rope_type", "default")
    if rope in LENGTH_DEPENDENT_ROPE:
        yield (
            f"{name} has rope_type={rope!r} with context={context}. transformers derives its "
            "frequencies from the largest position of a batch, of which a rank has a part. Use "
            "context=1, or import the model with `ranvier train --train.init-from`."
        )
    if any(not getattr(module, "is_causal", True) for _, module in _attention_modules(model)):
        yield (
            f"{name} uses bidirectional attention with context={context}. Attention over context "
            "is causal. Use context=1."
        )


def add_attention_cores(model: Any) -> list[str]:
    """Gives the attention modules of a model a core, and returns the names of the cores."""
    # The model is from transformers, which is therefore imported already.
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attend)
    model.config._attn_implementation = ATTENTION_NAME
    paths = []
    for path, module in _attention_modules(model):
        module.add_module("core", build_core(module))
        paths.append(f"{path}.core")
    return paths


def build_core(module: Any) -> AttentionCore:
    """Returns the attention core with the window, soft cap and scale of an attention module."""
    scaling = module.scaling
    # The core divides scores by sqrt(scalar); 0 stands for sqrt(head_dim).
    scalar = 0.0 if scaling == module.head_dim**-0.5 else scaling**-2
    window = _window(module)
    config: Any = SimpleNamespace(
        head_dim=module.head_dim,
        position_embedding="none",
        window_of_layer=lambda layer: window,
        attn_logit_softcap=_soft_cap(module),
        query_pre_attn_scalar=scalar,
        streams=1,
    )
    return AttentionCore(config)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | ContextDocuments | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the core of a module; an attention function of transformers.

    query: `[b, h, s, k]`; key, value: `[b, g, s, k]`; y: `[b, s, h, k]`. Masks, dropout and other
    arguments are those that the core was built for, or are refused when the model is adapted.
    Communicates: keys and values over context, as `nn.attention` describes.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # (b, s, h, k)
    y: Tensor = module.core(q, k, v, None, documents)  # (b, s, h·k)
    return y.unflatten(-1, (-1, module.head_dim)), None


def _attention_modules(model: Any) -> list[tuple[str, Any]]:
    """Returns the attention modules of a model and their names."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "q_proj")]


def _window(module: Any) -> int:
    """Returns the sliding window, which includes the token itself; 0: no window."""
    # Mistral has one window for all layers, in its config.
    if module.config.model_type == "mistral":
        window = module.config.sliding_window
    else:
        window = getattr(module, "sliding_window", None)
    return window or 0


def _soft_cap(module: Any) -> float:
    return float(getattr(module, "attn_logit_softcapping", None) or 0.0)
