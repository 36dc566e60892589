"""Models in Hugging Face format: safetensors with an index and a config.json.

Files are memory-mapped, never read as a whole: a tensor is a view of its file until its elements
are copied, so each rank reads only its own slices. A config that cannot be represented is refused
before any weight is read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ranvier import counter_rng
from ranvier.checkpoint import rank_file
from ranvier.checkpoint.rank_file import FileLayout
from ranvier.errors import CheckpointError, DamageError, PlanError, UnsafeInputError
from ranvier.models.config import DecoderConfig
from ranvier.models.hf.family import (
    Family,
    TensorMapping,
    UnsupportedModelError,
    parameter_shapes,
    rotary_halves,
)
from ranvier.models.hf.registry import find_family
from ranvier.sharding import Shard, ShardedStateDict
from ranvier.system import safe_files

MAX_FILE_BYTES = 1 << 30
"""Maximum bytes of a file of an imported checkpoint, unless one tensor is larger."""
ByteProgress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "freqs_cis")
"""Suffixes of tensors that are not weights: masks and tables of older versions."""


def read_json_table(path: Path, *, root: Path | None = None) -> dict[str, Any]:
    """Read a JSON file that contains an object. root: as for `safe_files.open_untrusted`."""
    try:
        found = json.loads(safe_files.read_text(path, root=root))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. A Hugging Face model is a directory with "
            "config.json and *.safetensors files. Pass the path of one."
        ) from None
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is not valid JSON: {error!s:.200}. Restore it.") from None
    if not isinstance(found, dict):
        raise DamageError(f"{path} is not a JSON object. Restore it.")
    return found


def is_file_name(name: str) -> bool:
    """Whether a string is a plain file name: no path separator, no NUL, valid UTF-8."""
    try:
        plain = os.fsencode(name) == os.path.basename(os.fsencode(name)) and "\0" not in name
    # An unpaired surrogate cannot be encoded.
    except UnicodeEncodeError:
        return False
    return plain and "\\" not in name and name not in ("", ".", "..")


def open_weights(path: Path) -> Any:
    """Memory-map a safetensors file; its tensors are read on demand."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_files.open_untrusted(path) as file:
            # Opened through the checked handle, so that the path cannot be swapped in between.
            return safe_open(safe_files.handle_path(file), framework="pt")
    except OSError as error:
        raise DamageError(f"{path} cannot be read: {error.strerror}. Restore it.") from None
    except SafetensorError as error:
        raise DamageError(f"{path} is damaged: {error!s:.200}. Restore it.") from None


RowPart = tuple[int, Tensor]
"""First row of a part of one of our tensors, and the part itself."""


@dataclass(frozen=True)
class RowSlice:
    """Rows of one of our tensors, and their location in one of the published tensors."""

    entry: TensorMapping
    first_row: int
    """First row in our tensor."""
    num_rows: int
    start: int = 0
    """Offset in the published tensor, along the entry's `concat_dim`."""
    rotary_dim: int = 0
    """Elements of a head whose rotary pairs are stored as neighbours; 0 if they are not."""

    def take_rows(self, theirs: Tensor, shape: Sequence[int]) -> Tensor:
        """Our rows `[rows, ...]` as a view. shape: shape of our tensor."""
        entry = self.entry
        # One published tensor per expert: ours stacks experts along dim 0.
        if entry.expert_index >= 0:
            return theirs.unsqueeze(0)
        # All experts in one published tensor: the expert is selected along dim 0 first.
        if entry.concat_dim == 1:
            theirs = theirs.narrow(0, self.first_row, self.num_rows)
        if entry.is_transposed:
            theirs = theirs.T
        if entry.stored_shape:
            theirs = theirs.flatten()
        theirs = entry.separate_inputs(theirs)
        rows = theirs.narrow(entry.concat_dim, self.start, shape[entry.concat_dim])
        if self.rotary_dim:
            return rotary_halves(rows, self.rotary_dim)
        return rows


@dataclass
class PublishedModel:
    """A Hugging Face model whose config maps to a `DecoderConfig`."""

    folder: Path
    hf_config: dict[str, Any]
    """Contents of its config.json."""
    family: Family
    config: DecoderConfig
    entries: list[TensorMapping]
    file_by_tensor: Mapping[str, Path]
    """File of each tensor."""
    _open_files: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> PublishedModel:
        """Open a directory, or a safetensors file with config.json next to it."""
        if path.is_file() and path.suffix != ".safetensors":
            raise PlanError(
                f"{path} is not a safetensors file. A model is a directory with config.json and "
                f"*.safetensors files, or one such file. Pass {path.parent}."
            )
        if path.is_dir():
            folder = path
        else:
            folder = path.parent
        theirs = read_json_table(folder / "config.json")
        try:
            family = find_family(theirs)
            config = family.config_from_hf(theirs)
            made = cls(folder, theirs, family, config, [], {})
            made.file_by_tensor = dict(made._tensor_files(path))
            # Checked before the entries are listed: a huge layer count in config.json would exhaust
            # memory.
            made._check_layers()
            entries = made.entries = entries_of(family, config)
        except UnsupportedModelError as error:
            raise PlanError([f"{folder / 'config.json'}:", *str(error).splitlines()]) from None
        # Experts are published one by one or fused per layer; use the layout that the files have.
        if any(
            entry.expert_index >= 0 and entry.name not in made.file_by_tensor for entry in entries
        ):
            whole = entries_of(family, config, fused=True)
            if any(entry.concat_dim == 1 and entry.name in made.file_by_tensor for entry in whole):
                made.entries = whole
        made._check_tensors()
        return made

    def _tensor_files(self, path: Path) -> Iterator[tuple[str, Path]]:
        """Yield the names of tensors and their files."""
        if path.is_file():
            files = {path}
        elif safe_files.path_exists(path / INDEX_FILE):
            listed = read_json_table(path / INDEX_FILE).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(x, str) for x in listed.values()):
                raise DamageError(f"{path / INDEX_FILE} has no valid weight_map. Restore it.")
            # The index is untrusted: a name with a path could read any file of the machine.
            odd = [x for x in listed.values() if not is_file_name(x)]
            if odd:
                raise UnsafeInputError(
                    f"{path / INDEX_FILE} names {odd[0]!r:.100}. It may only name files in the "
                    "same directory. Do not use this model."
                )
            files = {path / name for name in {*listed.values()}}
            other = sorted(file.name for file in files if file.suffix != ".safetensors")
            if other:
                raise CheckpointError(
                    f"{path / INDEX_FILE} names {other[0]!r:.100}. Weights are read from "
                    "*.safetensors files only, which cannot run code. Convert the model with "
                    "save_pretrained(..., safe_serialization=True)."
                )
        elif safe_files.path_exists(path / SINGLE_FILE):
            files = {path / SINGLE_FILE}
        else:
            # The directory may also hold a PEFT adapter, which is not part of the model.
            files = {*path.glob("*.safetensors")} - {path / "adapter_model.safetensors"}
        if not files:
            pickled = ", ".join(sorted(f.name for f in path.glob("*.bin"))[:3])
            raise CheckpointError(
                f"{path} has no *.safetensors files{f', but {pickled}' if pickled else ''}. "
                "Weights are read from *.safetensors files only, which cannot run code. Convert "
                "the model with save_pretrained(..., safe_serialization=True)."
            )
        known: dict[str, Path] = {}
        for file in sorted(files):
            for name in self._mapped_file(file).keys():  # noqa: SIM118, no mapping
                if name in known:
                    raise CheckpointError(
                        f"{name} is in {known[name]} and in {file}. Without a {INDEX_FILE} each "
                        "tensor must be in exactly one file. Remove one of them."
                    )
                known[name] = file
                yield name, file

    def _mapped_file(self, path: Path) -> Any:
        """The memory-mapped file, opened once."""
        if path not in self._open_files:
            self._open_files[path] = open_weights(path)
        return self._open_files[path]

    @cached_property
    def _stored_names(self) -> dict[str, str]:
        """Stored names by the names of the family: some models are stored without a head."""
        body = self.family.body_prefix
        # Such files omit the prefix of the body, for example `model.`.
        bare = {f"{body}{name}": name for name in self.file_by_tensor if not name.startswith(body)}
        return {entry.name: bare.get(entry.name, entry.name) for entry in self.entries}

    @cached_property
    def _slices_by_name(self) -> dict[str, list[RowSlice]]:
        """Location of each of our tensors: which of its rows are in which published tensor."""
        found: dict[str, list[RowSlice]] = {}
        for entry in self.entries:
            start = 0
            for name in entry.our_names:
                rows = self.shapes[name][0]
                pieces = found.setdefault(name, [])
                if entry.expert_index >= 0:
                    pieces.append(RowSlice(entry, entry.expert_index, 1))
                elif entry.concat_dim == 1 and len(self.shapes[name]) > 2:
                    # Fused experts are stored one after the other; only a single expert's rows are
                    # contiguous.
                    pieces += [RowSlice(entry, row, 1, start) for row in range(rows)]
                else:
                    pieces.append(RowSlice(entry, 0, rows, start, entry.rotary_dim(name)))
                # Packed tensors (q, k, v) follow each other along the concatenated dim.
                start += self.shapes[name][entry.concat_dim]
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of our tensors."""
        return shapes_of(self.config)

    def _check_layers(self) -> None:
        """Refuse a config with more layers than tensors, before any list of layers is made."""
        if self.config.layers > len(self.file_by_tensor):
            raise CheckpointError(
                f"{self.folder / 'config.json'} has {self.config.layers:,} layers, but the files "
                f"have {len(self.file_by_tensor):,} tensors. Each layer has at least one. Restore "
                "the original files."
            )

    def _check_tensors(self) -> None:
        """Refuse weights that are missing, unexpected, or of another shape or dtype."""
        problems = []
        expected = {*self._stored_names.values()}
        for entry in self.entries:
            name = self._stored_names[entry.name]
            want = [*entry.compute_shape(self.shapes)]
            if name not in self.file_by_tensor:
                problems.append(f"{entry.name} is missing")
                continue
            have = self._mapped_file(self.file_by_tensor[name]).get_slice(name)
            if list(have.get_shape()) != want:
                problems.append(f"{name} has the shape {list(have.get_shape())}, not {want}")
            elif have.get_dtype() not in ("F64", "F32", "BF16", "F16"):
                problems.append(f"{name} has the unsupported dtype {have.get_dtype()}")
        for name in sorted(self.file_by_tensor.keys() - expected):
            # Some publishers store the tied head as well; `_check_tied` compares it.
            head = name == "lm_head.weight" and self.config.tie_embeddings
            if not head and not name.endswith(IGNORED_SUFFIXES):
                problems.append(f"{name} is not a tensor of {self.family.model_type}")
        if problems:
            if len(problems) > 5:
                more = f" ({len(problems)} in all)"
            else:
                more = ""
            raise CheckpointError(
                f"{self.folder} does not match its config.json: {'; '.join(problems[:5])}{more}. "
                "Every tensor of a model must be loaded. Restore the original files."
            )
        self._check_tied()

    def _check_tied(self) -> None:
        """Refuse a head next to a tied embedding unless both are equal."""
        if self.config.tie_embeddings and "lm_head.weight" in self.file_by_tensor:
            head = self.mapped_tensor("lm_head.weight")
            if not torch.equal(head, self.load_tensor("embed.weight")):
                raise CheckpointError(
                    f"{self.folder} has tie_word_embeddings=True, but lm_head.weight differs from "
                    "the embedding. Tied weights must be equal. Set tie_word_embeddings to false "
                    "in config.json, or remove lm_head.weight."
                )

    def mapped_tensor(self, name: str) -> Tensor:
        """One of the published tensors, as a view of its file."""
        found: Tensor = self._mapped_file(self.file_by_tensor[name]).get_tensor(name)
        return found

    def row_parts(self, name: str, low: int = 0, high: int | None = None) -> Iterator[RowPart]:
        """Yield first row and view of each part of one of our tensors with rows in a range.

        Concatenated along dim 0 they are the tensor; most tensors have a single part.
        """
        if high is None:
            high = self.shapes[name][0]
        for piece in self._slices_by_name[name]:
            if piece.first_row < high and low < piece.first_row + piece.num_rows:
                theirs = self.mapped_tensor(self._stored_names[piece.entry.name])
                yield piece.first_row, piece.take_rows(theirs, self.shapes[name])

    def load_tensor(self, name: str) -> Tensor:
        """One of our tensors: a view of its file, or a concatenation of its experts."""
        parts = [part for _, part in self.row_parts(name)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which one of our tensors is stored."""
        return next(self.row_parts(name))[1].dtype

    def num_bytes(self, name: str) -> int:
        """Size of one of our tensors in bytes, in its stored dtype."""
        return math.prod(self.shapes[name]) * self.dtype_of(name).itemsize

    def fill_state(self, state: ShardedStateDict) -> None:
        """Fill the local shards of our tensors; only their elements are read."""
        with torch.no_grad():
            for name, (tensor, place) in state.items():
                low = place.global_offset[0]
                for first, part in self.row_parts(name, low, low + place.valid_shape[0]):
                    copy_rows(part, tensor, place, first)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most elements."""
        counts = dict.fromkeys(FLOAT_DTYPES, 0)
        for name, shape in self.shapes.items():
            counts[self.dtype_of(name)] += math.prod(shape)
        return max(counts, key=lambda dtype: counts[dtype])

    def __enter__(self) -> PublishedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.clear()


def entries_of(
    family: Family, config: DecoderConfig, *, fused: bool = False
) -> list[TensorMapping]:
    """The tensors that a family stores of a model. fused: all experts of a layer in one tensor."""
    with counter_rng.init_empty_weights():
        return family.tensor_mappings(config, fused=fused)


def shapes_of(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a model; no values are drawn, as that would import a compiler."""
    with counter_rng.init_empty_weights():
        return parameter_shapes(config)


def copy_rows(rows: Tensor, into: Tensor, place: Shard, first: int = 0) -> None:
    """Copy the elements of a local shard that are within given rows, which may be memory-mapped.

    first: index of the first of these rows in the global tensor.
    """
    flat = into.view(-1)
    # Clip each box to the given rows; the offset skips the rows of the box above them.
    for box in place.to_boxes():
        low = max(box.start[0], first)
        count = min(box.start[0] + box.size[0], first + len(rows)) - low
        if count > 0:
            start = (low - first, *box.start[1:])
            size = (count, *box.size[1:])
            source = rows[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            offset = flat.storage_offset() + box.offset + (low - box.start[0]) * box.strides[0]
            flat.as_strided(size, box.strides, offset).copy_(source)


# ---- writing a checkpoint ---------------------------------------------------------------


class TensorBytes:
    """The bytes of a tensor in row-major order, produced when they are sliced."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        if tensor.dim():
            self.row_bytes = tensor[0].numel() * tensor.element_size()
        else:
            self.row_bytes = 1

    def __len__(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def __getitem__(self, part: slice) -> memoryview:
        low, high, _ = part.indices(len(self))
        if self.tensor.is_contiguous():
            return memoryview(self.tensor.view(-1).view(torch.uint8).numpy()[low:high].data)
        # Only the rows that the slice touches are made contiguous.
        first = low // self.row_bytes
        last = -(-high // self.row_bytes)
        some = self.tensor[first:last].contiguous().view(-1).view(torch.uint8).numpy()
        return memoryview(some[low - first * self.row_bytes : high - first * self.row_bytes].data)


class TensorProvider(Protocol):
    """Full tensors of a model whose rows are produced on demand."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name."""
        ...

    def dtype_of(self, name: str, /) -> torch.dtype:
        """Dtype of a tensor."""
        ...

    def num_bytes(self, name: str, /) -> int:
        """Size of a tensor in bytes."""
        ...

    def row_parts(self, name: str, /) -> Iterator[RowPart]:
        """Parts of a tensor, with their first rows."""
        ...


def write_weights(source: TensorProvider, here: Path, progress: ByteProgress) -> int:
    """Write the weights of a model as rank files of a checkpoint; return their number."""
    groups: list[list[str]] = [[]]
    held = 0
    for name in source.shapes:
        size = source.num_bytes(name)
        if groups[-1] and held + size > MAX_FILE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    total = sum(source.num_bytes(name) for name in source.shapes)
    done = 0
    for number, group in enumerate(groups):
        progress(done, total)
        done += sum(map(source.num_bytes, group))
        state: ShardedStateDict = {}
        for name in group:
            shape = source.shapes[name]
            # A meta tensor: the layout needs shape and dtype only, and the bytes come from
            # `TensorBytes`.
            outline = torch.empty(shape, dtype=source.dtype_of(name), device="meta")
            state[f"{name}.master"] = outline, Shard(shape, (0,) * len(shape), shape, shape)
        layout = FileLayout.from_state(state)
        names = [name.removesuffix(".master") for name in layout.offsets]
        pieces = [TensorBytes(rows) for name in names for _, rows in source.row_parts(name)]
        rank_file.write_rank_file(here, number, state, layout, pieces)
    progress(total, total)
    return len(groups)
