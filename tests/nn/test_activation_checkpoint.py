"""Kinds of recomputation: the same numbers; what is kept and what is computed again differ."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equivalence import Case, batch_of, flow_of, gradients, micros_of
from grids import label
from pool import Pool
from ranvier import launch
from ranvier.config.plan import Plan, Recompute
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.nn.activation_checkpoint import checkpoint_block, is_saved_op
from ranvier.nn.layer import StepContext
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.trace import Event, communication_events, diff_events
from ranvier.train.memory import usage
from ranvier.train.step import forward_backward

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
    return parallelize(Decoder(CONFIG).double(), Grid({}), Plan(recompute=kind))


def passed(model: Decoder) -> tuple[float, dict[str, Tensor], Counted]:
    """Loss, gradients, and what ran in backward."""
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(3))
    loss, counted = model(tokens, tokens.roll(1, 1)), Counted()
    with counted:
        loss.backward()
    grads = {name: grad for name, (grad, _) in gradients(get_parallel_model(model)).items()}
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
    get_parallel_model(model).recompute_modes.update({"blocks.0": "full", "blocks.1": "selective"})
    loss, grads, counted = passed(model)
    assert loss == want[0] and all(torch.equal(grads[name], want[1][name]) for name in grads)
    assert want[2].products < counted.products < passed(decoder("full"))[2].products


@pytest.mark.compiled
@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "selective",
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
        block, parallel = model.blocks[0], get_parallel_model(model)

        def call(kind: Recompute, x: Tensor) -> Any:
            forward = type(block).forward  # noqa: B023
            return checkpoint_block(forward, kind, parallel.step_context, block, x, None, None)  # noqa: B023

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
        assert is_saved_op(op.default)
    assert is_saved_op(torch.ops.ranvier.attend_documents.default)
    for op in (ops.mul.Tensor, ops.silu.default, ops._to_copy.default, ops.view.default):
        assert not is_saved_op(op)


def test_a_budget_is_no_kind_of_a_block() -> None:
    model = decoder("none")
    with pytest.raises(PlanError, match=r"has recompute='memory_budget'\. .* Use 'none'"):
        checkpoint_block(
            model.blocks[0].forward, "memory_budget", get_parallel_model(model).step_context
        )


WAYS: list[tuple[Recompute, str]] = [
    ("none", "rerun"),
    ("full", "rerun"),
    ("full", "save"),
    ("selective", "save"),
]


def of_blocks(events: list[Event]) -> list[Event]:
    """What blocks communicate; of their buckets over depth, not what belongs to the update."""
    inside = [event for event in communication_events(events) if event.where.startswith("blocks.")]
    return [event for event in inside if event.where.count(".") > 1 or event.axis == ("depth",)]


def collectives(grid: Grid, case: Case) -> tuple[list[str], dict[str, int]]:
    """Gradients that are not those of blocks that keep all, events that were not predicted; and
    the collectives of blocks in a step by way of recomputation.
    """
    batch = batch_of(case.model, samples=16, packed=False)
    micros, flow = micros_of(batch, grid, case.micro_batches), flow_of(batch, grid, 1)
    flow = replace(flow, samples=flow.samples // case.micro_batches)
    lines, counts, want = list[str](), dict[str, int](), dict[str, Tensor]()
    for kind, what in WAYS:
        model = replace(case, recompute=kind, collectives=what).on(grid)
        parallel = get_parallel_model(model)
        predicted = of_blocks(parallel.events(flow, micro_batches=case.micro_batches))
        for _ in range(2):  # in the first the order of gathers and what is spare are not known
            with grid.trace.record_events() as events:
                forward_backward(model, micros)
                grads = {name: grad for name, (grad, _) in gradients(parallel).items()}
            lines += diff_events(predicted, of_blocks(events))
            want = want or grads
            lines += [n for n, grad in grads.items() if not torch.equal(grad, want[n])]
        counts[f"{kind} {what}"] = len(of_blocks(events))
    return lines, counts


GRIDS: list[tuple[dict[str, int], Case]] = [
    ({"row": 2, "col": 2}, Case("llama")),
    ({"pipe": 2, "row": 2}, Case("four", micro_batches=2)),
]
MORE: list[tuple[dict[str, int], Case]] = [
    ({"depth": 2, "row": 2}, Case("llama", micro_batches=2)),
    ({"pipe": 2, "row": 2}, Case("deep", micro_batches=4)),
    ({"row": 2, "col": 2}, Case("adapted")),
    ({"row": 2, "col": 2}, Case("llama", inner="features")),
    ({"data": 2, "col": 2}, Case("biased", micro_batches=2)),
    ({"depth": 2, "row": 2, "col": 2}, Case("olmo2", inner="features")),
    ({"pipe": 2, "depth": 2, "row": 2}, Case("deep", micro_batches=4, policy="zero-bubble")),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "case"),
    [*GRIDS, *(pytest.param(*one, marks=pytest.mark.full) for one in MORE)],
    ids=lambda one: label(one) if isinstance(one, dict) else one.label,
)
def test_kept_collectives_are_not_repeated(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    """As many as without recomputation, for every kind; and not one bit changes."""
    for lines, counts in pool.on_grid(degrees, collectives, case):
        assert lines == []
        assert counts["full rerun"] > counts["none rerun"]
        kept = [count for way, count in counts.items() if way.endswith("save")]
        assert kept == [counts["none rerun"]] * 2
        if (degrees, case) == GRIDS[0]:  # as docs/guides/memory.md says
            assert (counts["none rerun"], counts["full rerun"]) == (48, 68)


def bytes_kept(run: Callable[[], Tensor], x: Tensor, parallel: ParallelModel) -> int:
    """Bytes that live between the passes of a block; it has run before."""
    kept = 0
    for _ in range(2):
        parallel.bucket_scheduler.begin_step("")
        with usage.HostMemoryCounter(
            [[bucket.data for bucket in parallel.bucket_scheduler.buckets], x]
        ) as watch:
            y = run()
            kept = watch.live_bytes()
            y.backward(torch.zeros_like(y))
    return kept


@pytest.mark.parametrize(
    ("degrees", "inner"),
    [({"row": 2, "col": 2}, "features"), ({"row": 4}, "samples"), ({"col": 2}, "samples")],
    ids=["features", "row", "col"],
)
def test_kept_bytes_are_as_predicted(degrees: dict[str, int], inner: str) -> None:
    """The result of the last layer of a block, which nobody needs, is not kept.

    A selective block keeps less if it keeps what it communicates: sums instead of their terms.
    """
    found, world = dict[tuple[str, str], int](), math.prod(degrees.values())
    with launch.fake_process_group(world, rank=world - 1):
        grid = Grid(degrees, rank=world - 1, connected=True)
        flow = flow_of(batch_of("llama", samples=8, packed=False), grid, 1)
        shape = (flow.samples, flow.seq // grid.degrees["row"], 16 // grid.degrees["col"])
        for kind, what in itertools.product(KINDS[1:], ("rerun", "save")):
            model = Case("llama", inner=inner, recompute=kind, collectives=what).on(grid)
            parallel, block = get_parallel_model(model), model.get_submodule("blocks.0")
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            run = partial(block, x, None, None)
            found[kind, what] = bytes_kept(run, x, parallel)
        assert parallel.step_context.save_policy.unneeded_layers == {"blocks.0.mlp.down"}
        inside = {
            n: leaf
            for n, leaf in parallel.communicating_layers.items()
            if n.startswith("blocks.0.")
        }
        for kind, selective in (("full", False), ("selective", True)):
            more = sum(leaf.saved_bytes(flow, selective=selective) for leaf in inside.values())
            more -= inside["blocks.0.mlp.down"].saved_bytes(flow)
            assert found[kind, "save"] == found[kind, "rerun"] + more
    assert found["selective", "save"] < 0.7 * found["selective", "rerun"]


def test_what_is_kept_serves_one_backward_pass() -> None:
    model = decoder("selective")
    loss = model(*(torch.zeros(2, 2, 8, dtype=torch.int64)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Compute the loss again"):
        loss.backward()


class Odd(torch.nn.Module):
    """A block that writes into what it has computed, or does something else the second time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.runs = how, 0

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x, w, y: `[n, n]`."""
        self.runs += 1
        y = torch.addmm(x, x, w) if self.how == "other" and self.runs == 2 else x @ w
        z = y.sigmoid() @ w
        return z + (y.add_(1.0) if self.how == "writes" else y)


@pytest.mark.parametrize(
    ("how", "words"),
    [("writes", r"modified 1 times .* out-of-place"), ("other", "runs .*addmm.* pass ran .*mm")],
)
def test_a_block_that_cannot_run_again_is_refused(how: str, words: str) -> None:
    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    y = checkpoint_block(Odd(how), "selective", StepContext(), x, w)
    with pytest.raises(RuntimeError, match=words):
        y.sum().backward()
