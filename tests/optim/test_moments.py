"""The rule of AdamW with its options, and moments in bf16 that are rounded at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from ranvier.checkpoint.folder import found
from ranvier.checkpoint.load import wholes
from ranvier.grid import Grid
from ranvier.optim import fused, rules
from training import losses_of, run_of, stored, trainer_of

YES, NO = torch.tensor(True), torch.tensor(False)
SETTINGS: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "decay": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def number(step: int) -> Tensor:
    return torch.tensor(float(step), dtype=torch.float64)


def drawn(count: int, moments: torch.dtype, grads: torch.dtype) -> list[Tensor]:
    """Weight, gradient and both moments."""
    draw = torch.Generator().manual_seed(1)
    weight, grad, mean, square = torch.randn(4, count, generator=draw)
    return [weight.clone(), grad.to(grads), mean.to(moments), square.abs().to(moments)]


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rule_equals_that_of_torch(grads: torch.dtype) -> None:
    weight, grad, mean, square = drawn(1000, torch.float32, grads)
    mean.zero_(), square.zero_()
    theirs = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    out = torch.zeros(1000, dtype=torch.bfloat16)
    for step in range(1, 4):
        theirs.grad = grad.float() * (0.25 / step)
        optimizer.step()
        factor = torch.tensor(0.25 / step)
        now = fused.Scalars.of(number(step), YES, factor, (0.9, 0.95), 1e-2)
        fused.adamw(weight, grad, mean, square, now=now, decay=0.1, out=out)
    assert torch.allclose(weight, theirs, rtol=1e-6, atol=1e-7)
    assert torch.equal(out, weight.bfloat16())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_that_is_not_good_changes_no_bit(moments: torch.dtype) -> None:
    weight, grad, mean, square = drawn(1000, moments, torch.float32)
    weight[:9], mean[:9], grad[::7] = -0.0, -0.0, torch.nan
    out = torch.full((1000,), 3.0, dtype=torch.bfloat16)
    held = [x.clone() for x in (weight, mean, square, out)]
    factor = torch.tensor(torch.nan)
    rules.adamw(
        weight, grad, mean, square, step=number(2), good=NO, factor=factor, out=out, **SETTINGS
    )
    for before, after in zip(held, (weight, mean, square, out), strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def test_random_rounding_keeps_what_nearest_rounding_loses() -> None:
    """v goes from 1 to 0.25 by a thousandth of the way a step; a bf16 number has steps of 1/256."""
    count, steps = 100_000, 100
    weight, grad = torch.zeros(count), torch.full((count,), 0.5)
    mean, square = torch.zeros(2, count, dtype=torch.bfloat16)
    square.fill_(1.0)
    nearest, exact = torch.ones((), dtype=torch.bfloat16), 1.0
    for step in range(1, steps + 1):
        rules.adamw(
            weight, grad, mean, square, step=number(step), good=YES, lr=0.0, beta2=0.999, seed=5
        )
        nearest = (nearest.float() * 0.999 + 0.25 * 0.001).bfloat16()
        exact = exact * 0.999 + 0.25 * 0.001
    error = square.double().std().item() / count**0.5
    assert nearest == 1.0, "the control: it never moves"
    assert square.double().mean().item() == pytest.approx(exact, abs=5 * error)
    assert 0 < error < 1e-4


def test_rounding_leaves_what_is_exact_and_what_is_no_number() -> None:
    bits = rules.random_bits(number(1), 6, seed=1, first=0) & 0xFFFF
    x = torch.tensor([0.0, -0.0, -1.5, torch.inf, -torch.inf, torch.nan])
    x[5:].view(torch.int32).fill_(0x7F800001)  # cut to 16 bits it would be infinite
    assert torch.equal(rules.narrow(x, bits)[:5], x[:5].bfloat16())
    assert rules.narrow(x, bits)[5].isnan()


def test_the_random_bits_are_uniform_and_independent() -> None:
    count = 200_000
    streams = [
        rules.random_bits(number(step), count, seed=seed, first=first)
        for step, seed, first in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 1 << 32))
    ]
    halves = torch.stack([part for x in streams for part in (x >> 16, x & 0xFFFF)]).double()
    assert halves.min() >= 0 and halves.max() < 1 << 16
    assert (halves.mean(1) / 65535 - 0.5).abs().max() < 5 / (12 * count) ** 0.5
    off = torch.corrcoef(halves) - torch.eye(len(halves))
    assert off.abs().max() < 5 / count**0.5
    counts = torch.stack([torch.bincount(x.long() >> 8, minlength=256) for x in halves]).double()
    chi = (counts - count / 256).square().sum(1) / (count / 256)
    assert (chi - 255).abs().max() < 5 * (2 * 255) ** 0.5


def test_pieces_round_like_the_whole() -> None:
    whole = drawn(1000, torch.bfloat16, torch.bfloat16)
    pieces = [x.clone() for x in whole]
    far = (1 << 32) - 500  # a piece crosses the largest 32-bit index
    rules.adamw(*whole, step=number(3), good=YES, seed=7, first=far, **SETTINGS)
    for start, stop in ((0, 1), (1, 640), (640, 1000)):
        part = [x[start:stop] for x in pieces]
        rules.adamw(*part, step=number(3), good=YES, seed=7, first=far + start, **SETTINGS)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    other = drawn(1000, torch.bfloat16, torch.bfloat16)
    rules.adamw(*other, step=number(3), good=YES, seed=7, first=0, **SETTINGS)
    assert not torch.equal(other[2], whole[2]), "the control: the index counts"


@pytest.mark.parametrize("dtype", ["fp64", "fp16"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, corpus: str, dtype: str) -> None:
    changes = {"optim__moments": "bf16", "train__dtype": dtype, "checkpoint__every": 3}
    run = run_of(str(tmp_path), {}, 6, checkpoint__keep=0, **changes)
    whole, half = (trainer_of(Grid({}), corpus, run) for _ in range(2))
    losses = [row["loss"] for row in whole.steps()]
    half.resume(tmp_path / "checkpoints" / "step-00000003")
    assert [row["loss"] for row in half.steps()] == losses[3:]
    types = {
        name.rpartition(".")[2]: part.dtype for name, (part, _) in whole.optimizer.state().items()
    }
    wide = torch.float64 if dtype == "fp64" else torch.float32
    assert types == {"master": wide, "mean": torch.bfloat16, "square": torch.bfloat16}
    for name, (part, _) in half.optimizer.state().items():
        assert torch.equal(part, whole.optimizer.state()[name][0]), name
        assert bool((part != 0).any()), name


def test_ranks_over_data_round_like_one(pool: Pool, tmp_path: Path, corpus: str) -> None:
    changes = {"optim__moments": "bf16"}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, degrees in zip(folders, ({}, {"data": 2}), strict=True):
        pool.on_grid(degrees, losses_of, corpus, str(folder), 4, "", changes)
    paths = [found(folder / "checkpoints")[-1] for folder in folders]
    for kind in ("mean", "square", "master"):
        one, two = (wholes(path, kind) for path in paths)
        assert set(one) == set(two) and one
        for name, value in one.items():
            if kind == "master":
                assert (value - two[name]).abs().max() < 1e-9 * value.abs().max(), name
            else:
                assert value.dtype == torch.bfloat16 and torch.equal(value, two[name]), name
