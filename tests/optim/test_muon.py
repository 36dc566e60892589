"""Muon has the bits of `torch.optim.Muon`, and needs whole matrices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ranvier.cost.matrix_optimizers import muon_flops
from ranvier.optim import muon
from ranvier.optim.adamw import UpdateScalars
from ranvier.optim.muon import LrRule

SHAPES = [(48, 32), (16, 24), (20, 20), (9, 28), (33, 7), (1, 8)]
"""Products in bf16 are slow on CPUs without instructions for them."""
LR, BETA, DECAY = 0.02, 0.95, 0.1


def random_matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scalars(good: bool = True, factor: float | None = None, lr: float = LR) -> UpdateScalars:
    step = torch.ones((), dtype=torch.float64)
    known = None if factor is None else torch.tensor(factor, dtype=torch.float64)
    return UpdateScalars.for_update(step, torch.tensor(good), known, (0.9, 0.95), lr)


@pytest.mark.parametrize("rule", get_args(LrRule))
@pytest.mark.parametrize(
    ("shape", "nesterov"), [*((shape, True) for shape in SHAPES), ((16, 24), False)], ids=str
)
def test_weights_have_the_bits_of_torch(
    shape: tuple[int, int], rule: LrRule, nesterov: bool
) -> None:
    """The elementwise functions see flat tensors, as ranges of a bucket are."""
    theirs = torch.nn.Parameter(random_matrices(*shape, dtype=torch.float32))
    weight = theirs.detach().clone().flatten()
    momentum = torch.zeros_like(weight)
    optimizer = torch.optim.Muon(
        [theirs],
        lr=LR,
        momentum=BETA,
        weight_decay=DECAY,
        nesterov=nesterov,
        adjust_lr_fn=rule,
    )
    ratio = muon.lr_ratio(*shape, rule)
    for step in range(50):
        theirs.grad = random_matrices(*shape, seed=step + 1, dtype=torch.float32)
        optimizer.step()
        grad = theirs.grad.flatten()
        momentum, update = muon.momentum_update(momentum, grad, beta=BETA, nesterov=nesterov)
        direction = muon.orthogonalize(update.bfloat16().view(1, *shape)).flatten()
        weight = muon.weight_update(weight, direction, lr=LR, ratio=ratio, decay=DECAY)
        assert torch.equal(weight.view(shape), theirs.detach()), step
    assert torch.equal(momentum.view(shape), optimizer.state[theirs]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(3, 24, 40), (3, 40, 24), (2, 16, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_batch_has_the_bits_of_its_matrices(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x = random_matrices(*shape).to(dtype)
    found = muon.orthogonalize(x)
    apart = torch.cat([muon.orthogonalize(one[None]) for one in x])
    assert found.shape == shape and found.dtype == dtype and torch.equal(found, apart)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)], ids=str)
def test_singular_values_come_close_to_one(shape: tuple[int, int]) -> None:
    x = random_matrices(1, *shape)
    left, _, right = torch.linalg.svd(x[0], full_matrices=False)
    middle = left.mT @ muon.orthogonalize(x)[0] @ right.mT
    values = middle.diagonal()
    assert values.min() > 0.3 and values.max() < 1.3
    assert (middle - values.diag()).abs().max() < 1e-12, "singular vectors have changed"


def test_a_factor_does_not_matter_and_zero_remains_zero() -> None:
    x = random_matrices(2, 12, 20)
    x[1] = 0.0
    found = muon.orthogonalize(x)
    assert torch.equal(found[1], x[1])
    assert torch.allclose(muon.orthogonalize(1e3 * x), found, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_cannot_be_orthogonalized_apart(num_shards: int) -> None:
    """The negative control of every grid: a rule of shards would be another optimizer."""
    x = random_matrices(1, 256, 256)
    whole = muon.orthogonalize(x)
    apart = torch.cat([muon.orthogonalize(part) for part in x.chunk(num_shards, 1)], 1)
    assert (apart - whole).norm() / whole.norm() > 0.3


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)], ids=str)
def test_flops_are_those_of_the_products(shape: tuple[int, int], steps: int) -> None:
    with FlopCounterMode(display=False) as counter:
        muon.orthogonalize(random_matrices(1, *shape), steps=steps)
    assert counter.get_total_flops() == muon_flops(*shape, steps)


def test_a_skipped_update_changes_no_bit() -> None:
    now = scalars(good=False)
    weight, momentum = random_matrices(2, 30).unbind(0)
    out = weight.bfloat16()
    before = [x.clone() for x in (weight, momentum, out)]
    bad = torch.full_like(weight, float("nan"))
    muon.apply_momentum(momentum, bad, torch.empty_like(bad), now=now, beta=BETA)
    muon.apply_update(weight, bad, now=now, out=out)
    assert all(torch.equal(x, y) for x, y in zip((weight, momentum, out), before, strict=True))


def test_updates_in_place_are_the_pure_ones() -> None:
    now = scalars(factor=0.25)
    weight, momentum, grad = random_matrices(3, 30).unbind(0)
    weight, momentum, update = weight.clone(), momentum.clone(), torch.empty_like(grad)
    want, direction = muon.momentum_update(momentum, 0.25 * grad, beta=BETA)
    wanted = muon.weight_update(weight, direction, lr=0.5 * LR, ratio=3.0, decay=DECAY)
    muon.apply_momentum(momentum, grad, update, now=now, beta=BETA)
    out = weight.bfloat16()
    muon.apply_update(weight, update, now=now, share=0.5, ratio=3.0, decay=DECAY, out=out)
    assert torch.equal(momentum, want) and torch.equal(update, direction)
    assert torch.equal(weight, wanted) and torch.equal(out, wanted.bfloat16())


# ---- the batched iteration of CUDA, with products of the CPU --------------------------------


def batched(x: Tensor) -> Tensor:
    is_tall = x.shape[-2] > x.shape[-1]
    found = torch.empty_like(x)
    muon._orthogonalize_batch(
        x.mT if is_tall else x,
        found.mT if is_tall else found,
        muon.STEPS,
        muon.COEFFICIENTS,
        1e-7,
    )
    return found


EMULATED = SimpleNamespace(
    symmetric_product=lambda x: (x.float() @ x.float().mT).to(x.dtype),
    symmetric_polynomial=lambda a, b, c: (b * a.float() + c * a.float() @ a.float()).to(a.dtype),
)
"""Products as the kernels round them: in fp32, rounded once."""


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)], ids=str)
def test_the_batched_iteration_is_the_plain_one(shape: tuple[int, int, int]) -> None:
    x = random_matrices(*shape)
    assert torch.allclose(batched(x), muon.orthogonalize(x), rtol=0.0, atol=1e-12)


def emulated_torch(x: Tensor) -> Tensor:
    """The iteration of `torch.optim.Muon` with products in fp32 that are rounded once."""
    a, b, c = muon.COEFFICIENTS
    y = x / x.norm()
    for _ in range(muon.STEPS):
        gram = (y.float() @ y.float().mT).bfloat16().float()
        polynomial = (b * gram + c * gram @ gram).bfloat16().float()
        y = (a * y.float() + polynomial @ y.float()).bfloat16()
    return y


@pytest.mark.parametrize("shape", [(128, 128), (128, 176)], ids=str)
@pytest.mark.parametrize("decades", [0.0, 3.0])
def test_the_rounding_of_the_kernels_is_as_close_as_that_of_torch(
    shape: tuple[int, int], decades: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "MIN_SYMMETRIC_SIDE", 1)
    monkeypatch.setattr(muon, "_can_multiply_symmetric", lambda x: True)
    monkeypatch.setattr(muon, "_kernels", lambda: EMULATED)
    scale = torch.logspace(0.0, -decades, shape[1], dtype=torch.float64)
    x = (random_matrices(1, *shape) * scale).bfloat16()
    exact = muon.orthogonalize(x.double())
    ours, theirs = ((y.double() - exact).norm() for y in (batched(x)[0], emulated_torch(x[0])))
    assert theirs > 1e-3 * exact.norm() and ours < 1.2 * theirs, (ours, theirs)
