"""Layers from a dim to itself, alone and in a model, compared with one process in float64.

`test_equivalence` compares each layer and its communication. Here a model of such layers is trained
on grids of all axes, with adapters, recomputed and compiled, and the planner predicts it.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import leaf_cases
from equivalence import Case, Serial, batch_of, compare, micros_of, reload, run_case, worst
from grids import label
from pool import Pool, device_of
from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape, LayoutContext
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.models import AdapterConfig
from ranvier.models.feed_forward import FusedLinear
from ranvier.nn import linear
from ranvier.nn.example import EXAMPLE_SIZES, LayerExample
from ranvier.nn.linear import Conv1D
from ranvier.parallel.full_batch import call_on_full_batch
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.model_spec_torch import build_module_spec
from ranvier.sharding import ShardingTable
from ranvier.trace import diff_events
from ranvier.train.step import forward_backward
from same_dim_cases import build_same_dim_model
from states import assemble

pytestmark = pytest.mark.nccl
LR, CLIP = 1e-2, 0.5
AXES = ("pipe", "data", "expert", "context", "depth", "row", "col")


def list_grids() -> list[dict[str, int]]:
    """All grids of up to 8 ranks on all axes."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    found = [dict(zip(AXES, some, strict=True)) for some in sizes if math.prod(some) <= 8]
    # Depth pads the rows of a weight that it does not divide.
    uneven = [{"depth": 3}, {"depth": 3, "row": 2}, {"depth": 3, "col": 2}]
    return [*found, *(dict.fromkeys(AXES, 1) | some for some in uneven)]


def list_cases() -> list[Any]:
    """All grids with both splits of col, overlapped and not; the rest is drawn."""
    cases = []
    for number, degrees in enumerate(list_grids()):
        for inner, overlap in itertools.product(("samples", "features"), (True, False)):
            drawn = random.Random(f"{number} {inner} {overlap}")
            stages = degrees["pipe"] > 1
            case = Case(
                "same dim deep" if stages else drawn.choice(("same dim", "same dim lora")),
                inner=inner,
                overlap=overlap,
                recompute=drawn.choice(("none", "selective", "full")),
                micro_batches=2 if stages else 1,
                policy=drawn.choice(("message_driven", "zero-bubble")),
                weights_over=drawn.choice(("depth", "depth_context")),
                steps=3,
            )
            name = f"{label(degrees)}-{case.label}{'-overlap' * overlap}-{case.weights_over}"
            cases.append(pytest.param(degrees, case, id=name))
    return cases


@functools.cache
def serial(model: str, samples: int) -> Serial:
    return Serial(model, batch_of(model, samples=samples, packed=False), LR, CLIP, steps=3)


def differences(pool: Pool, degrees: dict[str, int], case: Case) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    whole = serial(case.model, 24 if degrees.get("depth") == 3 else 16)
    return compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_a_model_equals_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    assert differences(pool, degrees, case) == []


def test_the_state_reloads_on_another_grid(pool: Pool) -> None:
    """The columns of a packed in dim that a rank holds are not consecutive."""
    whole = serial("same dim", 16)
    case = Case("same dim", inner="features", steps=3)
    results = pool.on_grid({"depth": 2, "col": 2}, run_case, case, whole.batch, LR, CLIP)
    state = [assemble(result[key] for result in results) for key in ("after", "optimizer")]
    for degrees in ({"row": 2, "col": 2}, {"depth": 3}):
        found = pool.on_grid(degrees, reload, Case("same dim", steps=3), *state)
        assert [line for lines in found for line in lines] == []


def run_broken(grid: Grid, case: Case, batch: Any) -> dict[str, Any]:
    """Packed inputs are gathered as if they were one dim."""
    with mock.patch.multiple(
        linear, unpack_input=lambda x, layers, dim: x, pack_input=lambda x, layers, dim: x
    ):
        return run_case(grid, case, batch, LR, CLIP)


def test_a_wrong_order_of_packed_features_is_caught(pool: Pool) -> None:
    whole = serial("same dim", 16)
    case = Case("same dim", inner="features", steps=3)
    lines = compare(whole, pool.on_grid({"col": 2}, run_broken, case, whole.batch))
    assert any("gradient of blocks.0.mlp.down" in line for line in lines), lines


# ---- other ways to run the layer -----------------------------------------------------------------


def compiled_differences(grid: Grid, inner: str) -> list[str]:
    """What a compiled model computes otherwise than one process."""
    torch._dynamo.reset()
    whole = serial("same dim", 16)
    case = Case("same dim", inner=inner)
    model = case.on(grid, compiled="aot_eager")
    loss = forward_backward(model, micros_of(whole.batch, grid, 1)).item()
    lines = worst("loss", torch.tensor(loss), torch.tensor(whole.losses[0]), 1e-12)
    for name, (part, shard) in leaf_cases.gradients(get_parallel_model(model)).items():
        want = shard.slice_from(whole.grads[name])
        scale = whole.grads[name].abs().max().item()
        lines += worst(f"gradient of {name}", part.cpu(), want, 1e-12, scale)
    return lines


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [
        ({"col": 2}, "samples"),
        ({"depth": 2, "row": 2, "col": 2}, "features"),
    ],
    ids=["col", "cube"],
)
def test_compiled_blocks_equal_one_process(pool: Pool, degrees: dict[str, int], inner: str) -> None:
    found = pool.on_grid(degrees, compiled_differences, inner)
    assert [line for lines in found for line in lines] == []


class Transposed(nn.Module):
    """A linear layer whose weight is (in, out)."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def check_transposed(grid: Grid, inner: str) -> list[str]:
    pair = ("batch", "seq", (2, "mlp"))
    triple = ("batch", "seq", (3, "mlp"))
    example = LayerExample(
        lambda twin: twin(48, 72), ((2, "mlp"), (3, "mlp")), [pair], [triple], EXAMPLE_SIZES
    )
    with mock.patch.dict(leaf_cases.PARALLEL_LAYERS, {Transposed: Conv1D}):
        return [
            line
            for fast in (True, False)
            for line in leaf_cases.check(grid, inner, example, Transposed, fast)
        ]


@pytest.mark.parametrize("inner", [pytest.param("samples", marks=pytest.mark.full), "features"])
def test_a_transposed_weight_is_split_along_its_in_dim(pool: Pool, inner: str) -> None:
    found = pool.on_grid({"row": 2, "col": 2}, check_transposed, inner)
    assert [line for lines in found for line in lines] == []


class Rows(nn.Module):
    """A user's model on the residual stream: y = x + W₂ f(W₁ x)."""

    dims = {"first": ("embed", "embed"), "second": ("embed", "embed")}

    def __init__(self, embed: int = 16) -> None:
        super().__init__()
        self.sizes = {"embed": embed}
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(embed, embed), nn.Linear(embed, embed)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.second(torch.tanh(self.first(x)))
        return y


def full_batch_differences(grid: Grid, shape: tuple[int, ...]) -> list[str]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    want = Rows().double()(x)
    device = device_of(grid)
    model = parallelize(Rows().double(), grid, device=device)
    y = call_on_full_batch(model, x.to(device))
    return worst("output", y.detach().cpu(), want.detach(), 1e-12)


@pytest.mark.parametrize("shape", [(4, 6, 16), (6, 16), (4, 2, 3, 16)], ids=str)
def test_a_model_of_a_user(pool: Pool, shape: tuple[int, ...]) -> None:
    """Tokens of samples, rows, and tokens with several feature vectors."""
    found = pool.on_grid({"row": 2, "col": 2}, full_batch_differences, shape)
    assert [line for lines in found for line in lines] == []


# ---- prediction ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["samples", "features"])
@pytest.mark.parametrize("lora", [None, AdapterConfig(rank=2, target_modules=("pair", "a"))])
def test_the_planner_predicts_what_the_layers_do(inner: Any, lora: AdapterConfig | None) -> None:
    """The same communication, FLOPs and shards without layers, also from a stored spec."""
    spec = build_module_spec(build_same_dim_model(lora=lora))
    spec = type(spec).from_dict(spec.to_dict())
    degrees = {"depth": 2, "row": 2, "col": 2}
    grid = Grid(degrees, rank=5, connected=False)
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)
    parallel = get_parallel_model(
        parallelize(build_same_dim_model(lora=lora), grid, plan, materialize=False)
    )
    ground = LayoutContext(grid.degrees, ShardingTable(inner), spec.units)
    flow = ActivationShape(4, 8, itemsize=2, statistics_itemsize=4)
    (block,) = (part for part in spec.parts if part.is_block)
    for layer in block.layers_of_kind("linear", "siblings", "apart"):
        cost = layer.build_layer("blocks.0.", ground)
        real = parallel.layers[cost.name].cost_model
        assert diff_events(cost.events(flow), real.events(flow)) == []
        assert cost.flops(flow) == real.flops(flow)
        for param in layer.param_specs("blocks.0.", "", ground):
            assert param.sharding == parallel.weights[param.name].sharding


def test_flops_and_bytes_of_a_same_dim_layer() -> None:
    """Of [b, s/row, d/col] with W[d, d/col]: each rank has 1 / (row·col) of the work."""
    grid = Grid({"row": 2, "col": 4}, rank=0, connected=False)
    model = parallelize(Rows(), grid, materialize=False)
    cost = get_parallel_model(model).layers["first"].cost_model
    flow = ActivationShape(4, 8, itemsize=2, statistics_itemsize=4)
    tokens = 4 * 8
    assert cost.flops(flow) == 2 * tokens * 16 * 16 // 8
    (event,) = cost.forward_events(flow)
    assert (event.op, event.axis, event.bytes) == ("reduce_scatter", ("col",), tokens // 2 * 16 * 2)
    (event,) = cost.backward_events(flow)
    assert (event.op, event.axis, event.bytes) == ("all_gather", ("col",), tokens // 2 * 16 * 2)


# ---- what is refused -----------------------------------------------------------------------------


class Stack(nn.Module):
    """Some linear layers with these dims."""

    def __init__(self, **dims: tuple[Any, Any]) -> None:
        super().__init__()
        self.sizes = {"embed": 16, "kv_heads": 2, "heads": 8}
        self.dims = {f"layers.{name}": of_layer for name, of_layer in dims.items()}
        self.layers = FusedLinear({name: nn.Linear(16, 16) for name in dims})


def test_layers_that_communicate_otherwise_are_not_fused() -> None:
    model = Stack(a=("heads", "embed"), b=("embed", "embed"))
    message = r"layers fuses layers with the dims \('heads', 'embed'\), \('embed', 'embed'\).*alike"
    with pytest.raises(ShardingError, match=message):
        parallelize(model, Grid({}), materialize=False)


def test_a_layer_does_not_read_kv_heads_that_ranks_share() -> None:
    """A sum over row would count each head twice."""
    grid = Grid({"row": 4}, rank=0, connected=False)
    with pytest.raises(ShardingError, match=r"reads kv_heads, which 2 of row=4 ranks share.*fewer"):
        parallelize(Stack(a=("kv_heads", "kv_heads")), grid, materialize=False)
    fewer = Grid({"row": 2}, rank=0, connected=False)
    parallelize(Stack(a=("kv_heads", "kv_heads")), fewer, materialize=False)


def test_dora_of_a_same_dim_layer_is_refused() -> None:
    lora = AdapterConfig(rank=2, dora=True, target_modules=("last",))
    with pytest.raises(ShardingError, match=r"from 'embed' to itself.*without DoRA"):
        parallelize(build_same_dim_model(lora=lora), Grid({}), materialize=False)


class Packed(nn.Module):
    """A layer whose input or output is that of the model."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.sizes = {"mlp": 16}
        self.dims = {"layer": ((out, "mlp"), (into, "mlp"))}
        self.input_dims = {"x": ("batch", "seq", "mlp")}
        torch.manual_seed(5)
        self.layer = nn.Linear(16 * into, 16 * out)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def packed_message(grid: Grid, out: int, into: int) -> str:
    model = parallelize(Packed(out, into), grid, device=device_of(grid))
    try:
        call_on_full_batch(model, torch.ones(2, 4, 16 * into, device=device_of(grid)))
    except ShardingError as error:
        return str(error)
    return ""


def test_packed_features_of_the_model_are_refused(pool: Pool) -> None:
    """A rank would get consecutive features, and not its part of each of the packed dims."""
    for message in pool.on_grid({"row": 2}, packed_message, 1, 2):
        assert re.search(r"layer reads x as \(2, 'mlp'\).*torch.cat", message)
    for message in pool.on_grid({"row": 2}, packed_message, 2, 1):
        assert re.search(r"layer, which packs \(2, 'mlp'\).*y.chunk\(2, -1\)", message)
    # Samples are split as usual.
    assert {*pool.on_grid({"col": 2}, packed_message, 2, 2)} == {""}
