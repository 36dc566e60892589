"""Recomputation: a block forgets activations and computes them again in backward.

none        every activation stays until backward has used it
selective   results of matrix products and of attention stay; what is cheap is computed again
full        only the input of the block stays; all of it is computed again
reentrant   as full, in the older way of torch

What runs again communicates again: a selective block does on a grid what a full one does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ranvier.errors import PlanError
from ranvier.nn.leaf import Moment
from ranvier.plan import Recompute

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results a selective block keeps, by name: not every torch has all of them."""


def kept(operation: Any) -> bool:
    """Whether a selective block keeps the results: of matrix products, of attention."""
    schema = getattr(operation, "_schema", None)  # operators that take functions have none
    name = operation.name() if schema is None else schema.name
    return name in KEPT or (name.startswith("ranvier::") and "attend" in name)


def again(
    forward: Callable[..., Any], kind: Recompute, moment: Moment, *args: Any, **kwargs: Any
) -> Any:
    """Run a block so that it keeps what its kind says.

    What runs again works on the samples of its own forward.
    """
    if kind == "budget":
        raise PlanError(
            "recompute='budget' reached a block. A budget is turned into a kind for each block "
            "before the first step. Use none, selective or full."
        )
    if kind == "none" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    compiling, samples = torch.compiler.is_compiling(), moment.samples

    def run(*inputs: Any) -> Any:  # keywords are bound, as reentrant checkpoints take none
        if compiling:  # the graph reads the samples of its own pass, and may change nothing
            return forward(*inputs, **kwargs)
        before, moment.samples = moment.samples, samples
        try:
            return forward(*inputs, **kwargs)
        finally:
            moment.samples = before

    if kind == "selective":
        return checkpoint(
            run,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=partial(create_selective_checkpoint_contexts, _policy),
        )
    # A graph knows one way only; the older way loses gradients if no input has one.
    tracked = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    reentrant = kind == "reentrant" and not compiling and tracked
    return checkpoint(run, *args, use_reentrant=reentrant, preserve_rng_state=False)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE
