"""Compares every policy on pipe 2 row 2 depth 2 over NCCL, on one GPU, with a single process.

Usage: python benchmarks/nccl_policies.py [--policy 1f1b] [--dtype fp64] [--backend gloo]

Complete runs under torchrun: losses and gradient norms of every step and, in float64, the final
saved weights are compared with a run in one process. float64 must agree to 1e-9 (10 steps), fp32 to
1e-5 in the loss of every step (20 steps), bf16 to 2% in the last loss (100 steps of the default
model and batch, policy message_driven; with the few tokens per step of the other runs, the rounding
of bf16 alone changes a single loss by more). Each run must end within 10 s of its last step.
--backend gloo does the same on the CPU, slowly.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from script_parser import ScriptParser

from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors

POLICIES = ("message_driven", "1f1b", "gpipe", "zero-bubble", "interleaved")
STEPS = {"fp64": 10, "fp32": 20, "bf16": 100}
LIMITS = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 0.02}
"""Maximum relative difference of losses; for bf16 of the last one."""
END_SECONDS = 10.0
RUN_SECONDS = 300.0
COMMON = ("--train.eval-interval", "0", "--train.sample-prompt", "", "--plan.compile", "off")
SMALL = (
    *("--data.max-bytes", "60000", "--data.seq-len", "32", "--data.tokenizer", "bytes"),
    *("--model.layers", "2", "--model.embed", "32", "--model.head-dim", "8", "--model.mlp", "48"),
    *("--model.vocab", "260", "--plan.global-batch", "8", "--plan.micro-batch", "1"),
)
"""A model with fast steps."""
GRIDS = {
    1: (),
    8: ("--plan.pipe", "2", "--plan.row", "2", "--plan.depth", "2", "--plan.data", "1"),
}
"""Settings by number of ranks."""


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    folder: Path
    code: int
    after_last_step: float
    """Seconds from the line of its last step to its end."""
    output: str

    @property
    def rows(self) -> list[dict[str, float]]:
        """Its metrics."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def run(folder: Path, words: Sequence[str], backend: str, *, ranks: int) -> Ended:
    """Trains in one process, or on all ranks of the grid."""
    device = "cuda" if backend == "nccl" else "cpu"
    command = [sys.executable, "-m", "ranvier", "train", *COMMON, *words, "--train.device", device]
    command += ["--train.output-dir", str(folder)]
    if ranks == 1:
        command += ["--nproc", "1"]
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(ranks), *command, *GRIDS[ranks]]
        command += ["--train.backend", backend]
        command += ["--launch.share-gpu", "True"] if backend == "nccl" else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last, lines = time.monotonic(), list[str]()
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            last = time.monotonic()
    code = process.wait(RUN_SECONDS)
    return Ended(folder, code, time.monotonic() - last, "".join(lines))


def largest_difference(have: Sequence[float], want: Sequence[float]) -> float:
    """Returns the largest relative difference of two lists of numbers."""
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))


def compare_weights(have: Path, want: Path) -> float:
    """Returns the largest difference of two runs' last weights, relative to the largest magnitude
    of each tensor.
    """
    mine, whole = (
        load_full_tensors(find_checkpoints(folder / "checkpoints")[-1]) for folder in (have, want)
    )
    return max(
        float((mine[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(1e-300))
        for name, x in whole.items()
    )


def check(ended: Ended, one: Ended, dtype: str, end_seconds: float) -> tuple[str, bool]:
    """Compares a run with the one of a single process; returns a text and whether it passes."""
    if ended.code:
        return f"exit code {ended.code}\n{ended.output[-2000:]}", False
    rows, whole = ended.rows, one.rows
    first = -1 if dtype == "bf16" else 0
    loss = largest_difference([r["loss"] for r in rows[first:]], [r["loss"] for r in whole[first:]])
    words, good = f"loss {loss:.1e}", loss <= LIMITS[dtype]
    if dtype == "fp64":
        norm = largest_difference([r["grad_norm"] for r in rows], [r["grad_norm"] for r in whole])
        weights = compare_weights(ended.folder, one.folder)
        words += f"  norm {norm:.1e}  weights {weights:.1e}"
        good = good and max(norm, weights) <= LIMITS[dtype]
    words += f"  ended {ended.after_last_step:.1f} s after its last step"
    return words, good and ended.after_last_step <= end_seconds


def main() -> int:
    """Runs, compares and prints."""
    parser = ScriptParser(
        __doc__,
        smoke="--backend gloo --ranks 1 --policy 1f1b --dtype fp64 --steps 2 --end-seconds 100",
        skipped="the eight ranks, which take longer; another run in one process is compared",
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="default: all")
    parser.add_argument("--dtype", action="append", choices=[*STEPS], help="default: all")
    parser.add_argument(
        "--ranks",
        type=int,
        choices=GRIDS,
        default=8,
        help="of the grid; 1: another run in one process",
    )
    parser.add_argument("--steps", type=int, help="default: 10 of fp64, 20 of fp32, 100 of bf16")
    parser.add_argument(
        "--end-seconds", type=float, default=END_SECONDS, help="after the last step"
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    options, num_bad = parser.parse_args(), 0
    policies, dtypes = options.policy or [*POLICIES], options.dtype or [*STEPS]
    with (
        tempfile.TemporaryDirectory(prefix="nccl-policies-") as name,
        ThreadPoolExecutor(1) as thread,
    ):
        for dtype in dtypes:
            words = ["--train.dtype", dtype, "--train.steps", str(options.steps or STEPS[dtype])]
            words += SMALL if dtype != "bf16" else ()
            # The first grid runs at the same time: most of the time is that of imports.
            folder = Path(name) / f"one-{dtype}"
            single_run = thread.submit(run, folder, words, options.backend, ranks=1)
            for policy in policies if dtype != "bf16" else ["message_driven"]:
                more = ["--plan.schedule", policy]
                more += ["--plan.virtual-stages", "2"] if policy == "interleaved" else []
                folder = Path(name) / f"{policy}-{dtype}"
                ended = run(folder, [*words, *more], options.backend, ranks=options.ranks)
                single = single_run.result()
                if single.code:
                    output = single.output[-2000:]
                    print(f"one process, {dtype}: exit code {single.code}\n{output}")
                    return 1
                text, is_good = check(ended, single, dtype, options.end_seconds)
                print(f"{dtype}  {policy:<12} {'ok  ' if is_good else 'FAIL'}  {text}", flush=True)
                num_bad += not is_good
    print(f"{'FAIL' if num_bad else 'PASS'}: {num_bad} runs differ or end late")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
