"""Attention over keys and values that are stored in blocks of a cache (PagedAttention).

A step of an inference engine computes some tokens of several sequences, concatenated. Keys and
values of all their earlier tokens are in the cache, in blocks of `block_size` tokens that need not
be adjacent. The step first writes its own keys and values into their slots, and then attends, so
that a token sees the whole sequence up to itself. Plain PyTorch; imports only torch.

Ranks of context share the tokens of a sequence. A page is `block_size` consecutive tokens, and page
i is stored by rank i mod C: block j of the block table is page C·j + c on rank c. A rank attends to
its own pages, and returns log-sum-exps, with which the results of all ranks are merged.

Shapes: T tokens of a step, n sequences, h heads, g kv heads, k head dim. A layer has a cache
`[num_blocks, g, block_size, k]` of keys and one of values: the tokens of a head are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PARTS = 8192
"""Maximum number of parts that a kernel divides the sequences and heads of a step into."""


def num_split_counters(num_sequences: int, num_kv_heads: int) -> int:
    """Returns how many counters a decode kernel needs: of all heads, and of groups of parts."""
    return num_sequences * num_kv_heads + MAX_PARTS


class EarlyExit(Protocol):
    """Decides after each iteration of recurrent layers which tokens need no further one."""

    decides: bool
    """Whether a token of the step is to be decided, so that logits are needed."""

    def hide_finished(self, sequences: PagedSequences) -> PagedSequences:
        """Returns the sequences of a step, with finished tokens writing into block 0."""

    def keep_finished(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the states after an iteration, of finished tokens those before."""

    def update(self, iteration: int, logits: Tensor | None, sequences: PagedSequences) -> bool:
        """Finds the tokens that exit after an iteration. Returns whether all have."""


@dataclass(frozen=True, eq=False)
class PagedSequences:
    """The sequences of a step, and where their keys and values are stored.

    A step may have padding: tokens after the last sequence, whose slots are in block 0, which no
    sequence uses.
    """

    query_start_loc: Tensor
    """Start of the tokens of each sequence in the step, then the end, int32 `[n + 1]`."""
    seq_lens: Tensor
    """Number of tokens of each sequence up to its last one in this step, int32 `[n]`."""
    block_table: Tensor
    """Blocks of each sequence in order, int32 `[n, most blocks]`; 0 after the last one."""
    slot_mapping: Tensor
    """Slot of each token, block · block_size + offset, int64 `[T]`."""
    rope_lengths: Tensor
    """Number of known tokens of each token's sequence, which LongRoPE depends on, `[1, T]`; if
    context splits the tokens of the step, of those of this rank, `[1, T/context]`."""
    token_rows: Tensor
    """Row of the sequence of each token in `block_table`, `[T]`."""
    token_lens: Tensor
    """Number of tokens that each token sees, including itself, `[T]`; 0 for padding."""
    host_lens: Tensor | None = None
    """Number of tokens of each sequence in the step, and `seq_lens`, on the host, int64 `[2, n]`.
    None if nothing is known on the host, so that a graph can be replayed for other sequences."""
    is_decode: bool = False
    """Whether row i is the one token of sequence i. Rows without a sequence see 0 tokens."""

    context_size: int = 1
    """Number of ranks of context, which store the pages of a sequence in turn."""
    context_index: int = 0
    """Index of this rank on context. Tokens in pages of other ranks have slots in block 0."""

    num_iterations: int = 1
    """Number of iterations of recurrent layers, at most."""
    iteration: int = 0
    """The current iteration, which has keys and values of its own."""
    early_exit: EarlyExit | None = None
    """Which tokens have fewer iterations; None if none has."""

    split_counters: Tensor | None = None
    """Scratch memory of decode kernels, int32, of `num_split_counters`; zeros before and after each
    use."""

    dynamic_dims: ClassVar[Mapping[str, tuple[int, ...]]] = MappingProxyType(
        {
            "query_start_loc": (0,),
            "seq_lens": (0,),
            "block_table": (0, 1),
            "slot_mapping": (0,),
            "rope_lengths": (1,),
            "token_rows": (0,),
            "token_lens": (0,),
            "host_lens": (1,),
            "split_counters": (0,),
        }
    )
    """Dims of tensors whose sizes are numbers of tokens, sequences or blocks. A compiled graph is
    the same for all of them."""

    @property
    def graph_variant(self) -> tuple[bool, bool]:
        """What a compiled graph of a step depends on, apart from sizes."""
        return self.is_decode, self.host_lens is None

    @property
    def query_lens(self) -> list[int]:
        """Number of tokens of each sequence in the step."""
        assert self.host_lens is not None
        return self.host_lens[0].tolist()

    @property
    def host_seq_lens(self) -> list[int]:
        """`seq_lens` on the host."""
        assert self.host_lens is not None
        return self.host_lens[1].tolist()

    def narrow(self, start: int, tokens: int) -> PagedSequences:
        """Returns these sequences: a rank only has those whose blocks it stores.

        tokens: all tokens of the step, or, if context splits them, those of a rank.
        """
        size = len(self.slot_mapping)
        # A model with streams has each token several times.
        allowed = (size, size // self.context_size)
        assert any(tokens % count == 0 for count in allowed), (tokens, size)
        return self


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of one layer, `[num_blocks, g, block_size, k]` each."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        """Number of tokens of a block."""
        return self.keys.shape[2]

    def write(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Writes keys and values of tokens, `[T, g, k]` each, into their slots."""
        rows = self._rows_of_slots(slot_mapping)
        for cache, x in ((self.keys, k), (self.values, v)):
            # A view: the tokens of all heads of all blocks.
            tokens = cache.view(-1, cache.shape[-1])
            tokens.index_copy_(0, rows, x.flatten(0, 1).to(cache.dtype))

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the blocks of sequences, `[n, g, blocks · block_size, k]`.

        blocks: `[n, blocks]`.
        """
        # Selecting the blocks of each head in the order of the result takes only one copy.
        rows = self._rows_of_heads(blocks).flatten()
        shape = (len(blocks), self.keys.shape[1], -1, self.keys.shape[3])
        keys, values = (
            cache.view(-1, self.block_size * cache.shape[3]).index_select(0, rows).view(shape)
            for cache in (self.keys, self.values)
        )
        return keys, values

    def copy_slots(self, source: KVCache, slot_mapping: Tensor) -> None:
        """Copies keys and values of some tokens from another cache of the same shape."""
        rows = self._rows_of_slots(slot_mapping)
        for cache, other in ((self.keys, source.keys), (self.values, source.values)):
            width = cache.shape[-1]
            cache.view(-1, width).index_copy_(0, rows, other.view(-1, width).index_select(0, rows))

    def clear_new_values(self, slot_mapping: Tensor) -> None:
        """Clears the values of the blocks whose first slot is that of a token, `[T]`."""
        is_first = slot_mapping % self.block_size == 0
        self.values[slot_mapping[is_first] // self.block_size] = 0.0

    def _rows_of_slots(self, slot_mapping: Tensor) -> Tensor:
        """Returns where the tokens of each head are, counted in tokens of one head, `[T · g]`."""
        blocks = slot_mapping // self.block_size
        rows = self._rows_of_heads(blocks.unsqueeze(1)).squeeze(-1) * self.block_size
        return (rows + (slot_mapping % self.block_size).unsqueeze(1)).flatten()

    def _rows_of_heads(self, blocks: Tensor) -> Tensor:
        """Returns where the blocks of each head are, counted in blocks of one head, `[n, g, B]`.

        blocks: `[n, B]`.
        """
        num_heads = self.keys.shape[1]
        heads = torch.arange(num_heads, device=blocks.device)
        return blocks.unsqueeze(1) * num_heads + heads.unsqueeze(1)


PagedAttention = Callable[[Tensor, Tensor, Tensor, KVCache, PagedSequences, int, float], Tensor]
"""q, k, v, cache, sequences, window and cap to the output; see `paged_attention`."""


PagePartAttention = Callable[
    [Tensor, Tensor, Tensor, KVCache, PagedSequences, int, float], tuple[Tensor, Tensor]
]
"""As `PagedAttention`, to the output over the pages of this rank, and its log-sum-exps; see
`attend_to_own_pages`."""


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Writes keys and values of a step into the cache, and attends to all that the cache has.

    q, y: `[T, h, k]`; k, v: `[T, g, k]`. window: number of tokens that a token attends to,
    including itself; 0 means all. cap: scores become cap · tanh(score / cap); 0 disables it.
    """
    cache.write(k, v, sequences.slot_mapping)
    y = torch.zeros_like(q)
    lengths = sequences.host_seq_lens
    # Of finished tokens the cache has the keys to attend to, and the step has others.
    uses_step_keys = sequences.early_exit is None and not window and cap == 0.0
    decoding: dict[int, list[int]] = {}
    start = 0
    for i, length in enumerate(sequences.query_lens):
        some = slice(start, start + length)
        start += length
        if length == 1:
            # Sequences of similar length attend together: all are padded to the longest.
            num_blocks = -(-lengths[i] // cache.block_size)
            decoding.setdefault((num_blocks - 1).bit_length(), []).append(i)
        elif length == lengths[i] and uses_step_keys:
            y[some] = _attend_to_step(q[some], k[some], v[some])
        elif length > 1:
            table = sequences.block_table[i : i + 1]
            y[some] = attend_to_blocks(
                q[some].unsqueeze(0), cache, table, lengths[i : i + 1], window, cap
            )[0]
    for group in decoding.values():
        rows = torch.tensor(group, device=q.device)
        at = sequences.query_start_loc[rows].long()
        y[at] = attend_to_blocks(
            q[at].unsqueeze(1),
            cache,
            sequences.block_table[rows],
            [lengths[i] for i in group],
            window,
            cap,
        ).squeeze(1)
    return y


def _attend_to_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of all tokens of one sequence; q, y: `[s, h, k]`; k, v: `[s, g, k]`."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    shared = q.shape[1] != k.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y[0].transpose(0, 1)


def attend_to_blocks(
    q: Tensor,
    cache: KVCache,
    block_table: Tensor,
    seq_lens: Sequence[int],
    window: int,
    cap: float,
) -> Tensor:
    """Attention of the last queries of some sequences, `[n, s, h, k]`, to all their tokens."""
    lengths = torch.tensor(seq_lens, device=q.device)
    num_blocks = -(-max(seq_lens) // cache.block_size)
    keys, values = cache.read(block_table[:, :num_blocks].long())  # (n, g, L, k)
    places = torch.arange(keys.shape[2], device=q.device)
    # Queries are the last tokens of their sequence: query i of s is at position length - s + i.
    at = lengths.unsqueeze(1) - q.shape[1] + torch.arange(q.shape[1], device=q.device)  # (n, s)
    visible = places <= at.unsqueeze(-1)  # (n, s, L)
    if window:
        visible &= places > at.unsqueeze(-1) - window
    visible = visible.unsqueeze(1)
    q = q.transpose(1, 2)  # (n, h, s, k)
    keys, values = keys.to(q.dtype), values.to(q.dtype)
    if cap == 0.0:
        if q.shape[2] == 1:
            # Heads that share keys are the rows of one product, which reads the keys once.
            rows = q.squeeze(2).unflatten(1, (keys.shape[1], -1))  # (n, g, h/g, k)
            y = F.scaled_dot_product_attention(rows, keys, values, visible)
            return y.flatten(1, 2).unsqueeze(1)
        shared = q.shape[1] != keys.shape[1]
        y = F.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=shared)
        return y.transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.unflatten(1, (keys.shape[1], -1))  # (n, g, h/g, s, k)
    scores = (groups @ keys.unsqueeze(2).transpose(-1, -2) * q.shape[-1] ** -0.5).to(wide)
    scores = (torch.tanh(scores / cap) * cap).masked_fill(~visible.unsqueeze(2), float("-inf"))
    y = scores.softmax(-1).to(q.dtype) @ values.unsqueeze(2)
    return y.flatten(1, 2).transpose(1, 2)


# ---- pages on several ranks ----------------------------------------------------------------------

MAX_SCORES = 1 << 22
"""Number of scores that are computed at a time, unless one query of some sequences has more."""


def attend_to_own_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    sequences: PagedSequences,
    window: int = 0,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Writes keys and values of own pages into the cache, and attends to all own pages.

    q, o: `[T, h, k]`; k, v: `[T, g, k]`; log-sum-exps: `[h, T]`; both results in fp32, or float64
    for float64. A token that sees no key of this rank has o = 0 and a log-sum-exp of -inf. window,
    cap: as in `paged_attention`.
    """
    cache.write(k, v, sequences.slot_mapping)
    dtype = torch.promote_types(q.dtype, torch.float32)
    o = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[1]), float("-inf"), dtype=dtype)
    lengths = sequences.host_seq_lens
    groups: dict[tuple[int, int], list[int]] = {}
    for i, length in enumerate(sequences.query_lens):
        if length == 1:
            # Sequences of similar length attend together: all are padded to the longest.
            groups.setdefault((-1, lengths[i].bit_length()), []).append(i)
        elif length > 1:
            groups[i, 0] = [i]
    for group in groups.values():
        rows = torch.tensor(group, device=q.device)
        count = sequences.query_lens[group[0]]
        num_pages = -(-max(lengths[i] for i in group) // cache.block_size)
        # Pages of this rank among the first ones.
        num_blocks = -(-max(num_pages - sequences.context_index, 0) // sequences.context_size)
        if num_blocks == 0:
            continue
        blocks = sequences.block_table[rows, :num_blocks].long()
        keys, values = (x.to(dtype) for x in cache.read(blocks))  # (n, g, L, k)
        starts = sequences.query_start_loc[rows].long().unsqueeze(1)
        step = max(1, MAX_SCORES // (len(group) * q.shape[1] * keys.shape[2]))
        for first in range(0, count, step):
            at = starts + torch.arange(first, min(first + step, count), device=q.device)  # (n, s)
            visible = find_visible_keys(at, keys.shape[2], cache.block_size, sequences, window)
            o[at], lse[at] = _attend_with_sums(q[at].to(dtype), keys, values, visible, cap)
    return o, lse.T


def find_visible_keys(
    tokens: Tensor, num_keys: int, block_size: int, sequences: PagedSequences, window: int = 0
) -> Tensor:
    """Returns which keys of this rank's pages tokens of the step see, `[n, s, num_keys]`.

    tokens: numbers in the step, `[n, s]`; n sequences.
    """
    own = torch.arange(num_keys, device=tokens.device)
    page = own // block_size * sequences.context_size + sequences.context_index
    positions = page * block_size + own % block_size
    num_seen = sequences.token_lens[tokens].unsqueeze(-1)  # (n, s, 1)
    visible = positions < num_seen
    if window:
        visible &= positions >= num_seen - window
    return visible


def _attend_with_sums(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns the output `[n, s, h, k]` and the log-sum-exps `[n, s, h]` of masked attention.

    q: `[n, s, h, k]`; keys, values: `[n, g, L, k]`; visible: `[n, s, L]`.
    """
    groups = q.transpose(1, 2).unflatten(1, (keys.shape[1], -1))  # (n, g, h/g, s, k)
    scores = groups @ keys.unsqueeze(2).transpose(-1, -2) * q.shape[-1] ** -0.5
    if cap > 0.0:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    sums = scores.logsumexp(-1)  # (n, g, h/g, s)
    # A row of -inf minus 0 is a row of zeros; minus -inf it would be NaN.
    shift = sums.masked_fill(sums == float("-inf"), 0.0)
    o = (scores - shift.unsqueeze(-1)).exp() @ values.unsqueeze(2)
    return o.flatten(1, 2).transpose(1, 2), sums.flatten(1, 2).transpose(1, 2)
