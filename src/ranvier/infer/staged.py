"""Staged: tokens from a model on a grid, whose stages, rows and columns all take part.

The simple way, as in `sample`: each token is one pass over all tokens before it. Not handled: a
cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ranvier.comm import verbs
from ranvier.parallel import Parallel, parallel_of
from ranvier.pipeline.runtime import Micro


def continued(
    model: nn.Module, tokens: Tensor, count: int, choose: Callable[[Tensor], Tensor]
) -> Tensor:
    """Tokens `[b, s]` with `count` more, the same on all ranks that read them: `[b, s + count]`.

    choose: tokens `[b]` from the logits `[b, v]` of the last ones; all ranks must choose alike.
    Communicates: as a forward pass; logits of one token over the axes of vocab; tokens over pipe.
    """
    parallel, was = parallel_of(model), model.training
    model.eval()
    try:
        for _ in range(count):
            tokens = torch.cat([tokens, choose(last_logits(parallel, tokens)).unsqueeze(1)], 1)
    finally:
        model.train(was)
        parallel.queue.begin("")
    return tokens


@torch.no_grad()
def last_logits(parallel: Parallel, tokens: Tensor) -> Tensor:
    """Logits of what follows the tokens: `[b, v]`, on all ranks."""
    grid, stage = parallel.grid, parallel.pipeline.runtime.stage
    samples, length = tokens.shape
    multiple = grid.degrees["row"] * grid.degrees["context"]
    shares = grid.degrees["col"] if parallel.table.inner == "samples" else 1
    # what comes later changes nothing before it
    padded = tokens.new_zeros(-(-samples // shares) * shares, -(-length // multiple) * multiple)
    padded[:samples, :length] = tokens
    parallel.queue.begin("generate")
    found = parallel.pipeline.runtime.forward([Micro({"tokens": padded})])
    region = parallel.table.region("vocab")
    vocab = grid.axis(*region["vocab"])
    batch = grid.axis(*(axis for axis in region["batch"] if axis == "col"))
    if not found:  # another stage has them
        words = parallel.sizes["vocab"]
        y = torch.zeros(samples, words, dtype=_dtype(parallel), device=tokens.device)
    else:
        y = verbs.all_gather(_whole(found[0][:, length - 1], parallel), vocab, -1).wait()
        y = verbs.all_gather(y, batch, 0).wait()[:samples, : parallel.sizes["vocab"]]
    axis = grid.axis("pipe")
    if stage.vocabulary:
        return y.contiguous()
    return verbs.broadcast(y.contiguous(), axis, axis.size - 1).wait()


def _whole(y: Tensor, parallel: Parallel) -> Tensor:
    """My logits with their padding, which the head has left out: all ranks have equally many."""
    axes = parallel.table.region("vocab")["vocab"]
    ranks = parallel.grid.axis(*axes).size
    degrees = parallel.grid.degrees
    multiple = degrees["row"] * degrees["col"] * (degrees["pipe"] if "pipe" in axes else 1)
    each = -(-parallel.sizes["vocab"] // multiple) * multiple // ranks
    return torch.nn.functional.pad(y, (0, each - y.shape[-1]))


def _dtype(parallel: Parallel) -> torch.dtype:
    return parallel.queue.buckets[0].data.dtype
