"""Moments in 8 bits: levels and their errors, rounding without bias, codes that survive a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranvier.grid import Grid
from ranvier.optim import adamw, fused_adamw
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.low_precision_states import (
    BLOCK_SIZE,
    CODE_POWER,
    MAX_CODE,
    MIN_BLOCK_SCALE,
    MomentName,
    Moments,
    RoundingKey,
    _encode_blocks,
    dequantize_moment,
    quantize_moment,
)
from ranvier.sharding import Shard
from training import run_of, stored, trainer_of

BOTH: list[MomentName] = ["mean", "square"]
ULP = 2.0**-22
"""Of a scale: what a few operations in fp32 may add to an error."""


def key(name: str = "w", count: int = 1 << 40) -> RoundingKey:
    return RoundingKey.for_weight(name, Shard((count,), (0,), (count,), (count,)))


def update(step: int, betas: tuple[float, float] = (0.9, 0.95), lr: float = 1e-2) -> UpdateScalars:
    number = torch.tensor(float(step), dtype=torch.float64)
    return UpdateScalars.for_update(number, torch.tensor(True), None, betas, lr)


def spread(scales: Tensor, count: int) -> Tensor:
    """The scale of each number."""
    return scales.double().repeat_interleave(BLOCK_SIZE)[:count]


def error(x: Tensor, scales: Tensor, which: MomentName) -> Tensor:
    """The stated bound of the error of random rounding: s ((t + 1)ⁿ - tⁿ) / topⁿ."""
    s, top, n = spread(scales, x.numel()), MAX_CODE[which], CODE_POWER[which]
    t = top * (x.double().abs() / s.clamp(min=1e-300)) ** (1.0 / n)
    return s * ((t + 1.0) ** n - t**n) / top**n


def numbers(which: MomentName) -> Tensor:
    """Blocks of ordinary numbers and of those that are hard to hold."""
    draw = torch.Generator().manual_seed(3)
    normal = torch.randn(40 * BLOCK_SIZE, generator=draw)
    wide = normal[: 8 * BLOCK_SIZE] * torch.logspace(-30, 30, 8 * BLOCK_SIZE)[
        torch.randperm(8 * BLOCK_SIZE, generator=draw)
    ].view(8, BLOCK_SIZE).sort(0).values.view(-1)
    hard = [torch.zeros(BLOCK_SIZE), torch.full((BLOCK_SIZE,), 3.0)]
    hard += [torch.logspace(low, low + 12, BLOCK_SIZE) for low in (-48, -45, -40, -33, -30, -6, 24)]
    edge = torch.tensor([MIN_BLOCK_SCALE, 1e-45, 1e-38, 0.0])
    hard += [edge[n:].repeat(BLOCK_SIZE)[:BLOCK_SIZE] for n in range(3)]
    hard += [
        torch.cat([torch.ones(1), torch.full((BLOCK_SIZE - 1,), 2.0**-n)]) for n in (8, 14, 32, 60)
    ]
    hard += [torch.nextafter(x, torch.zeros(())) for x in hard[-4:]]
    top = MAX_CODE[which]
    levels = (torch.arange(BLOCK_SIZE).clamp(max=top).double() / top) ** CODE_POWER[which]
    hard += [(levels * s).float() for s in (1.0, 0.3, 7e-12, 2.0**-89)]
    odd = [normal[:77]]  # the last block is not full
    x = torch.cat([normal, wide, *hard, *odd])
    sign = torch.where(torch.rand(x.numel(), generator=draw) < 0.5, -1.0, 1.0)
    return x * sign if which == "mean" else x.abs()


def drawn(x: Tensor, which: MomentName, step: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `x` as one of two moments, rounded at random."""
    other = torch.zeros_like(x)
    pair = (x, other) if which == "mean" else (other, x)
    number = torch.tensor(float(step), dtype=torch.float64)
    moments = Moments.zeros(x.numel(), "int8", torch.float32).round_stochastically(
        *pair, number, key()
    )
    assert moments.scales is not None
    row = BOTH.index(which)
    return moments.tensors[row], moments.scales[row]


@pytest.mark.parametrize("which", BOTH)
def test_the_error_is_below_the_stated_one(which: MomentName) -> None:
    x = numbers(which)
    for share, (codes, scales) in ((0.5, quantize_moment(x, which)), (1.0, drawn(x, which, 5))):
        back = dequantize_moment(codes, scales, which)
        s, top = spread(scales, x.numel()), MAX_CODE[which]
        off, bound = (back.double() - x.double()).abs(), share * error(x, scales, which)
        floor = (
            s / top ** CODE_POWER[which]
            if which == "square"
            else torch.where(s > 0, 0.0, MIN_BLOCK_SCALE)
        )
        assert bool((off <= torch.maximum(bound, floor) + ULP * s).all())
        assert bool((bound <= share * s / 63.0 + 1e-300).all())
        assert torch.equal(back[x == 0], x[x == 0]) and codes.numel() == x.numel()
        assert bool(((back > 0) == (x > 0)).all()) or which == "mean", "no square becomes zero"
        assert off.max() > 0.4 * share * s.max() / 63.0, "the bound is of the right size"


@pytest.mark.parametrize("which", BOTH)
def test_what_was_unpacked_is_packed_to_the_same_bits(which: MomentName) -> None:
    x = numbers(which)
    states = [quantize_moment(x, which), *(drawn(x, which, step) for step in (1, 2, 3))]
    every = torch.arange(256, dtype=torch.uint8)
    every = every if which == "square" else torch.where(every == 128, 127, every)
    scales = torch.tensor([1.0, 0.7, 3e-27, 1e30, MIN_BLOCK_SCALE, 1.9999999])
    states.append((every.repeat(len(scales)), scales))
    draw = torch.Generator().manual_seed(4)
    many = torch.zeros(1000, BLOCK_SIZE)
    power = torch.randint(-80, 80, (1000,), generator=draw)
    many[:, 0] = (torch.rand(1000, generator=draw) + 0.5) * 2.0**power
    for bits in (0.5, 65535.5):  # the largest keeps its level in every draw
        states.append(_encode_blocks(many.view(-1), which, torch.full((many.numel(),), bits)))
        assert bool((states[-1][0][::BLOCK_SIZE] == MAX_CODE[which]).all())
    for codes, scales in states:
        again, others = quantize_moment(dequantize_moment(codes, scales, which), which)
        assert torch.equal(again, codes) and torch.equal(others, scales)


@pytest.mark.parametrize("which", BOTH)
def test_rounding_has_no_bias(which: MomentName) -> None:
    """Numbers between all pairs of levels, each rounded in many ways."""
    count, top, n = 4000, MAX_CODE[which], CODE_POWER[which]
    x = ((torch.arange(BLOCK_SIZE) * (top / BLOCK_SIZE) + 0.3) / top) ** n
    x[0] = 1.0  # the scale
    if which == "square":
        x = x.clamp(min=1.5 / top**n)  # below the first level squares are raised to it
    else:
        x[1::2] *= -1.0
    codes, scales = drawn(x.repeat(count), which, 7)
    back = dequantize_moment(codes, scales, which).view(count, BLOCK_SIZE).double()
    gap = error(x, scales[:1], which)
    off = (back.mean(0) - x.double()).abs()
    assert bool((off <= 5 * gap / 2 / count**0.5 + ULP).all())
    assert off.sum() < 2 * gap.sum() / 2 / count**0.5, "and all together less"
    near = dequantize_moment(*quantize_moment(x, which), which).double()
    assert ((near - x).abs() > 5 * gap / 2 / count**0.5).float().mean() > 0.5, "the control"


def test_a_small_square_stays_above_zero() -> None:
    x = torch.cat([torch.ones(1), torch.full((BLOCK_SIZE - 1,), 1e-30)])
    for codes, scales in (quantize_moment(x, "square"), drawn(x, "square", 1)):
        assert codes[1:].min() == codes[1:].max() == 1
        assert dequantize_moment(codes, scales, "square")[1:].min() > 0


def test_second_moments_follow_a_change_of_scale() -> None:
    """v goes from 1 to 0.25 at β₂ = 0.999, while one number of each block keeps its scale at 4."""
    blocks, steps = 100, 100
    count = blocks * BLOCK_SIZE
    first = torch.arange(count) % BLOCK_SIZE == 0
    weight, grad = torch.zeros(count), torch.where(first, 2.0, 0.5)
    start = torch.where(first, 4.0, 1.0)
    moments = Moments.zeros(count, "int8", torch.float32)
    codes, scales = quantize_moment(start, "square")
    moments.square.copy_(codes), moments.scales[1].copy_(scales)  # type: ignore[index]
    nearest = dequantize_moment(codes, scales, "square")
    exact = begin = nearest[1].item()
    for step in range(1, steps + 1):
        adamw.adamw_update(weight, grad, moments, now=update(step, (0.9, 0.999), 0.0), key=key())
        nearest = dequantize_moment(
            *quantize_moment(nearest * 0.999 + grad.square() * 0.001, "square"), "square"
        )
        exact = exact * 0.999 + 0.25 * 0.001
    square = moments.dequantize(torch.float64)[1][~first]
    spread = square.std().item() / len(square) ** 0.5
    assert bool((nearest[~first] == begin).all()), "the control: it never moves"
    assert square.mean().item() == pytest.approx(exact, abs=5 * spread)
    assert 0.0 < 5 * spread < 0.05 * (begin - exact)


def test_one_update_is_that_of_the_unpacked_moments() -> None:
    """The weight takes the moments before they are rounded, and these are near to theirs."""
    draw, count = torch.Generator().manual_seed(2), 9 * BLOCK_SIZE + 100
    weight, grad, mean, square = torch.randn(4, count, generator=draw)
    means, squares = quantize_moment(mean, "mean"), quantize_moment(square.square(), "square")
    moments = Moments(means[0], squares[0], torch.stack([means[1], squares[1]]))
    plain = Moments(*moments.dequantize(torch.float64))
    ours, theirs = weight.clone(), weight.double()
    fused_adamw.fused_adamw(ours, grad, moments, now=update(3), decay=0.1, key=key())
    fused_adamw.fused_adamw(theirs, grad.double(), plain, now=update(3), decay=0.1)
    assert torch.allclose(ours.double(), theirs, rtol=1e-5, atol=1e-6)
    for which, found, x in zip(BOTH, moments.dequantize(torch.float64), plain.tensors, strict=True):
        scales = moments.scales[BOTH.index(which)]  # type: ignore[index]
        bound = error(x, scales, which) + ULP * spread(scales, count)
        assert bool(((found - x).abs() <= bound).all())


@pytest.mark.parametrize("cut", [(32, 128), (13, 128)], ids=["blocks", "across"])
def test_parts_of_a_weight_round_like_the_whole(cut: tuple[int, int]) -> None:
    """Where the blocks of a part are those of the whole, to the bit; elsewhere within the error."""
    rows, columns = 64, 128
    draw = torch.Generator().manual_seed(2)
    weight, grad = torch.randn(2, rows * columns, generator=draw)
    whole = Moments.zeros(rows * columns, "int8", torch.float32)
    adamw.adamw_update(
        weight.clone(), grad, whole, now=update(1), key=RoundingKey(5, (64, 128), (0, 0), (64, 128))
    )
    means = []
    for row in range(0, rows, cut[0]):
        size = min(cut[0], rows - row)
        piece = slice(row * columns, (row + size) * columns)
        part = Moments.zeros(size * columns, "int8", torch.float32)
        where = RoundingKey(5, (size, columns), (row, 0), (rows, columns))
        adamw.adamw_update(weight[piece].clone(), grad[piece], part, now=update(1), key=where)
        means.append(part)
    same = torch.equal(torch.cat([part.mean for part in means]), whole.mean)
    assert same == (rows * columns % (cut[0] * columns) == 0)
    found = torch.cat([part.dequantize(torch.float64)[0] for part in means])
    assert (
        found - whole.dequantize(torch.float64)[0]
    ).abs().max() <= 2 * grad.abs().max() * 0.1 / 63


@dataclass
class Shadow:
    """Beside 8-bit moments exact ones that get the same gradients, and how far they may part.

    A rounding adds an error ε below e to what is left of those before: d ← βd + ε, so that
    |d| ≤ b ← βb + e.
    """

    exact: Moments
    bounds: Moments
    moved: Tensor
    """What rounding changed in the weights, before what that changes in later gradients."""
    grad: Tensor
    beyond: int = 0
    """Moments that were off by more than the bound."""

    @classmethod
    def of(cls, count: int) -> Shadow:
        zeros = [Moments.zeros(count, "master", torch.float64) for _ in range(3)]
        return cls(zeros[0], zeros[1], *zeros[2].tensors)

    def follow(self, before: Moments, after: Moments, grad: Tensor, now: UpdateScalars) -> None:
        """Make the update with exact moments, and compare."""
        self.grad = grad.double()
        g = self.grad * (1.0 if now.grad_factor is None else now.grad_factor)
        both = []
        for i, which in enumerate(BOTH):
            beta, new, scales = now.betas[i], g ** (i + 1), after.scales[i]  # type: ignore[index]
            held = (before.dequantize(torch.float64)[i], self.exact.tensors[i])
            x, exact = (beta * old + (1.0 - beta) * new for old in held)
            bound = self.bounds.tensors[i].mul_(beta)
            bound += error(x, scales, which) + ULP * spread(scales, x.numel())
            off = (after.dequantize(torch.float64)[i] - exact).abs()
            self.beyond += int((off > bound).sum())
            both.append((x, exact))
            self.exact.tensors[i].copy_(exact)
        root = (1.0 - now.betas[1] ** now.step).sqrt() / (1.0 - now.betas[0] ** now.step)
        ours, exact = (m / (v.sqrt() + 1e-8) * root for m, v in zip(*both, strict=True))
        self.moved -= now.lr * (ours - exact)


@pytest.mark.full
def test_a_run_stays_close_to_one_with_exact_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """30 steps: all moments within what follows from the error of a rounding, and the loss, too.

    To first order the loss differs by the sum of gradient times what rounding moved. Terms have
    either sign at random, hence a deviation of the root of the sum of their squares.
    """
    shadows: dict[tuple[int, int], Shadow] = {}
    real: Callable[..., None] = fused_adamw.fused_adamw

    def followed(weight: Tensor, grad: Tensor, moments: Moments, **options: Any) -> None:
        before = Moments(*(x.clone() for x in moments.tensors))
        real(weight, grad, moments, **options)
        if moments.scales is not None:
            where = options["key"]
            shadow = shadows.setdefault((where.stream, where.first), Shadow.of(grad.numel()))
            shadow.follow(before, moments, grad, options["now"])

    monkeypatch.setattr(fused_adamw, "fused_adamw", followed)
    corpus, curves = stored(tmp_path), []
    for kind in ("master", "int8"):
        run = run_of("", {}, 30, optim__state_dtype=kind)
        curves.append([row["loss"] for row in trainer_of(Grid({}), corpus, run).run_steps()])
    assert len(shadows) == 16 and not any(shadow.beyond for shadow in shadows.values())
    terms = torch.cat([shadow.grad * shadow.moved for shadow in shadows.values()])
    off, sure = abs(curves[0][-1] - curves[1][-1]), 5.0 * terms.norm().item()
    assert 0.0 < off < sure < 0.01 * (curves[0][0] - curves[0][-1])
