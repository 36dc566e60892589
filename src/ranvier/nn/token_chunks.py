"""Blocks in chunks of tokens, for ranks that have hundreds of thousands of tokens of a sample.

Only attention looks at several tokens. Norms, projections and the MLP run on some tokens at a time,
and run again in backward (sequence tiling, the tiled MLP of ALST, Bekman et al. 2025):

    chunks of tokens   x -> norm, q, k and v projections, rotation -> q, k, v
    all tokens         q, k, v -> attention -> a
    chunks of tokens   x, a -> output projection, norm, MLP -> y

So x, q, k, v, a, y and their gradients are whole, and nothing of the size of the MLP is. The second
part ends the block: the recomputation of a block does not run it, its backward does. What a block
saves until backward depends on its recompute mode: full: x; selective: x and the result of
attention (no other matmul runs outside of chunks); none: x, q, k, v and the result of attention.

Weight gradients of the chunks of a part are summed and added to their bucket once. Activations must
not be communicated inside of a block: with row or col above 1, blocks run as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ranvier.comm.collectives import hide_from_dispatch_modes
from ranvier.config.plan import Plan
from ranvier.nn.layer import LayerContext, apply_autograd

ChunkFunction = Callable[..., tuple[Tensor, ...]]
"""Maps tensors `[b, c, ...]` of c tokens to tensors of the same tokens."""


@dataclass(frozen=True)
class TokenChunks:
    """Runs the blocks of a model in chunks of tokens."""

    plan: Plan
    site: LayerContext

    def chunk_size(self, block: nn.Module, x: Any) -> int:
        """Returns the tokens of a chunk of x `[b, s, d]`; 0 if the block runs as a whole."""
        # Passes without gradients keep nothing for backward.
        if not torch.is_grad_enabled() or not isinstance(x, Tensor):
            return 0
        size = self.plan.tokens_per_chunk(x.shape[0], x.shape[1])
        return size if size and has_token_parts(block) else 0

    def forward(
        self,
        block: Any,
        chunk: int,
        x: Tensor,
        angles: Tensor | None,
        documents: Any,
        addend: Tensor | None = None,
    ) -> Any:
        """Runs a block in chunks of `chunk` tokens; x, addend, y: `[b, s, d]`."""
        weights = [weight for weight in block.parameters() if weight.requires_grad]
        steps = max(chunk // x.shape[0], 1)
        inputs = [x] if angles is None else [x, angles]

        def before(x: Tensor, angles: Tensor | None = None) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = block.forward_before_attention(x, angles)
            return found

        def after(*inputs: Tensor) -> tuple[Tensor, ...]:
            found = block.forward_after_attention(*inputs)
            return found if isinstance(found, tuple) else (found,)

        run = _ChunkedPart(before, self.site, steps, len(inputs))
        q, k, v = apply_autograd(_RunInChunks, run, *inputs, *weights)
        attended = block.attention.core(q, k, v, angles, documents, is_rotated=True)
        # Backward keeps what it needs; this frame must not.
        del q, k, v
        inputs = [x, attended] if addend is None else [x, attended, addend]
        outputs = 2 if getattr(block, "returns_addend", False) else 1
        run = _ChunkedPart(after, self.site, steps, len(inputs), num_block_outputs=outputs)
        ys = apply_autograd(_RunInChunks, run, *inputs, *weights)
        return ys if outputs > 1 else ys[0]


def has_token_parts(block: nn.Module) -> bool:
    """Whether a block has a part before and a part after attention that treat tokens alike."""
    # Experts have a capacity per sequence, and dropout masks depend on the places of all tokens.
    return hasattr(block, "forward_after_attention") and not any(
        hasattr(one, "needs_all_to_all") or getattr(one, "p", 0.0) for one in block.modules()
    )


@dataclass(frozen=True)
class _ChunkedPart:
    """A part of a block that treats tokens alike."""

    function: ChunkFunction
    site: LayerContext
    chunk: int
    """Tokens of a sample in a chunk."""
    num_inputs: int
    num_block_outputs: int = 0
    """Number of its results if they are those of the block, which a recomputation does not need."""

    def slices(self, x: Tensor) -> Iterator[slice]:
        """Yields the tokens of each chunk of x `[b, s, ...]`."""
        for start in range(0, x.shape[1], self.chunk):
            yield slice(start, min(start + self.chunk, x.shape[1]))

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """Returns a context in which weight gradients are computed at once, and summed."""
        moment = self.site.step_context
        deferred = moment.deferred_weight_grads
        # A deferred gradient would keep the activations of its chunk.
        moment.deferred_weight_grads = None
        try:
            with self.site.bucket_scheduler.sum_weight_grads(), torch.enable_grad():
                yield
        finally:
            moment.deferred_weight_grads = deferred


class _RunInChunks(torch.autograd.Function):
    """Runs a part of a block in chunks of tokens; backward computes each chunk again."""

    @staticmethod
    def forward(ctx: Any, part: _ChunkedPart, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: part.num_inputs]
        ctx.part = part
        ctx.num_weights = len(tensors) - part.num_inputs
        ctx.save_for_backward(*inputs)
        if part.num_block_outputs and part.site.step_context.is_recompute:
            # Only its inputs are needed, and they are saved. It is never read.
            return tuple(
                inputs[0].new_full((), torch.nan).expand(inputs[0].shape)
                for _ in range(part.num_block_outputs)
            )
        wholes: list[Tensor] = []
        # Nothing inside is saved for a recomputation, which runs the chunks again.
        with part.site.grid.trace.outside_block(), hide_from_dispatch_modes():
            for rows in part.slices(inputs[0]):
                made = part.function(*(x[:, rows] for x in inputs))
                if not wholes:
                    wholes = [_empty_for_tokens(y, inputs[0].shape[1]) for y in made]
                for whole, y in zip(wholes, made, strict=True):
                    whole[:, rows] = y
        return tuple(wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part: _ChunkedPart = ctx.part
        needs = ctx.needs_input_grad[1 : part.num_inputs + 1]
        inputs: Sequence[Tensor] = ctx.saved_tensors
        found = [torch.empty_like(x) if n else None for x, n in zip(inputs, needs, strict=True)]
        with part.backward_context():
            for rows in part.slices(inputs[0]):
                some = [
                    x[:, rows].detach().requires_grad_(n)
                    for x, n in zip(inputs, needs, strict=True)
                ]
                torch.autograd.backward(part.function(*some), [dy[:, rows] for dy in grads])
                for whole, x in zip(found, some, strict=True):
                    if whole is not None and x.grad is not None:
                        whole[:, rows] = x.grad
        return None, *found, *[None] * ctx.num_weights


def _empty_for_tokens(y: Tensor, tokens: int) -> Tensor:
    """Returns an empty tensor like y `[b, c, ...]` with another number of tokens."""
    return y.new_empty((y.shape[0], tokens, *y.shape[2:]))
