"""On a GPU: kernels of expert layers equal their twins, repeat every bit and wait for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ranvier.nn.moe import grouped_gemm as products
from ranvier.nn.moe import permutation as permutations
from ranvier.nn.moe.grouped_gemm import grouped_linear
from ranvier.nn.moe.local import ACTIVATION_FUNCTIONS, local_moe
from ranvier.nn.moe.permutation import TokenPermutation, permute, sort_by_expert, unpermute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),
]
SHAPES = [(7, 2, 4, 8, 16), (1000, 4, 32, 72, 136), (777, 8, 64, 2048, 704), (3, 1, 5, 1032, 8)]
"""Tokens, choices of each, experts, features, hidden features."""
NEAR = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
"""Of the norm of a tensor."""


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and PyTorch does what kernels did."""

    def switch() -> None:
        for module in (permutations, products):
            monkeypatch.setattr(module, "TRITON", False)

    yield switch
    monkeypatch.undo()


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    source = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, device="cuda", generator=source).to(dtype)


def ordered(tokens: int, k: int, experts: int, *, drop: bool) -> TokenPermutation:
    """The last expert gets nothing, the first more than the others."""
    scores = noise(tokens, experts)
    scores[:, 0] += 1.0
    scores[:, -1] = -torch.inf
    kept = noise(tokens, k, seed=1) > -0.5 if drop else None
    return sort_by_expert(scores.topk(k, 1).indices, experts, kept)


def near(one: Tensor, other: Tensor, limit: float) -> bool:
    gap = (one.double() - other.double()).norm()
    return bool(one.isfinite().all()) and bool(gap <= limit * other.double().norm() + 1e-12)


def everything(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, drop: bool, activation: str
) -> list[Tensor]:
    """All values and gradients of a mixture and of a permutation there and back."""
    t, k, e, d, f = shape
    order = ordered(t, k, e, drop=drop)
    gate = noise(e, f, d, dtype=dtype, seed=1) / d**0.5 if "glu" in activation else None
    up, down = noise(e, f, d, dtype=dtype, seed=2) / d**0.5, noise(e, d, f, dtype=dtype) / f**0.5
    x, weights = noise(t, d, dtype=dtype), noise(t, k).abs()
    leaves = [v.requires_grad_() for v in (x, weights, gate, up, down) if v is not None]
    y = local_moe(x, weights, order, gate, up, down, activation)
    moved = unpermute(permute(x, order), order, weights)
    firsts = torch.autograd.grad(y, leaves, noise(t, d, dtype=dtype, seed=3))
    seconds = torch.autograd.grad(moved, (x, weights), noise(t, d, dtype=dtype, seed=4))
    return [y, moved, *firsts, *seconds, *order[:3]]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_equal_their_twins(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    drop: bool,
    twins: Callable[[], None],
) -> None:
    found = everything(shape, dtype, drop, "swiglu")
    again = everything(shape, dtype, drop, "swiglu")
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    twins()
    for one, other in zip(found, everything(shape, dtype, drop, "swiglu"), strict=True):
        if one.is_floating_point():
            assert near(one, other, NEAR[dtype])
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_activations_run_on_the_device(activation: str) -> None:
    for value in everything((100, 2, 8, 32, 64), torch.bfloat16, True, activation):
        assert not value.is_floating_point() or bool(value.isfinite().all())


@pytest.mark.parametrize("counts", [[100, 0, 33, 1], [134, 0, 0, 0], [0, 0, 0, 134], [0] * 4])
def test_grouped_products_in_bf16_need_no_padding(counts: list[int]) -> None:
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    x = noise(sum(counts), 64, dtype=torch.bfloat16).requires_grad_()
    w = noise(4, 136, 64, dtype=torch.bfloat16).requires_grad_()
    dy = noise(sum(counts), 136, dtype=torch.bfloat16)
    dirty = [torch.full_like(w, torch.nan) for _ in range(8)]  # memory that results may get
    del dirty
    y = grouped_linear(x, w, ends)
    found = (y, *torch.autograd.grad(y, (x, w), dy))
    rows, grads = x.double().split(counts), dy.double().split(counts)
    pairs = list(zip(rows, grads, w.double(), strict=True))
    expected = (
        torch.cat([a @ m.T for a, _, m in pairs]),
        torch.cat([b @ m for _, b, m in pairs]),
        torch.stack([b.T @ a for a, b, _ in pairs]),
    )
    assert all(near(a, b, 5e-3) for a, b in zip(found, expected, strict=True))
    assert not any(found[2][e].any() for e, count in enumerate(counts) if count == 0)


def test_nothing_waits_for_the_device_in_bf16() -> None:
    arguments = ((1000, 4, 32, 64, 128), torch.bfloat16, False, "swiglu")
    everything(*arguments)  # kernels are built now
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_compiled_mixture_is_one_graph() -> None:
    t, k, e, d, f = 512, 4, 16, 128, 256
    gate, up = (noise(e, f, d, dtype=torch.bfloat16, seed=i) / 11 for i in (1, 2))
    down, x = noise(e, d, f, dtype=torch.bfloat16) / 16, noise(t, d, dtype=torch.bfloat16)
    leaves = [v.requires_grad_() for v in (x, gate, up, down)]

    def layer(x: Tensor, *matrices: Tensor) -> Tensor:
        weights, experts = (x[:, :e].float() * 2).softmax(1).topk(k, 1)
        y = local_moe(x.sigmoid(), weights, sort_by_expert(experts, e), *matrices, "swiglu")
        return x + y * 2

    dy = noise(t, d, dtype=torch.bfloat16, seed=3)
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        y = call(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for a, b in zip(*results, strict=True):
        assert near(a, b, 1e-2)


def test_it_keeps_little() -> None:
    t, k, e, d, f = 4096, 4, 16, 512, 256
    gate, up = (noise(e, f, d, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    down = noise(e, d, f, dtype=torch.bfloat16).requires_grad_()
    x, weights = noise(t, d, dtype=torch.bfloat16).requires_grad_(), noise(t, k).requires_grad_()
    order = ordered(t, k, e, drop=False)
    local_moe(x, weights, order, gate, up, down, "swiglu")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = local_moe(x, weights, order, gate, up, down, "swiglu")
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert kept <= 2 * t * k * f * 2 + 2**20
