"""Measures the memory of a rank while a published model is read: never a second copy of its shard.

A Llama of the given size is written as safetensors, tensor by tensor. Then
`ranvier.from_pretrained` reads it on one rank and on depth·row·col = 2·2·2, and `ranvier import`
makes it a run, each in new processes that record their anonymous memory (RssAnon) while they read.
Its increase on each rank must stay below

    1.3 x the bytes of its shard + 64 MiB

(`ranvier import` is one rank, which reads the whole model and keeps nothing).

    python benchmarks/streaming.py --gib 1 --folder /tmp
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from script_parser import ScriptParser

from ranvier.checkpoint.hf import model, safetensors
from ranvier.launch import find_free_port
from ranvier.models import DecoderConfig
from ranvier.models.hf.registry import find_family

MIB = 1 << 20
FACTOR, ROOM = 1.3, 64 * MIB
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
GRIDS: dict[int, dict[str, int]] = {1: {}, 8: {"depth": 2, "row": 2, "col": 2}}
"""Degrees by number of ranks."""


def config_of(num_bytes: int, dtype: torch.dtype, experts: int = 0) -> DecoderConfig:
    """Returns a Llama of at least this many bytes, with wide layers before more layers.

    experts: number of experts of a Mixtral instead, each as wide as the MLP divided by it.
    """
    width = 256
    while width < 2048 and 8 * width * width * dtype.itemsize * 16 < num_bytes:
        width *= 2
    layers = 1
    while True:
        config = DecoderConfig(
            layers=layers,
            embed=width,
            heads=width // 64,
            kv_heads=width // 128,
            head_dim=64,
            mlp=3 * width // max(experts, 1),
            vocab=8 * width,
            experts=experts,
        )
        elements = sum(torch.Size(one).numel() for one in model.shapes_of(config).values())
        if elements * dtype.itemsize >= num_bytes:
            return config
        layers += 1


def write(folder: Path, num_bytes: int, dtype: torch.dtype, experts: int = 0) -> int:
    """Writes a model with random weights, one tensor at a time; returns its bytes."""
    config = config_of(num_bytes, dtype, experts)
    family = find_family("mixtral" if experts else "llama")
    sizes = model.shapes_of(config)
    folder.mkdir(parents=True)
    theirs = family.config_to_hf(config) | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(theirs))
    listed = safetensors.list_hf_tensors(
        model.entries_of(family, config), sizes, dict.fromkeys(sizes, dtype)
    )
    safetensors.write_safetensors(
        folder, listed, lambda name: torch.randn(sizes[name]) * 0.02, most=1 << 40
    )
    return sum(one.num_bytes for one in listed)


@dataclass(frozen=True)
class Read:
    """The cost of reading on a rank."""

    shard: int
    """Bytes of its shard of the weights."""
    above: int
    """Maximum increase of anonymous memory, in bytes."""
    seconds: float

    @property
    def bound(self) -> float:
        """Allowed increase in bytes."""
        return FACTOR * self.shard + ROOM


def anonymous() -> int:
    """Returns the bytes of anonymous memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


def release_freed_memory() -> None:
    """Returns what malloc has kept of freed memory to the system: work could reuse it unseen."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def watched(work: Callable[[], int]) -> Read:
    """Measures work that returns the bytes of a shard."""
    release_freed_memory()
    before, over = anonymous(), threading.Event()
    most = [before]

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    start = time.perf_counter()
    shard = work()
    seconds = time.perf_counter() - start
    most[0] = max(most[0], anonymous())
    over.set()
    thread.join()
    return Read(shard, most[0] - before, seconds)


def load(folder: Path, axes: dict[str, int]) -> Read:
    """Reads a model on the grid of all ranks."""
    from ranvier import from_pretrained
    from ranvier.comm.collectives import all_gather
    from ranvier.comm.consensus import world_axis
    from ranvier.launch.external_launch import build_grid

    torch.set_num_threads(1)
    grid, device = build_grid(axes, device="cpu")
    all_gather(torch.zeros(1), world_axis(grid)).wait()  # a first message costs memory
    held: list[Any] = []

    def work() -> int:
        held.append(from_pretrained(folder, grid=grid, device=device))
        queue = held[0].parallel.bucket_scheduler
        return sum(bucket.data.numel() * bucket.data.element_size() for bucket in queue.buckets)

    return watched(work)


def imported(folder: Path, out: Path) -> Read:
    """Imports a model as a run."""
    from ranvier.train import import_export

    torch.set_num_threads(1)

    def work() -> int:
        import_export.import_model(str(folder), out)
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    return watched(work)


def ranks(folder: Path, what: str, axes: dict[str, int]) -> list[Read]:
    """Returns the results of new processes, one per rank."""
    world = torch.Size(axes.values()).numel()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    words = [sys.executable, __file__, "--folder", str(folder), "--rank", what]
    words += ["--axes", json.dumps(axes)]
    started = [
        subprocess.Popen(
            words,
            env={**env, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    told = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), "a rank has failed"
    return [Read(**json.loads(text.splitlines()[-1])) for text in told]


def shown(name: str, reads: list[Read]) -> bool:
    """Prints one line per rank; returns whether all are within the bound."""
    for rank, one in enumerate(reads):
        print(
            f"{name:22} rank {rank}: shard {one.shard / MIB:8.1f} MiB, increase "
            f"{one.above / MIB:8.1f}, bound {one.bound / MIB:8.1f}, {one.seconds:5.1f} s",
            flush=True,
        )
    return all(one.above < one.bound for one in reads)


def settings() -> argparse.Namespace:
    parser = ScriptParser(__doc__, smoke="--gib 0.01 --dtype bfloat16 --ranks 1")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model in GiB")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=[*DTYPES])
    parser.add_argument("--ranks", type=int, choices=GRIDS, nargs="+", default=[*GRIDS])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="directory for the model")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    parser.add_argument("--axes", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = settings()
    if asked.rank:
        folder = Path(asked.folder)
        read = imported(folder, folder.parent / "run") if asked.rank == "import" else None
        print(json.dumps((read or load(folder, json.loads(asked.axes))).__dict__))
        return
    good = True
    for word in asked.dtype:
        home = Path(tempfile.mkdtemp(prefix="ranvier-streaming-", dir=asked.folder))
        try:
            size = write(home / "model", int(asked.gib * (1 << 30)), DTYPES[word])
            print(f"{word}: {size / MIB:.1f} MiB", flush=True)
            for size_of_grid in asked.ranks:
                reads = ranks(home / "model", "load", GRIDS[size_of_grid])
                good &= shown(f"{word}, {size_of_grid} ranks", reads)
            good &= shown(f"{word} ranvier import", ranks(home / "model", "import", {}))
        finally:
            shutil.rmtree(home)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
