"""Kinds of recomputation: the same numbers; what is kept and what is computed again differ."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence import gradients
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.nn.recompute import again, kept
from ranvier.parallel import parallel_of, parallelize
from ranvier.plan import Recompute

KINDS: list[Recompute] = ["none", "selective", "full"]
CONFIG = DecoderConfig(layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.names[f"aten::{name}"] for name in ("mm", "addmm", "bmm", "baddbmm"))


def decoder(kind: Recompute) -> Decoder:
    torch.manual_seed(1)
    return parallelize(Decoder(CONFIG).double(), Grid({}), recompute=kind)


def passed(model: Decoder) -> tuple[float, dict[str, Tensor], Counted]:
    """Loss, gradients, and what ran in backward."""
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(3))
    loss, counted = model(tokens, tokens.roll(1, 1)), Counted()
    with counted:
        loss.backward()
    grads = {name: grad for name, (grad, _) in gradients(parallel_of(model)).items()}
    return loss.item(), grads, counted


def test_selective_repeats_no_product_and_changes_no_bit() -> None:
    (loss, grads, none), (less, fewer, selective), (least, fewest, full) = (
        passed(decoder(kind)) for kind in KINDS
    )
    assert loss == less == least
    for name, grad in grads.items():
        assert torch.equal(fewer[name], grad) and torch.equal(fewest[name], grad), name
    assert selective.products == none.products < full.products
    assert selective.names["aten::silu"] == full.names["aten::silu"] == 2 > none.names["aten::silu"]


def test_kinds_are_those_of_each_block() -> None:
    model, want = decoder("none"), passed(decoder("none"))
    parallel_of(model).kinds.update({"blocks.0": "full", "blocks.1": "selective"})
    loss, grads, counted = passed(model)
    assert loss == want[0] and all(torch.equal(grads[name], want[1][name]) for name in grads)
    assert want[2].products < counted.products < passed(decoder("full"))[2].products


@pytest.mark.parametrize(
    "kind",
    [
        *("selective", "reentrant"),
        pytest.param("none", marks=pytest.mark.full),
        pytest.param("full", marks=pytest.mark.full),
    ],
)
def test_a_compiled_block_is_the_same(kind: Recompute) -> None:
    """In one graph: nothing outside of it is changed while it runs."""
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    torch._dynamo.reset()
    found = []
    for compiled in (False, True):
        model = decoder("none")
        block, parallel = model.blocks[0], parallel_of(model)

        def call(kind: Recompute, x: Tensor) -> Any:
            forward = type(block).forward  # noqa: B023
            return again(forward, kind, parallel.moment, block, x, None, None)  # noqa: B023

        run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(2, 8, 16, dtype=torch.float64, generator=generator).requires_grad_()
        y = run(kind if compiled else "none", x)
        y.square().sum().backward()
        assert x.grad is not None
        grads = {name: grad for name, (grad, _) in gradients(parallel).items()}
        found.append({"y": y.detach(), "x": x.grad, **grads})
    for name, want in found[0].items():
        error = (found[1][name] - want).abs().max().item()
        assert error <= 1e-12 * want.abs().max().item(), name


def test_attention_is_kept_wherever_it_comes_from() -> None:
    ops = torch.ops.aten
    for op in (ops.mm, ops.addmm, ops._scaled_mm, ops._scaled_dot_product_flash_attention_for_cpu):
        assert kept(op.default)
    assert kept(torch.ops.ranvier.attend_documents.default)
    for op in (ops.mul.Tensor, ops.silu.default, ops._to_copy.default, ops.view.default):
        assert not kept(op)


def test_a_budget_is_no_kind_of_a_block() -> None:
    model = decoder("none")
    with pytest.raises(PlanError, match=r"recompute='budget' reached a block\. .* Use none"):
        again(model.blocks[0].forward, "budget", parallel_of(model).moment)
