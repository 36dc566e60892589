"""Runs a block: prepares its weights and applies its recompute mode and its save policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.config.plan import Recompute
from ranvier.nn.activation_checkpoint import checkpoint_block
from ranvier.nn.compile import CompiledBlocks, DeferredResidual
from ranvier.nn.layer import LayerContext
from ranvier.nn.token_chunks import TokenChunks


def run_block(
    block: nn.Module,
    forward: Callable[..., Any],
    name: str,
    kinds: Mapping[str, Recompute],
    site: LayerContext,
    compiled: CompiledBlocks | None,
    chunks: TokenChunks | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a block with its recompute mode; an enabled trace records its time.

    In evaluation, or in chunks of tokens, it runs eagerly, unless the step context asks for a
    graph.
    """
    # While the whole model is traced, the block is a part of that graph.
    if torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    if name in kinds:
        site.bucket_scheduler.prepare_block(name)
    with (
        site.grid.trace.record_compute(f"forward {name}"),
        site.step_context.save_policy.store.block_context(name),
    ):
        kind = kinds.get(name, "none")
        chunk = 0
        if chunks is not None and name in kinds and not kwargs:
            # The add that a compiled block has left.
            if isinstance(args[0], DeferredResidual) and chunks.chunk_size(block, args[0].x):
                args = (args[0].x + args[0].addend, *args[1:])
            chunk = chunks.chunk_size(block, args[0])
        # In training, iterations of a recurrent core without gradients have a graph too.
        in_step = torch.is_grad_enabled() or block.training
        wants_graph = in_step or site.step_context.compiles_inference
        if chunks is not None and chunk:
            run = partial(chunks.forward, block, chunk)
            out = checkpoint_block(run, kind, site.step_context, *args)
        elif compiled is not None and compiled.is_enabled and wants_graph and not kwargs:
            out = compiled(block, name, kind, *args)
        else:
            out = checkpoint_block(forward, kind, site.step_context, *args, **kwargs)
    # The backward pass of the block starts with the gradient of its output, so a hook there
    # fetches offloaded weights in time.
    if site.bucket_scheduler.host_offload is not None and name in kinds:
        for value in out if isinstance(out, tuple) else (out,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(
                    partial(_fetch_weights_for_backward, site.bucket_scheduler, name)
                )
    return out


def _fetch_weights_for_backward(queue: BucketScheduler, name: str, grad: Tensor) -> None:
    """Fetches the weights of a block for its backward pass."""
    queue.unshard_block(name)
