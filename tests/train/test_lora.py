"""Runs with adapters: from a base, resumed on another grid, the same masks everywhere, text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import training
from evaluation import fill_weights
from pool import Pool
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.hf import peft_write
from ranvier.checkpoint.hf.peft_read import read_adapter
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config.run import RunConfig, to_toml
from ranvier.config.sections import LoraConfig
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.load import load_model
from ranvier.models import build_decoder
from ranvier.models.hf.registry import FAMILIES
from ranvier.models.lora import named_adapters
from ranvier.train.metrics import step_flops
from ranvier.train.resolve import ResolveContext, check_memory, resolve_run
from ranvier.train.resume import checkpointing
from ranvier.train.resume import run_directory as folders
from ranvier.train.train import count_trainable

TOKENS = torch.arange(32).view(2, 16) * 5
CUBE = {"depth": 2, "row": 2, "col": 2}
LORA: dict[str, Any] = {"lora__rank": 3, "lora__dora": True, "lora__dropout": 0.25}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return training.stored(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """A run without adapters, which has taken three steps."""
    out = tmp_path_factory.mktemp("base") / "run"
    training.losses_of(Grid({}), corpus, str(out), 3)
    return find_checkpoints(out / "checkpoints")[-1]


def losses(
    grid: Grid, corpus: str, out: str, steps: int, changes: Any, start: str = "", resume: str = ""
) -> list[float]:
    """Of a run that begins with weights, or goes on; it saves at its end."""
    run = training.run_of(out, dict(grid.degrees), steps, **changes)
    trainer = training.trainer_of(grid, corpus, run)
    if start:
        checkpointing.load_initial_weights(trainer.run, trainer.state, Path(start))
    else:
        trainer.checkpointer.resume_from(Path(resume))
    found = [row["loss"] for row in trainer.run_steps()]
    trainer.save_checkpoint()
    return found


@pytest.mark.full
def test_a_run_from_a_base_goes_on_elsewhere_and_leaves_the_base_as_it_was(
    pool: Pool, corpus: str, base: Path, tmp_path: Path
) -> None:
    """Dropout's masks are those of one process, so the losses are."""
    whole = losses(Grid({}), corpus, str(tmp_path / "one"), 2, LORA, str(base))
    (first, *_) = pool.on_grid(CUBE, losses, corpus, str(tmp_path / "a"), 2, LORA, str(base))
    saved = find_checkpoints(tmp_path / "a" / "checkpoints")[-1]
    other = {**LORA, "plan__col_splits": "features"}
    grid = {"pipe": 2, "row": 2, "col": 2}
    (then, *_) = pool.on_grid(grid, losses, corpus, str(tmp_path / "b"), 4, other, "", str(saved))
    assert first == pytest.approx(whole, rel=1e-9)
    again = losses(Grid({}), corpus, str(tmp_path / "c"), 4, LORA, "", str(saved))
    assert len(then) == 2 and then == pytest.approx(again, rel=1e-9)
    before, after = (
        load_full_tensors(base),
        load_full_tensors(find_checkpoints(tmp_path / "b" / "checkpoints")[-1]),
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    names = manifests.read_manifest(saved).tensors
    assert not any(n.endswith((".mean", ".square")) and ".adapters." not in n for n in names)
    assert any(n.endswith("m.q.weight.mean") for n in names)


def adapted(grid: Grid, corpus: str, out: str, base: str, changes: Any) -> Any:
    """What a run begins with: its first loss without adapters and with, and DoRA's lengths."""
    run = training.run_of(out, dict(grid.degrees), 2, **changes)
    trainer = training.trainer_of(grid, corpus, run)
    checkpointing.load_initial_weights(trainer.run, trainer.state, Path(base))
    adapter = next(iter(named_adapters(trainer.state.model)))[1]
    return trainer.compute_val_loss(), adapter.m["q"].weight.detach().clone(), trainer.state.step


def test_at_the_start_nothing_is_added(pool: Pool, corpus: str, base: Path, tmp_path: Path) -> None:
    plain = training.trainer_of(Grid({}), corpus, training.run_of(str(tmp_path / "a"), {}, 9))
    checkpointing.load_initial_weights(plain.run, plain.state, base)
    want = plain.compute_val_loss()
    weight = load_full_tensors(base)["blocks.0.attention.qkv.q.weight"]
    for loss, lengths, step in pool.on_grid(
        {"row": 2}, adapted, corpus, str(tmp_path / "b"), str(base), LORA
    ):
        assert loss == pytest.approx(want, rel=1e-12) and step == 0
        assert lengths.numel() * 2 == weight.shape[0]
        assert float((lengths[:, None] - weight.norm(dim=1)).abs().min(1).values.max()) < 1e-12


def test_a_run_starts_from_a_written_adapter_with_its_settings(
    corpus: str, base: Path, tmp_path: Path
) -> None:
    run = training.run_of(
        str(tmp_path / "a"), {}, 2, **{**LORA, "lora__target_modules": ("q", "mlp")}
    )
    trainer = training.trainer_of(Grid({}), corpus, run)
    checkpointing.load_initial_weights(trainer.run, trainer.state, base)
    list(trainer.run_steps())
    saved = trainer.save_checkpoint()
    assert saved is not None
    out = tmp_path / "adapter"
    peft_write.write_adapter(saved, run.model, run.lora, FAMILIES["llama"], out, "a-base")
    assert read_adapter(out, run.model).lora.target_modules == ("q", "gate", "up", "down")
    more = training.run_of(str(tmp_path / "b"), {}, 2, lora__init_from=str(out))
    again = training.trainer_of(Grid({}), corpus, more)
    checkpointing.load_initial_weights(again.run, again.state, base)
    assert again.run.lora.rank == 3 and again.run.lora.dora and again.run.lora.dropout == 0.25
    assert again.compute_val_loss() == pytest.approx(trainer.compute_val_loss(), rel=1e-12)
    mine, theirs = again.state.optimizer.sharded_state(), trainer.state.optimizer.sharded_state()
    assert all(torch.equal(mine[n][0], theirs[n][0]) for n in mine if n.endswith(".master"))
    other = dataclasses.replace(more, lora=dataclasses.replace(more.lora, rank=5))
    with pytest.raises(PlanError, match=r"lora.rank=5, but lora.init_from=.* has rank 3"):
        resolve_run(other, ResolveContext(world_size=1))


def test_frozen_weights_take_no_memory_and_less_work(corpus: str, tmp_path: Path) -> None:
    run = training.run_of(str(tmp_path / "a"), {}, 2, lora__rank=3)
    trainer = training.trainer_of(Grid({}), corpus, run)
    parallel = trainer.state.parallel
    assert run.trainable_parameters == count_trainable(parallel) < 0.5 * run.model.num_parameters
    assert all(b.trainable for b in trainer.state.optimizer.master_weights)
    list(trainer.run_steps())
    assert all(
        bucket.grad is None for bucket in parallel.bucket_scheduler.buckets if not bucket.trainable
    )
    full = training.trainer_of(Grid({}), corpus, training.run_of(str(tmp_path / "b"), {}, 2))
    flow = ActivationShape(8, 16, 8, 8)
    assert step_flops(parallel, flow, 1) < step_flops(full.state.parallel, flow, 1)
    big = dataclasses.replace(run.model, embed=1024, mlp=2**18, layers=1)
    huge = dataclasses.replace(run, model=big, train=dataclasses.replace(run.train, dtype="fp32"))
    limit = dataclasses.replace(huge.memory, device_limit_gib=4.0)
    context = ResolveContext(world_size=1, device=torch.device("meta"))
    check_memory(dataclasses.replace(huge, memory=limit), context)
    whole = dataclasses.replace(huge, memory=limit, lora=dataclasses.replace(run.lora, rank=0))
    with pytest.raises(PlanError, match="A rank needs at least"):
        check_memory(whole, context)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora__target_modules": ("keys",)}, "\\['keys'\\] does not match a layer of this model"),
        ({"lora__target_modules": ()}, "an empty list does not match a layer"),
        ({"lora__target_modules": ("gate",), "model__activation": "gelu"}, "\\['gate'\\]"),
        ({"lora__layers": (2,)}, "numbered from 0 to 1"),
        ({"lora__layers": (1, 1)}, "names a block twice"),
        ({"lora__rank": -1}, "lora.rank=-1 is too small"),
        ({"lora__dropout": 1.0}, "lora.dropout=1.0 is not a fraction"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        training.run_of("", {}, 2, **{"lora__rank": 2, **changes})


def test_adapters_do_not_go_on_from_what_has_none(base: Path) -> None:
    run: RunConfig = training.run_of(str(base.parent.parent), {}, 9, **LORA)
    with pytest.raises(
        PlanError, match=r"lora\.rank=3, but .*without adapters.*Use train\.init_from="
    ):
        folders.acquire_dir(run)


def asked(grid: Grid, folder: str) -> torch.Tensor:
    """My logits of a run's newest checkpoint on a grid."""
    model = load_model(Path(folder), grid, "cpu")
    with torch.no_grad():
        return model(TOKENS)


def test_what_a_run_says_has_its_adapters_in_it(
    pool: Pool, corpus: str, base: Path, tmp_path: Path
) -> None:
    """Plain, and on a grid."""
    changes = {**LORA, "optim__lr": 0.1}
    losses(Grid({}), corpus, str(tmp_path), 2, changes, str(base))
    run = training.run_of(str(tmp_path), {}, 2, **changes)
    named = dataclasses.replace(run.model, size="tiny")
    (tmp_path / "config.toml").write_text(to_toml(dataclasses.replace(run, model=named)))
    model = build_decoder(run.model, run.lora)
    fill_weights(
        model, load_full_tensors(find_checkpoints(tmp_path / "checkpoints")[-1]), tmp_path, "cpu"
    )
    plain = build_decoder(run.model, LoraConfig())
    fill_weights(plain, load_full_tensors(base), base, "cpu")
    with torch.no_grad():
        want, before = model.eval()(TOKENS), plain.eval()(TOKENS)
    assert (want - before).abs().max() > 1e-3
    parts = pool.on_grid({"row": 2}, asked, str(tmp_path))
    torch.testing.assert_close(torch.cat(parts, -1), want, rtol=0, atol=1e-12)
