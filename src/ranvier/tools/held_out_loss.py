"""Held-out loss of a run before any training, on the validation samples of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from ranvier.config.run import RunConfig
from ranvier.data.loader import validation_batches
from ranvier.data.run_data import RunData, data_source
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.infer.load import load_model
from ranvier.train.step import evaluate

MICRO_BATCH = 8
"""Samples that are evaluated at a time."""


def compare_held_out_losses(
    run: RunConfig, folders: Sequence[Path], steps: Sequence[int | None]
) -> tuple[list[float], str]:
    """Returns the loss of each run directory on the held-out samples of a run.

    steps: of the checkpoints; None means the latest. Without losses, the text says why.
    """
    try:
        data = open_data_of_run(run, folders[0])
    except (DataError, PlanError) as error:
        return [], f"The held-out loss is not known: {str(error).splitlines()[0]}"
    if data.validation is None:
        return [], (
            "The held-out loss is not known, as the run has no held-out samples "
            f"(data.validation_fraction={run.data.validation_fraction})."
        )
    pairs = zip(folders, steps, strict=True)
    return [held_out_loss(folder, run, data, step) for folder, step in pairs], ""


def open_data_of_run(run: RunConfig, folder: Path) -> RunData:
    """Opens the data of a run, with the tokenizer of its directory."""
    if (folder / "tokenizer.json").exists():
        run = replace(run, data=replace(run.data, tokenizer=str(folder / "tokenizer.json")))
    source = data_source(run.model)
    return source.open(run, source.prepare(run))


def held_out_loss(folder: Path, run: RunConfig, data: RunData, step: int | None) -> float:
    """Returns the mean loss of the validation samples, on one device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grid = Grid({})
    model = load_model(folder, grid, device, step=step, seq_len=run.data.seq_len)
    assert data.validation is not None
    batches = validation_batches(
        data.validation, run.train.eval_samples, MICRO_BATCH, grid, MICRO_BATCH
    )
    micros = [batch.to(device) for batch in chain.from_iterable(batches)]
    return float(evaluate(model, micros))
