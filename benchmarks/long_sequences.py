"""Trains one very long sample on one device: memory predicted and measured, and tokens per second.

    python benchmarks/long_sequences.py --seq 131072 --steps 2
    python benchmarks/long_sequences.py --seq 262144
    python benchmarks/long_sequences.py --seq 433152 --stop-after-last-block
    python benchmarks/long_sequences.py --smoke

Weights and tokens are random. The memory settings are those that `memory.auto` chooses in closed
form, without its trial steps; `--set` changes any setting of the run, also memory.device_limit_gib
and memory.host_limit_gib, which are then used without a reserve. The verdict compares the peak
bytes that torch has allocated with the prediction: a ratio of 0.95 to 1.05 passes.

The bound of the speed is the time of all FLOPs of matmuls and attention, with recomputation, at the
rates that large matmuls and attention reach alone here, plus the part of the optimizer step that is
not hidden. With `--stop-after-last-block` the step ends when the backward pass of the last block,
which has the peak, is done.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import run_from_tables
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.launch import use_expandable_segments
from ranvier.nn.attention import AttentionCore
from ranvier.nn.attention_backends import BACKENDS, backend_with_fallback
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.planner import device_rates
from ranvier.planner.memory.breakdown import GIB, MemoryBreakdown, format_breakdown
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.tools.longest_sequence import find_limits
from ranvier.train.build_model import DTYPES, build_model
from ranvier.train.memory.choose import MemoryChoice, choose_memory, choose_tile
from ranvier.train.memory.resolve import build_optimizer, preview_choice
from ranvier.train.memory.usage import mark_blocks
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.step import StepLimits, forward_backward, train_step

TINY = {"layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
GOOD = (0.95, 1.05)
"""Accepted range of measured / predicted."""
ATTENTION_TOKENS = 32768
"""Tokens of the sample with which the rate of attention is measured."""


class StopStepError(Exception):
    """Ends a step after the backward pass of the last block."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and the part of them after the backward pass."""

    total: float
    update: float


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", default="llama3-8b", help="model size")
    add("--smoke", action="store_true", help="a model that a CPU trains quickly")
    add("--seq", type=int, default=0, help="tokens of the sample (131,072; 1,024 with --smoke)")
    add("--steps", type=int, default=1, help="steps; the time of the last one counts")
    add("--attention", default="cudnn", choices=BACKENDS, help="kernel of attention on a GPU")
    add("--stop-after-last-block", action="store_true", help="end after its backward pass")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    add("--json", help="file for the results")
    arguments = parser.parse_args()
    arguments.seq = arguments.seq or (1024 if arguments.smoke else 131072)
    return arguments


def build_run(arguments: argparse.Namespace, device: torch.device) -> ResolvedRun:
    """Returns the run: one sample a step, and memory settings that are chosen."""
    model: dict[str, Any] = TINY if arguments.smoke else {"size": arguments.size}
    tables: dict[str, dict[str, Any]] = {
        "model": model | {"max_seq": arguments.seq},
        "plan": {"global_batch": 1, "micro_batch": 1, "recompute": "memory_budget"},
        "data": {"seq_len": arguments.seq, "document_mask": False},
        "train": {"dtype": "fp32" if device.type == "cpu" else "bf16"},
        "memory": {"auto": device.type == "cuda"},
    }
    for word in arguments.set:
        name, _, text = word.partition("=")
        section, _, key = name.partition(".")
        tables.setdefault(section, {})[key] = parse_value(text)
    return resolve_run(run_from_tables(tables), ResolveContext(world_size=1, device=device))


def choose_settings(run: ResolvedRun, device: torch.device) -> MemoryChoice:
    """Returns the memory settings for the configured limits, or for the free memory."""
    if run.memory.device_limit_gib <= 0.0:
        return preview_choice(run, device, local_ranks=1)
    # Unlike a run, without a reserve below the limits.
    limits = find_limits(run)
    rates = device_rates.measure_rates(device, DTYPES[run.train.dtype])
    run = run.adopt("memory", choose_tile(run, limits.device_bytes), {"": "as in a run"})
    return choose_memory(run, resolve_model_spec(run), limits, rates)


def parse_value(text: str) -> Any:
    """Returns a value as in a settings file; a word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def run_steps(
    run: ResolvedRun,
    choice: MemoryChoice,
    arguments: argparse.Namespace,
    device: torch.device,
) -> list[StepTime]:
    """Runs the steps; returns their times, or no time of a step that stops early."""
    model = build_model(choice.run, Grid({}), device, local_ranks=1)
    parallel = get_parallel_model(model)
    modes = choice.placement.recompute_modes
    parallel.recompute_modes.update(zip(parallel.recompute_modes, modes, strict=True))
    for layer in parallel.layers.values():
        if isinstance(layer, AttentionCore) and device.type == "cuda":
            layer.serial.attend = backend_with_fallback(arguments.attention)  # type: ignore[assignment]
    optimizer = build_optimizer(choice.run, model, device, local_ranks=1)
    batch = Batch.random(run).to(device)
    _synchronize(device)
    print(f"built, {_allocated(device):.1f} GiB on the device", flush=True)
    if arguments.stop_after_last_block:
        stop_after_last_block(model, batch)
        _synchronize(device)
        return []
    return [time_step(model, optimizer, batch, device) for _ in range(arguments.steps)]


def stop_after_last_block(model: nn.Module, batch: Batch) -> None:
    """Runs the forward pass, and the backward pass of the last block."""
    count = len(model.get_submodule("blocks")._modules)

    def note(name: str) -> None:
        print(f"  {name}", flush=True)
        if name == f"backward {count - 2}":
            raise StopStepError

    with mark_blocks(model, note):
        try:
            forward_backward(model, [batch])
        except StopStepError:
            print("the backward pass of the last block is done")


def time_step(
    model: nn.Module, optimizer: Optimizer, batch: Batch, device: torch.device
) -> StepTime:
    """Runs a step with its update."""
    _synchronize(device)
    start = time.perf_counter()
    # The backward pass ends when the gradient of the first block's input is known.
    ends = [start]
    watch = StepLimits.for_device(device)

    def note(name: str) -> None:
        if name == "leave":
            _synchronize(device)
            ends.append(time.perf_counter())

    with mark_blocks(model, note):
        result = train_step(model, optimizer, [batch], 1e-5, watch)
    loss = result.loss.item()
    get_parallel_model(model).bucket_scheduler.wait_for_updates()
    _synchronize(device)
    stop = time.perf_counter()
    print(
        f"step: loss {loss:.4f}, {stop - start:.1f} s, update {stop - ends[-1]:.1f} s", flush=True
    )
    return StepTime(stop - start, stop - ends[-1])


def bound_seconds(
    run: ResolvedRun, choice: MemoryChoice, device: torch.device, attention: str
) -> tuple[float, float]:
    """Returns the seconds of matmuls, and of attention, at the rates that they reach alone."""
    shape = run.decoder
    seq = run.data.seq_len
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = 2.0 * seq * shape.embed * (heads + 2 * kv_heads)
    rest = 2.0 * seq * shape.embed * (heads + 3 * shape.mlp)
    attended = 2.0 * seq * seq * heads
    head = 2.0 * seq * shape.embed * shape.vocab
    products = 3 * head
    forward = backward = 0.0
    for kind in choice.placement.recompute_modes:
        # Forward, backward (twice), and the chunks again; full recomputation runs more again.
        products += 4 * (qkv + rest) + (qkv if kind != "none" else 0.0)
        forward += attended * (2 if kind == "full" else 1)
        backward += 2.5 * attended
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rate = device_rates.measure_rates(device, dtype).flops
    rates = attention_rates(run, device, attention)
    return products / rate, forward / rates[0] + backward / rates[1]


def attention_rates(run: ResolvedRun, device: torch.device, attention: str) -> tuple[float, float]:
    """Returns the FLOPs per second of attention alone, forward and backward."""
    shape = run.decoder
    tokens = min(ATTENTION_TOKENS, run.data.seq_len)
    sizes = [(1, tokens, n, shape.head_dim) for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(n, dtype=dtype, device=device, requires_grad=True) for n in sizes)
    dy = torch.randn_like(q)
    attend = BACKENDS[attention if device.type == "cuda" else "auto"]
    flops = 2.0 * tokens * tokens * shape.heads * shape.head_dim
    y = attend(q, k, v)
    forward = _best_seconds(lambda: attend(q, k, v), device)
    backward = _best_seconds(
        lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), device
    )
    return flops / forward, 2.5 * flops / backward


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(4):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def report(
    run: ResolvedRun,
    predicted: MemoryBreakdown,
    times: list[StepTime],
    bounds: tuple[float, float],
    device: torch.device,
) -> dict[str, Any]:
    """Prints the result, and returns it as JSON types."""
    found: dict[str, Any] = {"seq": run.data.seq_len, "predicted": predicted.to_dict()}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        ratio = peak / predicted.allocated_bytes
        word = "good" if GOOD[0] <= ratio <= GOOD[1] else "bad"
        found |= {"peak": peak, "ratio": ratio, "reserved": torch.cuda.max_memory_reserved(device)}
        print(
            f"peak {peak / GIB:.2f} GiB, predicted {predicted.allocated_bytes / GIB:.2f} GiB, "
            f"ratio {ratio:.3f} ({word}); reserved {found['reserved'] / GIB:.2f} GiB"
        )
    if times:
        last = times[-1]
        least = sum(bounds) + last.update
        found |= {"seconds": last.total, "update": last.update, "bounds": bounds}
        found["tokens_per_second"] = run.data.seq_len / last.total
        print(
            f"{found['tokens_per_second']:.0f} tokens/s: {last.total:.1f} s; bound {least:.1f} s = "
            f"matmuls {bounds[0]:.1f} + attention {bounds[1]:.1f} + update that is not hidden "
            f"{last.update:.1f}; {least / last.total:.3f} of the bound"
        )
    return found


def main() -> int:
    """Runs the benchmark."""
    arguments = parse_arguments()
    if arguments.smoke:
        torch.set_num_threads(1)
    use_expandable_segments()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run = build_run(arguments, device)
    choice = choose_settings(run, device)
    for line in choice.reasons:
        print(line)
    predicted = choice.tracker.predicted_usage
    assert predicted is not None
    print("\n".join(format_breakdown(predicted)), flush=True)
    bounds = (0.0, 0.0)
    if not arguments.stop_after_last_block:
        bounds = bound_seconds(run, choice, device, arguments.attention)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        times = run_steps(run, choice, arguments, device)
    found = report(run, predicted, times, bounds, device)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
