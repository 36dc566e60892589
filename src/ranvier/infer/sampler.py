"""Samples tokens from logits whose vocabulary is split over an axis, without sorting them.

A draw is a keyed maximum (the Gumbel-max trick): of the tokens that are kept, the one with the
largest logit / temperature + g, where g = -log(-log u), and u is a hash of the seed, the stream and
the position of the draw and of the token. Each rank looks at its own part of the vocabulary, and
one pair (value, token) per row is gathered. A draw therefore depends on no batch, grid or
preemption. Logits are fp32 (wider ones are rounded), keyed values are float64 on every device. CPU
and GPU may round a logarithm differently, so that they differ only if two values are within 1e-14.

Tokens are ordered by logit, equal logits by token (lower first). An int64 *sort key* has this
order: the bits of the logit above the complement of the token. Greedy is the largest key; top_k and
top_p keep the tokens down to a threshold key; min_p is a threshold of the logit. Thresholds are
found among the largest keys of each vocabulary part. top_p also needs the sum of all exponentials,
which is exact. If the candidates do not hold the mass, all logits of the row are looked at.

CUDA graphs: a graph belongs to the `SamplingFlags` of its batch, and the shapes of its inputs.
Nothing waits for the device, with one exception: whether all logits must be looked at, which is
possible only if `flags.may_need_all`, i.e. for top_p without a top_k of at most 1,024. On one rank
a kernel decides, and searches only in the rows that need it. On several ranks the host decides,
because the logits of these rows are gathered; while a graph is captured, those of all rows are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier import launch
from ranvier.comm import collectives
from ranvier.counter_rng import gumbel_values, scramble_bits
from ranvier.grid import Axis
from ranvier.infer.sampling_inputs import SamplingInputs
from ranvier.nn.cross_entropy import VocabShard

# n: rows, v: columns of this rank, c: candidates, p: ranks of the axis

MASS_TOLERANCE = 1e-10
"""Relative tolerance of top_p: tokens hold the mass if only the rounding of sums is missing."""
MIN_TEMPERATURE = 1e-100
"""Lower ones would overflow float64."""
CHUNK_ELEMENTS = 1 << 23
"""Number of logits that are processed at once, so that the temporaries stay small."""
TRITON = launch.has_triton()
LOWEST_KEY = torch.iinfo(torch.int64).min
_TOKEN_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of given tokens, of unchanged logits."""

    logprobs: Tensor
    """fp32 `[n]` (float64 for float64 logits)."""
    ranks: Tensor
    """int64 `[n]`; 1 for the most likely token, so that only that of greedy sampling has it."""
    top_tokens: Tensor
    """The most likely tokens in descending order, int64 `[n, k]`."""
    top_logprobs: Tensor
    """Their log-probabilities, `[n, k]`."""


@dataclass(frozen=True)
class SampledTokens:
    """A token for each row of logits."""

    tokens: Tensor
    """int64 `[n]`; 0 where `failed`."""
    failed: Tensor
    """Whether nothing can be sampled, bool `[n]`: all tokens are forbidden, or a logit is NaN or
    infinite."""
    scores: TokenScores | None
    """Log-probabilities; None if no row asks for them."""


@dataclass(frozen=True)
class _Filter:
    """Tokens that top_k, top_p and min_p keep."""

    candidates: Tensor
    """The largest sort keys in descending order, int64 `[n, c]`."""
    thresholds: Tensor
    """Smallest sort key that top_k and top_p keep, int64 `[n]`."""
    maxima: Tensor
    """Largest logits, float64 `[n]`."""
    is_complete: bool
    """Whether all kept tokens are among the candidates, as far as the host knows."""


@torch.no_grad()
def sample_tokens(logits: Tensor, inputs: SamplingInputs, shard: VocabShard) -> SampledTokens:
    """Returns one sampled token per row, equal on all ranks of the axis.

    logits: `[n, V/p]`, with the same number of columns on all ranks; columns that are not valid are
    ignored. inputs: on the device of the logits, equal on all ranks.
    Communicates: over the axis of the vocabulary, small tensors only. Greedy: all-reduce of one
    number per row; draws: all-gather of two numbers per row; filters: of up to 1,024 (and one more
    for top_p), or of all logits; log-probabilities: of 3 + k, and an all-reduce of one.
    """
    assert len(logits) == inputs.num_rows, (logits.shape, inputs.num_rows)
    flags = inputs.flags
    width = logits.shape[1]
    valid = valid_columns(logits, shard)
    changed = valid
    if flags.has_masks or flags.has_bias or flags.has_penalties:
        changed = change_logits(valid, inputs, shard.first_column)
    if flags.is_greedy:
        tokens, failed = _greedy_tokens(changed, shard)
    else:
        tokens, failed = _draw_tokens(changed, inputs, shard, width)
    scores = None
    if flags.num_logprobs >= 0:
        scores = score_tokens(logits, tokens, shard, num_top=flags.num_logprobs)
    return SampledTokens(tokens, failed, scores)


@torch.no_grad()
def score_tokens(
    logits: Tensor, tokens: Tensor, shard: VocabShard, *, num_top: int = 0
) -> TokenScores:
    """Returns the log-probability and rank of a token in each row, and the most likely tokens.

    logits: `[n, V/p]` as for `sample_tokens`; tokens: `[n]`. num_top: number of most likely tokens.
    Communicates: all-gather of three numbers per row over the axis of the vocabulary, all-reduce of
    one, all-gather of the most likely tokens.
    """
    x = valid_columns(logits, shard)
    columns = tokens - shard.first_column
    is_here = (columns >= 0) & (columns < shard.valid_columns)
    hits = x.gather(1, columns.clamp(0, x.shape[1] - 1).unsqueeze(1)).squeeze(1).double()
    hits = hits.masked_fill(~is_here, -torch.inf)
    peaks = x.amax(1).double()
    sums = _sum_exponentials(x, peaks, torch.ones_like(peaks))
    # A part without finite logits has the sum 0, not NaN.
    sums = sums.masked_fill(peaks == -torch.inf, 0.0)
    parts = gather_vocab_parts(torch.stack([peaks, sums, hits], 1), shard.axis)  # (p, n, 3)
    peaks, sums, hits = parts.unbind(2)
    peak = peaks.amax(0)
    normalizers = ((peaks - peak).exp() * sums).sum(0).log() + peak
    hit = hits.amax(0)
    ranks = _count_before(x, hit, tokens, shard) + 1
    top = _largest_keys(x, num_top, logits.shape[1], shard)  # (n, k)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return TokenScores(
        logprobs=(hit - normalizers).to(dtype),
        ranks=ranks,
        top_tokens=key_tokens(top),
        top_logprobs=(key_logits(top).double() - normalizers.unsqueeze(1)).to(dtype),
    )


def change_logits(x: Tensor, inputs: SamplingInputs, first_column: int) -> Tensor:
    """Returns logits (fp32) after masks, biases and penalties, each rounded to fp32.

    x: `[n, v]`, the columns from `first_column` on.
    """
    rows, columns = x.shape
    # One more row takes the entries of other ranks: there is no branch on the values of a device.
    space = x.new_empty(rows + 1, columns, dtype=torch.float32)
    space[:rows] = x
    flags = inputs.flags
    if flags.has_masks:
        tokens = torch.arange(first_column, first_column + columns, device=x.device)
        words = inputs.masks[:, (tokens >> 5).clamp(max=inputs.masks.shape[1] - 1)]  # (m, v)
        is_allowed = (words >> (tokens & 31).int()) & 1 == 1
        space[inputs.mask_rows] = space[inputs.mask_rows].masked_fill(~is_allowed, -torch.inf)

    def places(entries: Tensor) -> Tensor:
        column = entries[:, 1] - first_column
        is_here = (column >= 0) & (column < columns)
        return torch.where(is_here, entries[:, 0] * columns + column, rows * columns)

    flat = space.view(-1)
    if flags.has_bias:
        place = places(inputs.bias_entries)
        flat[place] = (flat[place].double() + inputs.bias_values).float()
    if flags.has_penalties:
        row, _, count, in_prompt = inputs.penalty_entries.unbind(1)
        place = places(inputs.penalty_entries)
        value = flat[place].double()
        repetition = inputs.repetition_penalties[row]
        repeated = torch.where(value > 0.0, value / repetition, value * repetition)
        value = torch.where((count > 0) | (in_prompt > 0), repeated, value)
        value = value - inputs.frequency_penalties[row] * count
        value = value - inputs.presence_penalties[row] * (count > 0)
        flat[place] = value.float()
    return space[:rows]


def valid_columns(logits: Tensor, shard: VocabShard) -> Tensor:
    """Returns the logits of tokens, `[n, v]`; one column of -inf if this rank has only padding."""
    if shard.valid_columns == 0:
        return logits.new_full((len(logits), 1), -torch.inf)
    x = logits[:, : shard.valid_columns]
    assert x.shape[1] == shard.valid_columns, (logits.shape, shard.valid_columns)
    return x


def _row_chunks(x: Tensor) -> Iterator[slice]:
    """Yields slices of rows with a limited number of elements; at least one."""
    rows = max(CHUNK_ELEMENTS // x.shape[1], 1)
    for start in range(0, max(len(x), 1), rows):
        yield slice(start, start + rows)


def gather_vocab_parts(x: Tensor, axis: Axis) -> Tensor:
    """Gathers `x` of all ranks as `[p, ...]`. Communicates: all-gather over axis."""
    return collectives.all_gather(x.unsqueeze(0), axis, 0).wait()


def can_use_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels support these logits."""
    # Wider logits are rounded first.
    return TRITON and x.is_cuda and x.dtype != torch.float64 and x.stride(1) == 1


def _sum_exponentials(x: Tensor, maxima: Tensor, temperatures: Tensor) -> Tensor:
    """Returns the sum of exp((logit - maximum) / temperature) of this rank's columns, `[n]`.

    maxima, temperatures: float64 `[n]`.
    """
    if can_use_kernels(x):
        from ranvier.infer import sampler_kernels

        return sampler_kernels.sum_exponentials(x, maxima, temperatures)
    sums = [
        (x[c].double() - maxima[c, None]).div_(temperatures[c, None]).exp_().sum(1)
        for c in _row_chunks(x)
    ]
    return torch.cat(sums)


# ---- sort keys --------------------------------------------------------------------------


def sort_keys(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns int64 keys that order tokens by logit (fp32), equal logits by token, lower first."""
    # -0.0 + 0.0 is 0.0. Not a number counts as infinite, which no row may have.
    bits = (logits.float() + 0.0).nan_to_num_(torch.inf, torch.inf, -torch.inf).view(torch.int32)
    # Of two negative numbers the one with the smaller bits is larger.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_TOKEN_BITS - tokens)


def key_logits(keys: Tensor) -> Tensor:
    """Returns the logits (fp32) of sort keys."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def key_tokens(keys: Tensor) -> Tensor:
    """Returns the tokens of sort keys."""
    return _TOKEN_BITS - (keys & _TOKEN_BITS)


def _token_ids(x: Tensor, shard: VocabShard) -> Tensor:
    """Returns the token of each column, `[v]`."""
    return torch.arange(shard.first_column, shard.first_column + x.shape[1], device=x.device)


def _column_keys(x: Tensor, shard: VocabShard) -> Tensor:
    """Returns the sort keys of this rank's columns, `[n, v]`."""
    if can_use_kernels(x):
        from ranvier.infer import sampler_kernels

        return sampler_kernels.sort_keys(x, shard.first_column)
    return sort_keys(x, _token_ids(x, shard))


def _largest_keys(x: Tensor, count: int, width: int, shard: VocabShard) -> Tensor:
    """Returns the largest sort keys of all ranks in descending order, at most `count`, `[n, c]`.

    width: number of columns of every rank, padding included. Communicates: all-gather.
    """
    own = min(count, x.shape[1])
    keys = torch.cat([_column_keys(x[c], shard).topk(own, 1).values for c in _row_chunks(x)])
    # All ranks gather equally many.
    keys = torch.nn.functional.pad(keys, (0, min(count, width) - own), value=LOWEST_KEY)
    if shard.axis.size == 1:
        return keys
    keys = collectives.all_gather(keys, shard.axis, 1).wait()
    return keys.topk(min(count, keys.shape[1]), 1).values


def _count_before(x: Tensor, hits: Tensor, tokens: Tensor, shard: VocabShard) -> Tensor:
    """Returns the number of tokens that are ordered before the given ones with logits `hits`.

    Communicates: all-reduce of one number per row over the axis of the vocabulary.
    """
    ids = _token_ids(x, shard)
    counts = []
    for c in _row_chunks(x):
        value = x[c].float()
        hit = hits[c, None].float()
        is_before = (value > hit) | ((value == hit) & (ids < tokens[c, None]))
        counts.append(is_before.sum(1))
    return collectives.all_reduce(torch.cat(counts), shard.axis).wait()


# ---- greedy -----------------------------------------------------------------------------


def _greedy_tokens(x: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns the most likely tokens, and whether there is none.

    Communicates: all-reduce of the largest sort key per row over the axis of the vocabulary.
    """
    if can_use_kernels(x) and shard.axis.size == 1:
        from ranvier.infer import sampler_kernels

        return sampler_kernels.greedy_tokens(x)
    # Rounded first, so that ties do not depend on the split.
    value, column = (x.float() if x.dtype == torch.float64 else x).max(1)
    keys = sort_keys(value, column + shard.first_column)
    keys = collectives.all_reduce(keys, shard.axis, "max").wait()
    failed = ~key_logits(keys).isfinite()
    return key_tokens(keys).masked_fill(failed, 0), failed


# ---- draws ------------------------------------------------------------------------------


def _draw_tokens(
    x: Tensor, inputs: SamplingInputs, shard: VocabShard, width: int
) -> tuple[Tensor, Tensor]:
    """Returns a drawn token for each row, and whether there is none. x: `[n, v]`."""
    if x.dtype == torch.float64:
        x = x.float()
    kept = None
    if inputs.flags.num_candidates:
        kept = _find_filter(x, inputs, shard, width)
    # All ranks have all candidates, so that nothing more is gathered.
    if kept is not None and kept.is_complete:
        keys = kept.candidates
        # Padding, which is not a number, must not be drawn.
        logits = key_logits(keys).masked_fill(keys == LOWEST_KEY, -torch.inf)
        values, tokens = _keyed_maxima(logits, key_tokens(keys), inputs, slice(None), kept)
        is_finite = values.isfinite()
        return tokens.masked_fill(~is_finite, 0), ~is_finite
    values, tokens = _keyed_maxima_of_columns(x, inputs, shard, kept)
    # Tokens are exact in float64.
    parts = gather_vocab_parts(torch.stack([values, tokens.double()], 1), shard.axis)  # (p, n, 2)
    best = parts[..., 0].amax(0)
    lost = parts[..., 0] != best
    tokens = parts[..., 1].masked_fill(lost, torch.inf).amin(0)
    failed = ~best.isfinite()
    return tokens.masked_fill(failed, 0.0).long(), failed


def _keyed_maxima_of_columns(
    x: Tensor, inputs: SamplingInputs, shard: VocabShard, kept: _Filter | None
) -> tuple[Tensor, Tensor]:
    """Returns the largest keyed value of each row among this rank's columns, and its token."""
    if can_use_kernels(x):
        from ranvier.infer import sampler_kernels

        temperatures, is_greedy = _divisors(inputs)
        return sampler_kernels.keyed_maxima(
            x,
            first_column=shard.first_column,
            keys=scramble_bits(inputs.keys ^ inputs.positions),
            temperatures=temperatures,
            is_greedy=is_greedy,
            thresholds=None if kept is None else kept.thresholds,
            maxima=None if kept is None else kept.maxima,
            log_min_p=inputs.log_min_p if inputs.flags.has_min_p else None,
        )
    ids = _token_ids(x, shard)
    found = [_keyed_maxima(x[c], ids, inputs, c, kept) for c in _row_chunks(x)]
    return torch.cat([value for value, _ in found]), torch.cat([token for _, token in found])


def _divisors(inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
    """Returns what logits are divided by, `[n]`, and which rows are greedy."""
    is_greedy = inputs.temperatures == 0.0
    return inputs.temperatures.clamp(min=MIN_TEMPERATURE).masked_fill(is_greedy, 1.0), is_greedy


def _keyed_maxima(
    logits: Tensor, tokens: Tensor, inputs: SamplingInputs, rows: slice, kept: _Filter | None
) -> tuple[Tensor, Tensor]:
    """Returns the largest keyed value of each row (float64) and its token, the lowest of equals.

    logits: `[n, c]`; tokens: `[n, c]` or `[c]`, in ascending order where logits are equal.
    """
    temperatures, is_greedy = (x[rows, None] for x in _divisors(inputs))
    keys = scramble_bits(inputs.keys[rows, None] ^ inputs.positions[rows, None])
    values = gumbel_values(scramble_bits(keys ^ tokens)).masked_fill_(is_greedy, 0.0)
    values += logits.double() / temperatures
    if kept is not None:
        is_kept = sort_keys(logits, tokens) >= kept.thresholds[rows, None]
        if inputs.flags.has_min_p:
            distance = (logits.double() - kept.maxima[rows, None]) / temperatures
            # Not a number stays, so that its row fails.
            is_kept &= ~(distance < inputs.log_min_p[rows, None])
        values.masked_fill_(~is_kept, -torch.inf)
    best, columns = values.max(1)
    return best, tokens.expand_as(values).gather(1, columns.unsqueeze(1)).squeeze(1)


def _find_filter(x: Tensor, inputs: SamplingInputs, shard: VocabShard, width: int) -> _Filter:
    """Finds the tokens that filters keep.

    Communicates: all-gather of the largest logits, and of a sum for top_p, over the axis of the
    vocabulary; of all logits of some rows if the largest do not hold the mass of top_p.
    """
    flags = inputs.flags
    candidates = _largest_keys(x, flags.num_candidates, width, shard)
    maxima = key_logits(candidates[:, 0]).double()
    # A row without finite logits fails anyway.
    maxima = torch.where(maxima.isfinite(), maxima, 0.0)
    totals = torch.zeros_like(maxima)
    if flags.has_top_p and flags.may_need_all:
        # Gathered and not reduced: all ranks add in the same order.
        sums = _sum_exponentials(x, maxima, _divisors(inputs)[0])
        totals = gather_vocab_parts(sums, shard.axis).sum(0)
    every_row = torch.arange(len(x), device=x.device)
    counts = _count_kept(candidates, maxima, inputs, every_row, totals)
    thresholds = _smallest_kept_keys(candidates, counts)
    if not flags.may_need_all or candidates.shape[1] == shard.axis.size * width:
        return _Filter(candidates, thresholds, maxima, is_complete=flags.is_bounded)
    is_capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if can_use_kernels(x) and (shard.axis.size == 1 or is_capturing):
        from ranvier.infer import sampler_kernels

        sampler_kernels.search_thresholds(
            _gather_logits(x, shard, width),
            counts=counts,
            candidates=candidates,
            maxima=maxima,
            temperatures=_divisors(inputs)[0],
            top_k=inputs.top_k,
            top_p=inputs.top_p,
            totals=totals,
            thresholds=thresholds,
            tolerance=MASS_TOLERANCE,
        )
        return _Filter(candidates, thresholds, maxima, is_complete=False)
    rows = every_row
    if not is_capturing:
        rows = (counts > candidates.shape[1]).nonzero().squeeze(1)
    if len(rows):
        logits = _gather_logits(x[rows], shard, width)
        thresholds[rows] = _thresholds_of_all(logits, maxima, inputs, rows)
    return _Filter(candidates, thresholds, maxima, is_complete=flags.is_bounded and not len(rows))


def _gather_logits(x: Tensor, shard: VocabShard, width: int) -> Tensor:
    """Returns the logits of all tokens `[n, V]`, padded by -inf.

    Communicates: all-gather over the axis of the vocabulary.
    """
    # The index in the result is the token.
    assert shard.valid_columns == 0 or shard.first_column == shard.axis.index * width, shard
    x = torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-torch.inf)
    return collectives.all_gather(x, shard.axis, 1).wait()


def _count_kept(
    keys: Tensor,
    maxima: Tensor,
    inputs: SamplingInputs,
    rows: Tensor,
    totals: Tensor | None,
) -> Tensor:
    """Returns how many of the sort keys top_k and top_p keep, `[r]`.

    0 means all; more than there are keys means that they are not enough. keys: `[r, c]`, the
    largest in descending order; rows: `[r]`, the rows they belong to. totals: sums of exponentials
    of all tokens, `[n]`; None if the keys are those of all tokens.
    """
    num_keys = keys.shape[1]
    logits = key_logits(keys).double()
    # Padding is not a number.
    logits = logits.masked_fill(keys == LOWEST_KEY, -torch.inf)
    temperatures = inputs.temperatures[rows, None].clamp(min=MIN_TEMPERATURE)
    weights = ((logits - maxima[rows, None]) / temperatures).exp()
    top_k = inputs.top_k[rows]
    top_p = inputs.top_p[rows]
    limits = top_k
    if totals is None:
        limits = torch.where(top_k > 0, top_k, num_keys)
    index = torch.arange(num_keys, device=keys.device)
    weights = weights.masked_fill((index >= limits[:, None]) & (limits[:, None] > 0), 0.0)
    masses = weights.sum(1)
    if totals is not None:
        masses = torch.where(limits > 0, masses, totals[rows])
    is_before = weights.cumsum(1) < (top_p - MASS_TOLERANCE)[:, None] * masses[:, None]
    counts = is_before.sum(1) + 1
    counts = torch.where(top_p < 1.0, counts, top_k)
    # Of more tokens than there are keys the masses are not known.
    return torch.where(top_k > num_keys, num_keys + 1, counts)


def _smallest_kept_keys(keys: Tensor, counts: Tensor) -> Tensor:
    """Returns the last of `counts` keys of each row, `[r]`; the lowest key if the count is 0."""
    index = (counts - 1).clamp(0, keys.shape[1] - 1)
    found = keys.gather(1, index.unsqueeze(1)).squeeze(1)
    return torch.where(counts > 0, found, LOWEST_KEY)


def _thresholds_of_all(
    logits: Tensor, maxima: Tensor, inputs: SamplingInputs, rows: Tensor
) -> Tensor:
    """Returns the smallest sort keys that top_k and top_p keep of some rows, by sorting them.

    logits: `[r, V]`, of all tokens; rows: `[r]`.
    """
    tokens = torch.arange(logits.shape[1], device=logits.device)
    found = []
    for c in _row_chunks(logits):
        keys = sort_keys(logits[c], tokens).sort(1, descending=True).values
        found.append(_smallest_kept_keys(keys, _count_kept(keys, maxima, inputs, rows[c], None)))
    return torch.cat(found)
