"""Manifest: the one JSON file of a checkpoint that says what lies where and how to check it.

It is written last and bears its own digest, so a directory with a manifest that reads is a
checkpoint that was finished. Nothing in it is trusted: each number and name is checked before use.
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

from ranvier.checkpoint.checksummed_file import Sums, opened
from ranvier.errors import DamageError, RefusedError, VersionError
from ranvier.sharding import Place

FORMAT = 2
NAME = "manifest.json"
FILE = re.compile(r"rank-\d{5,9}\.safetensors")
MOST = 1 << 32
"""Bytes of the largest manifest that is read."""
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
"""Types of tensors, as safetensors calls them."""
DIMS = 32
"""Dims of a tensor, at most."""
PRIME = 2**61 - 1
WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A part of a tensor in a file."""

    file: int
    """Number of the file in the manifest."""
    begin: int
    """Its first byte in the file."""
    place: Place


@dataclass(frozen=True)
class Entry:
    """A tensor and its parts in all files; parts do not overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    degrees: Mapping[str, int]
    """The grid that saved it."""
    facts: Mapping[str, Any]
    """What a run goes on from besides tensors: samples, updates, fingerprints, settings."""
    versions: Mapping[str, str]
    files: Mapping[str, Sums]
    tensors: Mapping[str, Entry]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(sums.size for sums in self.files.values())


def versions() -> dict[str, str]:
    """Versions of the code that writes."""
    try:
        mine = version("ranvier")
    except PackageNotFoundError:  # run from its sources
        mine = "unknown"
    return {
        "ranvier": mine,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def dumped(manifest: Manifest) -> bytes:
    """The file of a manifest: a digest, and the JSON it is of."""
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "degrees": dict(manifest.degrees),
        "facts": manifest.facts,
        "versions": dict(manifest.versions),
        "files": {name: [sums.size, sums.text()] for name, sums in manifest.files.items()},
        "tensors": {
            name: [WORDS[entry.dtype], entry.shape, [written(part) for part in entry.parts]]
            for name, entry in manifest.tensors.items()
        },
    }
    return sealed(json.dumps(body, separators=(",", ":")).encode())


def written(part: Part) -> list[Any]:
    """A part as JSON holds it."""
    place = part.place
    return [part.file, part.begin, place.start, place.valid, place.local, place.flat]


def sealed(body: bytes) -> bytes:
    """JSON with its digest."""
    return b'{"sha256":"%s",\n"body":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def unsealed(path: Path) -> Any:
    """What a sealed file holds; its digest is checked, byte for byte."""
    handle = opened(path)
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size > MOST:
            raise RefusedError(
                f"{path} has more than {MOST} bytes. That is no manifest. Remove it."
            )
        text = file.read()
    match = re.match(rb'\{"sha256":"([0-9a-f]{64})",\n"body":', text)
    body = text[match.end() : -2] if match else b""
    if not match or hashlib.sha256(body).hexdigest().encode() != match[1] or text != sealed(body):
        raise DamageError(f"{path} is damaged: its digest is not the one it was written with.")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{path} is no JSON: {str(error)[:100]}.") from None


def read(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint, every number of it checked."""
    path = checkpoint / NAME
    if not path.is_symlink() and not path.exists():
        raise DamageError(
            f"{checkpoint} has no {NAME}. A checkpoint is finished by one: this was cut off, or is "
            "none. Use another."
        )
    body = unsealed(path)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else body
        raise VersionError(
            f"{path} is of format {found!r:.40}. This version reads format {FORMAT}. Use the "
            "version that wrote it."
        )
    try:
        manifest = _checked(body)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise DamageError(
            f"{path} is damaged: {type(error).__name__} {str(error)[:200]}."
        ) from None
    return manifest


def _checked(body: Mapping[str, Any]) -> Manifest:
    """A manifest from JSON; an error of Python's own where something cannot be."""
    files = {str(name): Sums.of(_count(size), text) for name, (size, text) in body["files"].items()}
    for name in files:
        if not FILE.fullmatch(name):
            raise RefusedError(
                f"A manifest names the file {name!r:.100}. Files of a checkpoint are called "
                "rank-00000.safetensors and lie next to it. Do not use this checkpoint."
            )
    sizes = [sums.size for sums in files.values()]
    tensors = {str(name): _entry(entry, sizes) for name, entry in body["tensors"].items()}
    facts, degrees = dict(body["facts"]), {k: _count(n) for k, n in body["degrees"].items()}
    told = {str(k): str(v) for k, v in body["versions"].items()}
    return Manifest(_count(body["step"]), degrees, facts, told, files, tensors)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _entry(entry: Sequence[Any], sizes: Sequence[int]) -> Entry:
    word, shape, parts = entry
    dtype, whole = DTYPES[word], tuple(map(_count, shape))
    if len(whole) > DIMS:
        raise ValueError(f"a tensor of {len(whole)} dims")
    found = tuple(_part(part, whole, dtype, sizes) for part in parts)
    there = sum(box.elements for part in found for box in part.place.boxes())
    if there != math.prod(whole):
        raise ValueError(f"{there} elements of a tensor of {math.prod(whole)}")
    if len(found) > 1 and not _disjoint(found, whole):
        raise ValueError(f"parts of a tensor of shape {whole} overlap")
    return Entry(dtype, whole, found)


def _disjoint(parts: Sequence[Part], whole: tuple[int, ...]) -> bool:
    """Whether parts hold each element of a tensor once.

    Element (i, j, ...) stands for the term x^i * y^j ... of a polynomial: that of a box has a short
    form, and that of all parts is that of the whole only if none is missing or comes twice. They
    are compared at a random place, where others are equal once in 10^11 times or more.
    """
    at = [random.SystemRandom().randrange(2, PRIME) for _ in whole]  # no seed of a run is touched

    def value(start: Sequence[int], size: Sequence[int]) -> int:
        terms = zip(at, start, size, strict=True)
        return math.prod((pow(x, a + n, PRIME) - pow(x, a, PRIME)) % PRIME for x, a, n in terms)

    total = sum(value(box.start, box.size) for part in parts for box in part.place.boxes())
    return (total - value((0,) * len(whole), whole)) % PRIME == 0


def _part(
    part: Sequence[Any], whole: tuple[int, ...], dtype: torch.dtype, sizes: Sequence[int]
) -> Part:
    """A part that lies inside of its file and of its tensor."""
    file, begin, *box, flat = part
    start, valid, local = (tuple(map(_count, numbers)) for numbers in box)
    low, high = map(_count, flat or (0, math.prod(local)))
    inside = all(
        a + n <= size and n <= m for a, n, m, size in zip(start, valid, local, whole, strict=True)
    )
    room = _count(begin) + (high - low) * dtype.itemsize <= sizes[_count(file)]
    if not inside or not low <= high <= math.prod(local) or not room:
        raise ValueError(f"a part at {part!r:.200} of a tensor of shape {whole}")
    return Part(file, begin, Place(whole, start, valid, local, (low, high) if flat else None))
