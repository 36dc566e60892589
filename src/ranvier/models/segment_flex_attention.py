"""Attention of segments with a soft cap by FlexAttention, as torch's flash kernel has no cap.

A query sees consecutive keys, so a mask is two numbers per query. The block mask follows from these
numbers; the mask is never evaluated for all pairs of queries and keys. Plain PyTorch; imports only
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 128
"""Number of queries and of keys of a block, as in FlexAttention by default."""


@functools.cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Returns the kernel for any number of queries and keys, which differ between micro-batches."""
    # The import takes long, and only models with a cap need it.
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    return compiled


@dataclass(frozen=True, eq=False)
class FlexAttention:
    """Attention of queries to the keys from `first` up to, but not including, `end`."""

    first: Tensor
    """First key that each query sees, `[T_q]`, int32."""
    end: Tensor
    """`[T_q]`, int32; equal to `first` for queries that see nothing."""
    num_keys: int
    kernel: Callable[..., Any]
    """`flex_attention`, compiled or not."""

    @functools.cached_property
    def block_mask(self) -> Any:
        """Blocks of keys that the blocks of queries see, wholly or in part."""
        from torch.nn.attention.flex_attention import BlockMask

        first, end = self.first, self.end
        device = first.device
        queries = -(-len(first) // BLOCK_SIZE)
        keys = -(-self.num_keys // BLOCK_SIZE)
        padding = queries * BLOCK_SIZE - len(first)
        low, high = (
            torch.nn.functional.pad(x, (0, padding)).view(queries, BLOCK_SIZE) for x in (first, end)
        )
        some = torch.zeros(queries, keys + 1, dtype=torch.int32, device=device)
        every = torch.zeros_like(some)
        # Each query adds 1 at its first block, and subtracts it after its last one; the running
        # sum is the number of queries that see something of a block.
        sees = (high > low).int()
        some.scatter_add_(1, (low // BLOCK_SIZE).long(), sees)
        some.scatter_add_(1, ((high + BLOCK_SIZE - 1) // BLOCK_SIZE).long(), -sees)
        # The same for the blocks that a query sees wholly.
        from_block = (low + BLOCK_SIZE - 1) // BLOCK_SIZE
        to_block = high // BLOCK_SIZE
        whole = (to_block > from_block).int()
        every.scatter_add_(1, from_block.clamp(max=keys).long(), whole)
        every.scatter_add_(1, to_block.long(), -whole)
        full = every.cumsum(1)[:, :keys] == BLOCK_SIZE
        partial = (some.cumsum(1)[:, :keys] > 0) & ~full
        counts, indices = zip(*map(_list_blocks, (partial, full)), strict=True)

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key < end[query])

        return BlockMask.from_kv_blocks(
            counts[0],
            indices[0],
            counts[1],
            indices[1],
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=mask,
            seq_lengths=(len(first), self.num_keys),
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Returns the output `[T_q, h, k]`, and log-sum-exps `[h, T_q]`."""
        o, lse = self._run_kernel(heads_first(q), heads_first(k), heads_first(v), cap)
        return o[0].transpose(0, 1), lse[0]

    def _run_kernel(self, q: Tensor, k: Tensor, v: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        """Returns the output `[1, h, T_q, k]`, and log-sum-exps `[1, h, T_q]`."""
        # A kernel for any number of keys has no constant floats: a float that score_mod uses must
        # be a tensor on the device.
        limit = torch.full((), cap, device=q.device)

        def soft_cap(
            score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor
        ) -> Tensor:
            return limit * torch.tanh(score / limit)

        o, lse = self.kernel(
            q,
            k,
            v,
            score_mod=soft_cap,
            block_mask=self.block_mask,
            enable_gqa=q.shape[1] != k.shape[1],
            return_lse=True,
        )
        return o, lse

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v from these keys. o, lse: of all keys.

        The forward pass is repeated, as its backward needs the log-sum-exp l' of these keys. With
        w = exp(l' - l), the gradient of its output o' is w dy, and that of l' is w Σ dy (o' - o).
        """
        dy, o = (heads_first(x).float() for x in (dy, o))
        leaves = [heads_first(x).detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            own_o, own_lse = self._run_kernel(leaves[0], leaves[1], leaves[2], cap)
        # Queries that see no key here have no gradient.
        weight = (own_lse.detach() - lse).exp().masked_fill(own_lse == float("-inf"), 0.0)
        difference = (dy * (own_o.detach().float() - o)).sum(-1)  # (1, h, T)
        d_output = (dy * weight.unsqueeze(-1)).to(own_o.dtype)
        grads = torch.autograd.grad((own_o, own_lse), leaves, (d_output, weight * difference))
        dq, dk, dv = (x[0].transpose(0, 1).float() for x in grads)
        return dq, dk, dv


def heads_first(x: Tensor) -> Tensor:
    """Returns `[1, h, T, k]` of `[T, h, k]`."""
    return x.transpose(0, 1).unsqueeze(0)


def _list_blocks(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of blocks that are seen, `[1, 1, queries]`, and their numbers first."""
    indices = torch.argsort(seen.int(), dim=1, descending=True, stable=True)
    return seen.sum(1).int()[None, None], indices.int()[None, None]
