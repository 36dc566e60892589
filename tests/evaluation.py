"""A small trained run to be asked: on bytes, in float64, with config, checkpoint and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pool import Pool
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config import run as runs
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.infer import generate
from ranvier.models import Decoder
from training import losses_of, run_of, stored


def trained(pool: Pool, folder: Path, *, steps: int = 3, **changes: Any) -> Path:
    """A run that was trained on a grid."""
    corpus, out = stored(folder), folder / "run"
    changes = {"model__size": "tiny", **changes}
    pool.on_grid({"row": 2, "data": 2}, _train, corpus, str(out), steps, changes)
    return out


def _train(grid: Grid, corpus: str, out: str, steps: int, changes: dict[str, Any]) -> None:
    losses_of(grid, corpus, out, steps, changes=changes)
    if grid.rank == 0:
        run = run_of(out, dict(grid.degrees), steps, **changes)
        (Path(out) / "config.toml").write_text(runs.to_toml(run))
        ByteTokenizer().save(Path(out) / "tokenizer.json")


def serial(folder: Path) -> Decoder:
    """The model of a run as plain PyTorch."""
    checkpoint = generate.find_checkpoint(folder)
    with torch.device("meta"):
        model = Decoder(generate.load_config_from_dir(folder).model)
    generate.fill_weights(model, load_full_tensors(checkpoint), checkpoint, "cpu")
    return model.eval()
