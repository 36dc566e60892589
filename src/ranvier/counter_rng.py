"""Counter-based RNG: a random number is a function of (seed, name, index), not of a state.

Therefore all grids start bitwise equal, a rank computes only its own shard, and a recomputed
dropout mask is the same. All arithmetic is on integers (wrapping 64-bit), and a normal number is
the sum of twelve 16-bit uniforms (Irwin-Hall). This is exact, so it is bitwise equal on every
device, vector width and shape. It has the mean, the variance and nearly the shape of a normal
distribution truncated at six standard deviations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ranvier.models.counter_random import random_key as random_key
from ranvier.models.counter_random import scramble_bits as scramble_bits
from ranvier.models.counter_random import shift_right
from ranvier.sharding import Shard

CHUNK = 1 << 22
"""Number of elements initialized at a time, so that the temporaries stay small."""


class _SkipRandomInit(TorchFunctionMode):
    """Mode in which `normal_` and the other random initializers do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            if args:
                return args[0]
            return kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Context in which models are created without values, on the meta device.

    No random numbers are drawn, because drawing on the meta device imports its Python kernels,
    which takes more than a second on every rank.
    """
    with torch.device("meta"), _SkipRandomInit():
        yield


def uniform_bits(x: Tensor) -> Tensor:
    """Return 32 random bits of scrambled integers, as integers in [0, 2³²)."""
    return shift_right(x, 32)


def gumbel_values(x: Tensor) -> Tensor:
    """Return Gumbel-distributed numbers (float64) of scrambled integers: -log(-log u).

    u = (k + 1/2) / 2⁵² with the upper 52 bits k; this is exact in float64, and never 0 or 1.
    """
    uniform = (shift_right(x, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def normal_values(index: Tensor, stream: int) -> Tensor:
    """Return standard normal numbers (float64) at the given indices of a stream."""
    total = torch.zeros_like(index)
    # Three 64-bit words hold twelve 16-bit uniforms.
    for word in range(3):
        bits = scramble_bits(scramble_bits(index * 3 + word) ^ stream)
        for shift in (0, 16, 32, 48):
            total += (bits >> shift) & 0xFFFF
    # A uniform on [0, 1) has variance 1/12, so the sum of twelve has variance 1.
    return (total - 6 * 0xFFFF).double() / 65536.0


def init_shard(
    place: Shard,
    *,
    seed: int,
    name: str,
    std: float,
    mean: float = 0.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Returns the values of a shard: normal, or constant if std is 0; padding is zero."""
    assert place.flat_range is None, place
    part = torch.zeros(place.local_shape, dtype=dtype, device=device)
    if std == 0.0:
        part[tuple(slice(n) for n in place.valid_shape)] = mean
        return part
    index = torch.zeros((), dtype=torch.int64, device=device)
    # Index of each element in the flattened global tensor, by Horner's rule over the dims.
    for size, start, valid in zip(
        place.global_shape, place.global_offset, place.valid_shape, strict=True
    ):
        index = index.unsqueeze(-1) * size + torch.arange(start, start + valid, device=device)
    stream = random_key(seed, name)
    numbers = [
        (normal_values(i, stream) * std + mean).to(dtype) for i in index.reshape(-1).split(CHUNK)
    ]
    part[tuple(slice(n) for n in place.valid_shape)] = torch.cat(numbers).reshape(place.valid_shape)
    return part


def dropout_mask(
    shape: Sequence[int], counters: Sequence[Tensor], stream: Tensor, p: float
) -> Tensor:
    """Returns the mask of elements that dropout keeps, as a function of the counters.

    counters: for each dim of `shape` the global indices along it, shaped to broadcast to `shape`.
    """
    bits = stream.to(counters[0].device)
    for counter in counters:
        bits = scramble_bits(bits ^ counter)
    return (uniform_bits(bits) >= int(p * 2**32)).expand(tuple(shape))
