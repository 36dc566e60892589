"""Random numbers of models as functions of counters: seed, step, sample, token, feature.

All arithmetic is on integers (wrapping 64-bit), and normal numbers are read from a table, so that
they are bitwise equal on every device, in any order and on every grid. `ranvier.counter_rng` has
the random numbers of weights and layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

# The two odd factors of splitmix64, as signed numbers.
_SPLITMIX_FACTORS = (
    -0x40A7B892E31B1A47,
    -0x6B2FB644ECCEEE15,
)


def random_key(seed: int, *names: str | int) -> int:
    """Return a 63-bit hash of a seed and names."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniform_number(seed: int, *names: str | int) -> float:
    """Return a number in (0, 1) as a function of a seed and names, on the host."""
    return (random_key(seed, *names) + 0.5) * 2.0**-63


def scramble_bits(x: Tensor) -> Tensor:
    """Apply a random-looking bijection of 64-bit integers (the finalizer of splitmix64)."""
    x = (x ^ shift_right(x, 30)) * _SPLITMIX_FACTORS[0]
    x = (x ^ shift_right(x, 27)) * _SPLITMIX_FACTORS[1]
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically; `>>` of int64 would copy the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


TRUNCATED_NORMAL_BITS = 16
"""A truncated normal number is one of 2¹⁶ equally probable quantiles."""


@cache
def truncated_normal_quantiles(limit: float) -> Tensor:
    """Returns quantiles of a standard normal distribution truncated at ± limit, `[2¹⁶]` float64."""
    normal = NormalDist()
    count = 1 << TRUNCATED_NORMAL_BITS
    below = normal.cdf(-limit)
    share = (1.0 - 2.0 * below) / count
    # The other half is the same with the opposite sign, so that the mean is exactly zero.
    lower = [normal.inv_cdf(below + (i + 0.5) * share) for i in range(count // 2)]
    return torch.tensor([*lower, *(-x for x in reversed(lower))], dtype=torch.float64)


def truncated_normal_values(
    counters: Sequence[Tensor], stream: Tensor, *, std: float, limit: float, dtype: torch.dtype
) -> Tensor:
    """Returns normal numbers truncated at ± limit · std, as a function of the counters.

    Values are read from a table, so that they are bitwise equal on every device.
    counters: for each dim the global indices along it, shaped to broadcast to the result.
    """
    bits = stream.to(counters[0].device)
    for counter in counters:
        bits = scramble_bits(bits ^ counter)
    table = (truncated_normal_quantiles(limit) * std).to(dtype).to(bits.device)
    return table[shift_right(bits, 64 - TRUNCATED_NORMAL_BITS)]
