"""Compiled blocks: one full graph for all identical blocks of a model.

A block is compiled when it is first trained; the following blocks reuse its graph, as nothing in it
depends on the block index: weights are inputs, and names are relative to the block. The
communication of a graph is recorded when it is compiled, and added to the trace under the name of
the block at every call (without recomputed communication).

A graph belongs to one variant of a block (its part, its recompute mode, the properties of its
inputs) and is a compiled function of its own: variants and models share no cache and no limit of
the compiler, and a graph is freed with its owner. A variant that cannot be compiled runs eagerly
(`nn.compile_fallback`).

Blocks that dispatch tokens to experts of other ranks are an exception, as the host must know the
number of tokens. The part before the experts is a graph, and the experts run eagerly; with
activation checkpointing or a ladder residual the whole block runs eagerly. Attention over context
is one operation of a graph (`nn.context_graph`), which records its communication when it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ranvier.config.plan import Recompute
from ranvier.nn.activation_checkpoint import checkpoint_block
from ranvier.nn.attention import AttentionCore
from ranvier.nn.compile_fallback import CompileFallback, is_compile_error, is_launch_error
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.context_graph import BlockAttention
from ranvier.nn.layer import StepContext
from ranvier.trace import Event, Trace

RECOMPILE_LIMIT = 64
"""Maximum number of graphs of a variant, whose inputs may differ in ways that it does not know."""
MIN_DYNAMIC_SIZE = 2
"""Smallest number of tokens of a dynamic graph: torch.compile takes sizes 0 and 1 as constants."""
MAX_MODEL_GRAPHS = 24
"""Maximum number of variants of the blocks of a model that are compiled; others run eagerly."""


class DeferredResidual(NamedTuple):
    """A residual stream without its last add, which the next graph fuses."""

    x: Tensor
    addend: Tensor


BlockPart = Literal["forward", "forward_without_add", "forward_attention"]
"""Part of a block: all of it, all except its last add, or the part before its experts."""


def _run_block_part(
    kind: Recompute,
    part: BlockPart,
    moment: StepContext,
    block: torch.nn.Module,
    x: Tensor,
    more: Tensor | None,
    *args: Any,
) -> Any:
    """Runs a block or a part of it."""
    x = x if more is None else x + more
    if part != "forward":
        return getattr(type(block), part)(block, x, *args)
    return checkpoint_block(type(block).forward, kind, moment, block, x, *args)


def has_cached_graphs() -> bool:
    """Whether all graphs of this process came from the compile cache of an earlier process."""
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"]
    return bool(misses == 0 and counters["stats"]["unique_graphs"] > 0)


@dataclass(eq=False)
class BlockGraph:
    """The graph of one variant of a block."""

    function: Callable[..., Any]
    """Compiled; traced in its first call."""
    is_inference: bool
    events: list[Event] | None = None
    """Its communication, with names relative to the block; None before the first call."""


class CompiledBlocks:
    """Compiles the blocks of a model and runs them.

    Args:
        trace: Trace of the grid.
        moment: State of the current step.
        fallback: What happens to a variant that cannot be compiled.
    """

    def __init__(self, trace: Trace, moment: StepContext, fallback: CompileFallback) -> None:
        # Imported here, as the import takes a second.
        import torch._dynamo

        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
        self.trace = trace
        self.step_context = moment
        self.fallback = fallback
        self.is_enabled = True
        self.backend = "inductor"
        """The backend of torch.compile; can be changed until the first call. "aot_eager" traces as
        inductor does, but runs one operation at a time."""
        self.graphs: dict[tuple[Any, ...], BlockGraph] = {}
        """The graph of each variant that was compiled."""
        self._eager_keys: set[tuple[Any, ...]] = set()
        """Variants that could not be compiled."""

    def drop_inference_graphs(self) -> None:
        """Frees the graphs of an engine that is closed; the next one has another cache."""
        self.graphs = {key: graph for key, graph in self.graphs.items() if not graph.is_inference}

    def _build_graph(self, is_inference: bool) -> BlockGraph:
        """Returns a graph that is traced in its first call."""
        # Dynamo caches graphs by code object. With a graph of another variant nothing would be
        # traced here, and the communication would not be recorded.
        from torch._C._dynamo.eval_frame import reset_code

        own = FunctionType(_run_block_part.__code__.replace(), globals(), _run_block_part.__name__)
        options: dict[str, Any] | None = None
        if is_inference and self.backend == "inductor":
            from torch._inductor import config

            # Kernels of a step are short: they start before their predecessor has ended, if the
            # device can do that, and wait for it before they read what it writes.
            if hasattr(config.triton, "enable_pdl"):
                options = {"triton.enable_pdl": True}
        compiled = torch.compile(
            own, fullgraph=True, dynamic=False, backend=self.backend, options=options
        )
        graph = BlockGraph(compiled, is_inference)
        # What dynamo stores in a code object refers to it, which the garbage collector cannot see.
        weakref.finalize(graph, reset_code, own.__code__)
        return graph

    def __call__(self, block: torch.nn.Module, name: str, kind: Recompute, *args: Any) -> Any:
        """Runs a block, compiled if possible."""
        for document in args:
            # The number of documents is data and must not cause a recompilation.
            if hasattr(document, "cu_seqlens"):
                torch._dynamo.maybe_mark_dynamic(document.cu_seqlens, 0)
        is_inference = self.step_context.compiles_inference
        (x, *others), more = args, None
        if isinstance(x, DeferredResidual):
            # A recomputed block saves its inputs: one tensor is cheaper to save than two.
            x, more = x if kind == "none" else (x.x + x.addend, None)
        # Whether the block has a ladder residual, or returns two values for a block that has one.
        form = [getattr(block, name, False) for name in ("is_ladder", "returns_addend")]
        left = (
            self.step_context.defer_residual_add
            and kind == "none"
            and getattr(block, "can_defer_add", False)
            and not any(form)
        )
        # Hooks must see the complete output.
        left = left and not (block._forward_hooks or block._forward_pre_hooks)
        travels = getattr(getattr(block, "mlp", None), "needs_all_to_all", False)
        part: BlockPart = "forward"
        if travels:
            part = "forward_attention"
        elif left:
            part = "forward_without_add"
        # The iterations of a recurrent core that have no gradients have a graph of their own.
        has_grad = torch.is_grad_enabled()
        key = (type(block), kind, part, *form, has_grad, *map(_graph_key, (x, more, *others)))
        if is_inference:
            # One graph for all numbers of tokens and sequences.
            variants = [one.graph_variant for one in others if hasattr(one, "graph_variant")]
            adds = sum(isinstance(one, Tensor) for one in others)
            is_dynamic = x.shape[1] >= MIN_DYNAMIC_SIZE
            key = (type(block), part, *form, adds, *variants, more is None, is_dynamic)
            if key not in self.graphs:
                _mark_tokens_dynamic(args)
        is_refused = key in self._eager_keys or (
            key not in self.graphs and len(self.graphs) >= MAX_MODEL_GRAPHS
        )
        run_eagerly = partial(self._run_eagerly, block, kind, x, more, *others)
        if is_refused or (travels and (kind != "none" or any(form))):
            return run_eagerly()
        if key not in self.graphs:
            self.graphs[key] = self._build_graph(is_inference)
        try:
            out = self._call_graph(self.graphs[key], block, name, (kind, part), x, more, *others)
        except Exception as error:
            graph = self.graphs.pop(key)
            # A kernel may fail to start after the graph has communicated, which other ranks do not
            # repeat.
            if not is_compile_error(error) or (graph.events and is_launch_error(error)):
                raise
            self.fallback.handle("Blocks", error)
            self._eager_keys.add(key)
            return run_eagerly()
        if travels:
            # The experts run eagerly, between the graph and the residual add.
            x, y = out
            if not left:
                return block.add_mlp(x, block.mlp(y))  # type: ignore[operator]
            out = x, block.mlp_to_residual(block.mlp(y))  # type: ignore[operator]
        if left:
            return DeferredResidual(*out)
        return out

    def _run_eagerly(
        self, block: torch.nn.Module, kind: Recompute, x: Tensor, more: Tensor | None, *args: Any
    ) -> Any:
        """Runs a block without a graph."""
        x = x if more is None else x + more
        return checkpoint_block(type(block).forward, kind, self.step_context, block, x, *args)

    def _call_graph(
        self,
        graph: BlockGraph,
        block: torch.nn.Module,
        name: str,
        how: tuple[Recompute, BlockPart],
        *args: Any,
    ) -> Any:
        """Calls the graph and adds its communication to the trace."""
        layers = _context_layers(block)
        args = tuple(_as_graph_input(arg, name, layers) for arg in args)
        if graph.events is not None and not self.trace.enabled:
            return graph.function(*how, self.step_context, block, *args)
        where = self.trace.where
        depth = len(self.trace.outer_scopes)
        is_first = graph.events is None
        # Attention over context records its events in each call, under its full name.
        scopes = {layer.site.name for layer in layers.values()}
        try:
            # Events are recorded only while a graph is traced. For an existing graph `noted` is
            # empty, and the stored events are used.
            with self.trace.record_events() as noted, _lower_backward_too(is_first):
                out = graph.function(*how, self.step_context, block, *args)
        finally:
            # Tracing may have stopped inside a scope; restore the scopes of the caller.
            self.trace.where = where
            del self.trace.outer_scopes[depth:]
            if is_first:
                graph.events = [event for event in noted if event.where not in scopes]
        if self.trace.enabled:
            assert graph.events is not None
            self.trace.events += [event for event in noted if event.where in scopes]
            self.trace.events += [replace(e, where=f"{name}.{e.where}") for e in graph.events]
        return out


def _lower_backward_too(is_first: bool) -> AbstractContextManager[Any]:
    """Context in which the backward graph is compiled with the forward graph.

    Otherwise a failure would appear in the backward pass, in which a block cannot run eagerly any
    more.
    """
    if not is_first:
        return nullcontext()
    import torch._functorch.config

    context: AbstractContextManager[Any] = torch._functorch.config.patch(
        force_non_lazy_backward_lowering=True
    )
    return context


def _context_layers(block: torch.nn.Module) -> dict[str, AttentionCore]:
    """Returns the layers of a block that attend over context, by their names in the block."""
    return {
        layer.local_name: layer
        for layer in block.modules()
        if isinstance(layer, AttentionCore) and layer.context_axis.size > 1
    }


def _as_graph_input(arg: Any, block: str, layers: dict[str, AttentionCore]) -> Any:
    """Returns an argument of a block as its graph needs it."""
    if hasattr(arg, "without_lengths"):
        # torch 2.11 guards all fields of an argument of a recomputed block.
        return arg.without_lengths()
    if isinstance(arg, ContextDocuments) and layers:
        return BlockAttention.of_block(arg, block, layers)
    return arg


def _mark_tokens_dynamic(args: tuple[Any, ...]) -> None:
    """Marks the numbers of tokens and sequences as dynamic in the inputs of a block."""
    for arg in args:
        if isinstance(arg, DeferredResidual):
            _mark_tokens_dynamic(tuple(arg))
        elif isinstance(arg, Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, 1)
        elif hasattr(arg, "dynamic_dims"):
            for name, dims in arg.dynamic_dims.items():
                if getattr(arg, name) is not None:
                    torch._dynamo.maybe_mark_dynamic(getattr(arg, name), dims)


def _graph_key(arg: Any) -> Any:
    """Returns the properties of an argument that its graph depends on."""
    if isinstance(arg, Tensor):
        return (arg.shape, arg.requires_grad)
    return type(arg)
