"""Compiled blocks: one graph, without a break, for all equal blocks of a model.

A block is compiled the first time it is trained; the blocks after it find its graph, as nothing in
it depends on which block it is: weights are inputs, names count from the block. What a graph
communicates is noted when it is traced and counted again, under the block's own name, for every
call of it (not what it recomputes).

Tokens that travel to experts of other ranks are the exception: how many the host has to learn, so
such a block is a graph up to its experts, which run operation by operation; all of it does where it
computes activations again.
"""

from __future__ import annotations

from dataclasses import replace
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ranvier.config.plan import Recompute
from ranvier.nn.activation_checkpoint import checkpoint_block
from ranvier.nn.layer import StepContext
from ranvier.trace import Event, Trace

RECOMPILE_LIMIT = 64
"""Graphs of a function at most: kinds of recomputation, shapes, with documents and without."""
MAX_MODEL_GRAPHS = 24
"""Of these what a model asks for; more run operation by operation."""


class DeferredResidual(NamedTuple):
    """A residual stream whose last addition is left to the next graph, which does it in passing."""

    x: Tensor
    addend: Tensor


BlockPart = Literal["forward", "forward_without_add", "forward_attention"]
"""Of a block: all of it, all but its last addition, or what comes before its experts."""


def _run_block_part(
    kind: Recompute,
    part: BlockPart,
    moment: StepContext,
    block: torch.nn.Module,
    x: Tensor,
    more: Tensor | None,
    *args: Any,
) -> Any:
    """Run a block, or a part of it."""
    x = x if more is None else x + more
    if part != "forward":
        return getattr(type(block), part)(block, x, *args)
    return checkpoint_block(type(block).forward, kind, moment, block, x, *args)


def has_cached_graphs() -> bool:
    """Whether all graphs of this process came from the cache of an earlier one."""
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"]
    return bool(misses == 0 and counters["stats"]["unique_graphs"] > 0)


class CompiledBlocks:
    """The compiled function of all blocks of a model.

    backend: the compiler; "aot_eager" traces as it does and then runs operation by operation.
    """

    def __init__(self, trace: Trace, moment: StepContext, backend: str = "inductor") -> None:
        import torch._dynamo  # here, as it takes a second

        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
        self.trace = trace
        self.step_context = moment
        self.is_enabled = True
        # Graphs hang on the code: with one of another model's nothing would be noted here.
        own = FunctionType(_run_block_part.__code__.replace(), globals(), _run_block_part.__name__)
        self.compiled_function = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
        self.graph_events: dict[tuple[Any, ...], list[Event]] = {}
        """What each graph communicates, with names counted from the block."""

    def __call__(self, block: torch.nn.Module, name: str, kind: Recompute, *args: Any) -> Any:
        """Run a block."""
        for document in args:
            if hasattr(document, "cu_seqlens"):  # of documents, whose number is data
                torch._dynamo.maybe_mark_dynamic(document.cu_seqlens, 0)
        (x, *others), more = args, None
        if isinstance(x, DeferredResidual):
            x, more = x if kind == "none" else (x.x + x.addend, None)  # of what is kept: one tensor
        left = (
            self.step_context.defer_residual_add
            and kind == "none"
            and hasattr(block, "forward_without_add")
        )
        left = left and not (block._forward_hooks or block._forward_pre_hooks)
        travels = getattr(getattr(block, "mlp", None), "needs_all_to_all", False)
        part: BlockPart = "forward"
        if travels:
            part = "forward_attention"
        elif left:
            part = "forward_without_add"
        key = (type(block), kind, part, *map(_graph_key, (x, more, *others)))
        many = key not in self.graph_events and len(self.graph_events) >= MAX_MODEL_GRAPHS
        if many or (travels and kind != "none"):
            x = x if more is None else x + more
            return checkpoint_block(type(block).forward, kind, self.step_context, block, x, *others)
        out = self._call_graph(key, block, name, (kind, part), x, more, *others)
        if travels:
            out = out[0], block.mlp_to_residual(block.mlp(out[1]))  # type: ignore[operator]
        if left:
            return DeferredResidual(*out)
        if travels:
            return out[0] + out[1]
        return out

    def _call_graph(
        self,
        key: tuple[Any, ...],
        block: torch.nn.Module,
        name: str,
        how: tuple[Recompute, BlockPart],
        *args: Any,
    ) -> Any:
        """Call the graph; the trace gets what it communicates."""
        if key in self.graph_events and not self.trace.enabled:
            return self.compiled_function(*how, self.step_context, block, *args)
        where = self.trace.where
        depth = len(self.trace.outer_scopes)
        try:
            with self.trace.record_events() as noted:
                out = self.compiled_function(*how, self.step_context, block, *args)
        finally:  # tracing may have ended in the middle
            self.trace.where = where
            del self.trace.outer_scopes[depth:]
        events = self.graph_events.setdefault(key, list(noted))
        if self.trace.enabled:
            self.trace.events += [replace(e, where=f"{name}.{e.where}") for e in events]
        return out


def _graph_key(arg: Any) -> Any:
    """What a graph depends on of an argument."""
    if isinstance(arg, Tensor):
        return (arg.shape, arg.requires_grad)
    return type(arg)
