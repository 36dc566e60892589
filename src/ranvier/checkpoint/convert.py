"""Converts a checkpoint into a single-process one or into plain weights, file by file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint import checksummed_file, directory, load, rank_file
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.rank_file import FileLayout, HostBuffer
from ranvier.config.plan import AXES
from ranvier.errors import CheckpointError, PlanError, WriteError
from ranvier.sharding import Shard, ShardedStateDict

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file in bytes, unless a single tensor is larger."""
DTYPES_BY_NAME = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class CheckpointSource:
    """Full tensors of a checkpoint, read on demand."""

    step: int
    facts: Mapping[str, Any]
    tensor_specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    read_tensors: Callable[[Sequence[str]], Mapping[str, Tensor]]


def open_checkpoint(checkpoint: Path) -> CheckpointSource:
    """Open a checkpoint for reading full tensors by name."""
    manifest = manifests.read_manifest(checkpoint)

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        state = {name: load.empty_shard(manifest.tensors[name]) for name in names}
        load.fill_tensors(checkpoint, manifest, state)
        return {name: tensor for name, (tensor, _) in state.items()}

    kinds = {name: (entry.dtype, entry.shape) for name, entry in manifest.tensors.items()}
    return CheckpointSource(manifest.step, manifest.facts, kinds, read)


def convert_checkpoint(checkpoint: Path, out: Path, *, form: str, dtype: str) -> list[str]:
    """Write a checkpoint in another form; return the names of the files.

    `out` appears complete or not at all.
    """
    if out.exists():
        raise PlanError(f"{out} already exists. It is not overwritten. Choose another path.")
    if form not in ("checkpoint", "weights"):
        raise PlanError(f"--form {form} is unknown. Use checkpoint or weights.")
    if dtype and dtype not in DTYPES_BY_NAME:
        raise PlanError(
            f"--dtype {dtype} is unknown. Use one of {', '.join(DTYPES_BY_NAME)}, or leave it out "
            "to keep the stored dtype."
        )
    if form == "checkpoint" and dtype:
        raise PlanError(
            f"dtype={dtype!r} with form=checkpoint. A checkpoint keeps its dtypes. Remove dtype, "
            "or use form=weights."
        )
    source = open_checkpoint(checkpoint)
    # Written under a hidden name and renamed at the end, so that `out` is never half written.
    hidden = out.with_name(f".{out.name}.writing")
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        hidden.mkdir(parents=True)
        if form == "checkpoint":
            names = _write_checkpoint(source, hidden)
        else:
            names = _write_weights(checkpoint, source, hidden, DTYPES_BY_NAME.get(dtype))
        directory.rename_finished(hidden, out)
        checksummed_file.fsync_path(out.absolute().parent)
    # Both branches remove the partial output; only disk errors are explained with sizes.
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)
        size = sum(torch.Size(s).numel() * d.itemsize for d, s in source.tensor_specs.values())
        raise WriteError(
            f"{error.filename or out}: {error.strerror}. The output needs up to {size:,} bytes. "
            "Free disk space, or choose another path."
        ) from None
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
    return names


def _group_by_size(source: CheckpointSource, names: Sequence[str]) -> Iterator[list[str]]:
    """Split names, in order, into groups that fit into one file each."""
    group: list[str] = []
    held = 0
    for name in names:
        dtype, shape = source.tensor_specs[name]
        size = torch.Size(shape).numel() * dtype.itemsize
        if group and held + size > MAX_FILE_BYTES:
            yield group
            group = []
            held = 0
        group.append(name)
        held += size
    if group:
        yield group


def _write_checkpoint(source: CheckpointSource, here: Path) -> list[str]:
    """Write the checkpoint as one process would have saved it, in files of about 1 GiB."""
    host = HostBuffer(torch.device("cpu"))
    groups = list(_group_by_size(source, list(source.tensor_specs)))
    for number, group in enumerate(groups):
        state: ShardedStateDict = {
            # Each shard is the full tensor: offset 0, valid shape = local shape = global shape.
            name: (x, Shard(tuple(x.shape), (0,) * x.dim(), *(tuple(x.shape),) * 2))
            for name, x in source.read_tensors(group).items()
        }
        layout = FileLayout.from_state(state)
        host.ensure_size(layout.data_bytes)
        for begin, flat in rank_file.flat_runs(state, layout):
            host.copy_tensor(begin, flat)
        rank_file.write_rank_file(
            here, number, state, layout, host.byte_views(0, layout.data_bytes)
        )
    directory.write_manifest(
        here, source.step, dict.fromkeys(AXES, 1), source.facts, files=len(groups)
    )
    return [rank_file.rank_file_names(number)[0] for number in range(len(groups))]


def _write_weights(
    checkpoint: Path, source: CheckpointSource, here: Path, dtype: torch.dtype | None
) -> list[str]:
    """Write full weights under the names of their parameters, as safetensors with an index."""
    from safetensors.torch import save_file

    # Master weights are the parameters; the other tensors are optimizer states.
    names = [name for name in source.tensor_specs if name.endswith(".master")]
    if not names:
        raise CheckpointError(
            f"{checkpoint} has no weights (no tensor NAME.master). Only checkpoints that `ranvier "
            "train` or `ranvier import` wrote can be converted. Pass one of them."
        )
    groups = list(_group_by_size(source, names))
    where = dict[str, str]()
    size = 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            n.removesuffix(".master"): x.to(dtype) for n, x in source.read_tensors(group).items()
        }
        save_file(tensors, here / file, metadata={"format": "pt"})
        # Set the usual permissions of a new file, regardless of the mode that save_file used.
        (here / file).chmod(0o666 & ~_current_umask())
        checksummed_file.fsync_path(here / file)
        where |= dict.fromkeys(tensors, file)
        size += sum(x.numel() * x.dtype.itemsize for x in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    text = json.dumps(index, indent=1) + "\n"
    checksummed_file.write_checksummed(
        here / "model.safetensors.index.json", [memoryview(text.encode())]
    )
    return sorted(set(where.values()))


def _current_umask() -> int:
    # The umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
