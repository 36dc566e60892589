"""Blocks: how one runs. Its weights have come, what it keeps waits where the model wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.buckets.scheduler import Deferred
from ranvier.config.plan import Recompute
from ranvier.nn.activation_checkpoint import again
from ranvier.nn.compile import Compiled
from ranvier.nn.layer import Site


def run_block(
    block: nn.Module,
    forward: Callable[..., Any],
    name: str,
    kinds: Mapping[str, Recompute],
    site: Site,
    compiled: Compiled | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block as its kind says; a trace that is on shows when.

    Without gradients a block is not worth a graph of its own.
    """
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if name in kinds:
        site.queue.enter(name)
    with site.grid.trace.compute(f"forward {name}"), site.moment.keeping.store.block(name):
        kind = kinds.get(name, "none")
        if compiled is not None and compiled.on and torch.is_grad_enabled() and not kwargs:
            out = compiled(block, name, kind, *args)
        else:
            out = again(forward, kind, site.moment, *args, **kwargs)
    if site.queue.homes is not None and name in kinds:  # backward begins with what comes out
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(_back, site.queue, name))
    return out


def _back(queue: Deferred, name: str, grad: Tensor) -> None:
    """Have the weights of a block for its backward pass."""
    queue.use(name)
