"""Pruning: chooses the kept elements of matrices, identical on every grid, and predicts memory.

By magnitude: of each whole matrix of n elements the k = round((1 - p) n) largest are kept; of equal
elements those with the lowest index. No rank has the whole matrix, so a distributed radix select
finds the threshold: each rank builds a histogram (256 bins) of 8 bits of the fp32 magnitudes of its
elements, the histograms are summed, and the next 8 bits are counted among the elements that match
so far. By N:M pattern: of each M neighbours in a row the N largest are kept.

The weights of all experts of a layer are one tensor `[experts, n, m]`, in which each expert is a
separate matrix: k elements of each expert are kept.

Pruned elements remain zero: later masks are subsets of earlier ones. Embeddings, heads, vectors and
frozen weights are not pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ranvier.buckets.bucket import Bucket, ShardedParameter
from ranvier.buckets.scheduler import BucketScheduler
from ranvier.buckets.sparsity import CHUNK
from ranvier.comm import collectives
from ranvier.errors import PlanError
from ranvier.grid import Axis

MaskFunction = Callable[[ShardedParameter], Tensor | None]
"""Returns which elements of this rank's shard of a weight are kept, as flat bools; None for all."""
SortKeyFunction = Callable[[ShardedParameter, int, int], Tensor]
"""Returns integer sort keys of the elements [a, b) of this rank's flat shard; 0 for padding."""
TRACE_NAME = "prune"
"""Name of the histogram reductions in a trace."""
DIGIT_BITS = 8
"""Bits per digit of the radix select."""
INF_BITS = 0x7F800000
"""Bit pattern of fp32 infinity; finite magnitudes have smaller patterns, in the same order."""


def is_prunable(weight: ShardedParameter) -> bool:
    """Whether a weight is a trainable matrix of a layer, or of its experts."""
    if weight.dims[:1] == ("expert",):
        dims = 3
    else:
        dims = 2
    other = {"vocab", "stream"} & {dim for dim in weight.dims if isinstance(dim, str)}
    matrix = weight.param_group == "matrix" and len(weight.dims) == dims and not other
    return matrix and weight.trainable


def _prunable_weights(queue: BucketScheduler) -> list[ShardedParameter]:
    return [w for bucket in queue.buckets for w in bucket.weights if is_prunable(w)]


def num_matrices(weight: ShardedParameter) -> int:
    """Returns the number of matrices in a weight: one, or one per expert."""
    if weight.dims[0] == "expert":
        return weight.shard.global_shape[0]
    return 1


def num_kept_elements(elements: int, sparsity: float) -> int:
    """Returns the number of kept elements of a whole matrix."""
    return round((1.0 - sparsity) * elements)


def sparsity_at(step: int, sparsity: float, until: int) -> float:
    """Returns the sparsity after t steps, s (1 - (1 - t / until)³), which grows fast at first."""
    if until:
        return sparsity * (1.0 - (1.0 - min(step / until, 1.0)) ** 3)
    return sparsity


# ---- mask functions ---------------------------------------------------------------------


@dataclass(frozen=True)
class PruneThresholds:
    """Pruning thresholds of each matrix of a weight, both `[matrices]`.

    `min_key` is the smallest kept magnitude key, and `min_tie_key` is the smallest kept position
    key among elements with that magnitude.
    """

    min_key: Tensor
    min_tie_key: Tensor


def by_magnitude(queue: BucketScheduler, sparsity: float) -> MaskFunction:
    """Returns masks that prune the smallest magnitudes of each whole matrix.

    Communicates: all-reduce of histograms over all axes except pipe.
    """
    weights = _prunable_weights(queue)
    if not weights:
        return lambda weight: None
    # Wait for offloaded weights in flight.
    queue.wait_for_updates()
    counts = [num_matrices(weight) for weight in weights]
    sizes = [torch.Size(weight.sharding.shape).numel() for weight in weights]
    each = [num_kept_elements(n // count, sparsity) for n, count in zip(sizes, counts, strict=True)]
    wanted = torch.tensor(each).repeat_interleave(torch.tensor(counts)).to(queue.device)
    keys, left, equal = _find_thresholds(weights, _magnitude_keys, wanted, queue, bits=32)
    turns = torch.ones_like(keys)
    # If a matrix has more elements at the threshold than may be kept, select them by position.
    if bool((left != equal).any()):
        among = dict(zip(weights, keys.split(counts), strict=True))

        def ties(weight: ShardedParameter, a: int, b: int) -> Tensor:
            same = _magnitude_keys(weight, a, b) == among[weight][_matrix_index(weight, a, b)]
            return _position_keys(weight, a, b).masked_fill_(~same, 0)

        turns, _, _ = _find_thresholds(weights, ties, left, queue, bits=max(sizes).bit_length())
    pairs = zip(keys.split(counts), turns.split(counts), strict=True)
    found = dict(zip(weights, (PruneThresholds(*pair) for pair in pairs), strict=True))

    def choice(weight: ShardedParameter) -> Tensor | None:
        if weight in found:
            return _mask_above(weight, found[weight])
        return None

    return choice


def by_pattern(queue: BucketScheduler, stay: int, of: int) -> MaskFunction:
    """Returns masks that keep the `stay` largest of each `of` neighbours in a row."""
    odd = [
        f"{weight.name} has rows of {weight.sharding.local_shape[-1]} elements per rank"
        for weight in _prunable_weights(queue)
        if weight.sharding.local_shape[-1] % of
    ]
    if odd:
        raise PlanError(
            f"prune.n_m_pattern={stay}:{of} does not divide the rows of all matrices: "
            f"{', '.join(odd[:5])}{' ...' * (len(odd) > 5)}. Each group of {of} elements must be "
            "on one rank. Use other degrees of row and col, or another M."
        )
    queue.wait_for_updates()

    def choice(weight: ShardedParameter) -> Tensor | None:
        if not is_prunable(weight):
            return None
        found = []
        for a, b in _shard_chunks(weight, of):
            keys = _magnitude_keys(weight, a, b).view(-1, of)
            # A stable sort orders equal elements by index, so that the mask is deterministic.
            order = keys.sort(dim=1, descending=True, stable=True).indices[:, :stay]
            mask = torch.zeros_like(keys, dtype=torch.bool).scatter_(1, order, True)
            # Key 0 is padding or an element that is already pruned; it remains pruned.
            found.append((mask & (keys > 0)).view(-1))
        return torch.cat(found)

    return choice


def bucket_masks(
    queue: BucketScheduler, choice: MaskFunction
) -> Iterator[tuple[Bucket, Tensor | None]]:
    """Yields each bucket with matrices and its mask `[size]`, or None if no rank prunes it.

    Communicates: all-reduce of one number per bucket over all axes except pipe.
    """
    axis = _weight_axis(queue)
    for bucket in queue.buckets:
        if not any(is_prunable(weight) for weight in bucket.weights):
            continue
        mask = torch.zeros(bucket.size, dtype=torch.bool, device=queue.device)
        gone = torch.zeros(1, dtype=torch.int64, device=queue.device)
        for weight in bucket.weights:
            here = torch.cat([_valid_mask(weight, a, b) for a, b in _shard_chunks(weight)])
            chosen = choice(weight)
            if chosen is not None:
                chosen = chosen.to(here.device) & here
                gone |= (chosen != here).any()
            if chosen is None:
                mask[weight.offset : weight.offset + weight.num_elements] = here
            else:
                mask[weight.offset : weight.offset + weight.num_elements] = chosen
        with queue.grid.trace.named_scope(bucket.name):
            # All ranks must agree whether the bucket is compressed, as that changes the sizes of
            # its collectives.
            anywhere = collectives.all_reduce(gone, axis, "max").wait()
        yield bucket, mask if int(anywhere) else None


def prune_buckets(queue: BucketScheduler, choice: MaskFunction) -> None:
    """Prunes weights that have no optimizer states yet.

    Communicates: the collectives of `bucket_masks`; mask bits over depth.
    """
    for bucket, mask in bucket_masks(queue, choice):
        bucket.set_sparsity_mask(mask)
    queue.begin_step("")


def _weight_axis(queue: BucketScheduler) -> Axis:
    """Returns the axis of all ranks with shards of the same weights."""
    return queue.grid.axis(*(axis for axis in queue.grid.degrees if axis != "pipe"))


# ---- radix select -----------------------------------------------------------------------


def _shard_chunks(weight: ShardedParameter, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yields ranges of this rank's flat shard with at most `CHUNK` elements, in `multiple`s."""
    step = CHUNK // multiple * multiple
    # At least one chunk, which may be empty, as callers concatenate the results.
    for a in range(0, max(weight.num_elements, 1), step):
        yield a, min(a + step, weight.num_elements)


def _element_indices(weight: ShardedParameter, a: int, b: int) -> Iterator[tuple[Tensor, int]]:
    """Yields, for each dim, the indices of the flat elements [a, b) in the shard, and the dim."""
    flat = torch.arange(a, b, device=weight.bucket.bucket_scheduler.device)
    for dim, size in reversed(list(enumerate(weight.shard.local_shape))):
        yield flat % size, dim
        flat = flat // size


def _valid_mask(weight: ShardedParameter, a: int, b: int) -> Tensor:
    """Returns which elements of this rank's flat shard are not padding."""
    place = weight.shard
    found = torch.ones(b - a, dtype=torch.bool, device=weight.bucket.bucket_scheduler.device)
    if place.valid_shape != place.local_shape:
        for index, dim in _element_indices(weight, a, b):
            found &= index < place.valid_shape[dim]
    return found


def _unpruned_mask(weight: ShardedParameter, a: int, b: int) -> Tensor:
    """Returns which elements of this rank's flat shard are not pruned yet."""
    kept = weight.bucket.sparsity_mask
    if kept is None:
        return _valid_mask(weight, a, b)
    return kept.dense_mask(weight.offset + a, weight.offset + b)


def _magnitude_keys(weight: ShardedParameter, a: int, b: int) -> Tensor:
    """Returns sort keys in the order of fp32 magnitudes."""
    values = weight.storage.view(-1)[a:b].to(weight.bucket.bucket_scheduler.device)
    # Bit patterns of non-negative floats have the order of the floats. NaN counts as inf; + 1
    # reserves key 0.
    keys = values.float().abs().view(torch.int32).clamp(max=INF_BITS) + 1
    return keys.masked_fill_(~_unpruned_mask(weight, a, b), 0)


def _position_keys(weight: ShardedParameter, a: int, b: int) -> Tensor:
    """Returns sort keys by position in the whole matrix, largest for the first element."""
    place = weight.shard
    number = torch.zeros((), dtype=torch.int64)
    stride = 1
    number = number.to(weight.bucket.bucket_scheduler.device)
    for index, dim in _element_indices(weight, a, b):
        number = number + (index + place.global_offset[dim]) * stride
        stride *= place.global_shape[dim]
    return stride - number


def _matrix_index(weight: ShardedParameter, a: int, b: int) -> Tensor:
    """Returns the matrix index of each element of the shard; `[1]` if there is one matrix."""
    if num_matrices(weight) == 1:
        return torch.zeros(1, dtype=torch.int64, device=weight.bucket.bucket_scheduler.device)
    place = weight.shard
    flat = torch.arange(a, b, device=weight.bucket.bucket_scheduler.device)
    expert = flat // torch.Size(place.local_shape[1:]).numel() + place.global_offset[0]
    # Padding belongs to no expert; its key is 0, so it may have any valid index.
    return expert.clamp_(max=place.global_shape[0] - 1)


def _mask_above(weight: ShardedParameter, limits: PruneThresholds) -> Tensor:
    """Returns which elements of this rank's shard are kept."""
    found = []
    ties = bool((limits.min_tie_key > 1).any())
    for a, b in _shard_chunks(weight):
        keys = _magnitude_keys(weight, a, b)
        matrix = _matrix_index(weight, a, b)
        limit = limits.min_key[matrix]
        same = keys == limit
        if ties:
            same &= _position_keys(weight, a, b) >= limits.min_tie_key[matrix]
        found.append((keys > limit) | same)
    return torch.cat(found)


def _find_thresholds(
    weights: Sequence[ShardedParameter],
    keys: SortKeyFunction,
    wanted: Tensor,
    queue: BucketScheduler,
    *,
    bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the smallest kept key of each matrix, if its `wanted` largest keys are kept.

    Also returns how many elements with that key are kept, and how many there are; all
    `[matrices]`.
    Communicates: all-reduce of a histogram per matrix and digit over all axes except pipe.
    """
    sizes = [num_matrices(weight) for weight in weights]
    axis = _weight_axis(queue)
    low = torch.zeros_like(wanted)
    left = wanted
    equal = wanted
    # Most significant digit first: `low` is the prefix of the threshold, and `left` is the number
    # of elements to keep among those with that prefix.
    for shift in reversed(range(0, bits, DIGIT_BITS)):
        known = zip(weights, low.split(sizes), strict=True)
        counts = torch.cat([_digit_histogram(w, keys, prefix, shift) for w, prefix in known])
        with queue.grid.trace.named_scope(TRACE_NAME):
            counts = collectives.all_reduce(counts, axis).wait()  # (matrices, digits)
        least = counts.flip(1).cumsum(1).flip(1)  # with this digit or a larger one
        left = torch.minimum(left, least[:, 0])
        digit = (least >= left[:, None]).sum(1, keepdim=True) - 1
        equal = counts.gather(1, digit)[:, 0]
        left = left - (least.gather(1, digit)[:, 0] - equal)
        low = (low << DIGIT_BITS) + digit[:, 0]
    return low, left, equal


def _digit_histogram(
    weight: ShardedParameter, keys: SortKeyFunction, prefix: Tensor, shift: int
) -> Tensor:
    """Returns the histogram of one digit of this rank's keys with the higher digits `prefix`.

    prefix: `[matrices]`; counts: `[matrices, digits]`. If several ranks have the same shard, only
    the first counts it.
    """
    bucket = weight.bucket
    base = 1 << DIGIT_BITS
    # One extra bin per matrix for keys with another prefix.
    bins = len(prefix) * (base + 1)
    counts = torch.zeros(bins, dtype=torch.int64, device=bucket.bucket_scheduler.device)
    if bucket.replica_axis.index == 0 and bucket.segment_of(weight).shared_axis.index == 0:
        for a, b in _shard_chunks(weight):
            key = keys(weight, a, b).to(torch.int64)
            matrix = _matrix_index(weight, a, b)
            digit = (key >> shift) - prefix[matrix] * base
            outside = (digit < 0) | (digit >= base) | (key == 0)
            digit = digit.masked_fill_(outside, base) + matrix * (base + 1)
            counts += torch.bincount(digit, minlength=bins)
    return counts.view(-1, base + 1)[:, :base]


# ---- memory -----------------------------------------------------------------------------


def pruned_bucket_bytes(
    size: int,
    rows: Sequence[int],
    *,
    data: int = 1,
    working: int = 2,
    gradient: int = 4,
    master: int = 4,
    moments: int = 8,
) -> int:
    """Returns the bytes of a pruned bucket on a rank: values, gradient, master, moments, mask.

    working · size + gradient · count + (master + moments) · count / data
    + min(depth · ceil(size / 8), 4 · sum(rows)), with count = max(rows), a multiple of data.

    size: elements on the rank. rows: number of kept elements on each rank of its depth axis. The
    other arguments are bytes per element; `moments` is for both moments together.
    """
    count = -(-max(rows) // data) * data
    mask = min(len(rows) * -(-size // 8), 4 * sum(rows))
    return working * size + gradient * count + (master + moments) * (count // data) + mask
