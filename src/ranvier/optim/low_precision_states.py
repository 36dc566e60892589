"""Moments: what AdamW keeps of earlier gradients, in the type of the weight, in 16 bits or in 8.

Narrow moments are rounded up or down at random, so that what is too small for them still counts on
average. The random bits are a function of (seed, number of the update, name of the weight, index in
the whole weight): a resumed run, another grid and other ranges over data round alike.

In 8 bits a block of 256 numbers that lie one after the other has a scale s, its largest magnitude,
and every number x a code c, the larger the larger its magnitude is:

    mean    ±s (c / 127)²    c in 0..127, with the sign of x
    square   s (c / 255)⁴    c in 0..255

One of the two levels around x is drawn, so that x is its mean, or the nearest is taken. The error
is below e, or half of it, where t = top (|x| / s)^(1/n) is the place of x among the codes:

    e = s ((t + 1)ⁿ - tⁿ) / topⁿ ≤ s / 63    mean: top 127, n 2; square: top 255, n 4

But means of a block are zero if all are below `TINY`, and a square above zero is never less than
s / 255⁴, with s no less than `TINY`: if it became zero, mean / √square would explode. `pack` gives
what was unpacked the same codes and scales to the bit.

Not handled: blocks are counted from the start of a part of a weight, so where a grid cuts weights
elsewhere 8-bit moments are close, but not the same; in 16 bits they are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.sharding import Shard

MomentKind = Literal["master", "bf16", "int8"]
MomentName = Literal["mean", "square"]

BLOCK_SIZE = 256
"""Numbers with a scale of their own."""
MIN_BLOCK_SCALE = 2.0**-90
"""Least scale, so that all levels are normal numbers: means of a smaller block are zero."""
MAX_CODE: dict[MomentName, int] = {"mean": 127, "square": 255}
"""Codes of the largest magnitude."""
CODE_POWER: dict[MomentName, int] = {"mean": 2, "square": 4}
"""Levels are powers of codes."""
WORD_MASK = 0xFFFFFFFF
"""Mask of 32 bits."""


def moment_dtype(kind: MomentKind, master: torch.dtype) -> torch.dtype:
    """In what moments lie beside master weights of a type."""
    return {"master": master, "bf16": torch.bfloat16, "int8": torch.uint8}[kind]


@dataclass(frozen=True)
class RoundingKey:
    """Elements that lie one after the other in a box of a whole weight, as sources of random bits.

    index of element k = ravel(start + unravel(first + k, local), whole)
    """

    stream: int
    """Of the weight."""
    local_shape: tuple[int, ...]
    """Shape of the box."""
    start: tuple[int, ...]
    """Its first index in each dim of the whole."""
    global_shape: tuple[int, ...]
    first: int = 0
    """Where in the flattened box the elements begin."""

    @classmethod
    def for_weight(cls, name: str, place: Shard, *, seed: int = 0) -> RoundingKey:
        """The elements of a part of a weight. Padding gets bits of some other elements."""
        if place.flat_range is None:
            first = 0
        else:
            first = place.flat_range[0]
        stream = counter_rng.random_key(seed, "moments", name)
        return cls(stream, place.local_shape, place.global_offset, place.global_shape, first)

    def at_offset(self, offset: int) -> RoundingKey:
        """The elements from the one at `offset` on."""
        return replace(self, first=self.first + offset)

    @property
    def seed(self) -> int:
        """31 bits of the stream, which a kernel takes as a signed number."""
        return (self.stream ^ (self.stream >> 32)) & 0x7FFFFFFF

    @property
    def merged_dims(self) -> list[tuple[int, int, int]]:
        """Size, start and whole size of each dim; one that is whole joins the one before it."""
        merged = [(1, 0, 1)]
        for size, start, whole in zip(self.local_shape, self.start, self.global_shape, strict=True):
            last = merged[-1]
            if size == whole or last == (1, 0, 1):
                merged[-1] = (last[0] * size, last[1] * whole + start, last[2] * whole)
            else:
                merged.append((size, start, whole))
        return merged

    def global_index(self, count: int, device: torch.device) -> Tensor:
        """Places of the first `count` elements in the flattened whole: `[count]` (int64)."""
        at = torch.arange(self.first, self.first + count, device=device)
        index = torch.zeros_like(at)
        stride = 1
        (_, start, _), *inner = self.merged_dims
        for size, begin, whole in reversed(inner):
            row = at // size
            index += (at - row * size + begin) * stride
            at = row
            stride = stride * whole
        return index + (at + start) * stride

    def random_bits(self, step: Tensor, count: int) -> Tensor:
        """32 random bits of the first `count` elements as integers in [0, 2³²): `[count]`.

        step: number of the update.
        """
        index = self.global_index(count, step.device)
        key = mix_bits(mix_bits(step.to(torch.int64) & WORD_MASK) ^ self.seed)
        word = mix_bits((index & WORD_MASK) ^ key)
        return mix_bits((word + (index >> 32) * 0x9E3779B1 + key) & WORD_MASK)


def mix_bits(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in 64 bits) that looks random."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD_MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD_MASK
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Moments:
    """Both moments of elements that lie one after the other: numbers, or codes with scales."""

    mean: Tensor
    """`[n]`"""
    square: Tensor
    """`[n]`"""
    scales: Tensor | None = None
    """Of the blocks of means and of squares, fp32: `[2, ceil(n / BLOCK)]`; None: no codes."""

    @classmethod
    def zeros(
        cls, count: int, kind: MomentKind, master: torch.dtype, device: torch.device | str = "cpu"
    ) -> Moments:
        """Those of a new run."""
        kept = moment_dtype(kind, master)
        mean, square = (torch.zeros(count, dtype=kept, device=device) for _ in range(2))
        if kind == "int8":
            scales = torch.zeros(2, -(-count // BLOCK_SIZE), device=device)
        else:
            scales = None
        return cls(mean, square, scales)

    @property
    def tensors(self) -> list[Tensor]:
        """All that has to be kept."""
        return [self.mean, self.square, *([] if self.scales is None else [self.scales])]

    def slice_range(self, start: int, stop: int) -> Moments:
        """Those of the elements `[start, stop)`, in the same memory."""
        mean = self.mean[start:stop]
        square = self.square[start:stop]
        if self.scales is None:
            return Moments(mean, square)
        assert start % BLOCK_SIZE == 0, (
            f"{start} is no multiple of {BLOCK_SIZE}: it would cut a block"
        )
        return Moments(mean, square, self.scales[:, start // BLOCK_SIZE : -(-stop // BLOCK_SIZE)])

    def dequantize(self, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        """Mean and square as numbers of a type; those that have it already are not copied."""
        if self.scales is None:
            return self.mean.to(wide), self.square.to(wide)
        mean = dequantize_moment(self.mean, self.scales[0], "mean")
        return mean.to(wide), dequantize_moment(self.square, self.scales[1], "square").to(wide)

    def round_stochastically(
        self, mean: Tensor, square: Tensor, step: Tensor, key: RoundingKey | None
    ) -> Moments:
        """Other numbers in the type of these, rounded at random if it is narrower."""
        if self.mean.dtype == mean.dtype:
            return Moments(mean, square)
        assert key is not None, f"{self.mean.dtype} moments are rounded with the bits of a key"
        bits = key.random_bits(step, mean.numel())
        if self.scales is None:
            return Moments(
                stochastic_round_bf16(mean, bits >> 16),
                stochastic_round_bf16(square, bits & 0xFFFF),
            )
        codes, scales = _encode_blocks(mean, "mean", (bits >> 16) + 0.5)
        others, more = _encode_blocks(square, "square", (bits & 0xFFFF) + 0.5)
        return Moments(codes, others, torch.stack([scales, more]))


def stochastic_round_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """`x` rounded to bf16 at random, without bias: up with the probability of what is cut off.

    bits: uniform integers in [0, 2¹⁶), added to the half of a float that bf16 does not have.
    """
    x = x.float()
    rounded = ((x.view(torch.int32) + bits.to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def quantize_moment(x: Tensor, which: MomentName) -> tuple[Tensor, Tensor]:
    """Codes `[n]` (uint8) and scales `[ceil(n / BLOCK)]` of numbers `[n]`, by the nearest level."""
    return _encode_blocks(x, which, torch.full_like(x, 1 << 15, dtype=torch.float32))


def dequantize_moment(codes: Tensor, scales: Tensor, which: MomentName) -> Tensor:
    """The numbers `[n]` (fp32) that codes and scales stand for."""
    scale = scales[:, None].expand(-1, BLOCK_SIZE).reshape(-1)[: codes.numel()]
    if which == "mean":
        c = codes.view(torch.int8).float()
        return c * c.abs() * (1.0 / 127**2) * scale
    c = codes.float() * (1.0 / 255)
    c = c * c
    return c * c * scale


def _encode_blocks(x: Tensor, which: MomentName, draw: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of numbers `[n]`: of the levels a ≤ x < b around x, b if draw / 2¹⁶ < p.

    p = (x - a) / (b - a), in the units of the codes. draw: from 0.5 to 2¹⁶ - 0.5, `[n]`. Division
    is exact to the last bit, so the largest magnitude never falls below its level.
    """
    count = x.numel()
    top = MAX_CODE[which]
    x = _pad_to_blocks(x)
    draw = _pad_to_blocks(draw)
    size = x.abs().float()
    scale = size.amax(1, keepdim=True)
    if which == "mean":
        scale = torch.where(scale < MIN_BLOCK_SCALE, 0.0, scale)
    else:
        scale = torch.where((x > 0.0).any(1, keepdim=True), scale.clamp(min=MIN_BLOCK_SCALE), 0.0)
    full = torch.where(scale > 0.0, scale, 1.0)
    # a number divided by a tensor would be multiplied by its inverse, which is rounded once more
    y = size * (torch.full_like(full, float(top) ** CODE_POWER[which]) / full)
    if which == "mean":  # levels c²: the next one is 2c + 1 away
        c = y.sqrt().floor().clamp(max=top - 1)
        above = y - c * c
        gap = 2.0 * c + 1.0
    else:  # levels c⁴
        c = y.sqrt().sqrt().floor().clamp(max=top - 1)
        above = y - (c * c) * (c * c)
        gap = (2.0 * c + 1.0) * (2.0 * c * (c + 1.0) + 1.0)
    c = c + (draw * gap < above * 65536.0)
    if which == "mean":
        c = torch.where(x < 0.0, -c, c)
    else:
        c = torch.where(x > 0.0, c.clamp(min=1.0), c)
    return c.to(torch.int16).to(torch.uint8).view(-1)[:count], scale.view(-1)


def _pad_to_blocks(x: Tensor) -> Tensor:
    """Numbers `[n]` with zeros behind them as `[ceil(n / BLOCK), BLOCK]`."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
