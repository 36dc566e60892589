"""Activation checkpointing: a block drops activations and recomputes them in backward.

none        every activation is saved until backward has used it
selective   results of matmuls and attention are saved; cheap operations are recomputed
full        only the input of the block is saved; everything else is recomputed

A recomputed block either communicates a second time or reuses the saved results of its first run
(`memory.saved_results`); in the second case a step has the same collectives as without
recomputation.
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
from ranvier.nn.pending_output import PendingOutput

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
"""Operations whose results selective checkpointing saves; by name, as not every torch version has
all of them."""
NEEDS_OP_TAGS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether a graph needs a policy that tags each operation for recomputation. Older torch versions
do not tag operations inside autograd functions and save their results."""


def is_saved_op(operation: Any) -> bool:
    """Whether selective checkpointing saves the results of an operation (matmuls, attention)."""
    name = _op_name(operation)
    return name in SAVED_OPS or (name.startswith("ranvier::") and "attend" in name)


def _op_name(operation: Any) -> str:
    # Higher-order operators have no schema.
    schema = getattr(operation, "_schema", None)
    return str(operation.name() if schema is None else schema.name)


def checkpoint_block(
    forward: Callable[..., Any], kind: Recompute, moment: StepContext, *args: Any, **kwargs: Any
) -> Any:
    """Runs a block with activation checkpointing.

    A recomputation uses the sample indices of its forward pass.
    """
    if kind == "memory_budget":
        raise PlanError(
            "A block has recompute='memory_budget'. `ranvier train` replaces it by a mode for each "
            "block before the first step. Use 'none', 'selective' or 'full'."
        )
    if kind == "none" or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Captured now: during recomputation the step context belongs to another micro-batch.
    keeping = moment.save_policy
    current = (moment.samples, moment.context_documents)
    for arg in args:
        if isinstance(arg, PendingOutput):
            arg.save_for_recomputation(keeping.store)
    selective = kind == "selective"
    compiling = torch.compiler.is_compiling()
    if compiling:
        results = None
    else:
        results = keeping.open_results(selective=selective)

    has_run = False

    def run(*inputs: Any) -> Any:
        nonlocal has_run
        # A graph reads the samples of its own pass and must not change outside state.
        if compiling:
            return forward(*inputs, **kwargs)
        before = (moment.samples, moment.context_documents)
        moment.samples, moment.context_documents = current
        moment.is_recompute, has_run = has_run, True
        try:
            if results is None:
                return forward(*inputs, **kwargs)
            with results.block_run(), _SaveOpsMode(results) if selective else nullcontext():
                return forward(*inputs, **kwargs)
        finally:
            moment.samples, moment.context_documents = before
            moment.is_recompute = False

    # In a graph the compiler recomputes, so it needs a policy per operation; in eager mode
    # `_SaveOpsMode` and the saved results do this. No RNG state is preserved, as random masks are
    # functions of the sample index (`counter_rng`).
    saves_some = selective or keeping.saves_all_layers or keeping.saves_attention
    if compiling and (saves_some or NEEDS_OP_TAGS):
        contexts = partial(
            _checkpoint_contexts, selective, keeping.saves_all_layers, keeping.gather_group
        )
        return checkpoint(
            run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


class _SaveOpsMode(TorchDispatchMode):
    """Queues the results of matmuls and attention; takes them from the queue in recomputation."""

    supports_higher_order_operators = True

    def __init__(self, results: SavedResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, as compiled code may run while this mode is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation; saves the results of matmuls and attention, or reuses them."""
        if not is_saved_op(func):
            return func(*args, **(kwargs or {}))
        if self.results.is_recompute:
            return self.results.next_result(str(func))
        out = func(*args, **(kwargs or {}))
        self.results.save_result(str(func), out)
        return out


def _checkpoint_contexts(selective: bool, collectives: bool, depth: str) -> Any:
    """Returns contexts that make a graph save matmuls, and collectives that are not over depth.

    A collective has its group as an argument. The following operation waits for its result, and
    that result is saved.
    """
    # Group of the last collective, as the wait that follows has no group argument.
    group = ""

    def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal group
        name = _op_name(operation)
        # Attention over context is most of a step at long sequences.
        saved = name == "ranvier::attend_over_context" or (selective and is_saved_op(operation))
        if collectives and name == "_c10d_functional::wait_tensor":
            # Weights gathered over depth are not saved, as that would undo their sharding.
            saved = group != depth
        elif name.startswith("_c10d_functional::"):
            group = args[-1]
        if saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
