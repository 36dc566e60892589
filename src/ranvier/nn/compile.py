"""Compiled blocks: one full graph for all equal blocks of a model.

A block is compiled the first time it is trained; the following blocks reuse its graph, as nothing
in it depends on the block index: weights are inputs, names are relative to the block. What a graph
communicates is recorded when it is traced and replayed into the trace, under the block's own name,
for every call (not what it recomputes).

Dispatching tokens to experts of other ranks is the exception: the host has to know their number, so
such a block is a graph up to its experts, which run eagerly; all of it runs eagerly where
activations are recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ranvier.config.plan import Recompute
from ranvier.nn.activation_checkpoint import checkpoint_block
from ranvier.nn.layer import StepContext
from ranvier.trace import Event, Trace

RECOMPILE_LIMIT = 64
"""Maximum number of graphs of a function: recompute modes, shapes, with documents and without."""
MAX_MODEL_GRAPHS = 24
"""Number of these that one model may use; further variants run eagerly."""


class DeferredResidual(NamedTuple):
    """A residual stream whose last add is left to the next graph, which fuses it."""

    x: Tensor
    addend: Tensor


BlockPart = Literal["forward", "forward_without_add", "forward_attention"]
"""Part of a block: all of it, all but its last add, or what comes before its experts."""


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
    """Whether all graphs of this process came from the compile cache of an earlier one."""
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"]
    return bool(misses == 0 and counters["stats"]["unique_graphs"] > 0)


class CompiledBlocks:
    """The compiled function of all blocks of a model."""

    def __init__(self, trace: Trace, moment: StepContext) -> None:
        # Imported here, as it takes a second.
        import torch._dynamo

        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
        self.trace = trace
        self.step_context = moment
        self.is_enabled = True
        self.backend = "inductor"
        """The compiler, until the first call; "aot_eager" traces as inductor does and then runs
        operation by operation."""
        self.graph_events: dict[tuple[Any, ...], list[Event]] = {}
        """Communication of each graph, with names relative to the block."""

    @cached_property
    def compiled_function(self) -> Callable[..., Any]:
        """The function that runs a block, or a part of it."""
        # Dynamo caches graphs by code object. A copy per model: with a graph of another model no
        # tracing would happen here, and its communication would not be recorded.
        own = FunctionType(_run_block_part.__code__.replace(), globals(), _run_block_part.__name__)
        return torch.compile(own, fullgraph=True, dynamic=False, backend=self.backend)

    def __call__(self, block: torch.nn.Module, name: str, kind: Recompute, *args: Any) -> Any:
        """Run a block."""
        for document in args:
            # The number of documents is data and must not cause a recompilation.
            if hasattr(document, "cu_seqlens"):
                torch._dynamo.maybe_mark_dynamic(document.cu_seqlens, 0)
        (x, *others), more = args, None
        if isinstance(x, DeferredResidual):
            # A recomputed block saves its inputs: one tensor is cheaper to save than two.
            x, more = x if kind == "none" else (x.x + x.addend, None)
        left = (
            self.step_context.defer_residual_add
            and kind == "none"
            and hasattr(block, "forward_without_add")
        )
        # Hooks must see the complete output.
        left = left and not (block._forward_hooks or block._forward_pre_hooks)
        travels = getattr(getattr(block, "mlp", None), "needs_all_to_all", False)
        part: BlockPart = "forward"
        if travels:
            part = "forward_attention"
        elif left:
            part = "forward_without_add"
        key = (type(block), kind, part, *map(_graph_key, (x, more, *others)))
        # Beyond the limit new variants run eagerly instead of hitting dynamo's recompile limit.
        many = key not in self.graph_events and len(self.graph_events) >= MAX_MODEL_GRAPHS
        if many or (travels and kind != "none"):
            x = x if more is None else x + more
            return checkpoint_block(type(block).forward, kind, self.step_context, block, x, *others)
        out = self._call_graph(key, block, name, (kind, part), x, more, *others)
        if travels:
            # The experts run eagerly, between the graph and the residual add.
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
        """Call the graph and add what it communicates to the trace."""
        if key in self.graph_events and not self.trace.enabled:
            return self.compiled_function(*how, self.step_context, block, *args)
        where = self.trace.where
        depth = len(self.trace.outer_scopes)
        try:
            # Only tracing records events, so an existing graph leaves `noted` empty and the stored
            # events are used.
            with self.trace.record_events() as noted:
                out = self.compiled_function(*how, self.step_context, block, *args)
        finally:
            # Tracing may have stopped inside of a scope; restore the scopes of the caller.
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
