"""All leaves on a grid against their serial twins, from the examples the leaves give.

Runs inside workers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equivalence import ONE_PASS, gradients, worst
from pool import device_of
from ranvier.comm import collectives
from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.grid import Grid
from ranvier.nn.example import LayerExample
from ranvier.parallel.parallelize import PARALLEL_LAYERS, parallelize
from ranvier.sharding import (
    OUTER_RULE,
    WEIGHT_RULE,
    AxisRule,
    Dim,
    Sharding,
    ShardingTable,
    dim_name,
    num_packed_dims,
)
from ranvier.trace import diff_events


class Lone(nn.Module):
    """A model of one layer."""

    def __init__(self, example: LayerExample, twin: type[nn.Module]) -> None:
        super().__init__()
        self.sizes = {
            k: v for k, v in example.sizes.items() if k not in ("batch", "seq", "head_dim")
        }
        torch.manual_seed(3)
        self.leaf = example.make_layer(twin).double()
        self.dims = {"leaf": tuple(example.dims)} if example.dims else {}
        self.dims |= {
            f"leaf.{name}": tuple(dims) for name, dims in (example.children or {}).items()
        }

    def forward(self, *inputs: Tensor) -> Any:
        return self.leaf(*inputs)


def check_all(grid: Grid, inner: str, ways: Sequence[bool] = (True, False)) -> list[str]:
    """Every example of every leaf, fast (True) and as reference (False)."""
    lines = []
    for twin, leaf in PARALLEL_LAYERS.items():
        for number, example in enumerate(leaf.example_layers()):  # type: ignore[attr-defined]
            for fast in ways:
                way = "fast" if fast else "reference"
                name = f"{leaf.__name__} {number} {way} on rank {grid.rank}: "
                lines += [name + line for line in check(grid, inner, example, twin, fast)]
            name = f"{leaf.__name__} {number} with whole tokens on rank {grid.rank}: "
            lines += [name + line for line in check_whole_tokens(grid, inner, example, twin)]
    return lines


@torch.no_grad()
def check_whole_tokens(
    grid: Grid, inner: str, example: LayerExample, twin: type[nn.Module]
) -> list[str]:
    """Outputs and communication of a forward pass, for which row does not split tokens."""
    device = device_of(grid)
    inputs = [whole_input(dims, example, i, device) for i, dims in enumerate(example.inputs)]
    outputs = as_list(Lone(example, twin).to(device)(*inputs))
    table = ShardingTable(inner, row_splits="none")  # type: ignore[arg-type]
    plan = Plan(col_splits=table.col_splits).with_degrees(grid.degrees)
    model = parallelize(Lone(example, twin), grid, plan, device=device).eval()
    parallel = model.parallel
    parallel.step_context.row_splits = "none"
    parts = [
        part_of(x, dims, example, table, grid)
        for x, dims in zip(inputs, example.inputs, strict=True)
    ]
    parallel.bucket_scheduler.begin_step("test")
    with grid.trace.record_events() as events:
        mine = as_list(model(*parts))
    lines = []
    for y, want, dims in zip(mine, outputs, example.outputs, strict=True):
        if dims:
            # Padding columns are only returned for training.
            want = part_of(want, dims, example, table, grid)[..., : y.shape[-1]]
        else:
            y = collectives.all_reduce(y, parallel.token_axis).wait()
        lines += worst("output", y, want, ONE_PASS)
    samples = example.sizes["batch"] // grid.axis("data", "expert", "depth").size
    flow = ActivationShape(samples, example.sizes["seq"], itemsize=8, statistics_itemsize=8)
    predicted = [
        event
        for layer in parallel.communicating_layers.values()
        for event in layer.forward_events(flow)
    ]
    return lines + diff_events(predicted, [event for event in events if "depth" not in event.axis])


def check(
    grid: Grid, inner: str, example: LayerExample, twin: type[nn.Module], fast: bool
) -> list[str]:
    """Outputs, gradients of inputs and weights, and communication of one example."""
    device = device_of(grid)
    serial = Lone(example, twin).to(device)
    inputs = [whole_input(dims, example, i, device) for i, dims in enumerate(example.inputs)]
    outputs = as_list(serial(*inputs))
    seeds = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).double().to(device)
        for i, y in enumerate(outputs)
    ]
    sum((y * seed).sum() for y, seed in zip(outputs, seeds, strict=True)).backward()

    table = ShardingTable(inner)  # type: ignore[arg-type]
    plan = Plan(col_splits=table.col_splits).with_degrees(grid.degrees)
    model = parallelize(Lone(example, twin), grid, plan, device=device)
    parallel = model.parallel
    parallel.step_context.overlapped_autograd = fast
    parts = [
        part_of(x.detach(), dims, example, table, grid).requires_grad_(x.requires_grad)
        for x, dims in zip(inputs, example.inputs, strict=True)
    ]
    parallel.bucket_scheduler.begin_step("test")
    with grid.trace.record_events() as events:
        mine = as_list(model(*parts))
        shares = [
            seed if not dims else share_of(seed, dims, example, table, grid)
            for seed, dims in zip(seeds, example.outputs, strict=True)
        ]
        torch.autograd.backward(
            mine, [share.expand_as(y) for share, y in zip(shares, mine, strict=True)]
        )
        grads = gradients(parallel)
    lines = []
    for y, want, dims in zip(mine, outputs, example.outputs, strict=True):
        y = y.detach()
        if not dims:
            y = collectives.all_reduce(y, parallel.token_axis).wait()
        else:
            want = part_of(want, dims, example, table, grid)
        lines += worst("output", y, want.detach(), ONE_PASS)
    for i, (x, part, dims) in enumerate(zip(inputs, parts, example.inputs, strict=True)):
        if x.grad is not None:
            grad = summed_copies(part.grad, dims, example, table, grid, x.shape)
            want = part_of(x.grad, dims, example, table, grid)
            lines += worst(f"gradient of input {i}", grad, want, ONE_PASS)
    for name, param in serial.named_parameters():
        part, place = grads[name]
        want = place.slice_from(param.grad)
        if want.numel():
            lines += worst(
                f"gradient of {name}", part, want, ONE_PASS, param.grad.abs().max().item()
            )
    if fast:
        lines += diff_events(leaf_events(parallel, example, grid), events)
    return lines


def leaf_events(parallel: Any, example: LayerExample, grid: Grid) -> list[Any]:
    samples = example.sizes["batch"] // grid.axis("data", "expert", "depth").size
    passes = parallel.events(
        ActivationShape(samples, example.sizes["seq"], itemsize=8, statistics_itemsize=8)
    )
    update = [e for e in parallel.update_events() if e.where != "norm" and e.op != "all_gather"]
    return passes + update


def as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def shape_of(dims: Sequence[Dim], example: LayerExample) -> list[int]:
    """Elements of each dim: heads are counted as such only before head_dim."""
    sizes, out = example.sizes, []
    for i, dim in enumerate(dims):
        name = dim_name(dim)
        wide = name in ("heads", "kv_heads") and "head_dim" not in dims[i:]
        out.append(num_packed_dims(dim) * sizes[name] * (sizes["head_dim"] if wide else 1))
    return out


def whole_input(dims: Sequence[Dim], example: LayerExample, number: int, device: str) -> Tensor:
    generator, shape = torch.Generator().manual_seed(100 + number), shape_of(dims, example)
    if len(dims) == 2:
        words = torch.randint(0, example.sizes["vocab"], shape, generator=generator)
        return words.to(device)
    return torch.randn(shape, generator=generator).double().to(device).requires_grad_()


def sharding_of(
    shape: Sequence[int],
    dims: Sequence[Dim],
    example: LayerExample,
    table: ShardingTable,
    grid: Grid,
) -> Sharding:
    """Cut by the region of its features; ids come whole to row and col."""
    feature = next((dim_name(dim) for dim in dims if dim_name(dim) in WEIGHT_RULE), None)
    rule: AxisRule = (
        {"batch": OUTER_RULE["batch"]} if feature is None else table.activation_rule(feature)
    )
    return Sharding.from_dims(shape, dims, rule, grid.degrees, units=example.sizes)


def part_of(
    whole: Tensor, dims: Sequence[Dim], example: LayerExample, table: ShardingTable, grid: Grid
) -> Tensor:
    """My part of an activation, in which packed dims are one."""
    sharding = sharding_of(whole.shape, dims, example, table, grid)
    part = sharding.shard_at(grid.index).slice_from(whole)
    return part.flatten(len(dims) - 1) if part.dim() > len(dims) else part


def copies_of(
    shape: Sequence[int],
    dims: Sequence[Dim],
    example: LayerExample,
    table: ShardingTable,
    grid: Grid,
) -> dict[str, int]:
    """Consecutive ranks of each axis that hold the same part (shared kv heads)."""
    sharding = sharding_of(shape, dims, example, table, grid)
    return {cut.axis: cut.replicas for cuts in sharding.splits for cut in cuts if cut.replicas > 1}


def share_of(
    seed: Tensor, dims: Sequence[Dim], example: LayerExample, table: ShardingTable, grid: Grid
) -> Tensor:
    """My part of the gradient of an output.

    Ranks that hold the same part each bring a share of it.
    """
    copies = copies_of(seed.shape, dims, example, table, grid)
    return part_of(seed, dims, example, table, grid) / math.prod(copies.values())


def summed_copies(
    grad: Tensor,
    dims: Sequence[Dim],
    example: LayerExample,
    table: ShardingTable,
    grid: Grid,
    shape: Sequence[int],
) -> Tensor:
    """The gradient of an input: ranks that hold the same part each have a share of it."""
    copies = copies_of(shape, dims, example, table, grid)
    return collectives.all_reduce(grad, grid.axis(share=copies)).wait()
