"""Grouped products, permutation and the mixture as one operation equal loops over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from ranvier.nn.moe import local as mixtures
from ranvier.nn.moe.grouped_gemm import can_use_grouped_mm, grouped_linear, grouped_mm_weight_grad
from ranvier.nn.moe.local import ACTIVATION_FUNCTIONS, local_moe
from ranvier.nn.moe.permutation import permute, sort_by_expert, unpermute

T, K, E, D, FF = 7, 2, 4, 8, 16
COUNTS = {"some": [3, 0, 5, 2], "first": [10, 0, 0, 0], "last": [0, 0, 0, 10], "none": [0] * 4}


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=source).to(dtype)


def ends_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).int()


def chosen(*, drop: bool = False) -> tuple[Tensor, Tensor | None]:
    """Experts of tokens, one of which nobody chooses, and which choices stay."""
    source = torch.Generator().manual_seed(5)
    experts = torch.stack([torch.randperm(E - 1, generator=source)[:K] for _ in range(T)])
    kept = torch.rand(T, K, generator=source) > 0.4 if drop else None
    return experts, kept


# ---- grouped products -------------------------------------------------------------------


def looped(x: Tensor, w: Tensor, counts: Sequence[int]) -> Tensor:
    rows = x.split(list(counts))
    return torch.cat([part @ matrix.T for part, matrix in zip(rows, w, strict=True)])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_a_grouped_product_is_a_loop(counts: list[int], dtype: torch.dtype, limit: float) -> None:
    x, w = noise(sum(counts), D, dtype=dtype), noise(E, FF, D, dtype=dtype)
    dy = noise(sum(counts), FF, dtype=dtype)
    ours, theirs = ([v.clone().requires_grad_() for v in (x, w)] for _ in range(2))
    found, expected = grouped_linear(*ours, ends_of(counts)), looped(*theirs, counts)
    for y in (found, expected):
        y.backward(dy)
    assert found.dtype == dtype
    assert torch.allclose(found, expected, atol=limit, rtol=limit)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=limit * 4, rtol=limit)


def test_torch_multiplies_what_it_can() -> None:
    def good(*shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return can_use_grouped_mm(torch.ones(shape, dtype=dtype))

    assert good(3, 8) and good(2, 3, 16)
    assert not good(3, 6) and not good(0, 8) and not good(3, 8, dtype=torch.float32)
    assert not can_use_grouped_mm(torch.ones(8, 8, dtype=torch.bfloat16)[:, ::2])
    assert not can_use_grouped_mm(torch.ones(9, 8, dtype=torch.bfloat16).flatten()[1:65].view(8, 8))


def test_rows_of_no_group_leave_no_trace() -> None:
    x, w = noise(6, D).requires_grad_(), noise(2, FF, D).requires_grad_()
    y = grouped_linear(x, w, torch.tensor([2, 5], dtype=torch.int32))
    (y[:5] ** 2).sum().backward()
    alone = noise(6, D)[:5]
    assert x.grad is not None and w.grad is not None
    assert torch.allclose(w.grad[1], 2 * (alone[2:] @ w[1].T).T @ alone[2:])
    assert not x.grad[5].any()


def test_grouped_products_have_two_derivatives() -> None:
    x, w, ends = noise(6, 3).requires_grad_(), noise(3, 2, 3).requires_grad_(), ends_of([2, 0, 4])
    assert gradcheck(grouped_linear, (x, w, ends))
    assert torch.autograd.gradgradcheck(grouped_linear, (x, w, ends))


def test_an_empty_group_has_no_gradient_whatever_the_kernel_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dirty = torch.full((3, 8, 8), torch.nan, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *_, **__: dirty.clone())
    rows = torch.ones(4, 8, dtype=torch.bfloat16)
    found = grouped_mm_weight_grad(rows, rows, ends_of([0, 4, 0]))
    assert not found[[0, 2]].any() and found[1].isnan().all()


# ---- permutation ------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [False, True])
def test_choices_are_in_the_order_of_experts_then_tokens(drop: bool) -> None:
    experts, kept = chosen(drop=drop)
    order = sort_by_expert(experts, E, kept)
    keys = [
        (E if kept is not None and not kept[t, j] else int(experts[t, j]), t * K + j)
        for t in range(T)
        for j in range(K)
    ]
    assert order.choices.tolist() == [choice for _, choice in sorted(keys)]
    assert order.places.flatten()[order.choices].tolist() == list(range(T * K))
    ends = [sum(e <= expert for e, _ in keys) for expert in range(E)]
    assert order.ends.tolist() == ends and order.ends.dtype == torch.int32
    assert order.is_dropless is not drop


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_permutations_are_loops_over_tokens(drop: bool, weighted: bool) -> None:
    experts, kept = chosen(drop=drop)
    order, stays = sort_by_expert(experts, E, kept), torch.ones(T, K) if kept is None else kept
    x, rows, weights = noise(T, D), noise(T * K, D), noise(T, K)
    spread = permute(x, order)
    rows[int(order.ends[-1]) :] = torch.nan  # what is behind the last end counts nothing
    found = unpermute(rows, order, weights if weighted else None)
    for t in range(T):
        total = torch.zeros(D, dtype=torch.float64)
        for j in range(K):
            place = int(order.places[t, j])
            assert torch.equal(spread[place], x[t] * bool(stays[t, j]))
            if stays[t, j]:
                total += rows[place] * (weights[t, j] if weighted else 1.0)
        assert torch.allclose(found[t], total, atol=1e-12)


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_of_permutations(drop: bool) -> None:
    order = sort_by_expert(*_args(drop))
    x, weights = noise(T, 3).requires_grad_(), noise(T, K).requires_grad_()
    rows = noise(T * K, 3).requires_grad_()
    assert gradcheck(lambda x: permute(x, order), (x,))
    assert gradcheck(lambda rows, weights: unpermute(rows, order, weights), (rows, weights))


def _args(drop: bool) -> tuple[Tensor, int, Tensor | None]:
    experts, kept = chosen(drop=drop)
    return experts, E, kept


# ---- the mixture ------------------------------------------------------------------------


def slowly(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    kept: Tensor | None,
    matrices: Sequence[Tensor | None],
    activation: str,
) -> Tensor:
    """Token after token."""
    gate, up, down = matrices
    assert up is not None and down is not None
    out = []
    for t in range(T):
        total = torch.zeros_like(x[t])
        for j in range(K):
            e = int(experts[t, j])
            if kept is None or kept[t, j]:
                u, f = up[e] @ x[t], ACTIVATION_FUNCTIONS[activation].function
                h = f(u) if gate is None else f(gate[e] @ x[t]) * u
                total = total + weights[t, j] * (down[e] @ h)
        out.append(total)
    return torch.stack(out)


def inputs(
    activation: str, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    gated = activation.endswith(("glu", "glu_exact"))
    matrices = [
        noise(E, FF, D, dtype=dtype, seed=1) / 3 if gated else None,
        noise(E, FF, D, dtype=dtype, seed=2) / 3,
        noise(E, D, FF, dtype=dtype, seed=3) / 4,
    ]
    leaves = [None if m is None else m.requires_grad_() for m in matrices]
    weights = noise(T, K, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    return noise(T, D, dtype=dtype).requires_grad_(), weights, leaves


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_a_mixture_is_a_loop_over_tokens(activation: str, drop: bool) -> None:
    experts, kept = chosen(drop=drop)
    x, weights, matrices = inputs(activation)
    leaves = [v for v in (x, weights, *matrices) if v is not None]
    dy = noise(T, D, seed=4)
    found = local_moe(x, weights, sort_by_expert(experts, E, kept), *matrices, activation)  # type: ignore[arg-type]
    expected = slowly(x, weights, experts, kept, matrices, activation)
    assert torch.allclose(found, expected, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y, leaves, dy) for y in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("expert", [0, E - 1])
def test_one_expert_may_get_every_token(expert: int) -> None:
    x, weights, matrices = inputs("swiglu")
    order = sort_by_expert(torch.full((T, K), expert), E)
    local_moe(x, weights, order, *matrices, "swiglu").sum().backward()  # type: ignore[arg-type]
    for matrix in matrices:
        assert matrix is not None and matrix.grad is not None and matrix.grad.isfinite().all()
        assert [e for e in range(E) if matrix.grad[e].any()] == [expert]


def test_everything_may_be_dropped() -> None:
    x, weights, matrices = inputs("swiglu", torch.bfloat16)
    order = sort_by_expert(
        torch.zeros(T, K, dtype=torch.int64), E, torch.zeros(T, K, dtype=torch.bool)
    )
    y = local_moe(x, weights, order, *matrices, "swiglu")  # type: ignore[arg-type]
    y.sum().backward()
    assert not y.any()
    for leaf in (x, weights, *matrices):
        assert leaf is not None and leaf.grad is not None and not leaf.grad.any()


def test_in_bf16_it_is_as_near_as_bf16_can_be() -> None:
    experts, _ = chosen()
    x, weights, matrices = inputs("swiglu", torch.bfloat16)
    order = sort_by_expert(experts, E)
    exact = [None if v is None else v.detach().double() for v in (x, weights, *matrices)]
    expected = local_moe(exact[0], exact[1], order, *exact[2:], "swiglu")  # type: ignore[arg-type,misc]
    found = local_moe(x, weights, order, *matrices, "swiglu")  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_frozen_experts_get_no_gradient() -> None:
    x, weights, matrices = inputs("swiglu")
    frozen = [None if m is None else m.detach() for m in matrices]
    order = sort_by_expert(chosen()[0], E)
    dy = noise(T, D)
    a = torch.autograd.grad(local_moe(x, weights, order, *matrices, "swiglu"), (x, weights), dy)  # type: ignore[arg-type]
    b = torch.autograd.grad(local_moe(x, weights, order, *frozen, "swiglu"), (x, weights), dy)  # type: ignore[arg-type]
    assert all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def test_it_keeps_the_arguments_of_the_activation_only() -> None:
    x, weights, matrices = inputs("swiglu")
    order, seen = sort_by_expert(chosen()[0], E), dict[int, int]()

    def pack(value: Tensor) -> Tensor:
        seen[value.untyped_storage().data_ptr()] = value.numel()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        local_moe(x, weights, order, *matrices, "swiglu")  # type: ignore[arg-type]
    given = (x, weights, *matrices, *order[:3])
    known = {v.untyped_storage().data_ptr() for v in given if v is not None}
    assert sum(n for where, n in seen.items() if where not in known) == 2 * T * K * FF


@pytest.mark.compiled
def test_a_compiled_mixture_is_one_graph() -> None:
    order_of = chosen(drop=True)

    def layer(x: Tensor, weights: Tensor, experts: Tensor, kept: Tensor, *m: Tensor) -> Tensor:
        order = sort_by_expert(experts, E, kept)
        y = local_moe(x, weights, order, m[0], m[1], m[2], "swiglu")
        rows = permute(F.silu(y), order)
        return unpermute(grouped_linear(rows, m[0], order.ends)[:, :D], order, weights)

    x, weights, matrices = inputs("swiglu")
    args = (x, weights, *order_of, *matrices)
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [x, weights, *(m for m in matrices if m is not None)]
    dy = noise(T, D)
    plain = layer(*args)  # type: ignore[arg-type]
    found = graph(*args)  # type: ignore[arg-type]
    assert torch.equal(plain, found)
    ours, theirs = (torch.autograd.grad(y, leaves, dy) for y in (found, plain))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_operations_are_well_formed() -> None:
    experts, _ = chosen()
    order = sort_by_expert(experts, E)
    x, weights, matrices = inputs("swiglu", torch.float32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (x, weights, *order[:3], *matrices, "swiglu", True)
    torch.library.opcheck(mixtures._local_moe_op, args, test_utils=checks)
