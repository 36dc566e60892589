"""Compiled blocks: the numbers of eager ones, one graph for all, and events under their own names.

The backend traces as the compiler does and then runs operation by operation, so that numbers can be
compared closely; one test makes machine code.
"""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from comm.test_compile import strict
from equivalence import batch_of, compile_with, copied, flow_of, gradients, micros_of, worst
from pool import Pool
from ranvier import call_on_full_batch, launch
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models import AdapterConfig, DecoderConfig, build_decoder
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.context_graph import BlockAttention
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardedStateDict
from ranvier.trace import Event, communication_events, diff_events
from ranvier.train.step import forward_backward

pytestmark = pytest.mark.compiled
ONE_PASS, STEPS = 1e-12, 1e-9
"""Relative to the tensor's largest magnitude."""
LAYERS = 3
PLAIN = AdapterConfig()
SHAPE = {"embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 29}


@dataclass(frozen=True)
class Case:
    """One way to run the decoder."""

    inner: str = "samples"
    recompute: str = "none"
    collectives: str = "rerun"
    packed: bool = False
    dropout: float = 0.0
    micro_batches: int = 1
    layers: int = LAYERS
    lora: AdapterConfig = PLAIN
    context_attention: str = "auto"

    @property
    def graphs(self) -> int:
        """One for all blocks, one for the last norm.

        Where nothing is computed again, blocks leave their last addition to the next: the first
        one, which gets none, has a graph of its own.
        """
        return 3 if self.recompute == "none" and self.layers > 1 else 2

    def on(self, grid: Grid, compiled: str) -> Any:
        """The decoder on a grid, the same on every call."""
        torch.manual_seed(1)
        config = DecoderConfig(**SHAPE, layers=self.layers, dropout=self.dropout)  # type: ignore[arg-type]
        model = build_decoder(config, self.lora).double()
        plan = Plan(
            col_splits=self.inner,  # type: ignore[arg-type]
            recompute=self.recompute,  # type: ignore[arg-type]
            compile="on" if compiled else "off",
            context_attention=self.context_attention,  # type: ignore[arg-type]
        ).with_degrees(grid.degrees)
        model = compile_with(parallelize(model, grid, plan), compiled)
        parallel = get_parallel_model(model)
        parallel.step_context.save_policy.collectives = self.collectives  # type: ignore[assignment]
        return model

    def micros(self, grid: Grid, batch: Batch) -> list[Batch]:
        """What this rank works on, with documents as cuts."""
        return [one.to("cpu") for one in micros_of(batch, grid, self.micro_batches)]


def fresh() -> None:
    """Forget all graphs; warnings are errors, but for one that the compiler itself lets go by."""
    strict()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def batches(packed: bool) -> list[Batch]:
    """Two batches; if packed of different numbers of documents, in each sample several."""
    first = batch_of("llama", samples=8, packed=False)
    if not packed:
        return [first, first]
    index, row = torch.arange(8).expand(8, 8), torch.arange(8).unsqueeze(1)
    found = []
    for most in (3, 5):
        ids = (index + row) // most
        starts = ids.diff(dim=1, prepend=ids[:, :1] - 1) > 0
        positions = index - torch.where(starts, index, 0).cummax(1).values
        found.append(Batch(first.tokens, first.targets, positions, ids, samples=first.samples))
    return found


@dataclass
class Trained:
    """What two steps gave."""

    numbers: list[float]
    """Loss and norm of each."""
    grads: ShardedStateDict
    after: ShardedStateDict
    graphs: list[int]
    """Compiled in each step."""
    weights: dict[str, weakref.ref[nn.Parameter]]


def trained(grid: Grid, case: Case, compiled: str) -> Trained:
    """Two steps."""
    model = case.on(grid, compiled)
    parallel: ParallelModel = model.parallel
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2, clip=0.5)
    numbers, made, grads = list[float](), list[int](), ShardedStateDict()
    for step, batch in enumerate(batches(case.packed)):
        before = graphs()
        numbers.append(forward_backward(model, case.micros(grid, batch)).item())
        grads = grads if step else copied(gradients(parallel))
        numbers.append(optimizer.step().item())
        made.append(graphs() - before)
    weights = {name: weakref.ref(param) for name, param in model.named_parameters()}
    return Trained(numbers, grads, copied(parallel.sharded_state()), made, weights)


def differs(grid: Grid, case: Case) -> tuple[list[str], list[int], list[str]]:
    """What a compiled decoder does otherwise than the eager one; graphs of each step; what of the
    weights is left when the models are gone.
    """
    fresh()
    want, have = trained(grid, case, ""), trained(grid, case, "aot_eager")
    lines = []
    for i, (a, b) in enumerate(zip(have.numbers, want.numbers, strict=True)):
        if not abs(a - b) <= (ONE_PASS if i < 2 else STEPS) * abs(b):
            lines.append(f"number {i}: {a} instead of {b}")
    floor = max(grad.abs().max().item() for grad, _ in want.grads.values() if grad.numel())
    for what, limit in (("grads", ONE_PASS), ("after", STEPS)):
        for name, (part, place) in getattr(want, what).items():
            mine, where = getattr(have, what)[name]
            assert where == place, name
            if part.numel():
                lines += worst(f"{what} of {name}", mine, part, limit, floor)
    gc.collect()
    alive = [name for one in (want, have) for name, ref in one.weights.items() if ref() is not None]
    return [f"rank {grid.rank}: {line}" for line in lines], have.graphs, alive


CASES: list[tuple[dict[str, int], Case]] = [
    ({}, Case(recompute="full", packed=True, dropout=0.1, micro_batches=2)),
    ({"col": 2}, Case(recompute="selective", collectives="save", packed=True)),
    ({"row": 2}, Case(layers=2, lora=AdapterConfig(rank=2, dropout=0.2, dora=True))),
    ({"row": 2, "col": 2}, Case(recompute="selective", packed=True)),
    ({"row": 2, "col": 2}, Case(inner="features", recompute="full", collectives="save", layers=1)),
    ({"depth": 2, "data": 2}, Case(packed=True, dropout=0.1, layers=1)),
    ({"context": 2}, Case(packed=True, context_attention="kv_gather")),
    ({"context": 2}, Case(packed=True, recompute="full", dropout=0.1, context_attention="ring")),
    ({"context": 2, "row": 2}, Case(packed=True, recompute="selective", layers=2)),
    (
        {"context": 2, "col": 2},
        Case(packed=True, recompute="full", layers=2, context_attention="ulysses"),
    ),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_compiled_blocks_equal_eager_ones:
        names = ["one", "col", "adapters", "samples", "features", "depth"]
        names += ["kv_gather", "ring", "context and row", "ulysses"]
        count = len(CASES) if metafunc.config.getoption("--full") else 1
        metafunc.parametrize(("degrees", "case"), CASES[:count], ids=names[:count])


def test_compiled_blocks_equal_eager_ones(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    """And one graph serves all blocks, one the last norm; other documents need no other."""
    for lines, made, alive in pool.on_grid(degrees, differs, case):
        assert lines == []
        assert made == [case.graphs, 0]
        assert alive == [], "no graph holds a weight of a model that is gone"


def traced(grid: Grid) -> list[tuple[list[str], list[float | None]]]:
    """How the events of two steps differ from the prediction for eager blocks.

    And when what a graph communicates was issued: it is counted, not measured.
    """
    fresh()
    case, found = Case(), []
    batch, before = batches(packed=False)[0], graphs()
    model = case.on(grid, "aot_eager")
    expected = model.parallel.events(flow_of(batch, grid, 1))
    for _ in range(2):
        with grid.trace.record_events() as events:
            forward_backward(model, case.micros(grid, batch))
        mine = [e for e in communication_events(events) if not e.where.startswith("step.")]
        times = [e.issue_time for e in mine if e.where.startswith("blocks.")]
        found.append((diff_events(expected, mine), times))
    assert graphs() - before == case.graphs
    return found


@pytest.mark.full
def test_a_graph_counts_its_events_under_the_name_of_each_block(pool: Pool) -> None:
    """A graph keeps the gathered input of a layer, which eager backward gathers again."""
    size = 8 * 8 * 16 * 8
    again = [
        f"all_gather over row of {size} bytes at blocks.{block}.{where}: predicted 2, recorded 1"
        for block in range(LAYERS)
        for where in ("attention.qkv", "mlp.enter")
    ]
    for found in pool.on_grid({"row": 2}, traced):
        for lines, times in found:
            assert lines == again
            assert times and not any(times)


def traced_over_context(grid: Grid, case: Case) -> tuple[list[list[str]], int]:
    """How the communication of attention differs from the prediction for the documents of each of
    two steps, and how much is kept for backward at the end."""
    fresh()
    model = case.on(grid, "aot_eager")
    lines, kept = [], 0
    for batch in batches(packed=True):
        (micro,) = case.micros(grid, batch)
        assert isinstance(micro.documents, ContextDocuments)
        orders = [micro.documents.orders]
        expected = model.parallel.events(flow_of(batch, grid, 1), token_orders=orders)
        with grid.trace.record_events() as events:
            forward_backward(model, [micro])
        lines.append(diff_events(_of_attention(expected), _of_attention(events)))
        for block in model.parallel.blocks:
            kept += len(BlockAttention.of_block(micro.documents, block, {}).saved)
    return lines, kept


def _of_attention(events: list[Event]) -> list[Event]:
    return [event for event in events if event.where.endswith("attention.core")]


@pytest.mark.full
@pytest.mark.parametrize("method", ["kv_gather", "ring", "ulysses"])
def test_a_graph_records_what_attention_communicates_for_its_documents(
    pool: Pool, method: str
) -> None:
    case = Case(packed=True, layers=2, context_attention=method)
    for found in pool.on_grid({"context": 2}, traced_over_context, case):
        assert found == ([[], []], 0)


def one_operation(grid: Grid, method: str) -> list[bool]:
    """Whether attention as one operation has the bits of the layer: output and gradients."""
    model = Case(layers=1, context_attention=method).on(grid, "")
    core = model.blocks[0].attention.core
    (micro,) = Case().micros(grid, batches(packed=True)[0])
    assert isinstance(micro.documents, ContextDocuments)
    block = BlockAttention.of_block(micro.documents, "blocks.0", {core.local_name: core})
    generator = torch.Generator().manual_seed(grid.rank)
    results = []
    for documents in (micro.documents, block):
        generator.manual_seed(grid.rank)
        shapes = [(*micro.tokens.shape, heads, 4) for heads in (8, 2, 2)]
        inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        y = core(*inputs, micro.positions, documents)
        y.sin().sum().backward()
        results.append([y.detach(), *(x.grad for x in inputs)])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("method", ["kv_gather", "ring", "ulysses"])
def test_attention_over_context_is_one_operation(pool: Pool, method: str) -> None:
    for found in pool.on_grid({"context": 2}, one_operation, method):
        assert found == [True] * 4


def two_batches_then_backward(grid: Grid) -> tuple[list[str], int]:
    """What differs if two batches run before their backward pass; what is kept without one."""
    fresh()
    results = []
    for compiled in ("", "aot_eager"):
        model = Case(packed=True, layers=2).on(grid, compiled)
        losses = []
        for batch in batches(packed=True):
            inputs = {"positions": batch.positions, "documents": batch.documents}
            losses.append(call_on_full_batch(model, batch.tokens, batch.targets, **inputs))
        gc.collect()
        (losses[0] + 2 * losses[1]).backward()
        results.append({name: x for name, (x, _) in gradients(model.parallel).items()})
    loss = call_on_full_batch(model, batch.tokens, batch.targets, **inputs)
    documents = weakref.ref(model.parallel.step_context.context_documents)
    model.parallel.step_context.context_documents = None
    del loss
    gc.collect()
    want, have = results
    lines = [line for name, x in want.items() for line in worst(name, have[name], x, ONE_PASS, 1.0)]
    return lines, int(documents() is not None)


@pytest.mark.full
def test_batches_of_a_loop_keep_their_documents_until_backward(pool: Pool) -> None:
    for found in pool.on_grid({"context": 2}, two_batches_then_backward):
        assert found == ([], 0)


class Counted(TorchDispatchMode):
    """Collectives that graphs issue, by group."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.groups: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().startswith("_c10d_functional::") and "wait" not in func.name():
            self.groups[args[-1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.full
def test_a_graph_keeps_what_it_communicates() -> None:
    """But weights gathered over depth, which a block that keeps all of its activations holds."""
    found, weights = dict[str, int](), dict[str, int]()
    ways = [("none", "rerun"), ("full", "rerun"), ("full", "save")]
    with launch.fake_process_group(4, rank=3), warnings.catch_warnings():
        fresh()
        grid = Grid({"depth": 2, "row": 2}, rank=3, connected=True)
        for kind, what in ways:
            model = Case(recompute=kind, collectives=what, layers=1).on(grid, "aot_eager")
            tokens, counted = torch.zeros(2, 8, dtype=torch.int64), Counted()
            loss = model(tokens, tokens)
            with counted:
                loss.backward()
            depth = counted.groups.pop(model.parallel.bucket_scheduler.gather_axis.group_name)
            found[f"{kind} {what}"], weights[f"{kind} {what}"] = counted.groups.total(), depth
    assert found["full rerun"] > found["none rerun"] > 0
    assert found["full save"] == found["none rerun"]
    assert weights["full save"] == weights["full rerun"] == 2 * weights["none rerun"], (
        "gathered again, and gradients reduced"
    )


class Hidden(nn.Module):
    """A block with little to compile."""

    dims = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        y: Tensor = self.down(F.silu(self.up(x)))
        return y


class Blocks(nn.Module):
    """Blocks and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": 16, "mlp": 24}
        self.blocks = nn.ModuleList(Hidden() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        for block in self.blocks:
            x = block(x)
        return x


def passed(grid: Grid, backend: str) -> tuple[ShardedStateDict, list[str]]:
    """Gradients of blocks alone, and what they communicate."""
    torch.manual_seed(1)
    plan = Plan(compile="on" if backend else "off").with_degrees(grid.degrees)
    model = compile_with(parallelize(Blocks().double(), grid, plan), backend)
    x = torch.randn(2, 4, 16, dtype=torch.float64)
    model.parallel.bucket_scheduler.begin_step("")  # type: ignore[union-attr]
    with grid.trace.record_events() as events:
        model(x).square().sum().backward()
    where = sorted(f"{event.op} {event.where}" for event in communication_events(events))
    return copied(gradients(model.parallel)), where  # type: ignore[arg-type]


def models(grid: Grid) -> list[list[str]]:
    """What two equal models communicate, one after the other."""
    fresh()
    return [passed(grid, "aot_eager")[1] for _ in range(2)]


@pytest.mark.full
def test_a_second_model_counts_its_events_too(pool: Pool) -> None:
    """It must not find the graphs of the first, which were noted there.

    The input of the first block needs no gradient, so nothing is reduced for it.
    """
    want = [
        *("all_gather blocks.0.down", "all_gather blocks.0.up"),
        *("all_gather blocks.1.down", "all_gather blocks.1.up"),
        *("reduce_scatter blocks.0.down", "reduce_scatter blocks.1.down"),
        "reduce_scatter blocks.1.up",
    ]
    for found in pool.on_grid({"row": 2}, models):
        assert found == [want, want]


def machine_code(grid: Grid) -> list[str]:
    """Gradients that are others in machine code."""
    fresh()
    (want, _), (have, _) = (passed(grid, backend) for backend in ("", "inductor"))
    return [line for n, (part, _) in want.items() for line in worst(n, have[n][0], part, ONE_PASS)]


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler"
)
def test_blocks_compile_to_machine_code(pool: Pool) -> None:
    assert pool.on_grid({}, machine_code) == [[]]


def machine_code_over_context(grid: Grid) -> list[str]:
    """What is other in machine code: losses and gradients of two batches with other documents."""
    fresh()
    results = []
    for backend in ("", "inductor"):
        model = Case(packed=True, layers=2).on(grid, backend)
        losses = list[Tensor]()
        for batch in batches(packed=True):
            losses.append(forward_backward(model, Case().micros(grid, batch)))
            grads = copied(gradients(model.parallel))
        results.append({"losses": torch.stack(losses)} | {n: x for n, (x, _) in grads.items()})
    want, have = results
    return [line for name, x in want.items() for line in worst(name, have[name], x, ONE_PASS, 1.0)]


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler"
)
def test_blocks_over_context_compile_to_machine_code(pool: Pool) -> None:
    assert pool.on_grid({"context": 2}, machine_code_over_context) == [[], []]
