"""Runs with stages: losses, checkpoints, credits, measured times, the timeline of a step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence import Case, batch_of, gradients, micros_of, worst
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints as checkpoints
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.pipeline.stage_profile import load_stage_times
from ranvier.tools.verify import compare_with_serial, shrink_run
from ranvier.train.step import forward_backward
from training import losses_of, run_of, stored, trainer_of

STEPS = 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


def trained(grid: Grid, corpus: str, out: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Losses and norms of a few steps, evaluated at the end, and what the pipeline settled."""
    run = run_of(out, dict(grid.degrees), STEPS, **changes)
    trainer = trainer_of(grid, corpus, run)
    rows = list(trainer.run_steps())
    trainer.write_timeline()
    pipeline = trainer.state.parallel.pipeline
    return {
        "losses": [row["loss"] for row in rows],
        "norms": [row["grad_norm"] for row in rows],
        "held_out": trainer.compute_val_loss(),
        "limit": pipeline.config.max_in_flight,
        "firsts": pipeline.executor.stage.stage_starts,
        "notes": trainer.notes,
        "flops": trainer.meter.flops,
    }


@pytest.mark.sample(1)
@pytest.mark.nccl
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"pipe": 2, "row": 2, "data": 2}, {}),
        (
            {"pipe": 4},
            {"model__tie_embeddings": True, "plan__schedule": "zero-bubble", "model__dropout": 0.2},
        ),
        ({"pipe": 2}, {"plan__vocab_over_pipe": True, "plan__recompute": "selective"}),
        ({"pipe": 2, "depth": 2}, {"plan__reshard_after": "step", "plan__virtual_stages": 2}),
    ],
    ids=str,
)
def test_a_run_with_stages_is_that_of_one_process(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], changes: dict[str, Any]
) -> None:
    """Dropout draws by sample, so it is the same as well."""
    model = {name: value for name, value in changes.items() if name.startswith("model")}
    ((one),) = pool.on_grid({}, trained, corpus, "", model)
    for found in pool.on_grid(degrees, trained, corpus, str(tmp_path), changes):
        for what in ("losses", "norms", "held_out"):
            assert found[what] == pytest.approx(one[what], rel=1e-9), what
    facts = json.loads((tmp_path / "timeline.json").read_text())
    assert len(facts["stages"]) == degrees["pipe"] and facts["step"] == STEPS
    each = facts["micro_batches"] * facts["chunks"]
    for jobs in facts["stages"]:
        assert sum(kind == "F" for kind, *_ in jobs) == each
        assert all(0.0 <= start <= stop <= facts["seconds"] for _, _, _, start, stop in jobs)
    assert len(facts["part_seconds"]) == 4 and min(facts["part_seconds"]) > 0.0


ORDERED: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"pipe": 2, "data": 2, "row": 2}, ("data", "row", "pipe")),
    ({"pipe": 2, "depth": 2, "col": 2}, ("col", "pipe", "depth")),
    ({"data": 2, "row": 2}, ("row", "data")),
    ({"pipe": 4}, ("pipe", "row")),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("degrees", "order"),
    [
        ({"pipe": 2, "row": 2}, ("row", "pipe")),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ORDERED),
    ],
    ids=str,
)
def test_ranks_may_be_placed_in_any_order(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], order: tuple[str, ...]
) -> None:
    """Trained, saved and resumed, also in the usual order: the run is that of one process."""
    even = {"optim__schedule": "wsd", "optim__warmup_steps": 0, "optim__decay_ratio": 0.0}
    whole = losses_of(Grid({}), corpus, str(tmp_path / "one"), 6, changes=even)
    found, last = list[float](), ""
    for steps, axes in ((2, order), (4, ()), (6, order)):
        out, changes = (
            tmp_path / str(steps),
            {**even, "plan__rank_order": axes, "guard__replica_check_interval": 1},
        )
        plan = run_of(str(out), degrees, steps, **changes).plan
        ranks = [int(rank) for rank in Grid.from_plan(plan).ranks.reshape(-1)]
        told = pool.on_grid(degrees, losses_of, corpus, str(out), steps, last, changes, order=ranks)
        assert all(losses == told[0] for losses in told)
        found, last = found + told[0], str(checkpoints(out / "checkpoints")[-1])
    assert found == pytest.approx(whole, rel=1e-12)


@pytest.mark.full
def test_a_limit_of_memory_bounds_what_a_stage_holds(
    pool: Pool, tmp_path: Path, corpus: str
) -> None:
    """With much room it is no limit, with little it is the same on all stages, or an error."""
    settings = {"plan__micro_batch": 1, "memory__device_limit_gib": 1.0}
    roomy = pool.on_grid({"pipe": 2}, trained, corpus, str(tmp_path), settings)
    assert roomy[0]["limit"] == roomy[1]["limit"] == 0
    assert any("each stage may hold all micro-batches" in line for line in roomy[0]["notes"])
    for gib, spread in ((4e-4, False), (3e-4, True)):
        little = {**settings, "memory__device_limit_gib": gib, "plan__vocab_over_pipe": spread}
        found = pool.on_grid({"pipe": 2}, trained, corpus, "", little)
        assert 1 <= found[0]["limit"] == found[1]["limit"] < 8
        assert found[0]["losses"] == pytest.approx(roomy[0]["losses"], rel=1e-9)
    tight = {**settings, "memory__device_limit_gib": 2e-4}
    for said in pool.on_grid({"pipe": 2}, refused, corpus, tight):
        assert said.startswith("memory.device_limit_gib=0.0002 leaves no room for a micro-batch")


def refused(grid: Grid, corpus: str, changes: dict[str, Any]) -> str:
    """What is said of a run that cannot be."""
    try:
        trained(grid, corpus, "", changes)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_measured_times_decide_where_the_model_is_cut(
    pool: Pool, tmp_path: Path, corpus: str
) -> None:
    table = tmp_path / "times.toml"
    table.write_text("forward = [1.0, 1.0, 1.0, 9.0]\nbackward = [2, 2, 2, 18]\n")
    changes: dict[str, Any] = {"plan__stage_profile": str(table)}
    found = pool.on_grid({"pipe": 2}, trained, corpus, str(tmp_path), changes)
    assert found[0]["firsts"] == (0, 3)
    changes = {"plan__stage_profile": str(tmp_path)}  # of the run just made
    again = pool.on_grid({"pipe": 2}, trained, corpus, str(tmp_path), changes)
    assert again[0]["losses"] == pytest.approx(found[0]["losses"], rel=1e-12)
    explicit = pool.on_grid({"pipe": 2}, trained, corpus, "", {"plan__stage_starts": (1,)})
    assert explicit[1]["firsts"] == (0, 1)
    assert explicit[0]["flops"] == found[0]["flops"], "the mean over stages"


@pytest.mark.parametrize("facts", ["{}", '{"part_seconds": ["a"]}', '{"part_seconds": [0.0, 0]}'])
def test_a_timeline_without_times_is_refused(tmp_path: Path, facts: str) -> None:
    (tmp_path / "timeline.json").write_text(facts)
    with pytest.raises(PlanError, match="stage_profile"):
        load_stage_times(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["forward = 3", "forward = [-1.0]", "forward = [", "", "forward = [nan, 1.0]", "forward = [0]"],
)
def test_times_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "times.toml").write_text(text)
    with pytest.raises(PlanError, match="stage_profile"):
        load_stage_times(tmp_path / "times.toml")
    with pytest.raises(PlanError, match="cannot be read"):
        load_stage_times(tmp_path / "nowhere")


def resumed(grid: Grid, corpus: str, out: str) -> tuple[list[float], list[float]]:
    """Losses of a run, and of one that goes on from its checkpoint in the middle."""
    settings: dict[str, Any] = {"checkpoint__interval": 2, "model__tie_embeddings": True}
    run = run_of(out, dict(grid.degrees), STEPS, **settings)
    whole = [row["loss"] for row in trainer_of(grid, corpus, run).run_steps()]
    second = trainer_of(grid, corpus, run)
    second.checkpointer.resume_from(Path(out) / "checkpoints" / "step-00000002")
    return whole, [row["loss"] for row in second.run_steps()]


def test_a_run_with_stages_goes_on_to_the_bit(pool: Pool, tmp_path: Path, corpus: str) -> None:
    for whole, rest in pool.on_grid({"pipe": 2, "data": 2}, resumed, corpus, str(tmp_path)):
        assert rest == whole[2:]


def verified(grid: Grid, changes: dict[str, Any]) -> list[str]:
    """What `ranvier verify` finds wrong on a grid, on this rank."""
    run = shrink_run(run_of("", dict(grid.degrees), STEPS, **changes))
    torch.manual_seed(run.train.seed)
    findings, lines, _ = compare_with_serial(run, grid, Decoder(run.model).double())
    names = [finding.quantity for finding in findings]
    assert len(names) > 40 and len(names) == len(set(names))
    return lines + [finding.quantity for finding in findings if not finding.is_within_limit]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "changes"),
    [
        ({"pipe": 2, "depth": 2}, {"model__tie_embeddings": True, "plan__vocab_over_pipe": True}),
        ({"pipe": 4}, {"plan__schedule": "1f1b"}),
    ],
    ids=str,
)
def test_verify_takes_stages(pool: Pool, degrees: dict[str, int], changes: dict[str, Any]) -> None:
    assert pool.on_grid(degrees, verified, changes) == [[]] * math.prod(degrees.values())


def reduced(grid: Grid) -> list[str]:
    """Messages back and reductions over data of a step, in the order of their issue."""
    model = Case("deep", policy="1f1b").on(grid)
    micros = micros_of(batch_of("deep", samples=16, packed=False), grid, 2)
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler)
    with grid.trace.record_events() as events:
        forward_backward(model, micros)
        optimizer.step()
    words = {("send", ("pipe",)): "message", ("reduce_scatter", ("data",)): "reduction"}
    return [words[e.op, e.axis] for e in events if (e.op, e.axis) in words]


def test_reductions_over_data_begin_in_the_last_backward_pass(pool: Pool) -> None:
    """Before the last gradient is sent on, all but the last block are on their way."""
    last_stage = pool.on_grid({"pipe": 2, "data": 2}, reduced)[2]
    assert last_stage.count("message") == 2
    before = last_stage[: len(last_stage) - last_stage[::-1].index("message")]
    assert before.count("reduction") >= 2


def compiled(grid: Grid) -> list[str]:
    """What differs between compiled blocks and eager ones in the stages of a pipeline."""
    lines, found = [], []
    for backend in ("", "aot_eager"):
        case = Case("deep tied", micro_batches=2, packed=True)
        model = case.on(grid, compiled=backend)
        loss = forward_backward(model, micros_of(batch_of("", samples=8, packed=True), grid, 2))
        found.append(
            {n: g for n, (g, _) in gradients(get_parallel_model(model)).items()} | {"": loss}
        )
    for name, want in found[0].items():
        lines += worst(name, found[1][name], want, 1e-12)
    return lines


@pytest.mark.compiled
@pytest.mark.full
def test_compiled_blocks_run_in_stages(pool: Pool) -> None:
    assert pool.on_grid({"pipe": 2}, compiled) == [[], []]
