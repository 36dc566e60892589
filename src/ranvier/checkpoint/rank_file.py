"""The file of a checkpoint that one rank writes, copied to host memory first.

It is a safetensors file: length of the header, header, tensors without gaps. Host memory has the
same order, so that it is written in one pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.buckets.sparsity import CompressedTensor, unpack_bits
from ranvier.checkpoint import checksummed_file
from ranvier.checkpoint.checksummed_file import BlockChecksums, LazyBytes
from ranvier.checkpoint.manifest import (
    DTYPE_NAMES,
    StoredShard,
    add_digest,
    read_digested,
    serialize_shard,
)
from ranvier.errors import NumericError, WriteError
from ranvier.sharding import ShardedStateDict

CHUNK_BYTES = 1 << 30
"""Bytes of a chunk of host memory: pinned memory is allocated in powers of two."""


@dataclass(frozen=True)
class FileLayout:
    """Byte offsets of the tensors of a state in a file."""

    header: bytes
    offsets: Mapping[str, int]
    """First byte of each tensor, relative to the end of the header."""
    data_bytes: int
    """Bytes after the header."""

    @classmethod
    def from_state(cls, state: ShardedStateDict) -> FileLayout:
        """Place wide dtypes first, so that each tensor is aligned to its item size."""
        order = sorted(state, key=lambda name: -state[name][0].dtype.itemsize)
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        begins = {}
        at = 0
        for name in order:
            tensor = state[name][0]
            end = at + tensor.numel() * tensor.dtype.itemsize
            begins[name] = at
            word = DTYPE_NAMES[tensor.dtype]
            shape = list(tensor.shape)
            table[name] = {"dtype": word, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(table, separators=(",", ":")).encode()
        # Padding with spaces aligns the data to 8 bytes, as safetensors itself does.
        text += b" " * (-len(text) % 8)
        return cls(len(text).to_bytes(8, "little") + text, begins, at)


DIRECT_WRITE_BYTES = 2**20
"""Size from which a tensor in host memory is written in place, without a copy."""


class HostBuffer:
    """Host memory that the tensors of a rank are copied into, reused by all saves."""

    def __init__(self, device: torch.device) -> None:
        self.is_pinned = device.type == "cuda"
        self.chunks: list[Tensor] = []

    def ensure_size(self, size: int) -> None:
        """Grow to at least `size` bytes."""
        # The last chunk may be smaller than a full one, from an earlier, smaller save.
        if self.chunks and len(self.chunks[-1]) < min(CHUNK_BYTES, size):
            self.chunks.pop()
        while CHUNK_BYTES * len(self.chunks) < size:
            # A small state on a CPU does not need a whole chunk.
            if self.is_pinned or size > CHUNK_BYTES:
                room = CHUNK_BYTES
            else:
                room = size
            self.chunks.append(torch.empty(room, dtype=torch.uint8, pin_memory=self.is_pinned))

    def copy_tensor(self, begin: int, tensor: Tensor) -> None:
        """Copy a flat tensor to byte `begin`; asynchronously from a device."""
        source = tensor.view(torch.uint8)
        at = 0
        while at < len(source):
            chunk, low = divmod(begin + at, CHUNK_BYTES)
            room = min(CHUNK_BYTES - low, len(source) - at)
            into = self.chunks[chunk][low : low + room]
            # Asynchronous from CUDA, as the chunks are pinned; the caller synchronizes with an
            # event.
            into.copy_(source[at : at + room], non_blocking=True)
            at += room

    def byte_views(self, begin: int, size: int) -> list[memoryview]:
        """Views of `size` bytes from `begin` on, one per chunk."""
        found = []
        end = begin + size
        while begin < end:
            chunk, low = divmod(begin, CHUNK_BYTES)
            high = min(low + end - begin, CHUNK_BYTES)
            found.append(memoryview(self.chunks[chunk].numpy().data)[low:high])
            begin += high - low
        return found


def is_read_in_place(flat: Tensor, device: torch.device) -> bool:
    """Whether an offloaded tensor of a CUDA run is too large to copy within host memory."""
    return device.type == "cuda" and flat.device.type == "cpu" and flat.nbytes >= DIRECT_WRITE_BYTES


class SparseBytes:
    """The bytes of a dense tensor, expanded from its nonzero values when they are sliced."""

    COUNT_STEP = 2**16
    """Elements between two stored prefix counts of nonzero values."""

    def __init__(
        self, values: Sequence[LazyBytes], sparse: CompressedTensor, dtype: torch.dtype
    ) -> None:
        self.values = values
        self.sparse = sparse
        self.itemsize = dtype.itemsize
        # Prefix counts let a slice find its values without unpacking all bits before it.
        counts = [unpack_bits(bits).sum() for bits in sparse.bits.split(self.COUNT_STEP // 8)]
        self.counts_before = torch.tensor([0, *counts]).cumsum(0).tolist()

    def __len__(self) -> int:
        return self.sparse.size * self.itemsize

    def __getitem__(self, part: slice) -> memoryview:
        low, high, _ = part.indices(len(self))
        # A slice may begin or end within an element: widen it to whole elements.
        first = low // self.itemsize
        last = -(-high // self.itemsize)
        bits = self.sparse.bits
        # Start at the last prefix count at or before the first element.
        step = first // self.COUNT_STEP * self.COUNT_STEP
        mask = unpack_bits(bits[step // 8 : -(-last // 8)])[: last - step]
        start = self.counts_before[step // self.COUNT_STEP] + int(mask[: first - step].sum())
        mask = mask[first - step :]
        stop = start + int(mask.sum())
        whole = mask.to(
            # Bits are copied, not converted: an integer type of the same width stands for the
            # dtype. The mask as numbers is already right for tensors that are themselves masks (no
            # values).
            {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.itemsize]
        )
        if self.sparse.values.numel() and stop > start:
            data = bytearray(
                checksummed_file.join_bytes(
                    self.values, start * self.itemsize, stop * self.itemsize
                )
            )
            whole.masked_scatter_(mask, torch.frombuffer(data, dtype=whole.dtype))
        found = memoryview(whole.view(torch.uint8).numpy().data)
        return found[low - first * self.itemsize : high - first * self.itemsize]


def flat_runs(
    state: ShardedStateDict,
    layout: FileLayout,
    sparse: Mapping[str, CompressedTensor] | None = None,
) -> list[tuple[int, Tensor]]:
    """The tensors of a state as few flat tensors, each with its byte offset in the file.

    Tensors that are adjacent both in the file and in memory are merged: a device gets few copies,
    as the host would have to wait for its queue to accept many. sparse: tensors that have only
    their nonzero values in memory, each on its own.
    """
    found: list[tuple[int, Tensor]] = []
    alone = False
    for name in layout.offsets:
        tensor = state[name][0].detach()
        if tensor.numel() == 0:
            continue
        before = alone
        alone = name in (sparse or {})
        if sparse and alone:
            flat = sparse[name].values
        else:
            flat = tensor.contiguous().view(-1)
        if found and not alone and not before and _is_adjacent(found[-1][1], flat):
            begin, last = found[-1]
            size = last.numel() + flat.numel()
            # Extend the previous view; both share one storage.
            found[-1] = begin, last.as_strided((size,), (1,), last.storage_offset())
        else:
            found.append((layout.offsets[name], flat))
    return found


def _is_adjacent(one: Tensor, other: Tensor) -> bool:
    """Whether `other` starts in memory where `one` ends."""
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    end = one.storage_offset() + one.numel()
    return same and one.dtype == other.dtype and end == other.storage_offset()


def max_magnitude(tensors: Iterable[Tensor]) -> Tensor:
    """The largest magnitude of all values; not finite if any value is not finite."""
    numbers = [x for x in tensors if x.is_floating_point() and x.numel()]
    if not numbers:
        return torch.zeros(())
    # The infinity norm propagates NaN and inf in one reduction, without a boolean tensor.
    norms = [torch.linalg.vector_norm(x, math.inf).to(torch.float64) for x in numbers]
    where = next((x.device for x in norms if x.is_cuda), norms[0].device)
    return torch.stack([x.to(where) for x in norms]).max()


def non_finite_error(
    state: ShardedStateDict, sparse: Mapping[str, CompressedTensor], step: int
) -> NumericError:
    """The error for a state with non-finite values; names the first such tensor."""
    known = {name: sparse[name].values if name in sparse else x for name, (x, _) in state.items()}
    names = [name for name, x in known.items() if not bool(x.isfinite().all())]
    return NumericError(
        f"{(names or ['A tensor'])[0]} is not finite after step {step}. Such a state is not "
        "saved. Use a lower optim.lr and resume from the previous checkpoint."
    )


def rank_file_names(rank: int) -> tuple[str, str]:
    """The file of a rank, and its report, which exists until the manifest is written."""
    return f"rank-{rank:05d}.safetensors", f"rank-{rank:05d}.json"


def write_rank_file(
    folder: Path, rank: int, state: ShardedStateDict, layout: FileLayout, data: Sequence[LazyBytes]
) -> None:
    """Write the tensors of a rank, and a report with their entries for the manifest."""
    file, report = (folder / name for name in rank_file_names(rank))
    sums = checksummed_file.write_checksummed(file, [memoryview(layout.header), *data])
    start = len(layout.header)
    tensors = {
        name: [
            DTYPE_NAMES[tensor.dtype],
            place.global_shape,
            # File number 0 is a placeholder: the manifest numbers the files.
            serialize_shard(StoredShard(0, start + layout.offsets[name], place)),
        ]
        for name, (tensor, place) in state.items()
    }
    body = {"size": sums.size, "sums": sums.to_hex(), "tensors": tensors}
    checksummed_file.write_checksummed(
        report, [memoryview(add_digest(json.dumps(body, separators=(",", ":")).encode()))]
    )


def read_rank_report(folder: Path, rank: int) -> tuple[BlockChecksums, dict[str, Any]]:
    """Read the report of a rank: checksums of its file and entries of its tensors."""
    path = folder / rank_file_names(rank)[1]
    if not path.exists():
        raise WriteError(
            f"{path} is missing, although rank {rank} has written it. All ranks must see the same "
            "directory. Use a train.output_dir on a file system that all nodes share."
        )
    body = read_digested(path)
    return BlockChecksums.from_hex(body["size"], body["sums"]), body["tensors"]
