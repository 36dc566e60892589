"""Loads a checkpoint on any grid, no matter which grid saved it.

A shard of a tensor is a few boxes of the global tensor (see `Shard.to_boxes`). A rank needs the
intersections of its own boxes with the boxes in the files. Only the blocks of the files with such
elements are read, and each is verified. At most `WINDOW_BYTES` bytes are held in addition to the
tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.checksummed_file import BLOCK_BYTES, ChecksummedFile
from ranvier.checkpoint.manifest import CheckpointManifest, StoredShard, TensorEntry
from ranvier.errors import CheckpointError, DamageError, UnsafeInputError
from ranvier.sharding import Box, Shard, ShardedStateDict

WINDOW_BYTES = 64 * BLOCK_BYTES
"""Bytes of a file that are held in memory at once."""


@dataclass(frozen=True)
class ElementCopy:
    """A copy of elements from a file into a tensor."""

    shard_offset: int
    """First byte of the stored shard in the file."""
    source: Box
    target: Box
    into: Tensor
    dtype: torch.dtype

    @property
    def first_byte(self) -> int:
        """First byte in the file."""
        return self.shard_offset + self.source.offset * self.dtype.itemsize

    @property
    def end_byte(self) -> int:
        """End of the bytes in the file (exclusive)."""
        return self.first_byte + self.source.span * self.dtype.itemsize

    def copy_from(self, window: memoryview, at: int) -> None:
        """Copy from `window`, bytes of the file that start at byte `at`."""
        numbers = torch.frombuffer(
            window, dtype=self.dtype, count=self.source.span, offset=self.first_byte - at
        )
        # The box may be strided in the file: `span` elements are mapped, `size` of them are taken.
        values = numbers.as_strided(self.source.size, self.source.strides)
        flat = self.into.view(-1)
        place = flat.as_strided(
            self.target.size, self.target.strides, flat.storage_offset() + self.target.offset
        )
        # Gather on the host first, so that the transfer to the device is one contiguous copy.
        if place.device.type != "cpu":
            values = values.contiguous()
        place.copy_(values)


def load_checkpoint(
    checkpoint: Path, state: ShardedStateDict, *, strict: bool = True, cast: bool = False
) -> list[str]:
    """Fill local shards from a checkpoint; return the names left unchanged (only if not strict).

    cast: convert tensors of other dtypes.
    """
    manifest = manifests.read_manifest(checkpoint)
    left = _check_tensors(checkpoint, manifest, state, strict=strict, cast=cast)
    with torch.no_grad():
        fill_tensors(checkpoint, manifest, {n: x for n, x in state.items() if n not in left})
    return sorted(left)


def fill_tensors(checkpoint: Path, manifest: CheckpointManifest, state: ShardedStateDict) -> None:
    """Fill local shards with all of their elements; the manifest must contain their names."""
    # Plan all copies first, by file, so that each file is opened once and read in order.
    jobs: dict[int, list[ElementCopy]] = {}
    for name, (tensor, place) in state.items():
        entry = manifest.tensors[name]
        wanted = place.to_boxes()
        assert tensor.is_contiguous(), name
        missing = sum(box.num_elements for box in wanted)
        for part in entry.shards:
            for copy in _plan_copies(part, wanted, tensor, entry):
                jobs.setdefault(part.file, []).append(copy)
                missing -= copy.source.num_elements
        # Stored shards do not overlap, so counting elements proves that all are covered.
        if missing:
            raise DamageError(f"{checkpoint} lacks {missing} elements of {name}.")
    files = list(manifest.files.items())
    for number, copies in sorted(jobs.items()):
        name, sums = files[number]
        with ChecksummedFile(checkpoint / name, sums) as file:
            check_header(file)
            _run_copies(file, sorted(copies, key=lambda copy: copy.first_byte))


def check_header(file: ChecksummedFile) -> None:
    """Refuse a file with an impossible header length: other readers would trust it."""
    size = file.checksums.size
    length = int.from_bytes(file.read(0, min(8, size)), "little")
    if size < 8 or length > size - 8:
        raise UnsafeInputError(
            f"{file.path} has {size} bytes, but its header claims to have {length}. A header "
            "cannot be longer than its file. Do not use this checkpoint."
        )


def _plan_copies(
    part: StoredShard, wanted: Sequence[Box], into: Tensor, entry: TensorEntry
) -> Iterator[ElementCopy]:
    """Intersections of a stored shard with the wanted boxes, in pieces that fit a window."""
    place = part.shard
    # Half a window leaves room for the alignment to blocks.
    most = WINDOW_BYTES // 2 // entry.dtype.itemsize
    # A cheap test on the bounding box first: most pairs of shards do not intersect.
    bounds = Box(place.global_offset, place.valid_shape, 0, (0,) * len(place.global_offset))
    near = [box for box in wanted if box.intersection(bounds) is not None]
    for source in place.to_boxes() if near else ():
        for target in near:
            meeting = source.intersection(target)
            for piece in [] if meeting is None else meeting.split_to_fit(most):
                # The same elements, with the strides of the file and with the strides of the
                # tensor.
                goal = target.intersection(piece)
                assert goal is not None
                yield ElementCopy(part.offset, piece, goal, into, entry.dtype)


def _run_copies(file: ChecksummedFile, copies: Sequence[ElementCopy]) -> None:
    """Execute copies sorted by file offset; neighbours share one read."""
    window: list[ElementCopy] = []
    start = end = 0
    for copy in copies:
        # A gap of at least one block would be read and verified for nothing.
        apart = copy.first_byte > -(-end // BLOCK_BYTES) * BLOCK_BYTES
        if window and (apart or max(copy.end_byte, end) - start > WINDOW_BYTES):
            _flush_window(file, window, end)
            window = []
            end = 0
        if not window:
            start = copy.first_byte // BLOCK_BYTES * BLOCK_BYTES
        window.append(copy)
        end = max(end, copy.end_byte)
    _flush_window(file, window, end)


def _flush_window(file: ChecksummedFile, window: Sequence[ElementCopy], stop: int) -> None:
    if not window:
        return
    start = window[0].first_byte
    data = file.read(start, stop)
    for copy in window:
        copy.copy_from(data, start)


def _check_tensors(
    checkpoint: Path,
    manifest: CheckpointManifest,
    state: ShardedStateDict,
    *,
    strict: bool,
    cast: bool,
) -> set[str]:
    """Names of tensors that are not loaded; an error if `strict`."""
    missing = sorted(set(state) - set(manifest.tensors))
    shapes = []
    dtypes = []
    for name, (tensor, place) in state.items():
        entry = manifest.tensors.get(name)
        if entry is not None and entry.shape != place.global_shape:
            shapes.append(f"{name} {list(entry.shape)}, not {list(place.global_shape)}")
        elif entry is not None and entry.dtype != tensor.dtype:
            dtypes.append(f"{name} {entry.dtype}, not {tensor.dtype}")
    problems = [
        f"{words}: {', '.join(found[:5])}{' ...' * (len(found) > 5)} ({len(found)} in all)"
        for words, found in (
            ("missing", missing if strict else []),
            ("wrong shape", shapes if strict else []),
            ("wrong dtype", dtypes if strict and not cast else []),
        )
        if found
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint} does not match the model: {'; '.join(problems)}. A checkpoint only fits "
            "the model that saved it. Use the same settings, or checkpoint.strict=False to load "
            "the tensors that match."
        )
    return {*missing, *(line.partition(" ")[0] for line in shapes)}


def load_full_tensors(checkpoint: Path, kind: str = "master") -> dict[str, Tensor]:
    """Full tensors of a checkpoint by the name of their parameter."""
    manifest = manifests.read_manifest(checkpoint)
    end = f".{kind}"
    state = {n: empty_shard(e) for n, e in manifest.tensors.items() if n.endswith(end)}
    fill_tensors(checkpoint, manifest, state)
    return {name.removesuffix(end): tensor for name, (tensor, _) in state.items()}


def empty_shard(entry: TensorEntry) -> tuple[Tensor, Shard]:
    """An uninitialized full tensor for an entry, and its shard."""
    shape = entry.shape
    place = Shard(shape, (0,) * len(shape), shape, shape)
    return torch.empty(shape, dtype=entry.dtype), place


def find_damage(checkpoint: Path, manifest: CheckpointManifest) -> Iterator[tuple[str, int]]:
    """Read every byte of a checkpoint; yield problems (or an empty string) and bytes read."""
    starts = _tensor_byte_ranges(manifest)
    for number, (name, sums) in enumerate(manifest.files.items()):
        with ExitStack() as stack:
            try:
                file = stack.enter_context(ChecksummedFile(checkpoint / name, sums))
                check_header(file)
            except DamageError as error:
                yield str(error), 0
                continue
            for low in range(0, sums.size, BLOCK_BYTES):
                high = min(low + BLOCK_BYTES, sums.size)
                try:
                    file.read(low, high)
                except DamageError as error:
                    # Name the tensors that the damaged block overlaps.
                    inside = [t for a, b, t in sorted(starts[number]) if a < high and b > low]
                    yield f"{error} Affected: {', '.join(inside[:5]) or 'the header'}.", high - low
                else:
                    yield "", high - low


def _tensor_byte_ranges(manifest: CheckpointManifest) -> list[list[tuple[int, int, str]]]:
    """First byte, end and name of each tensor, per file."""
    found: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for name, entry in manifest.tensors.items():
        for part in entry.shards:
            low, high = part.shard.flat_range or (0, torch.Size(part.shard.local_shape).numel())
            end = part.offset + (high - low) * entry.dtype.itemsize
            found[part.file].append((part.offset, end, name))
    return found


def differing_tensors(
    one: Mapping[str, TensorEntry], other: Mapping[str, TensorEntry]
) -> list[str]:
    """Names that only one of two checkpoints has, or with another shape or dtype."""
    kinds = [{n: (e.dtype, e.shape) for n, e in table.items()} for table in (one, other)]
    return sorted(n for n in {*kinds[0], *kinds[1]} if kinds[0].get(n) != kinds[1].get(n))
