"""Writes the weights of a model in Hugging Face format: safetensors shards with an index.

One tensor is produced at a time, so at most one full tensor of ours is in memory.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint import checksummed_file
from ranvier.checkpoint.hf.model import INDEX_FILE, ByteProgress
from ranvier.checkpoint.manifest import DTYPE_NAMES
from ranvier.errors import PlanError
from ranvier.models.hf.family import TensorMapping, rotary_neighbours


@dataclass(frozen=True)
class HFTensor:
    """A tensor to write: name, dtype, shape and the mapping that produces it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    entry: TensorMapping

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def list_hf_tensors(
    entries: Sequence[TensorMapping],
    sizes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> list[HFTensor]:
    """The tensors that a family stores, from the shapes and dtypes of ours."""
    found = []
    for entry in entries:
        dtype = dtypes[entry.our_names[0]]
        found.append(HFTensor(entry.name, dtype, entry.compute_shape(sizes), entry))
    return found


def write_safetensors(
    here: Path,
    tensors: Sequence[HFTensor],
    read: Any,
    *,
    most: int,
    progress: ByteProgress | None = None,
) -> list[str]:
    """Write safetensors files of at most `most` bytes with an index; return their names.

    read: returns one of our full tensors by its name.
    """
    groups: list[list[HFTensor]] = [[]]
    for one in tensors:
        if groups[-1] and sum(x.num_bytes for x in groups[-1]) + one.num_bytes > most:
            groups.append([])
        groups[-1].append(one)
    where: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = sum(one.num_bytes for one in tensors)
    done = 0

    def wrote(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # Hugging Face's name for a model in a single file, which has no index.
        if len(groups) == 1:
            file = "model.safetensors"
        _write_file(here / file, group, functools.partial(_source_parts, read, held), wrote)
        where |= {one.name: file for one in group}
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2) + "\n"
        checksummed_file.write_checksummed(here / INDEX_FILE, [memoryview(text.encode())])
    return list(dict.fromkeys(where.values()))


def _write_file(
    path: Path, group: Sequence[HFTensor], read: Any, wrote: Callable[[int], None]
) -> None:
    """Write one file: the header, then each tensor, produced when it is written."""
    # Wide dtypes first, so that each tensor is aligned to its item size.
    group = sorted(group, key=lambda one: -one.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in group:
        word = DTYPE_NAMES[one.dtype]
        end = at + one.num_bytes
        header[one.name] = {"dtype": word, "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Padding aligns the data to 8 bytes.
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in group:
            parts = [_cast_checked(x, one) for x in read(one.entry)]
            if len(parts) == 1:
                whole = parts[0]
            else:
                whole = torch.cat(parts, one.entry.concat_dim)
            whole = whole.T if one.entry.is_transposed else whole
            whole = one.entry.interleave_inputs(whole).contiguous()
            file.write(whole.view(-1).view(torch.uint8).numpy().data)
            # Freed before the next tensor is read, so that only one is in memory.
            del parts, whole
            wrote(one.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def _source_parts(read: Any, held: dict[str, Tensor], entry: TensorMapping) -> list[Tensor]:
    """Our tensors that make up one stored tensor; stacked experts are cached until the last one."""
    # Experts of one tensor are consecutive entries, so that a cache of one tensor is enough.
    if entry.expert_index < 0:
        held.clear()
        parts = {name: read(name) for name in entry.our_names}
        return [
            rotary_neighbours(part, entry.rotary_dim(name)) if entry.rotary_dim(name) else part
            for name, part in parts.items()
        ]
    (name,) = entry.our_names
    if name not in held:
        held.clear()
        held[name] = read(name)
    return [held[name][entry.expert_index]]


def _cast_checked(x: Tensor, one: HFTensor) -> Tensor:
    """Cast to the dtype of the file; values that overflow fp16 are refused."""
    y = x.to(one.dtype)
    if one.dtype == torch.float16 and not bool(y.isfinite().all()):
        raise PlanError(
            f"{one.name} has values up to {float(x.abs().max()):.3g}. The largest fp16 value is "
            "65504. Use --dtype bf16 or fp32."
        )
    return y
