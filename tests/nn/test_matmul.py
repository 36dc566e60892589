"""The products of a linear layer: all layouts give the same values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.cli import main
from ranvier.nn.fastest import Fastest
from ranvier.nn.matmul import WAYS, Layouts
from ranvier.train import matmuls

T, O, I = 6, 10, 4  # noqa: E741
CASES = [(product, name) for product, ways in WAYS.items() for name in ways]


def operands(product: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"y": ((T, I), (O, I)), "dx": ((T, O), (O, I)), "dw": ((T, O), (T, I))}[product]
    first, second = (torch.randn(n, dtype=torch.float64, generator=generator) for n in sizes)
    return first, second


def wanted(product: str) -> Tensor:
    form = {"y": "ti,oi->to", "dx": "to,oi->ti", "dw": "to,ti->oi"}[product]
    return torch.einsum(form, *operands(product))


def apply(layouts: Layouts, product: str, a: Tensor, b: Tensor) -> Tensor:
    method = {"y": layouts.forward, "dx": layouts.grad_x, "dw": layouts.grad_w}[product]
    return method(a, b)


@pytest.mark.parametrize(("product", "name"), CASES)
def test_all_ways_are_equal(product: str, name: str) -> None:
    layouts = Layouts(**{product: name})
    a, b = operands(product)
    y = apply(layouts, product, a, b)
    torch.testing.assert_close(y, wanted(product), rtol=0, atol=1e-12)
    assert y.is_contiguous()
    torch.compiler.reset()
    traced = torch.compile(apply, backend="aot_eager", fullgraph=True)(layouts, product, a, b)
    torch.testing.assert_close(traced, y, rtol=0, atol=1e-12)
    assert traced.stride() == y.stride()


def test_the_default_is_what_a_linear_layer_does() -> None:
    layouts = Layouts()
    x, w = operands("y")
    dy, _ = operands("dx")
    assert torch.equal(layouts.forward(x, w), F.linear(x, w))
    assert torch.equal(layouts.grad_x(dy, w), dy @ w)
    assert torch.equal(layouts.grad_w(dy, x), dy.T @ x)


def test_layouts_are_measured_by_shape_and_type() -> None:
    fastest = Fastest("cpu")
    layouts = Layouts.tuned((T, O, I), torch.float32, "cpu", fastest)
    assert [*fastest.table] == ["matmul y", "matmul dx", "matmul dw"]
    for product, ways in WAYS.items():
        (key,) = fastest.table[f"matmul {product}"]
        assert key == "t6 o10 i4 float32"
        measured = fastest.table[f"matmul {product}"][key]
        assert {*measured["milliseconds"]} == {*ways} and not measured["failed"]
        assert measured["choice"] == getattr(layouts, product)
    assert Layouts.tuned((T, O, I), torch.float32, "cpu", fastest) == layouts


def test_a_known_shape_makes_no_matrices() -> None:
    fastest = Fastest("cpu")
    shape = (2**40, 2**40, 2**40)
    for product, ways in WAYS.items():
        times = dict.fromkeys(ways, 1.0)
        kind, key = matmuls.label(product, shape, torch.float32)
        found = {"choice": "copied", "milliseconds": times, "failed": {}}
        fastest.table[kind] = {key: found}  # type: ignore[dict-item]
    assert Layouts.tuned(shape, torch.float32, "cpu", fastest) == Layouts(*["copied"] * 3)


def test_the_doctor_times_the_matmuls_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--matmuls", "--size", "tiny", "--tokens", "8", "--dtype", "fp32"]
    texts = []
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1], "the second finds what the first has kept"
    lines = texts[0].splitlines()
    assert lines[0].startswith("tiny with 8 tokens in fp32 on ")
    rows = lines[3:18]
    for layer in ("q, o", "k, v", "gate, up", "down", "head"):
        assert sum(line.startswith(f"{layer} ") for line in rows) == 3
    assert lines[18] == "" and "2%" in lines[19] and "Kept in" in lines[20]


def test_the_verdict_names_what_gains() -> None:
    def row(**times: float) -> matmuls.Row:
        choice = Fastest("cpu").decide(times, "plain")
        return matmuls.Row(
            "q", "dw", (4, 5, 6), {"choice": choice, "milliseconds": times, "failed": {}}
        )

    even, better = row(plain=1.0, copied=0.99), row(plain=1.0, copied=0.75)
    assert matmuls.verdict([even], 0.02) == "No product gains 2%; layouts stay plain."
    text = matmuls.verdict([even, better], 0.02)
    assert text == "1 of 2 products gain 2% or more over plain: dw of q (copied, 25%)."
    better.measured["failed"]["transposed"] = "out of memory"
    assert better.cell("transposed") == "failed" and better.cell("copied_x") == "-"
    assert matmuls.verdict([better], 0.02).endswith("in every layout: out of memory")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "tiny"], "Add --matmuls"),
        (["--matmuls", "--size", "tinny"], "Did you mean 'tiny'?"),
        (["--matmuls", "--tokens", "-1"], "tokens=-1"),
        (["--matmuls", "--dtype", "int8"], "dtype='int8'"),
    ],
)
def test_mistakes_are_told(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    assert end.value.code == 64 and says in capsys.readouterr().err
