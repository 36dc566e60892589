"""Training runs inside workers: small, in float64 if not said otherwise, on a corpus of bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from pool import device_of
from ranvier.config.plan import Plan
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.config.sections import (
    CheckpointConfig,
    DataConfig,
    DecoderModelConfig,
    OptimConfig,
    TrainConfig,
)
from ranvier.data.canaries import CanaryDocuments
from ranvier.data.dataset import open_data
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.models import DecoderConfig
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume.checkpointing import state_tensors
from ranvier.train.text import goldfish_mask, place_canaries
from ranvier.train.trainer import Trainer

SHAPE = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24}


def stored(folder: Path, *, documents: int = 40) -> str:
    """A tokenized corpus of lines of different lengths."""
    words = [f"{n} times {n} is {n * n}, " * (1 + n % 5) for n in range(documents)]
    for n, text in enumerate(words):
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{n:03}.txt").write_text(text)
    prepare_corpus([folder / "texts"], folder / "corpus", ByteTokenizer())
    return str(folder / "corpus")


def run_of(out: str, degrees: dict[str, int], steps: int, **changes: Any) -> ResolvedRun:
    """A run of a small model; changes: `section__setting=value`."""
    model = DecoderModelConfig(
        size="small", **dataclasses.asdict(DecoderConfig(**SHAPE, vocab=257))
    )
    run = RunConfig(
        model=model,
        data=DataConfig(seq_len=16, validation_fraction=0.1),
        optim=OptimConfig(lr=1e-2),
        plan=Plan(**degrees, global_batch=8),
        train=TrainConfig(steps=steps, output_dir=out, dtype="fp64", eval_interval=0),
        checkpoint=CheckpointConfig(),
    )
    for name, value in changes.items():
        section, _, key = name.partition("__")
        part = dataclasses.replace(getattr(run, section), **{key: value})
        run = dataclasses.replace(run, **{section: part})
    world = 1
    for size in degrees.values():
        world *= size
    return resolve_run(run, ResolveContext(world_size=world))


def trainer_of(
    grid: Grid,
    corpus: str,
    run: ResolvedRun,
    device: str = "",
    canaries: CanaryDocuments | None = None,
) -> Trainer:
    """A trainer on a corpus. device: empty: that of the grid's backend."""
    data = open_data(
        [corpus],
        seq=run.data.seq_len,
        seed=run.train.seed,
        held_out=run.data.validation_fraction,
        packed=run.data.document_mask,
        truncate=run.data.truncate,
        loss_on=run.data.loss_on,
        canaries=None if canaries is None else place_canaries(run, canaries),
        goldfish=goldfish_mask(run),
    )
    return Trainer.from_run(run, grid, torch.device(device or device_of(grid)), data)


def losses_of(
    grid: Grid,
    corpus: str,
    out: str,
    steps: int,
    resume: str = "",
    changes: dict[str, Any] | None = None,
) -> list[float]:
    """Losses of a run, which saves at its end; resume: a checkpoint to go on from."""
    trainer = trainer_of(grid, corpus, run_of(out, dict(grid.degrees), steps, **(changes or {})))
    if resume:
        trainer.checkpointer.resume_from(Path(resume))
    found = [row["loss"] for row in trainer.run_steps()]
    trainer.save_checkpoint()
    trainer.write_timeline()
    return found


def poisoned(grid: Grid, corpus: str, out: str, where: str, rank: int, at: int) -> dict[str, Any]:
    """What a run says whose layer `where` gives a bad number on one rank from step `at` on."""
    run = run_of(out, dict(grid.degrees), 6, guard__max_skipped_steps=0)
    trainer = trainer_of(grid, corpus, run)
    leaf = trainer.state.model.get_submodule(where)

    def poison(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor | None:
        if grid.rank != rank or trainer.state.step < at:
            return None
        return output.index_fill(0, torch.tensor([0]), torch.nan)

    leaf.register_forward_hook(poison)
    said, before = "", {}
    rows = 0
    try:
        for row in trainer.run_steps():
            rows += 1
            if row["step"] == at - 2:  # the step after it was issued and is the last good one
                before = {name: x.clone() for name, (x, _) in state_tensors(trainer.state).items()}
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = state_tensors(trainer.state)
    same = all(torch.equal(x, after[name][0]) for name, x in before.items())
    return {"said": said, "rows": rows, "kept": bool(before) and same}
