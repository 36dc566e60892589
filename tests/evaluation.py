"""A small trained run to be asked: on bytes, in float64, with config, checkpoint and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pool import Pool
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config import run as runs
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import DataError
from ranvier.grid import Grid
from ranvier.infer.load import find_checkpoint, load_config_from_dir
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
    checkpoint = find_checkpoint(folder)
    with torch.device("meta"):
        model = Decoder(load_config_from_dir(folder).model)
    fill_weights(model, load_full_tensors(checkpoint), checkpoint, "cpu")
    return model.eval()


def fill_weights(
    model: nn.Module, whole: Mapping[str, Tensor], origin: Path, device: torch.device | str
) -> None:
    """Assigns weights and buffers to a model on the meta device; every tensor must be present.

    A tied weight is looked up by its first name and stays tied. Buffers, such as the expert bias of
    a router, keep the dtype in which they were saved.
    """
    # Group the names of each tensor: the names of a tied weight share one object.
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for path, module in model.named_modules():
        own = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for key, tensor in chain(*own):
            owners.setdefault(id(tensor), []).append((module, key, f"{path}.{key}".lstrip(".")))
    dtype = _common_dtype(whole, device)
    for tied in owners.values():
        module, key, name = tied[0]
        empty = getattr(module, key)
        if name not in whole or whole[name].shape != empty.shape:
            raise DataError(
                f"{origin} has no {name} of shape {tuple(empty.shape)}. It must match the "
                "config it was trained with. Restore the config.toml of its run."
            )
        weight = isinstance(empty, nn.Parameter)
        value = whole[name].to(device, dtype if weight else None)
        if weight:
            value = nn.Parameter(value, requires_grad=False)
        for module, key, _ in tied:
            setattr(module, key, value)


def _common_dtype(whole: Mapping[str, Tensor], device: torch.device | str) -> torch.dtype:
    """Returns the dtype of most weights (adapters may have a wider one); at least fp32 on a CPU."""
    counts: dict[torch.dtype, int] = {}
    for value in whole.values():
        counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    most = max(counts, key=lambda one: counts[one], default=torch.float32)
    narrow = most in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"
    if narrow:
        return torch.float32
    return most
