"""Jorge follows its rule to rounding, approximates inverse roots, and never divides by zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranvier.cost.matrix_optimizers import jorge_flops, tile_bounds
from ranvier.optim import jorge

LR, BETA, DECAY = 0.1, 0.9, 0.01


def random_gradient(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative(found: Tensor, want: Tensor) -> float:
    return float((found - want).abs().max() / want.abs().max())


def restated_side(side: Tensor, statistics: Tensor, symmetric: bool) -> Tensor:
    """One side `[B, B]`, written as the series of (1 + x)^(-1/4) to the second order."""
    power = torch.linalg.matrix_power(side, 4)
    if symmetric:
        half = torch.linalg.matrix_power(side, 2)
        x = half @ statistics @ half
    else:
        x = power @ statistics
    size = x.square().sum().sqrt()
    y = x / size
    new = side - side @ y / 4 + 5 * side @ y @ y / 32
    new = new * ((size + 1) / size) ** 0.25
    return (new + new.T) / 2 if symmetric else new


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "plain"])
@pytest.mark.parametrize("shape", [(12, 20), (16, 16), (20, 5)], ids=str)
def test_a_run_follows_the_rule(shape: tuple[int, int], symmetric: bool) -> None:
    """A batch of three matrices against one after the other."""
    rows, cols = shape
    count, steps = 3, 20
    like = torch.empty(0, dtype=torch.float64)
    weight = random_gradient(0, count, *shape)
    left = jorge.initial_side(count, rows, like=like)
    right = jorge.initial_side(count, cols, like=like)
    momentum, sgd_momentum = torch.zeros_like(weight), torch.zeros_like(weight)
    start = weight.clone()
    for step in range(steps):
        grad = random_gradient(step + 1, count, *shape)
        left = jorge.precondition_update(left, jorge.statistics(grad, "left"), symmetric=symmetric)
        right = jorge.precondition_update(
            right, jorge.statistics(grad, "right"), symmetric=symmetric
        )
        momentum, sgd_momentum = jorge.momentum_update(
            momentum, sgd_momentum, grad, jorge.precondition(left, grad, right), beta=BETA
        )
        weight = torch.stack(
            [
                jorge.weight_update(w, m, norm=m.norm(), sgd_norm=s.norm(), lr=LR, decay=DECAY)
                for w, m, s in zip(weight, momentum, sgd_momentum, strict=True)
            ]
        )
    for one in range(count):
        w, m, s = start[one], torch.zeros(shape).double(), torch.zeros(shape).double()
        L, R = (1e-6**-0.25 * torch.eye(n, dtype=torch.float64) for n in shape)
        for step in range(steps):
            g = random_gradient(step + 1, count, *shape)[one]
            L = restated_side(L, g @ g.T, symmetric)
            R = restated_side(R, g.T @ g, symmetric)
            m = BETA * m + (1 - BETA) * (L @ g @ R)
            s = BETA * s + g
            w = (1 - LR * DECAY) * w - LR * s.norm() / (m.norm() + 1e-12) * m
        for found, want in ((left, L), (right, R), (momentum, m), (sgd_momentum, s), (weight, w)):
            assert relative(found[one], want) < 1e-12


def inverse_root(x: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values**-0.25) @ vectors.mT


def test_sides_approximate_the_inverse_root() -> None:
    """Against the exact root of statistics with the same β₂; the symmetric form is closer."""
    size, errors = 32, {}
    scale = torch.logspace(0, -1.5, size, dtype=torch.float64)[:, None]
    base = random_gradient(0, size, 48) * scale
    for symmetric in (True, False):
        side = jorge.initial_side(1, size, like=base)
        exact = 1e-6 * torch.eye(size, dtype=torch.float64)
        for step in range(200):
            grad = (base + 0.5 * random_gradient(step + 1, size, 48) * scale) / 48**0.5
            half = side[0] @ side[0]
            found = grad @ grad.mT
            x = half @ found @ half if symmetric else half @ half @ found
            beta2 = x.norm() / (x.norm() + 1)
            side = jorge.precondition_update(side, found[None], symmetric=symmetric)
            exact = beta2 * exact + (1 - beta2) * found
        want = inverse_root(exact)
        errors[symmetric] = float((side[0] - want).norm() / want.norm())
    assert errors[True] < 0.02 and errors[True] < errors[False] < 0.1


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "plain"])
@pytest.mark.parametrize("value", [0.0, 1e-30, float("nan"), float("inf")])
def test_sides_without_statistics_do_not_change(value: float, symmetric: bool) -> None:
    grad = random_gradient(0, 2, 8, 6).float()
    grad[1] *= value
    side = jorge.initial_side(2, 8, like=grad)
    new = jorge.precondition_update(side, jorge.statistics(grad, "left"), symmetric=symmetric)
    assert new.isfinite().all() and not torch.equal(new[0], side[0])
    assert torch.equal(new[1], side[1])


def test_a_weight_without_gradient_does_not_change() -> None:
    weight = random_gradient(0, 4, 4)
    none = torch.zeros_like(weight)
    new = jorge.weight_update(weight, none, norm=none.norm(), sgd_norm=none.norm(), lr=LR)
    assert torch.equal(new, weight)


def test_many_sides_are_updated_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = random_gradient(0, 5, 8, 6)
    side = jorge.initial_side(5, 8, like=grad)
    want = jorge.precondition_update(side, jorge.statistics(grad, "left"))
    monkeypatch.setattr(jorge, "MAX_BATCH_ELEMENTS", 2 * 8 * 8)
    found = jorge.precondition_update(side, jorge.statistics(grad, "left"))
    assert relative(found, want) < 1e-14


def test_the_precision_of_products_is_restored() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(RuntimeError), jorge.matmul_precision("tf32"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        raise RuntimeError
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_tiles_cover_a_dim_once() -> None:
    for size in (1, 5, 8, 20, 64):
        places = [i for start, stop in tile_bounds(size, 8) for i in range(start, stop)]
        assert places == list(range(size))


def test_flops_fall_with_the_interval() -> None:
    every, tenth = (jorge_flops(64, 32, precondition_interval=n) for n in (1, 10))
    precondition = 2 * 64 * 32 * (64 + 32)
    assert tenth - precondition == pytest.approx((every - precondition) / 10)
