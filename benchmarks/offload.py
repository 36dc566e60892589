"""Measures models with optimizer states on the host: size, speed, and comparison with FSDP2.

    python benchmarks/offload.py --speed --sizes 1.5b     tokens per second by tokens per step
    python benchmarks/offload.py --fsdp --sizes 1.5b      alternating with FSDP2 and CPU offload
    python benchmarks/offload.py --largest                the largest model for each placement
    python benchmarks/offload.py --smoke                  a small model, on any machine

Steps are compared with a plain twin before they are timed (`right_step.py`), and there is no ratio
with one that differs; in --speed with the fewest tokens: more only are more micro-batches.
The printed bound: 12 bytes per parameter are transferred each way per step, and only the first
forward pass can overlap with it, so a step takes at least 12·N / (bandwidth of the link).
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_gpu import SIZES, TOY, TOY_RATE
from peers import RATE, Contestant, Ours, Peer, Shape, Task, decoder_location, run_of
from right_step import Check, check_step, checked_ratio
from torch import Tensor, distributed

from ranvier.errors import RanvierError
from ranvier.launch import use_expandable_segments
from ranvier.memory.host import Arena, host_bytes_per_rank
from ranvier.models.decoder import Decoder
from ranvier.planner import offload_search
from ranvier.planner.memory.breakdown import format_breakdown
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.offload_search import FitProblem
from ranvier.train.memory.breakdown import TYPICAL_RATES
from ranvier.train.memory.choose import MemoryLimits, build_fit_problem, open_settings
from ranvier.train.memory.usage import available_bytes
from ranvier.train.resolve import ResolveContext, resolve_run

GIB = 2**30
HOST = {"memory.optimizer_states": "host"}
WEIGHTS = {**HOST, "memory.parameters": "host"}


def device() -> torch.device:
    """Returns the device to run on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> int:
    """Returns the peak bytes on the device since the last reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def cleared() -> None:
    """Frees unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def bandwidth(size: int = GIB) -> float:
    """Returns the bytes per second between host and device in both directions at once."""
    if not torch.cuda.is_available():
        return 1e10
    host = Arena(2 * size, device())
    here = torch.empty(2, size, dtype=torch.uint8, device=device())
    there, lanes = host.buffer.view(2, size), [torch.cuda.Stream() for _ in range(2)]
    best = 0.0
    for _ in range(3):
        synchronize()
        begun = time.perf_counter()
        for _ in range(4):
            with torch.cuda.stream(lanes[0]):
                here[0].copy_(there[0], non_blocking=True)
            with torch.cuda.stream(lanes[1]):
                there[1].copy_(here[1], non_blocking=True)
        synchronize()
        best = max(best, 4 * size / (time.perf_counter() - begun))
    return best


def timed(one: Contestant, steps: int) -> float:
    """Returns the seconds per step."""
    synchronize()
    begun = time.perf_counter()
    for i in range(steps):
        one.step(i)
    synchronize()
    return (time.perf_counter() - begun) / steps


def measured(make: Callable[[], Contestant], *, warm: int, steps: int) -> dict[str, float]:
    """Returns seconds per step, peak bytes and parameters of a contestant, alone on the device."""
    cleared()
    one = make()
    for i in range(warm):
        one.step(i)
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(one, steps)
    assert one.loss is not None
    found = {
        "seconds": seconds,
        "peak": float(peak()),
        "parameters": float(one.parameters),
        "loss": one.loss.item(),
    }
    one.close()
    del one
    cleared()
    return found


def check_contestant(name: str, make: Callable[[], Contestant], task: Task) -> Check:
    """Compares the steps of a contestant with the twin, alone on the device."""
    reference = task.reference()
    cleared()
    contestant = make()
    rule = contestant.rule
    contestant.close()
    del contestant
    cleared()
    reference.record(rule)
    contestant = make()
    check = check_step(name, contestant, reference)
    print(check, flush=True)
    contestant.close()
    del contestant
    cleared()
    return check


# ---- speed ------------------------------------------------------------------------------


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns tokens per second with states on the device and on the host, by tokens per step."""
    link, rows = bandwidth(), []
    print(f"link: {link / 1e9:.1f} GB/s in each direction at once")
    for name, shape in shapes(arguments):
        seq = shape.max_seq
        checks: dict[str, Check] = {}
        for tokens in arguments.tokens:
            samples = max(tokens // seq, 1)
            more = {"plan.recompute": arguments.recompute}
            row: dict[str, Any] = {"size": name, "tokens": samples * seq}
            hosted = {**HOST, "memory.optimizer_step_on": arguments.update}
            ways = (("plain", {}, arguments.micro), ("host", hosted, arguments.host_micro))
            for way, where, most in ways:
                more["plan.micro_batch"] = str(min(samples, most or arguments.micro))
                task = Task.of(shape, samples, device(), clip=True, lr=learning_rate(arguments))
                make = partial(Ours, task, {**more, **where})
                if way not in checks:
                    checks[way] = check_contestant(way, make, task)
                row[way] = attempt(make, arguments)
            row["checked"] = all(check.passed for check in checks.values())
            rows.append(row)
            print_row(row, link, list(checks.values()))
    return rows


def learning_rate(arguments: argparse.Namespace) -> float:
    """Returns the learning rate of all contestants."""
    return TOY_RATE if arguments.smoke else RATE


def print_row(row: Mapping[str, Any], link: float, checks: Sequence[Check]) -> None:
    """Prints a row."""
    rates = {way: row["tokens"] / row[way]["seconds"] for way in ("plain", "host") if row[way]}
    words = [f"{row['size']:>6} {row['tokens']:>8} tokens"]
    words += [
        f"{way} {rate:>9.0f} tok/s {row[way]['peak'] / GIB:6.1f} GiB" for way, rate in rates.items()
    ]
    if row["host"]:
        least = 12 * row["host"]["parameters"] / link
        words.append(f"bound {least:.3f} s of {row['host']['seconds']:.3f}")
    if len(rates) == 2:
        words.append(f"ratio {checked_ratio(rates['host'] / rates['plain'], checks)}")
    print(" | ".join(words), flush=True)


def attempt(
    make: Callable[[], Contestant], arguments: argparse.Namespace
) -> dict[str, float] | None:
    """Returns the measurements; None if it does not fit."""
    try:
        return measured(make, warm=arguments.warm, steps=arguments.steps)
    except torch.OutOfMemoryError as error:
        print(f"does not fit: {str(error).splitlines()[0]}")
        cleared()
        return None


# ---- comparison with FSDP2 --------------------------------------------------------------


class Offloaded(Peer):
    """FSDP2 on one rank: shards, gradients and AdamW (torch's fused one) on the CPU."""

    def __init__(self, task: Task) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if task.cuda else "gloo"
            distributed.init_process_group(
                backend, store=distributed.HashStore(), rank=0, world_size=1
            )
            atexit.register(distributed.destroy_process_group)
        model = Decoder(task.shape)
        mesh = init_device_mesh(task.device.type, (1,))
        dtype = torch.bfloat16 if task.cuda else torch.float32
        how = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=task.cuda),
        }
        for block in model.blocks:
            if task.cuda:
                block.compile()
            fully_shard(block, **how)
        fully_shard(model, **how)

        def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return model(tokens, targets) / targets.numel()

        super().__init__(model, mean_loss, task, partial(decoder_location, task.shape))


def fsdp(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Compares Ranvier with FSDP2 and CPU offload, alternating."""
    rows = []
    for name, shape in shapes(arguments):
        task = Task.of(shape, arguments.batch, device(), clip=True, lr=learning_rate(arguments))
        ways: dict[str, Callable[[], Contestant]] = {
            "fsdp2 cpu": partial(Offloaded, task),
            "states": partial(Ours, task, HOST),
            "weights": partial(Ours, task, WEIGHTS),
        }
        checks = {way: check_contestant(way, make, task) for way, make in ways.items()}
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(arguments.windows):
            for way, make in ways.items():
                found[way].append(measured(make, warm=arguments.warm, steps=arguments.steps))
                print(f"{way}: {found[way][-1]}", flush=True)
        theirs = statistics.median(one["seconds"] for one in found["fsdp2 cpu"])
        for way, several in found.items():
            seconds = statistics.median(one["seconds"] for one in several)
            last = several[-1]
            compared = [checks[way], checks["fsdp2 cpu"]]
            passed = all(check.passed for check in compared)
            row = {"size": name, "way": way, **last, "seconds": seconds, "checked": passed}
            row["ratio"] = theirs / seconds if passed else None
            rows.append(row)
            print(
                f"{name:>6} {way:>10} {seconds:8.3f} s {task.batch * shape.max_seq / seconds:9.0f} "
                f"tok/s {last['peak'] / GIB:6.2f} GiB loss {last['loss']:.3f} "
                f"{checked_ratio(theirs / seconds, compared)}",
                flush=True,
            )
        resident = 4 * found["states"][0]["parameters"]
        verdicts = {
            "states: faster": theirs > statistics.median(o["seconds"] for o in found["states"]),
            "states: at most its memory plus weights and gradients": found["states"][-1]["peak"]
            <= found["fsdp2 cpu"][-1]["peak"] + resident,
            "weights: no more memory": found["weights"][-1]["peak"]
            <= found["fsdp2 cpu"][-1]["peak"],
        }
        for words, good in verdicts.items():
            print(f"{'pass' if good else 'FAIL'} {name} {words}")
    return rows


# ---- largest models ---------------------------------------------------------------------

WAYS: dict[str, dict[str, str]] = {
    "plain": {"plan.recompute": "none"},
    "fp32 states": {"memory.auto": "True", "plan.recompute": "full"},
    "8-bit moments": {"memory.auto": "True", "plan.recompute": "full", "optim.state_dtype": "int8"},
}
"""Plain AdamW, and states where they fit; only placement and dtype of the moments differ."""


def largest(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the largest number of blocks of each placement, predicted and confirmed by a run.

    Each placement has its own process, because threads of the last update keep their tensors.
    """
    if arguments.way:
        return [one_way(arguments.way, arguments)]
    rows = list[dict[str, Any]]()
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "row.json"
            command = [sys.executable, *sys.argv, "--way", way, "--json", str(path)]
            if subprocess.run(command, check=False).returncode != 0:
                continue
            (row,) = json.loads(path.read_text())["largest"]
        rows.append(row)
        print(f"{way:>14}: {row['parameters'] / rows[0]['parameters']:.2f}x", flush=True)
    return rows


def one_way(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the largest number of blocks for one placement."""
    if arguments.limit and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(arguments.limit * GIB / total, 1.0))
    toy = Shape.of(1, 64, 4, 256, kv_heads=2, vocab=512, max_seq=64)
    # A small device gets a small vocabulary: otherwise it alone exceeds what plain AdamW can hold.
    small = Shape.of(1, 2560, 20, 10240, kv_heads=4, vocab=50304, max_seq=2048)
    shape = toy if arguments.smoke else small if arguments.limit else wide(1)
    where = {**WAYS[way], "plan.compile": "off"}
    if arguments.limit and "memory.auto" in where:
        where |= {"memory.device_limit_gib": str(arguments.limit)}
    blocks = foretold(shape, where, arguments)
    row = confirmed(shape, where, blocks)
    print(
        f"{way:>14}: {row['blocks']} blocks, {row['parameters'] / 1e9:.2f}B parameters, "
        f"{row['seconds']:.2f} s per step, {row['peak'] / GIB:.1f} GiB on the device, "
        f"{row['host'] / GIB:.1f} GiB on the host"
    )
    print(*(f"    {line}" for line in row["table"]), sep="\n", flush=True)
    return {**row, "way": way, "predicted blocks": blocks}


def wide(layers: int) -> Shape:
    """Returns a model with this many blocks of the width of Llama 3 8B."""
    return Shape.of(layers, 4096, 32, 14336, max_seq=2048)


def foretold(shape: Shape, where: Mapping[str, str], arguments: argparse.Namespace) -> int:
    """Returns the predicted largest number of blocks that fit."""
    limits = MemoryLimits(available_bytes(0.0, device(), 1), host_bytes_per_rank(1))
    if arguments.smoke:
        limit = 10 * offload_search.min_device_bytes(fit_problem(shape, where, limits, 3))
        limits = MemoryLimits(limit, limit)
    elif arguments.limit:
        limits = replace(limits, device_bytes=int(arguments.limit * GIB))
    low, high = 1, 2
    while fitting(fit_problem(shape, where, limits, high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = fitting(fit_problem(shape, where, limits, middle))
        low, high = (middle, high) if fits else (low, middle)
    return low


def fit_problem(
    shape: Shape, where: Mapping[str, str], limits: MemoryLimits, blocks: int
) -> FitProblem:
    """Returns the fit problem of a model with this many blocks."""
    run = run_of(replace(shape, layers=blocks), 1, where, device().type)
    run = resolve_run(run, ResolveContext(world_size=1, device=device()))
    free = open_settings(run) if run.memory.auto else frozenset[str]()
    return build_fit_problem(run, resolve_model_spec(run), limits, TYPICAL_RATES, free)


def fitting(case: FitProblem) -> bool:
    """Returns whether a placement fits."""
    if not case.open_settings:
        shown = offload_search.predict_breakdown(case, case.given_placement)
        return shown.total_bytes <= case.device_limit
    return offload_search.fastest_fit(offload_search.enumerate_fits(case)) is not None


def confirmed(shape: Shape, where: Mapping[str, str], blocks: int) -> dict[str, Any]:
    """Returns memory and time of a model with this many blocks, or with 5% fewer if it does not
    fit.
    """
    for _ in range(3):
        try:
            cleared()
            task = Task.of(replace(shape, layers=blocks), 1, device(), clip=True)
            one = Ours(task, where)
            one.step(0)
            found = {"blocks": blocks, "seconds": timed(one, 1), "peak": float(peak())}
            trainer = one.trainer
            kept = trainer.state.optimizer.state_store.bytes_by_kind()
            account = trainer.memory_tracker
            table = (
                [] if account.predicted_usage is None else format_breakdown(account.predicted_usage)
            )
            found |= {
                "parameters": float(one.parameters),
                "host": float(sum(away for _, away in kept.values())),
                "table": [*trainer.notes, *table],
            }
            one.close()
            return found
        except (torch.OutOfMemoryError, RanvierError) as error:
            print(f"{blocks} blocks do not fit: {str(error).splitlines()[0][:200]}")
            blocks -= max(blocks // 20, 1)
    raise SystemExit("No number of blocks near the prediction fits.")


def shapes(arguments: argparse.Namespace) -> list[tuple[str, Shape]]:
    """Returns the selected models."""
    known = TOY if arguments.smoke else SIZES
    names = list(TOY)[:1] if arguments.smoke else arguments.sizes.split(",")
    found = []
    for name in names:
        layers = name.removesuffix("x4096")
        shape = known[name][0] if name in known else wide(int(layers))
        found.append((name, replace(shape, max_seq=arguments.seq or shape.max_seq)))
    return found


def settings() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    for mode in ("speed", "fsdp", "largest", "smoke"):
        add(f"--{mode}", action="store_true")
    add("--sizes", default="1.5b", help=f"list of {', '.join(SIZES)}, or 30x4096 (blocks x width)")
    add("--seq", type=int, default=0, help="tokens per sample; 0: as the size has")
    add("--tokens", type=int, nargs="+", default=[2048 * 4**i for i in range(4)] + [262144])
    add("--micro", type=int, default=8, help="maximum samples per micro-batch")
    add("--host-micro", type=int, default=0, help="the same with states on the host; 0: equal")
    add("--batch", type=int, default=4, help="samples per step in the comparison with FSDP2")
    add("--limit", type=float, default=0.0, help="GiB of the device, for the largest model")
    add("--way", default="", choices=["", *WAYS], help="placement of the largest model; '': all")
    add("--recompute", default="none")
    add("--update", default="auto", help="where states on the host are updated: auto, device, cpu")
    add("--windows", type=int, default=2)
    add("--warm", type=int, default=2)
    add("--steps", type=int, default=3)
    add("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Runs the selected parts."""
    use_expandable_segments()
    arguments, found = settings(), {}
    if arguments.smoke:
        arguments.tokens, arguments.batch, arguments.windows = [128], 2, 1
        arguments.warm, arguments.steps = 1, 1
        torch.set_num_threads(1)
        if not (arguments.speed or arguments.fsdp or arguments.largest):
            arguments.speed = True
            print("skipped: --fsdp and --largest, which also run with --smoke")
    for mode in (speed, fsdp, largest):
        if getattr(arguments, mode.__name__):
            found[mode.__name__] = mode(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
