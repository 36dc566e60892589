"""On a GPU, symmetric products are those of torch, and Muon is as accurate as torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ranvier.optim import jorge, muon
from ranvier.optim.adamw import UpdateScalars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [
    (1, 512, 512),
    (3, 512, 1024),
    (2, 1024, 1024),
    (2, 2048, 8192),
    (1, 520, 712),
    (2, 1000, 1504),
    (1, 1160, 1336),
    (4, 128, 64),
    (2, 40, 72),
]
"""Matrices, rows and columns; some are no multiples of a tile."""


def random_matrices(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def relative(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_symmetric_products(
    dtype: torch.dtype, shape: tuple[int, int, int], is_transposed: bool
) -> None:
    count, rows, columns = shape
    if is_transposed:
        x = random_matrices(count, columns, rows, dtype=dtype).mT
    else:
        x = random_matrices(*shape, dtype=dtype)
    found = muon._kernels().symmetric_product(x)
    want = torch.bmm(x.double(), x.double().mT)
    assert found.shape == want.shape and found.is_contiguous()
    assert relative(found, want) <= 1.01 * relative(torch.bmm(x, x.mT), want)
    assert relative(found, found.mT) < 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_polynomials(shape: tuple[int, int, int]) -> None:
    count, rows, _ = shape
    x = random_matrices(count, rows, rows)
    a = ((x + x.mT) / rows**0.5).contiguous()
    found = muon._kernels().symmetric_polynomial(a, -4.775, 2.0315)
    wide = a.double()
    want = -4.775 * wide + 2.0315 * wide @ wide
    # Half a unit in the last place of bf16, which rounds once.
    assert relative(found, want) < 2.0**-9


def test_other_tiles() -> None:
    kernels = muon._kernels()
    x = random_matrices(2, 1024, 2048)
    found = kernels.symmetric_product(x, tiles=kernels.TileConfig(64, 32, 4, 2))
    assert relative(found, kernels.symmetric_product(x)) < 1e-3


@pytest.mark.parametrize("size", [2051, 2056])
def test_rows_that_cannot_be_copied_have_plain_products(size: int) -> None:
    x = random_matrices(2, size, 2104)
    assert muon._can_multiply_symmetric(x) == (size % 8 == 0)
    assert not muon._can_multiply_symmetric(x.float())
    want = torch.stack([one_by_one(one) for one in x])
    assert relative(muon.orthogonalize(x), want) < 0.05


@pytest.mark.parametrize("decades", [0.0, 3.0])
@pytest.mark.parametrize(
    "shape",
    [(1, 2048, 8192), (2, 8192, 2048), (2, 2048, 2048), (2, 512, 2048), (64, 256, 256)],
    ids=str,
)
def test_the_iteration_is_as_close_to_float64_as_that_of_torch(
    shape: tuple[int, int, int], decades: float
) -> None:
    # Singular values of gradients fall off.
    scale = torch.logspace(0, -decades, shape[2], device="cuda")
    x = (random_matrices(*shape, dtype=torch.float32) * scale).bfloat16()
    exact = torch.stack([one_by_one(one.double()) for one in x])
    theirs = torch.stack([one_by_one(one) for one in x])
    found = muon.orthogonalize(x)
    assert found.shape == shape and found.is_contiguous()
    error, want = relative(found, exact), relative(theirs, exact)
    assert want > 1e-3 and error <= 1.2 * want, (error, want)


def one_by_one(x: Tensor) -> Tensor:
    """The iteration of `torch.optim.Muon` in the dtype of one matrix."""
    is_tall = x.shape[0] > x.shape[1]
    y = x.T if is_tall else x
    y = muon._orthogonalize_matrix(y, muon.STEPS, muon.COEFFICIENTS, 1e-7)
    return y.T if is_tall else y


def test_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_matrices(5, 512, 640)
    want = muon.orthogonalize(x)
    monkeypatch.setattr(muon, "MAX_BATCH_ELEMENTS", 2 * 512 * 640)
    assert relative(muon.orthogonalize(x), want) < 1e-2


@pytest.mark.parametrize("size", [1024 * 1024, 1000, 37])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_kernels(grad_dtype: torch.dtype, size: int) -> None:
    weight, momentum, noise = random_matrices(3, size, dtype=torch.float32).unbind(0)
    grad = noise.to(grad_dtype)
    step = torch.ones((), device="cuda")
    factor = torch.tensor(0.25, device="cuda")
    for good in (False, True):
        flag = torch.tensor(good, device="cuda")
        now = UpdateScalars.for_update(step, flag, factor, (0.9, 0.95), 0.02)
        w, m = weight.clone(), momentum.clone()
        update, out = torch.empty_like(w, dtype=torch.bfloat16), w.bfloat16()
        muon.apply_momentum(m, grad, update, now=now, beta=0.95)
        muon.apply_update(w, update, now=now, share=0.5, ratio=3.0, decay=0.1, out=out)
        wanted, direction = muon.momentum_update(momentum, 0.25 * grad.float(), beta=0.95)
        assert relative(update, direction) < 2.0**-8
        if not good:
            assert torch.equal(w, weight) and torch.equal(m, momentum)
            continue
        want = muon.weight_update(weight, update, lr=0.01, ratio=3.0, decay=0.1)
        assert relative(m, wanted) < 1e-6 and relative(w, want) < 1e-6
        assert torch.equal(out, w.bfloat16())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "plain"])
def test_jorge_in_tf32(symmetric: bool) -> None:
    grad = random_matrices(3, 256, 300, dtype=torch.float32) / 300**0.5
    side = jorge.initial_side(3, 256, like=grad)
    exact = side.double()
    for _ in range(3):
        found = jorge.statistics(grad, "left")
        side = jorge.precondition_update(side, found, symmetric=symmetric)
        exact = jorge.precondition_update(
            exact, jorge.statistics(grad.double(), "left"), symmetric=symmetric
        )
    assert relative(side, exact) < 1e-2
