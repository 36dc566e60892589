"""The manifest of a checkpoint: one JSON file with the location and checksums of all tensors.

It is written last and contains its own digest, so that a directory with a readable manifest is a
complete checkpoint. Nothing in it is trusted: each number and name is validated before use.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ranvier.checkpoint.checksummed_file import BlockChecksums, open_plain_file
from ranvier.errors import DamageError, UnsafeInputError, VersionError
from ranvier.sharding import Shard

MANIFEST_FORMAT = 2
MANIFEST_NAME = "manifest.json"
RANK_FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
MAX_MANIFEST_BYTES = 1 << 32
"""Size limit of a manifest in bytes."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Data types by their names in safetensors."""
MAX_DIMS = 32
"""Maximum number of dims of a tensor."""
# A Mersenne prime: the modulus of the polynomial test in `_are_disjoint`.
PRIME = 2**61 - 1
DTYPE_NAMES = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor in a file."""

    file: int
    """Index of the file in the manifest."""
    offset: int
    """First byte in the file."""
    shard: Shard


@dataclass(frozen=True)
class TensorEntry:
    """A tensor and its shards in all files; shards do not overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True)
class CheckpointManifest:
    """Contents of a checkpoint."""

    step: int
    degrees: Mapping[str, int]
    """Sizes of the axes of the grid that saved it."""
    facts: Mapping[str, Any]
    """State of the run other than tensors: samples, updates, fingerprints, settings."""
    versions: Mapping[str, str]
    files: Mapping[str, BlockChecksums]
    tensors: Mapping[str, TensorEntry]

    @property
    def total_bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(sums.size for sums in self.files.values())


def package_versions() -> dict[str, str]:
    """Versions of the packages that write the checkpoint."""
    try:
        mine = version("ranvier")
    # The package runs from its sources and is not installed.
    except PackageNotFoundError:
        mine = "unknown"
    return {
        "ranvier": mine,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def serialize_manifest(manifest: CheckpointManifest) -> bytes:
    """The manifest as JSON, with its digest."""
    body = {
        "format": MANIFEST_FORMAT,
        "step": manifest.step,
        "degrees": dict(manifest.degrees),
        "facts": manifest.facts,
        "versions": dict(manifest.versions),
        "files": {name: [sums.size, sums.to_hex()] for name, sums in manifest.files.items()},
        "tensors": {
            name: [
                DTYPE_NAMES[entry.dtype],
                entry.shape,
                [serialize_shard(part) for part in entry.shards],
            ]
            for name, entry in manifest.tensors.items()
        },
    }
    return add_digest(json.dumps(body, separators=(",", ":")).encode())


def serialize_shard(part: StoredShard) -> list[Any]:
    """A stored shard as a JSON list."""
    place = part.shard
    return [
        part.file,
        part.offset,
        place.global_offset,
        place.valid_shape,
        place.local_shape,
        place.flat_range,
    ]


def add_digest(body: bytes) -> bytes:
    """Wrap JSON together with its SHA-256 digest."""
    return b'{"sha256":"%s",\n"body":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def read_digested(path: Path) -> Any:
    """Read a file written with `add_digest`; the digest is verified byte for byte."""
    handle = open_plain_file(path)
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size > MAX_MANIFEST_BYTES:
            raise UnsafeInputError(
                f"{path} has more than {MAX_MANIFEST_BYTES} bytes, the limit of a manifest. Remove "
                "it."
            )
        text = file.read()
    match = re.match(rb'\{"sha256":"([0-9a-f]{64})",\n"body":', text)
    if match:
        # The last two bytes close the wrapper: `}` and a newline.
        body = text[match.end() : -2]
    else:
        body = b""
    if (
        not match
        or hashlib.sha256(body).hexdigest().encode() != match[1]
        # Nothing outside of the body may have changed either.
        or text != add_digest(body)
    ):
        raise DamageError(f"{path} is damaged: its digest does not match.")
    try:
        return json.loads(body)
    # Deeply nested JSON exhausts the parser's recursion.
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is not valid JSON: {str(error)[:100]}.") from None


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """Read and validate the manifest of a checkpoint."""
    path = checkpoint / MANIFEST_NAME
    if not path.is_symlink() and not path.exists():
        raise DamageError(
            f"{checkpoint} has no {MANIFEST_NAME}. It is written last: the save was interrupted, "
            "or this is not a checkpoint. Use another checkpoint."
        )
    body = read_digested(path)
    if not isinstance(body, dict) or body.get("format") != MANIFEST_FORMAT:
        if isinstance(body, dict):
            found = body.get("format")
        else:
            found = body
        raise VersionError(
            f"{path} has format {found!r:.40}. This version of Ranvier reads format "
            f"{MANIFEST_FORMAT}. Use the version that wrote the checkpoint."
        )
    try:
        manifest = _parse_manifest(body, path)
    # Any exception that a malformed manifest raises while it is parsed means damage.
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise DamageError(
            f"{path} is damaged: it cannot be parsed ({type(error).__name__}: {str(error)[:200]}). "
            "Use another checkpoint; `ranvier checkpoint ls RUN` lists them."
        ) from None
    return manifest


def _parse_manifest(body: Mapping[str, Any], path: Path) -> CheckpointManifest:
    """Parse a manifest; raises built-in exceptions for impossible values.

    path: of the manifest, for errors.
    """
    files = {
        str(name): BlockChecksums.from_hex(_parse_count(size), text)
        for name, (size, text) in body["files"].items()
    }
    # A name with a path separator could read files outside of the checkpoint.
    for name in files:
        if not RANK_FILE_NAME.fullmatch(name):
            raise UnsafeInputError(
                f"{path} names the file {name!r:.100}. It may only name files such as "
                "rank-00000.safetensors in its own directory. Do not use this checkpoint."
            )
    sizes = [sums.size for sums in files.values()]
    tensors = {str(name): _parse_entry(entry, sizes) for name, entry in body["tensors"].items()}
    facts = dict(body["facts"])
    degrees = {k: _parse_count(n) for k, n in body["degrees"].items()}
    versions = {str(k): str(v) for k, v in body["versions"].items()}
    return CheckpointManifest(_parse_count(body["step"]), degrees, facts, versions, files, tensors)


def _parse_count(value: Any) -> int:
    # Not isinstance: JSON `true` is a bool, which is an int in Python.
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a valid count")
    return value


def _parse_entry(entry: Sequence[Any], sizes: Sequence[int]) -> TensorEntry:
    word, shape, parts = entry
    dtype = DTYPES[word]
    whole = tuple(map(_parse_count, shape))
    if len(whole) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(whole)} dims")
    found = tuple(_parse_shard(part, whole, dtype, sizes) for part in parts)
    # The count alone finds missing elements; the polynomial test finds overlaps that hide them.
    there = sum(box.num_elements for part in found for box in part.shard.to_boxes())
    if there != math.prod(whole):
        raise ValueError(f"{there} elements instead of {math.prod(whole)} in a tensor")
    if len(found) > 1 and not _are_disjoint(found, whole):
        raise ValueError(f"shards of a tensor of shape {whole} overlap")
    return TensorEntry(dtype, whole, found)


def _are_disjoint(parts: Sequence[StoredShard], whole: tuple[int, ...]) -> bool:
    """Whether shards hold each element of a tensor exactly once.

    Element (i, j, ...) stands for the term x^i * y^j ... of a polynomial: the sum over a box has a
    closed form, and the sum over all shards equals the sum over the whole tensor only if no element
    is missing or duplicated. The polynomials are compared at a random point, where different ones
    agree with a probability of at most about 10^-11.
    """
    # SystemRandom leaves the seeded generators of the run untouched.
    at = [random.SystemRandom().randrange(2, PRIME) for _ in whole]

    def value(start: Sequence[int], size: Sequence[int]) -> int:
        # Geometric sum of x^a ... x^(a+n-1), times (x - 1), which all boxes have in common.
        terms = zip(at, start, size, strict=True)
        return math.prod((pow(x, a + n, PRIME) - pow(x, a, PRIME)) % PRIME for x, a, n in terms)

    total = sum(value(box.start, box.size) for part in parts for box in part.shard.to_boxes())
    return (total - value((0,) * len(whole), whole)) % PRIME == 0


def _parse_shard(
    part: Sequence[Any], whole: tuple[int, ...], dtype: torch.dtype, sizes: Sequence[int]
) -> StoredShard:
    """Parse a shard; it must be within its file and its tensor."""
    file, begin, *box, flat = part
    start, valid, local = (tuple(map(_parse_count, numbers)) for numbers in box)
    low, high = map(_parse_count, flat or (0, math.prod(local)))
    # valid <= local, and the valid box does not exceed the global shape.
    inside = all(
        a + n <= size and n <= m for a, n, m, size in zip(start, valid, local, whole, strict=True)
    )
    room = _parse_count(begin) + (high - low) * dtype.itemsize <= sizes[_parse_count(file)]
    if not inside or not low <= high <= math.prod(local) or not room:
        raise ValueError(f"a shard at {part!r:.200} of a tensor of shape {whole}")
    return StoredShard(
        file, begin, Shard(whole, start, valid, local, (low, high) if flat else None)
    )
