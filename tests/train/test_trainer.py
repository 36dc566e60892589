"""The trainer: resume to the bit, bad numbers named, work counted, health without waiting."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.config.run import RunConfig
from ranvier.config.sections import TrainConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.models import MODEL_SIZES, Decoder
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.metrics import finite_or_none, peak_flops, step_flops
from ranvier.train.resolve import ResolveContext, default_local_ranks, resolve_run
from ranvier.train.trainer import freeze_gc
from training import losses_of, poisoned, run_of, stored, trainer_of

GRIDS = [
    {},
    pytest.param({"data": 2, "depth": 2}, marks=pytest.mark.full),
    pytest.param({"row": 2, "col": 2}, marks=pytest.mark.full),
]
"""Others: tests/reliability/test_repeatable.py."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stored(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_a_resumed_run_repeats_the_undisturbed_one_to_the_bit(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int]
) -> None:
    whole, *_ = pool.on_grid(degrees, losses_of, corpus, str(tmp_path / "whole"), 6)
    half = str(tmp_path / "half")
    options = {"train__steps": 6, "checkpoint__interval": 3}
    pool.on_grid(degrees, losses_of, corpus, half, 6, "", options)
    middle = find_checkpoints(Path(half) / "checkpoints")[0]
    assert middle.name == "step-00000003"
    rest = pool.on_grid(degrees, losses_of, corpus, half, 6, str(middle))
    assert rest == [whole[3:]] * len(rest)
    assert whole[-1] < whole[0]


def test_other_batches_go_on_with_the_next_sample(tmp_path: Path, corpus: str) -> None:
    grid = Grid({})
    losses_of(grid, corpus, str(tmp_path), 2)
    trainer = trainer_of(grid, corpus, run_of(str(tmp_path), {}, 4, plan__global_batch=4))
    trainer.checkpointer.resume_from(find_checkpoints(tmp_path / "checkpoints")[-1])
    assert (trainer.state.step, trainer.state.samples) == (2, 16)
    batches = trainer._batch_maker()(2)
    assert [n for batch in batches for n in batch.samples.tolist()] == [16, 17, 18, 19]  # type: ignore[union-attr]


def test_a_changed_corpus_is_noticed_by_its_fingerprint(tmp_path: Path, corpus: str) -> None:
    losses_of(Grid({}), corpus, str(tmp_path / "run"), 2)
    other = stored(tmp_path, documents=39)
    checkpoint = str(find_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    with pytest.raises(DataError, match="has the fingerprint"):
        losses_of(Grid({}), other, str(tmp_path / "run"), 4, checkpoint)
    allowed = {"checkpoint__allow_data_mismatch": True}
    assert len(losses_of(Grid({}), other, str(tmp_path / "run"), 4, checkpoint, allowed)) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "where", "rank"),
    [
        ({}, "blocks.1.mlp.down", 0),
        ({"row": 2}, "blocks.0.attention.core", 1),
        ({"data": 2, "col": 2}, "blocks.1.norm2", 3),
    ],
    ids=str,
)
def test_a_bad_number_is_named_and_changes_nothing(
    pool: Pool, tmp_path: Path, corpus: str, degrees: dict[str, int], where: str, rank: int
) -> None:
    found = pool.on_grid(degrees, poisoned, corpus, str(tmp_path), where, rank, 3)
    for one in found:
        assert one["said"].startswith("NumericError: Step 4 of 6 (loss nan)"), one
        assert f"The first non-finite tensor is the output of {where} (" in one["said"], one
        assert (f"on rank {rank}" in one["said"]) == (len(found) > 1)
        assert one["rows"] == 3 and one["kept"], one


def test_metrics_are_those_of_their_step(tmp_path: Path, corpus: str) -> None:
    trainer = trainer_of(Grid({}), corpus, run_of(str(tmp_path), {}, 5, train__eval_interval=2))
    rows = list(trainer.run_steps())
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["tokens"] for row in rows] == [128 * (i + 1) for i in range(5)]
    assert [row["val_loss"] is not None for row in rows] == [True, True, False, True, True]
    assert all(row["step_seconds"] > 0 and row["peak_memory_bytes"] > 0 for row in rows)
    assert all(row["mfu"] is None and row["loss_scale"] is None for row in rows)
    assert all(row["exposed_communication_seconds"] == 0.0 for row in rows)
    phases = trainer.meter.phases
    assert set(phases) == {"compute", "exposed communication", "waiting for data", "evaluation"}


def test_the_work_of_a_step_is_counted_both_ways() -> None:
    config = MODEL_SIZES["llama3-8b"]
    with torch.device("meta"):
        model = parallelize(Decoder(config), Grid({}), materialize=False)
        cut = Grid({"row": 2, "col": 2, "depth": 2})
        small = parallelize(Decoder(config), cut, materialize=False)
    causal, full = step_flops(get_parallel_model(model), ActivationShape(1, 8192, 2, 4), 1)
    # 57.9 GFLOP a token with full attention is what torchtitan counts, causal 51.5 (Megatron)
    assert full / 8192 == pytest.approx(57.9e9, rel=0.01)
    assert causal / 8192 == pytest.approx(51.5e9, rel=0.01)
    part, _ = step_flops(get_parallel_model(small), ActivationShape(2, 8192, 2, 4), 1)
    assert part == causal * 2 // 4, "row and col divide the work of a coordinate"
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None
    assert finite_or_none(float("nan")) is None and finite_or_none(1.0) == 1.0


def test_types_are_settled_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = ResolveContext(world_size=1, device=torch.device("cpu"))
    cuda = ResolveContext(world_size=1, device=torch.device("cuda", 0))
    assert resolve_run(RunConfig(), cpu).train.dtype == "fp32"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    for has, want in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **_: has)
        assert resolve_run(RunConfig(), cuda).train.dtype == want
    with pytest.raises(PlanError, match="Old GPU does not support bf16"):
        resolve_run(RunConfig(train=TrainConfig(dtype="bf16")), cuda)


def test_ranks_follow_from_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert default_local_ranks(RunConfig()) == 1
    assert default_local_ranks(run_of("", {"row": 4, "data": 1}, 1)) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert default_local_ranks(RunConfig()) == 8


def test_a_freeze_of_the_program_around_is_left_as_it_is() -> None:
    """Nothing frozen: a run freezes and thaws; else neither."""
    before = gc.get_freeze_count()
    assert before > 0, "the suite freezes all modules at its start"
    with freeze_gc():
        assert gc.get_freeze_count() <= before
    assert gc.get_freeze_count() > 0
    try:
        gc.unfreeze()
        with freeze_gc():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
