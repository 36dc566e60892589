"""Recomputation: a block forgets activations and computes them again in backward.

none        every activation stays until backward has used it
selective   results of matrix products and of attention stay; what is cheap is computed again
full        only the input of the block stays; all of it is computed again

What runs again communicates again, or takes what its first run has kept (`comm.results`): then the
collectives of a step are those of a block that keeps all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ranvier.config.plan import Recompute
from ranvier.errors import PlanError
from ranvier.memory.saved_results import SavedResults
from ranvier.nn.layer import StepContext

SAVED_OPS = frozenset(
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
        "ranvier::grouped",
        "ranvier::mixture",
    }
)
"""Operations whose results a selective block keeps, by name: not every torch has all of them."""
NEEDS_OP_TAGS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether a graph must be told of each operation that it is to be computed again: older ones of
torch tell those inside of autograd functions nothing, and keep their results."""


def is_saved_op(operation: Any) -> bool:
    """Whether a selective block keeps the results: of matrix products, of attention."""
    name = _op_name(operation)
    return name in SAVED_OPS or (name.startswith("ranvier::") and "attend" in name)


def _op_name(operation: Any) -> str:
    schema = getattr(operation, "_schema", None)  # operators that take functions have none
    return str(operation.name() if schema is None else schema.name)


def checkpoint_block(
    forward: Callable[..., Any], kind: Recompute, moment: StepContext, *args: Any, **kwargs: Any
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
    keeping = moment.save_policy
    samples = moment.samples
    selective = kind == "selective"
    compiling = torch.compiler.is_compiling()
    if compiling:
        results = None
    else:
        results = keeping.open_results(selective=selective)

    def run(*inputs: Any) -> Any:
        if compiling:  # the graph reads the samples of its own pass, and may change nothing
            return forward(*inputs, **kwargs)
        before = moment.samples
        moment.samples = samples
        try:
            if results is None:
                return forward(*inputs, **kwargs)
            with results.block_run(), _SaveOpsMode(results) if selective else nullcontext():
                return forward(*inputs, **kwargs)
        finally:
            moment.samples = before

    if compiling and (selective or keeping.saves_all_layers or NEEDS_OP_TAGS):
        contexts = partial(
            _checkpoint_contexts, selective, keeping.saves_all_layers, keeping.depth_group
        )
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


class _SaveOpsMode(TorchDispatchMode):
    """Puts the results of matrix products and of attention into a queue, or takes them from it."""

    supports_higher_order_operators = True

    def __init__(self, results: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code may run while this mode is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run what is not kept."""
        if not is_saved_op(func):
            return func(*args, **(kwargs or {}))
        if self.results.is_recompute:
            return self.results.next_result(str(func))
        out = func(*args, **(kwargs or {}))
        self.results.save_result(str(func), out)
        return out


def _checkpoint_contexts(selective: bool, collectives: bool, depth: str) -> Any:
    """How a graph is told what to keep: results of products, of collectives but those over depth.

    A collective has its group and is followed by the wait for its result, which is what is kept.
    """
    group = ""

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal group
        name = _op_name(operation)
        saved = selective and is_saved_op(operation)
        if collectives and name == "_c10d_functional::wait_tensor":
            saved = group != depth
        elif name.startswith("_c10d_functional::"):
            group = args[-1]
        if saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
