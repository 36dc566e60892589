"""Flips single bits of a checkpoint: `verify` and a load that reads the byte must notice each.

Usage: python benchmarks/flips.py [--flips 10000] [--seed 0]

The checkpoint is from four ranks with tensors of several dtypes and sizes. Bits of all files in its
directory are flipped and restored one at a time, each byte equally likely.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from kills import Kind, saved
from script_parser import ScriptParser

from ranvier.checkpoint import load
from ranvier.checkpoint import manifest as manifests
from ranvier.cli import checkpoint as show
from ranvier.errors import CheckpointError, RanvierError


def noticed(checkpoint: Path) -> tuple[bool, bool]:
    """Returns whether `verify` finds damage, and whether a load of all tensors does."""
    with open(os.devnull, "w") as null, redirect_stdout(null):
        try:
            seen = show.verify_checkpoints(checkpoint) == CheckpointError.exit_code
        except RanvierError:  # refused
            seen = True
    try:
        manifest = manifests.read_manifest(checkpoint)
        load.fill_tensors(
            checkpoint, manifest, {n: load.empty_shard(e) for n, e in manifest.tensors.items()}
        )
    except RanvierError:
        return seen, True
    return seen, False


def flips(checkpoint: Path, count: int, seed: int) -> Iterator[tuple[str, int, bool, bool]]:
    """Yields file, byte, and whether verify and load notice, for each flipped bit."""
    draw = random.Random(seed)
    files = sorted(path for path in checkpoint.iterdir())
    sizes = [path.stat().st_size for path in files]
    for number in range(count):
        # Half in proportion to the file size, half evenly over files, because manifests are small.
        weights = sizes if number % 2 else [1] * len(files)
        path = draw.choices(files, weights)[0]
        at, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ bit]))
        yield path.name, at, *noticed(checkpoint)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([old]))


def main() -> int:
    parser = ScriptParser(__doc__, smoke="--flips 20")
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    missed = {"verify": 0, "load": 0}
    with tempfile.TemporaryDirectory(prefix="flips-") as folder:
        saved(Path(folder), 1, 1.0, Kind("four ranks", ranks=4), "aaaa")
        checkpoint = Path(folder) / "step-00000001"
        assert noticed(checkpoint) == (False, False), "control: the checkpoint is not damaged"
        for name, at, seen, failed in flips(checkpoint, options.flips, options.seed):
            missed["verify"] += not seen
            missed["load"] += not failed
            if not seen or not failed:
                print(f"byte {at} of {name}: verify {seen}, load {failed}")
        assert noticed(checkpoint) == (False, False), "control: all bits are restored"
    print(
        f"{options.flips} flips: not noticed by verify {missed['verify']}, by load {missed['load']}"
    )
    return int(any(missed.values()))


if __name__ == "__main__":
    sys.exit(main())
