"""The runtime: evaluation and generation through stages, models of other kinds, lost messages."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivalence import Case, batch_of, build, copied, gradients, micros_of, worst
from pool import Pool, RankError, device_of
from ranvier.comm.p2p import EagerTransport, Key
from ranvier.config.plan import Plan
from ranvier.errors import CommunicationError, PlanError, RanvierError
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models.decoder import Decoder, DecoderConfig, LMHead
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.pipeline.balance import partition_by_cost
from ranvier.pipeline.partition import PipelineConfig, partition_model
from ranvier.pipeline.policy import Job, JobKind
from ranvier.pipeline.simulator import replay_choices
from ranvier.train.step import evaluate, forward_backward

# ---- cut --------------------------------------------------------------------------------


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    draw = torch.Generator().manual_seed(5)
    for _ in range(200):
        parts = int(torch.randint(2, 9, (), generator=draw))
        count = int(torch.randint(1, parts + 1, (), generator=draw))
        costs = (torch.rand(parts, generator=draw) * 4).tolist()
        firsts = partition_by_cost(tuple(costs), count)
        assert firsts[0] == 0 and all(a < b for a, b in pairwise((*firsts, parts)))

        def largest(firsts: tuple[int, ...], costs: list[float] = costs) -> float:
            return max(sum(costs[a:b]) for a, b in pairwise((*firsts, len(costs))))

        every = [
            (0, *rest)
            for rest in torch.combinations(torch.arange(1, parts), count - 1).tolist()
            if count > 1
        ] or [(0,)]
        assert largest(firsts) == pytest.approx(min(map(largest, every)))


def test_a_heavy_head_gets_fewer_blocks() -> None:
    model = build("deep")
    stage = partition_model(model, [0.1, *[1.0] * 6, 3.0], PipelineConfig(), 1, 2)
    assert stage.stage_starts == (0, 5) and stage.stage_costs == pytest.approx((4.1, 5.0))
    assert "stage 1: blocks.4 to norm" in stage.describe_stages()[1]


@pytest.mark.parametrize(
    ("how", "count", "words"),
    [
        (PipelineConfig(stage_starts=(3, 3)), 3, "increasing"),
        (PipelineConfig(stage_starts=(3,)), 3, "3 virtual stages"),
        (PipelineConfig(chunks=5), 2, "10 virtual stages"),
        (PipelineConfig(part_costs=(1.0, 2.0)), 2, "2 costs for 8 parts"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(how: PipelineConfig, count: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        partition_model(build("deep"), [1.0] * 8, how, 0, count)


def test_other_models_cannot_be_cut() -> None:
    with pytest.raises(PlanError, match="Linear cannot be split into stages"):
        partition_model(nn.Linear(2, 2), [1.0], PipelineConfig(), 0, 2)


# ---- evaluation, generation -------------------------------------------------------------


def evaluated(grid: Grid, case: Case) -> tuple[float, list[str]]:
    """The mean loss through the pipeline, and what it changed."""
    model = case.on(grid)
    parallel = get_parallel_model(model)
    before = copied(parallel.sharded_state())
    micros = micros_of(batch_of(case.model, samples=16, packed=True), grid, case.micro_batches)
    losses = [evaluate(model, micros).item() for _ in range(2)]
    assert losses[0] == losses[1] and model.training
    changed = [
        n
        for n, (x, _) in parallel.sharded_state().items()
        if not torch.equal(x.cpu(), before[n][0])
    ]
    changed += [
        b.name
        for b in parallel.bucket_scheduler.buckets
        if b.grad is not None or b.unsharded_grads is not None
    ]
    return losses[0], changed


@pytest.mark.sample(2)
@pytest.mark.nccl
@pytest.mark.parametrize(
    ("degrees", "chunks", "spread", "micro_batches"),
    [
        ({"pipe": 4}, 1, False, 1),
        ({"pipe": 2, "row": 2}, 2, False, 4),
        ({"pipe": 2, "col": 2}, 1, True, 2),
    ],
    ids=str,
)
def test_evaluation_through_stages_is_that_of_one_process(
    pool: Pool, degrees: dict[str, int], chunks: int, spread: bool, micro_batches: int
) -> None:
    case = Case("deep tied", chunks=chunks, spread=spread, micro_batches=micro_batches, delay=1)
    batch = batch_of("deep tied", samples=16, packed=True)
    with torch.no_grad():
        want = build_once()(**batch.model_inputs()).item() / int((batch.targets != -100).sum())
    for loss, changed in pool.on_grid(degrees, evaluated, case):
        assert loss == pytest.approx(want, rel=1e-12) and changed == []


def crowded(grid: Grid) -> tuple[float, int]:
    """Evaluation with a slow last stage: the most messages that waited there."""
    model = Case("deep").on(grid)
    runtime = get_parallel_model(model).pipeline.executor
    run, most = runtime.stage.run_parts, [0]

    def slow(*args: Any, **kwargs: Any) -> Tensor:
        if runtime.stage.index == 1:
            time.sleep(0.01)
        return run(*args, **kwargs)

    object.__setattr__(runtime.stage, "run_parts", slow)
    take = EagerTransport.take_message

    def counted(transport: EagerTransport, key: Key) -> Tensor:
        most[0] = max(most[0], len(transport._ready_messages[key]))
        return take(transport, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagerTransport, "take_message", counted)
        micros = micros_of(batch_of("deep", samples=32, packed=False), grid, 32)
        return evaluate(model, micros).item(), most[0]


def test_evaluation_does_not_pile_up_messages(pool: Pool) -> None:
    (one, none), (same, most) = pool.on_grid({"pipe": 2}, crowded)
    assert one == same and none == 0 and 1 <= most <= 3


def build_once() -> nn.Module:
    """The tied model as plain PyTorch."""
    return Case("deep tied").build()


def spoken(grid: Grid, spread: bool, inner: str) -> list[list[int]]:
    """What the model says greedily after some tokens."""
    model = Case("deep tied", spread=spread, inner=inner).on(grid)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    return generate_tokens(model, [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], params)


@pytest.mark.sample(2)
@pytest.mark.nccl
@pytest.mark.parametrize(
    ("degrees", "spread", "inner"),
    [
        ({"pipe": 4}, False, "samples"),
        ({"pipe": 2, "row": 2, "col": 2}, False, "features"),
        ({"pipe": 2, "row": 2}, True, "samples"),
        ({"pipe": 2, "col": 2}, False, "samples"),
    ],
    ids=str,
)
def test_generation_through_stages_is_that_of_one_process(
    pool: Pool, degrees: dict[str, int], spread: bool, inner: str
) -> None:
    model, tokens = build_once(), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    for said in pool.on_grid(degrees, spoken, spread, inner):
        assert said == tokens[:, 5:].tolist()


# ---- other models -----------------------------------------------------------------------


class Chain(nn.Sequential):
    """Layers one after the other, with an elementwise one between them."""

    sizes = {"embed": 16, "mlp": 24, "vocab": 29}
    dims = {
        "0": ("vocab", "embed"),
        "1": ("embed",),
        "2": ("mlp", "embed"),
        "4": ("embed", "mlp"),
        "5": ("vocab", "embed"),
    }

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(29, 16),
            nn.RMSNorm(16),
            nn.Linear(16, 24),
            nn.SiLU(),
            nn.Linear(24, 16),
            LMHead(16, 29, bias=False),
        )


def chained(grid: Grid, firsts: tuple[int, ...]) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a chain of layers."""
    torch.manual_seed(2)
    plan = Plan(stage_starts=firsts, stage_time_jitter=0.0).with_degrees(grid.degrees)
    model = parallelize(Chain().double(), grid, plan, device=device_of(grid))
    batch = batch_of("", samples=8, packed=False)
    loss = forward_backward(model, micros_of(batch, grid, 4)).item()
    return loss, {n: g for n, (g, _) in copied(gradients(get_parallel_model(model))).items()}


@pytest.mark.nccl
@pytest.mark.parametrize("firsts", [(2,), (3,), (5,)])
def test_a_sequence_of_layers_is_cut_anywhere(pool: Pool, firsts: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    serial, batch = Chain().double(), batch_of("", samples=8, packed=False)
    x: Any = batch.tokens
    *layers, head = serial
    for layer in layers:
        x = layer(x)
    loss = head(x, batch.targets) / int((batch.targets != -100).sum())
    loss.backward()
    found: dict[str, Tensor] = {}
    for have, grads in pool.on_grid({"pipe": 2}, chained, firsts):
        assert have == pytest.approx(loss.item(), rel=1e-12)
        found.update(grads)
    for name, param in serial.named_parameters():
        assert param.grad is not None
        assert worst(name, found[name], param.grad, 1e-12) == []


# ---- lost messages ----------------------------------------------------------------------


def lost(grid: Grid, how: str, policy: str, path: str) -> None:
    """A step in which stage 1 stalls or dies at micro-batch 2; stage 0 writes down what it says."""
    grid.timeout_seconds = 3.0
    model = Case("deep", policy=policy).on(grid)
    runtime = get_parallel_model(model).pipeline.executor
    run, calls = runtime.stage.run_parts, [0]

    def stop(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 3 and runtime.stage.index == 1:
            if how == "dies":
                os._exit(3)
            time.sleep(8.0)
        return run(*args, **kwargs)

    object.__setattr__(runtime.stage, "run_parts", stop)
    start = time.monotonic()
    try:
        forward_backward(model, micros_of(batch_of("deep", samples=8, packed=False), grid, 8))
    except CommunicationError as error:
        if grid.rank == 0:
            Path(path).write_text(f"{time.monotonic() - start:.1f} {error}")
        raise


@pytest.mark.full
@pytest.mark.parametrize("how", ["stalls", "dies"])
def test_a_stage_that_stops_ends_the_step_with_its_name(tmp_path: Path, how: str) -> None:
    pool, path = Pool(size=2), tmp_path / "said"
    try:
        with pytest.raises(RankError):
            pool.on_grid({"pipe": 2}, lost, how, "1f1b", str(path), timeout=30.0)
        for _ in range(60):
            if path.exists() and path.read_text():
                break
            time.sleep(0.1)
    finally:
        pool.stop()
    seconds, _, words = path.read_text().partition(" ")
    assert float(seconds) < 6.0
    # of a stage that is gone either the next gradient is missed or the next activation not sent
    missed = r"did not receive the gradient of micro-batch \d from stage 1 \(backward\)"
    unsent = r"could not send the activation of micro-batch \d to stage 1 \(forward\)"
    said = re.match(rf"Stage 0 \(rank 0\) ({missed}|{unsent})", words)
    assert said is not None and (how == "dies" or "did not receive" in words), words


# ---- stages that train little or nothing ------------------------------------------------


class Bare(nn.Sequential):
    """A chain whose middle part has no weights."""

    sizes = {"embed": 16, "vocab": 29}
    dims = {"0": ("vocab", "embed"), "1": ("embed",), "2": ("vocab", "embed")}

    def __init__(self) -> None:
        super().__init__(nn.Embedding(29, 16), nn.Dropout(0.0), LMHead(16, 29, bias=False))


def stepped(grid: Grid, kind: str, frozen: tuple[str, ...], how: Plan) -> list[Any]:
    """Losses and norms of three steps, and the weights after them."""
    torch.manual_seed(2)
    model = Bare().double() if kind == "bare" else build("deep")
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(frozen))
    plan = replace(how, stage_time_jitter=0.0).with_degrees(grid.degrees)
    model = parallelize(model, grid, plan, device=device_of(grid))
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler, lr=1e-2, clip=0.5)
    micros, found = micros_of(batch_of("", samples=8, packed=False), grid, 4), list[Any]()
    for _ in range(3):
        loss = forward_backward(model, micros).item()
        found.append((loss, optimizer.step().item()))
    found.append({n: x for n, (x, _) in copied(get_parallel_model(model).sharded_state()).items()})
    return found


@pytest.mark.sample(1)
@pytest.mark.nccl
@pytest.mark.parametrize(
    ("kind", "stages", "frozen", "how"),
    [
        ("bare", 3, ("nothing",), Plan()),
        (
            "deep",
            2,
            ("embed", "blocks.0", "blocks.1", "blocks.2"),
            Plan(stage_starts=(4,)),
        ),
        ("deep", 2, ("blocks.5", "norm", "head"), Plan(stage_starts=(6,))),
        ("deep", 2, ("embed",), Plan(vocab_over_pipe=True)),
        (
            "deep",
            4,
            ("blocks.2", "blocks.3"),
            Plan(stage_starts=(2, 3, 5), schedule="zero-bubble"),
        ),
    ],
    ids=["no weights", "first", "last", "embedding-vocab_over_pipe", "middle-zero_bubble"],
)
def test_stages_may_have_nothing_to_train(
    pool: Pool, kind: str, stages: int, frozen: tuple[str, ...], how: Plan
) -> None:
    (one,) = pool.on_grid({}, stepped, kind, frozen, Plan())
    for found in pool.on_grid({"pipe": stages}, stepped, kind, frozen, how):
        assert found[:3] == [pytest.approx(want, rel=1e-9) for want in one[:3]]
        for name, value in found[3].items():
            if value.shape == one[3][name].shape:  # a spread vocabulary is cut
                assert worst(name, value, one[3][name], 1e-9) == []


class Trebled(Decoder):
    """A model that does something in forward that no stage would do."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 3.0


def misused(grid: Grid, how: str) -> str:
    """What is said of a model or a batch that stages cannot take."""
    batch = batch_of("deep", samples=8, packed=False)
    try:
        if how == "forward":
            config = DecoderConfig(layers=2, embed=16, heads=8, kv_heads=2, head_dim=4, vocab=29)
            parallelize(Trebled(config), grid)
            return ""
        model = Case("deep").on(grid)
        micros = micros_of(batch, grid, 4)
        if how == "hook":
            model.register_forward_hook(lambda *_: None)
        else:
            micros = [batch.select(slice(0, 3)), batch.select(slice(3, 8))]
        forward_backward(model, micros)
    except RanvierError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("forward", "Trebled overrides forward but inherits segment from another class."),
        ("hook", "Decoder has forward hooks, but pipeline stages never call the whole model"),
        ("ragged", "The micro-batches of a step have the shapes [(3, 8), (5, 8)]."),
    ],
)
def test_what_stages_would_leave_out_is_refused(pool: Pool, how: str, words: str) -> None:
    assert [said.startswith(words) for said in pool.on_grid({"pipe": 2}, misused, how)] == [
        True
    ] * 2


# ---- the same choices in the simulator ---------------------------------------------------


def timed(grid: Grid, case: Case) -> tuple[list[Job], list[Job | None], int]:
    """Jobs of a step, what the simulator chooses for the same arrivals, and how many came."""
    model = case.on(grid)
    pipeline = get_parallel_model(model).pipeline
    runtime, count = pipeline.executor, case.micro_batches
    runtime.record_times = True
    micros = micros_of(batch_of(case.model, samples=16, packed=False), grid, count)
    for _ in range(2):
        forward_backward(model, micros)
    kinds: dict[str, JobKind] = {"forward": "F", "backward": "B"}
    arrivals = [Job(kinds[way], number, chunk) for (way, chunk), number, _ in runtime.arrival_log]
    known = [seen for _, seen in runtime.policy_choices]
    shape, policy = pipeline.step_shape(count), pipeline.policy_for_step(count)
    return (
        [job for job, _ in runtime.policy_choices],
        replay_choices(shape, policy, runtime.stage.index, arrivals, known),
        len(arrivals),
    )


@pytest.mark.sample(1)
@pytest.mark.nccl
@pytest.mark.parametrize(
    "rendezvous",
    [
        pytest.param(None, marks=pytest.mark.full, id="as it is"),
        pytest.param(True, id="rendezvous"),
    ],
)
@pytest.mark.parametrize(
    ("degrees", "policy", "chunks"),
    [
        ({"pipe": 4}, "message_driven", 1),
        ({"pipe": 2, "row": 2}, "message_driven", 2),
        ({"pipe": 2}, "zero-bubble", 1),
    ],
    ids=str,
)
def test_the_policy_chooses_as_in_the_simulator(
    pool: Pool, degrees: dict[str, int], policy: str, chunks: int, rendezvous: bool | None
) -> None:
    case = Case("deep", policy=policy, chunks=chunks, micro_batches=8, delay=4)
    found = pool.on_grid(degrees, timed, case, rendezvous=rendezvous)
    leaders = found[:: len(found) // degrees["pipe"]]
    for stage, (jobs, chosen, messages) in enumerate(leaders):
        ends = (stage == 0) + (stage == degrees["pipe"] - 1)
        assert jobs == chosen and len(jobs) >= 2 * 8 * chunks
        assert messages == 8 * (2 * chunks - ends)
