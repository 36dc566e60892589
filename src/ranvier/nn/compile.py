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
from ranvier.nn.activation_checkpoint import again
from ranvier.nn.layer import Moment
from ranvier.trace import Event, Trace

GRAPHS = 64
"""Graphs of a function at most: kinds of recomputation, shapes, with documents and without."""
SHAPES = 24
"""Of these what a model asks for; more run operation by operation."""


class Unadded(NamedTuple):
    """A residual stream whose last addition is left to the next graph, which does it in passing."""

    x: Tensor
    more: Tensor


Part = Literal["forward", "halves", "before"]
"""Of a block: all of it, all but its last addition, or what comes before its experts."""


def _block(
    kind: Recompute,
    part: Part,
    moment: Moment,
    block: torch.nn.Module,
    x: Tensor,
    more: Tensor | None,
    *args: Any,
) -> Any:
    """Run a block, or a part of it."""
    x = x if more is None else x + more
    if part != "forward":
        return getattr(type(block), part)(block, x, *args)
    return again(type(block).forward, kind, moment, block, x, *args)


def found() -> bool:
    """Whether all graphs of this process came from the cache of an earlier one."""
    from torch._dynamo.utils import counters

    misses = counters["inductor"]["fxgraph_cache_miss"]
    return bool(misses == 0 and counters["stats"]["unique_graphs"] > 0)


class Compiled:
    """The compiled function of all blocks of a model.

    backend: the compiler; "aot_eager" traces as it does and then runs operation by operation.
    """

    def __init__(self, trace: Trace, moment: Moment, backend: str = "inductor") -> None:
        import torch._dynamo  # here, as it takes a second

        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, GRAPHS)
        self.trace, self.moment, self.on = trace, moment, True
        # Graphs hang on the code: with one of another model's nothing would be noted here.
        own = FunctionType(_block.__code__.replace(), globals(), _block.__name__)
        self.function = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
        self.events: dict[tuple[Any, ...], list[Event]] = {}
        """What each graph communicates, with names counted from the block."""

    def __call__(self, block: torch.nn.Module, name: str, kind: Recompute, *args: Any) -> Any:
        """Run a block."""
        for document in args:
            if hasattr(document, "bounds"):  # of documents, whose number is data
                torch._dynamo.maybe_mark_dynamic(document.bounds, 0)
        (x, *others), more = args, None
        if isinstance(x, Unadded):
            x, more = x if kind == "none" else (x.x + x.more, None)  # of what is kept: one tensor
        left = self.moment.leave and kind == "none" and hasattr(block, "halves")
        left = left and not (block._forward_hooks or block._forward_pre_hooks)
        travels = getattr(getattr(block, "mlp", None), "travels", False)
        part: Part = "before" if travels else "halves" if left else "forward"
        key = (type(block), kind, part, *map(_seen, (x, more, *others)))
        many = key not in self.events and len(self.events) >= SHAPES
        if many or (travels and kind != "none"):
            x = x if more is None else x + more
            return again(type(block).forward, kind, self.moment, block, x, *others)
        out = self._called(key, block, name, (kind, part), x, more, *others)
        if travels:
            out = out[0], block.behind(block.mlp(out[1]))  # type: ignore[operator]
        if left:
            return Unadded(*out)
        return out[0] + out[1] if travels else out

    def _called(
        self,
        key: tuple[Any, ...],
        block: torch.nn.Module,
        name: str,
        how: tuple[Recompute, Part],
        *args: Any,
    ) -> Any:
        """Call the graph; the trace gets what it communicates."""
        if key in self.events and not self.trace.on:
            return self.function(*how, self.moment, block, *args)
        where, depth = self.trace.where, len(self.trace.outer)
        try:
            with self.trace.recording() as noted:
                out = self.function(*how, self.moment, block, *args)
        finally:  # tracing may have ended in the middle
            self.trace.where = where
            del self.trace.outer[depth:]
        events = self.events.setdefault(key, list(noted))
        if self.trace.on:
            self.trace.events += [replace(e, where=f"{name}.{e.where}") for e in events]
        return out


def _seen(arg: Any) -> Any:
    """What a graph depends on of an argument."""
    return (arg.shape, arg.requires_grad) if isinstance(arg, Tensor) else type(arg)
