"""Times Muon and Jorge on one GPU, and compares Muon with `torch.optim.Muon`.

    python benchmarks/muon.py                       all parts, with their limits
    python benchmarks/muon.py layers accuracy       some parts
    python benchmarks/muon.py tiles                 times of symmetric products by tile size
    python benchmarks/muon.py --smoke               small sizes, also on a CPU, without limits

Parts:
    layers    the optimizer step of the matrices of llama3-1b (16 layers of 2048 and 8192, fp32
              weights and gradients): at most 0.85 of the time of `torch.optim.Muon`
    small     the same for 64 matrices of 256 x 256: at least 20 times as fast
    accuracy  the error of the iteration against float64: at most 1.2 times that of torch in bf16
    jorge     Jorge's update of a side of 4096: at least 20 times as fast as `torch.linalg.eigh`;
              and all of Jorge's work for a 4096 x 4096 matrix in tiles of 1024
    train     llama3-1b with `optim.name = "muon"`, 131,072 tokens per step: the optimizer step
              takes at most 6 % of the step; states take 4 bytes per parameter less than with AdamW
    losses    50 steps of a small decoder with symmetric products and with plain ones: losses differ
              by at most twice as much as those of plain paths that round differently

Calls are interleaved, and times are medians. Before a step is timed, its weights after one update
are compared with those of `torch.optim.Muon` in fp32, and a training step with a plain twin
(`right_step.py`); there is no ratio otherwise. Exit status 1 if a limit does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from one_gpu import TOY_RATE
from peers import RATE, Ours, Shape, Task, rule_of_run, run_of
from right_step import Check, check_step
from rows import append_rows, checked_cell, data_columns, package_hash
from torch import Tensor

from ranvier.cost.matrix_optimizers import muon_flops, tile_bounds
from ranvier.optim import jorge, muon
from ranvier.optim.adamw import UpdateScalars

STEP_LIMIT, STEP_GOAL = 0.85, 0.70
"""Limit and goal of the time of a step, as a share of `torch.optim.Muon`'s."""
SMALL_LIMIT = 20.0
ERROR_LIMIT = 1.2
EIGH_LIMIT = 20.0
SHARE_LIMIT = 0.06
"""Limit of the optimizer step as a share of a training step of 131,072 tokens."""
STATE_TOLERANCE = 0.05
LR, BETA, DECAY = 1e-3, 0.95, 0.1
"""Defaults of `torch.optim.Muon`."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    layers: int
    embed: int
    mlp: int
    small_count: int
    small_side: int
    jorge_side: int
    tile: int
    shape: Shape
    batch: int
    micro_batch: int
    rounds: int
    loss_shape: Shape
    loss_steps: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of the matrices of all layers: q, k, v, o, gate, up, down."""
        d, f = self.embed, self.mlp
        layer = [(d, d), (d // 4, d), (d // 4, d), (d, d), (f, d), (f, d), (d, f)]
        return layer * self.layers


FULL = Sizes(
    layers=16,
    embed=2048,
    mlp=8192,
    small_count=64,
    small_side=256,
    jorge_side=4096,
    tile=1024,
    shape=Shape.of(16, 2048, 32, 8192, tie_embeddings=True),
    batch=32,
    micro_batch=4,
    rounds=7,
    loss_shape=Shape.of(4, 1024, 16, 2816, vocab=8192, max_seq=512),
    loss_steps=50,
)
SMOKE = Sizes(
    layers=2,
    embed=32,
    mlp=64,
    small_count=4,
    small_side=16,
    jorge_side=64,
    tile=16,
    shape=Shape.of(2, 64, 8, 128, vocab=256, max_seq=16),
    batch=4,
    micro_batch=2,
    rounds=2,
    loss_shape=Shape.of(2, 64, 8, 128, vocab=256, max_seq=16),
    loss_steps=2,
)


@dataclass
class Bench:
    """Sizes, a device, and what was found."""

    sizes: Sizes
    device: torch.device
    results: dict[str, Any]
    has_limits: bool
    csv: Path | None = None
    failed: bool = False

    def check(self, holds: bool, text: str) -> None:
        """Prints a result and whether its limit holds."""
        self.failed |= self.has_limits and not holds
        if self.has_limits:
            print(f"{'holds' if holds else 'FAILS'}: {text}", flush=True)
        else:
            print(text, flush=True)

    def measure(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Returns the median time of each call in ms; calls are interleaved."""
        for call in [*calls, *calls]:
            call()
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(self.sizes.rounds):
            for call, found in zip(calls, times, strict=True):
                self.synchronize()
                start = time.perf_counter()
                call()
                self.synchronize()
                found.append(1e3 * (time.perf_counter() - start))
        return [statistics.median(found) for found in times]

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def allocated_bytes(self) -> int:
        """Returns the bytes of tensors on a GPU."""
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def free(self) -> None:
        """Returns cached memory."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def random(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns random numbers."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator).to(dtype)


# ---- the optimizer step -------------------------------------------------------------------------


class BatchedMuon:
    """Muon by the functions of `ranvier.optim.muon`; weights of one shape are one flat tensor."""

    def __init__(self, bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
        self.counts = {shape: list(shapes).count(shape) for shape in dict.fromkeys(shapes)}
        sizes = [n * rows * cols for (rows, cols), n in self.counts.items()]
        self.weights, self.grads = ([bench.random(n, seed=s) for n in sizes] for s in (0, 1))
        self.momenta = [torch.zeros_like(x) for x in self.weights]
        self.dtype = torch.bfloat16 if bench.device.type == "cuda" else torch.float32
        one = torch.ones((), dtype=torch.float64, device=bench.device)
        self.now = UpdateScalars.for_update(one, one.bool(), one, (0.9, 0.95), LR)

    @torch.no_grad()
    def step(self) -> None:
        """Updates all weights."""
        states = zip(self.counts.items(), self.weights, self.momenta, self.grads, strict=True)
        for ((rows, cols), count), weight, momentum, grad in states:
            update = torch.empty_like(grad, dtype=self.dtype)
            muon.apply_momentum(momentum, grad, update, now=self.now, beta=BETA)
            direction = muon.orthogonalize(update.view(count, rows, cols))
            ratio = muon.lr_ratio(rows, cols, "original")
            muon.apply_update(weight, direction.view(-1), now=self.now, ratio=ratio, decay=DECAY)


UPDATE_LIMIT = 0.1
"""Largest difference of an update to torch's in bf16, relative to its norm: five iterations with
coefficients that do not converge amplify the rounding of bf16."""


def check_update(bench: Bench, shapes: Sequence[tuple[int, int]]) -> Check:
    """Compares the updates of our step with those of `torch.optim.Muon` on the same gradients."""
    ours = BatchedMuon(bench, shapes)
    worst = 0.0
    before = [weight.clone() for weight in ours.weights]
    ours.step()
    flats = zip(ours.counts.items(), before, ours.weights, ours.grads, strict=True)
    for ((rows, cols), count), start, weight, grad in flats:
        # One matrix of each shape, and the last one, which an offset would miss first.
        for number in {0, count - 1}:
            part = slice(number * rows * cols, (number + 1) * rows * cols)
            param = torch.nn.Parameter(start[part].view(rows, cols).clone())
            param.grad = grad[part].view(rows, cols).clone()
            torch.optim.Muon([param], lr=LR, momentum=BETA, weight_decay=DECAY).step()
            update = weight[part].view(rows, cols) - start[part].view(rows, cols)
            expected = param.detach() - start[part].view(rows, cols)
            worst = max(worst, float((update - expected).norm() / expected.norm()))
    values = f"updates differ from torch.optim.Muon's by {worst:.4f} of their norm"
    problems = () if worst <= UPDATE_LIMIT else (f"{values} (at most {UPDATE_LIMIT})",)
    return Check("muon", values, problems)


def compare_steps(
    bench: Bench, shapes: Sequence[tuple[int, int]], name: str
) -> tuple[float, float]:
    """Returns the ms of our step and of that of `torch.optim.Muon`. name: of the matrices."""
    ours = BatchedMuon(bench, shapes)
    params = [torch.nn.Parameter(bench.random(*shape)) for shape in shapes]
    for param in params:
        param.grad = bench.random(*param.shape, seed=1)
    theirs = torch.optim.Muon(params, lr=LR, momentum=BETA, weight_decay=DECAY)
    check = check_update(bench, shapes)
    print(check, flush=True)
    if not check.passed:
        bench.check(False, str(check))
        return math.nan, math.nan
    found, peer = bench.measure([ours.step, theirs.step])
    flops = sum(muon_flops(rows, cols, muon.STEPS) for rows, cols in shapes)
    count = sum(rows * cols for rows, cols in shapes)
    print(
        f"{len(shapes)} matrices, {count / 1e9:.3f}B parameters: {found:.2f} ms "
        f"({flops / found / 1e9:.0f} TFLOP/s of full products), torch.optim.Muon {peer:.2f} ms "
        f"({flops / peer / 1e9:.0f} TFLOP/s)"
    )
    if bench.csv is not None:
        row = {
            "measurement": f"step of {name}",
            "ranvier": f"{found:.3f}",
            "torch": f"{peer:.3f}",
            "unit": "ms",
            "checked": checked_cell(check),
            "source": package_hash(),
        }
        append_rows(bench.csv, data_columns("muon.csv"), [row])
    return found, peer


def time_layers(bench: Bench) -> None:
    """The step of the layers of llama3-1b."""
    ours, theirs = compare_steps(
        bench, bench.sizes.matrices, f"{len(bench.sizes.matrices)} matrices of llama3-1b"
    )
    bench.results["layers"] = {"ms": ours, "torch_ms": theirs}
    ratio = ours / theirs
    bench.check(ratio <= STEP_LIMIT, f"ratio {ratio:.3f} (limit {STEP_LIMIT}, goal {STEP_GOAL})")


def time_small(bench: Bench) -> None:
    """The step of many small matrices."""
    side = bench.sizes.small_side
    count = bench.sizes.small_count
    ours, theirs = compare_steps(
        bench, [(side, side)] * count, f"{count} matrices of {side} x {side}"
    )
    bench.results["small"] = {"ms": ours, "torch_ms": theirs}
    ratio = theirs / ours
    bench.check(ratio >= SMALL_LIMIT, f"{ratio:.1f} times as fast (limit {SMALL_LIMIT:.0f})")


# ---- accuracy -----------------------------------------------------------------------------------


def iterate_one(x: Tensor) -> Tensor:
    """Returns the iteration of `torch.optim.Muon` of one matrix, in its dtype."""
    is_tall = x.shape[0] > x.shape[1]
    y = x.T if is_tall else x
    y = muon._orthogonalize_matrix(y, muon.STEPS, muon.COEFFICIENTS, 1e-7)
    return y.T if is_tall else y


def compare_errors(bench: Bench) -> None:
    """Errors of both iterations in bf16 against float64."""
    d, f, side = bench.sizes.embed, bench.sizes.mlp, bench.sizes.small_side
    found = bench.results["accuracy"] = {}
    for shape in ((1, d, d), (2, d // 4, d), (1, f, d), (1, d, f), (8, side, side)):
        # Singular values of gradients fall off; those of random numbers do not.
        scale = torch.logspace(0, -3, shape[2], device=bench.device)
        for name, x in (
            ("random", bench.random(*shape)),
            ("ill-conditioned", bench.random(*shape) * scale),
        ):
            x = x.bfloat16()
            exact = torch.stack([iterate_one(one.double()) for one in x])
            theirs = torch.stack([iterate_one(one) for one in x]).double()
            ours, peer = (
                float((y - exact).norm() / exact.norm())
                for y in (muon.orthogonalize(x).double(), theirs)
            )
            found[f"{name} {shape}"] = {"error": ours, "torch_error": peer}
            bench.check(
                ours <= ERROR_LIMIT * peer,
                f"{name} {shape}: error {ours:.5f}, torch {peer:.5f}, ratio {ours / peer:.3f} "
                f"(limit {ERROR_LIMIT})",
            )


# ---- Jorge --------------------------------------------------------------------------------------


def time_jorge(bench: Bench) -> None:
    """One side against its eigendecomposition, and a matrix in tiles."""
    size, tile = bench.sizes.jorge_side, bench.sizes.tile
    grad = bench.random(1, size, size) / size**0.5
    statistics_ = jorge.statistics(grad, "left")
    side = jorge.precondition_update(jorge.initial_side(1, size, like=grad), statistics_)
    parts = len(tile_bounds(size, tile))
    tiles = grad.view(parts, tile, parts, tile).transpose(1, 2).reshape(-1, tile, tile)
    sides = [jorge.initial_side(len(tiles), tile, like=grad) for _ in range(2)]

    def update_tiles() -> None:
        left = jorge.precondition_update(sides[0], jorge.statistics(tiles, "left"))
        right = jorge.precondition_update(sides[1], jorge.statistics(tiles, "right"))
        jorge.precondition(left, tiles, right)

    names = ["side, tf32", "side, fp32", "eigh", f"{size} x {size} in tiles of {tile}"]
    times = bench.measure(
        [
            lambda: jorge.precondition_update(side, statistics_, precision="tf32"),
            lambda: jorge.precondition_update(side, statistics_, precision="ieee"),
            lambda: torch.linalg.eigh(statistics_[0]),
            update_tiles,
        ]
    )
    found = bench.results["jorge"] = dict(zip(names, times, strict=True))
    print(f"side {size}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))
    ratio = found["eigh"] / found["side, tf32"]
    bench.check(ratio >= EIGH_LIMIT, f"{ratio:.1f} times as fast as eigh (limit {EIGH_LIMIT:.0f})")


# ---- training -----------------------------------------------------------------------------------


def train_with(bench: Bench, task: Task, name: str) -> dict[str, float]:
    """Returns the ms of a training step and of its optimizer step, and the bytes of the model."""
    bench.free()
    before = bench.allocated_bytes()
    settings = {"optim.name": name, "plan.micro_batch": str(bench.sizes.micro_batch)}
    ours = Ours(task, settings)
    num_bytes = bench.allocated_bytes() - before
    optimizer: Any = ours.trainer.state.optimizer
    step = optimizer.step
    inside: list[float] = []

    def timed_step(*args: Any, **rest: Any) -> Tensor:
        bench.synchronize()
        start = time.perf_counter()
        norm: Tensor = step(*args, **rest)
        bench.synchronize()
        inside.append(1e3 * (time.perf_counter() - start))
        return norm

    optimizer.step = timed_step
    (ms,) = bench.measure([lambda: ours.step(0)])
    ours.close()
    return {"ms": ms, "optimizer_ms": statistics.median(inside[2:]), "bytes": num_bytes}


def check_training(bench: Bench) -> Check:
    """Compares steps of the model, with one micro-batch and AdamW, with the twin."""
    sizes = bench.sizes
    rate = RATE if bench.has_limits else TOY_RATE
    task = Task.of(sizes.shape, sizes.micro_batch, bench.device, clip=True, lr=rate)
    reference = task.reference()
    run = run_of(sizes.shape, sizes.micro_batch, {}, bench.device.type)
    reference.record(rule_of_run(run, rate))
    contestant = Ours(task, {})
    check = check_step("training", contestant, reference)
    contestant.close()
    bench.free()
    return check


def time_training(bench: Bench) -> None:
    """The optimizer step inside a training step, and the bytes of states."""
    sizes = bench.sizes
    task = Task.of(sizes.shape, sizes.batch, bench.device, clip=True)
    tokens = sizes.batch * sizes.shape.max_seq
    check = check_training(bench)
    print(check, flush=True)
    if not check.passed:
        bench.check(False, str(check))
        return
    found: dict[str, dict[str, float]] = {}
    for name in ("adamw", "muon"):
        found[name] = train_with(bench, task, name)
        print(
            f"{name}: {tokens:,} tokens in {found[name]['ms']:.1f} ms, optimizer step "
            f"{found[name]['optimizer_ms']:.1f} ms"
        )
    bench.results["train"] = found
    share = found["muon"]["optimizer_ms"] / found["muon"]["ms"]
    bench.check(share <= SHARE_LIMIT, f"{share:.1%} of the step (limit {SHARE_LIMIT:.0%})")
    if bench.device.type == "cuda":
        matrices = sum(rows * cols for rows, cols in sizes.matrices)
        saved = (found["adamw"]["bytes"] - found["muon"]["bytes"]) / matrices
        bench.check(
            abs(saved / 4 - 1) <= STATE_TOLERANCE,
            f"states take {saved:.3f} bytes per matrix parameter less than with AdamW "
            f"(4 within {STATE_TOLERANCE:.0%})",
        )


LOSS_FACTOR = 2.0
"""Limit of the distance of losses, relative to the mean distance between plain paths."""


def compare_losses(bench: Bench) -> None:
    """Losses with symmetric products against those of several plain paths.

    Plain paths iterate the same matrices one by one, batched, and one by one with a random error
    of half a unit in the last place of bf16 in each element. How far they are apart is the noise.
    """
    sizes = bench.sizes

    def iterate_each(x: Tensor, out: Tensor, *rest: Any) -> None:
        for one, into in zip(x, out, strict=True):
            into.copy_(muon._orthogonalize_matrix(one, *rest))

    def iterate_rounded(generator: torch.Generator) -> Callable[..., None]:
        def iterate(x: Tensor, out: Tensor, *rest: Any) -> None:
            noise = torch.rand(x.shape, device=x.device, generator=generator)
            iterate_each((x * (1 + (2 * noise - 1) * 2.0**-9)).to(x.dtype), out, *rest)

        return iterate

    plain = "matrix by matrix"
    paths = {
        plain: mock.patch.object(muon, "_orthogonalize_batch", iterate_each),
        "symmetric": mock.patch.object(muon, "MIN_SYMMETRIC_SIDE", muon.MIN_SYMMETRIC_SIDE),
        "batched": mock.patch.object(muon, "_can_multiply_symmetric", lambda x: False),
    }
    for seed in range(3):
        generator = torch.Generator(bench.device).manual_seed(seed)
        paths[f"rounded {seed}"] = mock.patch.object(
            muon, "_orthogonalize_batch", iterate_rounded(generator)
        )
    curves: dict[str, list[float]] = {}
    task = Task.of(sizes.loss_shape, 8, bench.device, clip=True)
    for name, path in paths.items():
        bench.free()
        with path:
            ours = Ours(task, {"optim.name": "muon"})
            curves[name] = []
            for i in range(sizes.loss_steps):
                ours.step(i)
                assert ours.loss is not None
                curves[name].append(ours.loss.item())
            ours.close()
    bench.results["losses"] = curves
    distances = {
        name: max(abs(a - b) for a, b in zip(curve, curves[plain], strict=True))
        for name, curve in curves.items()
        if name != plain
    }
    found = distances.pop("symmetric")
    noise = statistics.mean(distances.values())
    bench.check(
        found <= LOSS_FACTOR * noise,
        f"{sizes.loss_steps} steps, last loss {curves[plain][-1]:.4f}: symmetric products differ "
        f"by at most {found:.5f}, plain paths by {noise:.5f} on average "
        f"({', '.join(f'{name} {far:.5f}' for name, far in distances.items())}; limit: twice the "
        "average)",
    )


# ---- tiles --------------------------------------------------------------------------------------


def time_tiles(bench: Bench) -> None:
    """Times symmetric products with several tile sizes, for the constants of `muon_kernels`."""
    if bench.device.type != "cuda":
        print("tiles: skipped, needs a CUDA device")
        return
    kernels = muon._kernels()
    found = bench.results["tiles"] = {}
    for count, size, depth in (
        (8, 2048, 8192),
        (16, 2048, 2048),
        (16, 1024, 4096),
        (32, 512, 2048),
    ):
        x = bench.random(count, size, depth, dtype=torch.bfloat16)
        tall = bench.random(count, depth, size, dtype=torch.bfloat16).mT
        full = 2 * count * size * size * depth
        (plain,) = bench.measure([lambda x=x: torch.bmm(x, x.mT)])  # type: ignore[misc]
        print(f"{(count, size, depth)}: bmm {plain:.3f} ms, {full / plain / 1e9:.0f} TFLOP/s")
        for side, inner, warps, stages in (
            (128, 64, 8, 4),
            (128, 64, 8, 3),
            (128, 64, 4, 4),
            (128, 128, 8, 3),
            (128, 32, 8, 4),
            (64, 64, 4, 4),
        ):
            tiles = kernels.TileConfig(side, inner, warps, stages)
            try:
                ms, tall_ms = bench.measure(
                    [
                        lambda t=tiles, x=x: kernels.symmetric_product(x, tiles=t),  # type: ignore[misc]
                        lambda t=tiles, x=tall: kernels.symmetric_product(x, tiles=t),  # type: ignore[misc]
                    ]
                )
            except Exception as error:
                print(f"  {tiles}: {str(error).splitlines()[0]}")
                continue
            found[f"{(count, size, depth)} {tiles}"] = {"ms": ms, "transposed_ms": tall_ms}
            print(f"  {tiles}: {ms / plain:.3f} of bmm, transposed {tall_ms / plain:.3f}")


PARTS: dict[str, Callable[[Bench], None]] = {
    "layers": time_layers,
    "small": time_small,
    "accuracy": compare_errors,
    "jorge": time_jorge,
    "train": time_training,
    "losses": compare_losses,
    "tiles": time_tiles,
}


def main(words: Sequence[str] | None = None) -> int:
    """Runs all parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all but tiles by default")
    parser.add_argument("--smoke", action="store_true", help="small sizes, without limits")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--csv", type=Path, help="file to append rows of steps to, as muon.csv")
    asked = parser.parse_args(words)
    parts = asked.parts or [name for name in PARTS if name != "tiles"]
    for name in parts:
        if name not in PARTS:
            parser.error(f"{name!r} is not a part. Use some of {', '.join(PARTS)}.")
    if asked.smoke:
        torch.set_num_threads(1)
    if not asked.smoke and not torch.cuda.is_available():
        print("torch sees no CUDA device. The benchmark needs one. Use --smoke here.")
        return 64
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    facts: dict[str, Any] = {"command": sys.argv, "device": name, "torch": torch.__version__}
    print(f"{name}, torch {torch.__version__}, kernels: {muon._has_kernels()}")
    bench = Bench(
        SMOKE if asked.smoke else FULL, device, facts, has_limits=not asked.smoke, csv=asked.csv
    )
    for part in parts:
        print(f"\n{part}")
        PARTS[part](bench)
        bench.free()
        if asked.json is not None:
            asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
