"""Load: tensors of any grid from a checkpoint of any other.

A part of a tensor is a few boxes of the whole (see `Place.boxes`). What a rank needs is where its
own boxes and those in the files meet: only the blocks of the files that hold such elements are
read, each is checked, and never more than `WINDOW` bytes are held beside the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.checksummed_file import BLOCK, Blocks
from ranvier.checkpoint.manifest import Entry, Manifest, Part
from ranvier.errors import CheckpointError, DamageError, RefusedError
from ranvier.sharding import Box, Place, State

WINDOW = 64 * BLOCK
"""Bytes of a file that are held at once."""


@dataclass(frozen=True)
class Copy:
    """Elements that go from a file to a tensor."""

    begin: int
    """First byte of the part in the file."""
    source: Box
    target: Box
    into: Tensor
    dtype: torch.dtype

    @property
    def first(self) -> int:
        """First byte in the file."""
        return self.begin + self.source.offset * self.dtype.itemsize

    @property
    def last(self) -> int:
        """Behind the last byte in the file."""
        return self.first + self.source.span * self.dtype.itemsize

    def run(self, window: memoryview, at: int) -> None:
        """Copy from bytes of the file that begin at byte `at`."""
        numbers = torch.frombuffer(
            window, dtype=self.dtype, count=self.source.span, offset=self.first - at
        )
        values = numbers.as_strided(self.source.size, self.source.strides)
        flat = self.into.view(-1)
        place = flat.as_strided(
            self.target.size, self.target.strides, flat.storage_offset() + self.target.offset
        )
        if place.device.type != "cpu":
            values = values.contiguous()
        place.copy_(values)


def load(checkpoint: Path, state: State, *, partial: bool = False, cast: bool = False) -> list[str]:
    """Fill my parts from a checkpoint; the names that were left as they are (only if partial).

    cast: other types of numbers are converted.
    """
    manifest = manifests.read(checkpoint)
    left = _compared(checkpoint, manifest, state, partial=partial, cast=cast)
    with torch.no_grad():
        fill(checkpoint, manifest, {n: x for n, x in state.items() if n not in left})
    return sorted(left)


def fill(checkpoint: Path, manifest: Manifest, state: State) -> None:
    """Fill tensors that the manifest has, all of their elements."""
    jobs: dict[int, list[Copy]] = {}
    for name, (tensor, place) in state.items():
        entry, wanted = manifest.tensors[name], place.boxes()
        assert tensor.is_contiguous(), name
        missing = sum(box.elements for box in wanted)
        for part in entry.parts:
            for copy in _copies(part, wanted, tensor, entry):
                jobs.setdefault(part.file, []).append(copy)
                missing -= copy.source.elements
        if missing:
            raise DamageError(f"{checkpoint} lacks {missing} elements of {name}.")
    files = list(manifest.files.items())
    for number, copies in sorted(jobs.items()):
        name, sums = files[number]
        with Blocks(checkpoint / name, sums) as file:
            check_header(file)
            _run(file, sorted(copies, key=lambda copy: copy.first))


def check_header(file: Blocks) -> None:
    """Refuse a file whose header cannot be: other readers would trust it."""
    size = file.sums.size
    length = int.from_bytes(file.read(0, min(8, size)), "little")
    if size < 8 or length > size - 8:
        raise RefusedError(
            f"{file.path} has {size} bytes, but says that its header has {length}. A header is "
            "part of its file. Do not use this checkpoint."
        )


def _copies(part: Part, wanted: Sequence[Box], into: Tensor, entry: Entry) -> Iterator[Copy]:
    """Where a part in a file and the boxes of mine meet, in pieces that fit into a window."""
    place, most = part.place, WINDOW // 2 // entry.dtype.itemsize
    bounds = Box(place.start, place.valid, 0, (0,) * len(place.start))
    near = [box for box in wanted if box.within(bounds) is not None]
    for source in place.boxes() if near else ():
        for target in near:
            meeting = source.within(target)
            for piece in [] if meeting is None else meeting.cut(most):
                goal = target.within(piece)
                assert goal is not None
                yield Copy(part.begin, piece, goal, into, entry.dtype)


def _run(file: Blocks, copies: Sequence[Copy]) -> None:
    """Make copies that are in the order of the file; neighbours share what is read."""
    window: list[Copy] = []
    start = end = 0
    for copy in copies:
        apart = copy.first > -(-end // BLOCK) * BLOCK
        if window and (apart or max(copy.last, end) - start > WINDOW):
            _flush(file, window, end)
            window, end = [], 0
        if not window:
            start = copy.first // BLOCK * BLOCK
        window.append(copy)
        end = max(end, copy.last)
    _flush(file, window, end)


def _flush(file: Blocks, window: Sequence[Copy], stop: int) -> None:
    if not window:
        return
    start = window[0].first
    data = file.read(start, stop)
    for copy in window:
        copy.run(data, start)


def _compared(
    checkpoint: Path, manifest: Manifest, state: State, *, partial: bool, cast: bool
) -> set[str]:
    """Tensors of mine that are not loaded; refused unless that is wanted."""
    missing = sorted(set(state) - set(manifest.tensors))
    shapes, dtypes = [], []
    for name, (tensor, place) in state.items():
        entry = manifest.tensors.get(name)
        if entry is not None and entry.shape != place.whole:
            shapes.append(f"{name} {list(entry.shape)}, not {list(place.whole)}")
        elif entry is not None and entry.dtype != tensor.dtype:
            dtypes.append(f"{name} {entry.dtype}, not {tensor.dtype}")
    problems = [
        f"{words}: {', '.join(found[:5])}{' ...' * (len(found) > 5)} ({len(found)} in all)"
        for words, found in (
            ("not there", [] if partial else missing),
            ("of another shape", [] if partial else shapes),
            ("of another type", [] if cast or partial else dtypes),
        )
        if found
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint} does not fit the model: {'; '.join(problems)}. A checkpoint fits the "
            "model that saved it. Use the same settings, or checkpoint.partial=True to load what "
            "fits."
        )
    return {*missing, *(line.partition(" ")[0] for line in shapes)}


def wholes(checkpoint: Path, kind: str = "master") -> dict[str, Tensor]:
    """Whole weights of a checkpoint by the name of their parameter."""
    manifest, end = manifests.read(checkpoint), f".{kind}"
    state = {n: blank(e) for n, e in manifest.tensors.items() if n.endswith(end)}
    fill(checkpoint, manifest, state)
    return {name.removesuffix(end): tensor for name, (tensor, _) in state.items()}


def blank(entry: Entry) -> tuple[Tensor, Place]:
    """Room for a whole tensor."""
    shape = entry.shape
    place = Place(shape, (0,) * len(shape), shape, shape)
    return torch.empty(shape, dtype=entry.dtype), place


def damage(checkpoint: Path, manifest: Manifest) -> Iterator[tuple[str, int]]:
    """Read every byte of a checkpoint: problems and bytes read so far, file by file."""
    starts = _begins(manifest)
    for number, (name, sums) in enumerate(manifest.files.items()):
        with ExitStack() as stack:
            try:
                file = stack.enter_context(Blocks(checkpoint / name, sums))
                check_header(file)
            except DamageError as error:
                yield str(error), 0
                continue
            for low in range(0, sums.size, BLOCK):
                high = min(low + BLOCK, sums.size)
                try:
                    file.read(low, high)
                except DamageError as error:
                    inside = [t for a, b, t in sorted(starts[number]) if a < high and b > low]
                    yield f"{error} It holds {', '.join(inside[:5]) or 'the header'}.", high - low
                else:
                    yield "", high - low


def _begins(manifest: Manifest) -> list[list[tuple[int, int, str]]]:
    """First byte, end and name of each tensor in each file."""
    found: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for name, entry in manifest.tensors.items():
        for part in entry.parts:
            low, high = part.place.flat or (0, torch.Size(part.place.local).numel())
            end = part.begin + (high - low) * entry.dtype.itemsize
            found[part.file].append((part.begin, end, name))
    return found


def differing(one: Mapping[str, Entry], other: Mapping[str, Entry]) -> list[str]:
    """Names that only one of two checkpoints has, or in another shape or type."""
    kinds = [{n: (e.dtype, e.shape) for n, e in table.items()} for table in (one, other)]
    return sorted(n for n in {*kinds[0], *kinds[1]} if kinds[0].get(n) != kinds[1].get(n))
