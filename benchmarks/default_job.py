"""Compares the default job with plain PyTorch: same model, batches, documents and cores.

Usage: python benchmarks/default_job.py [--steps 150] [--turn 1.5] [-- OPTIONS OF ranvier train]
       python benchmarks/default_job.py --smoke

Runs `ranvier train` with its defaults, and a plain PyTorch loop in one process with as many threads
as there are cores: a model of torch.nn modules with the same sizes, scaled-dot-product attention
with a mask for packed documents, cross_entropy, and AdamW in its default form (and again with
`fused=True`). All read the same batches. They alternate every second or two while the others are
stopped, because the speed of a shared machine changes by half within a minute. The first steps, and
steps in which a process was stopped, are skipped. Prints the medians of steps and their ratio.
Before that, a step of each is compared with a plain twin on the same batch (`right_step.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peers import LAYER_NAME, Location, Ours, Peer, Shape, Task
from right_step import Check, check_step, checked_ratio
from torch import Tensor, nn

from ranvier import launch
from ranvier.config.run import RunConfig
from ranvier.data.batch import Batch
from ranvier.data.dataset import cache_corpora, open_data
from ranvier.data.loader import load_micro_batches
from ranvier.grid import Grid
from ranvier.models import DecoderConfig

WARMUP = 5
"""Number of first steps to skip."""
LR = 2e-3
"""Learning rate of the plain loops."""


def packed_documents(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns positions and documents of samples of two documents."""
    position = torch.arange(tokens.shape[1]).expand_as(tokens)
    half = tokens.shape[1] // 2
    return position % half, position // half


class Block(nn.Module):
    """A Llama block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = config
        self.head_dim = c.head_dim
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(c.embed, c.norm_eps) for _ in range(2))
        self.q = nn.Linear(c.embed, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.embed, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.embed, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.embed, bias=False)
        self.gate = nn.Linear(c.embed, c.mlp, bias=False)
        self.up = nn.Linear(c.embed, c.mlp, bias=False)
        self.down = nn.Linear(c.mlp, c.embed, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        h = self.attention_norm(x)
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q(h), self.k(h), self.v(h))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Plain(nn.Module):
    """A Llama of torch.nn modules."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, config.norm_eps)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Returns the mean loss of a batch."""
        c, seq = self.config, batch.tokens.shape[1]
        positions = torch.arange(seq) if batch.positions is None else batch.positions
        rates = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = positions.unsqueeze(-1) * rates
        angles = torch.cat((angles, angles), -1).unsqueeze(-3)
        mask = torch.ones(seq, seq, dtype=torch.bool).tril()
        if batch.documents is not None:
            d = batch.documents
            mask = mask & (d[:, None, :, None] == d[:, None, None, :])
        x = self.embed(batch.tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)


NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def plain_location(name: str) -> Location:
    """Returns where the plain model has a tensor."""
    module = name.removesuffix(".weight")
    layer = LAYER_NAME.fullmatch(module)
    if layer is None:
        return Location(f"{NAMES[module]}.weight")
    inner = layer[2]
    own = NAMES.get(inner, inner.rpartition(".")[2].removesuffix("_proj"))
    return Location(f"blocks.{layer[1]}.{own}.weight")


@dataclass(frozen=True)
class Job(Task):
    """The default job: its model and its first batches."""

    batches: tuple[Batch, ...] = ()

    @classmethod
    def load(cls, num_batches: int, run: RunConfig) -> Job:
        """Returns the job of a run."""
        folders = cache_corpora(
            list(run.data.sources),
            cache=launch.cache_dir(),
            tokenizer=run.data.tokenizer,
            max_bytes=run.data.max_bytes,
        )
        data = open_data(
            folders,
            seq=run.data.seq_len,
            seed=run.train.seed,
            held_out=run.data.validation_fraction,
        )
        size = run.plan.global_batch
        batches = tuple(
            load_micro_batches(data.train, step * size, size, Grid({}), size)[0]
            for step in range(num_batches)
        )
        shape = Shape(**{one.name: getattr(run.decoder, one.name) for one in fields(DecoderConfig)})
        pairs = [(batch.tokens, batch.targets) for batch in batches]
        return cls(shape, size, torch.device("cpu"), pairs, True, LR, batches)

    def load_batch(self, i: int) -> Batch:
        """Returns batch number i, with its documents."""
        return self.batches[i]


class PlainJob(Peer):
    """The plain loop."""

    def __init__(self, job: Job, *, fused: bool) -> None:
        torch.manual_seed(0)
        model = Plain(job.shape)
        batches = {id(batch.tokens): batch for batch in job.batches}

        def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model(batches[id(tokens)])
            return loss

        super().__init__(model, mean_loss, job, plain_location, fused)


def train_plain(steps: int, threads: int, out: Path, *, fused: bool) -> None:
    """Writes the seconds of each step into a file, a row of JSON each, as `ranvier train` does."""
    torch.set_num_threads(threads)
    job = Job.load(steps, RunConfig())
    contestant = PlainJob(job, fused=fused)
    with out.open("w") as file:
        for step in range(steps):
            start = time.perf_counter()
            contestant.step(step)
            assert contestant.loss is not None
            loss = contestant.loss.item()
            row = {"loss": loss, "step_seconds": time.perf_counter() - start}
            print(json.dumps(row), file=file, flush=True)


def check_contestants(job: Job) -> dict[str, Check]:
    """Compares a step of each contestant with the twin."""
    reference = job.reference()
    contestants: dict[str, Callable[[], Any]] = {
        "ranvier": partial(Ours, job, {}),
        "plain PyTorch": partial(PlainJob, job, fused=False),
        "plain PyTorch, fused AdamW": partial(PlainJob, job, fused=True),
    }
    checks = {name: check_step(name, make(), reference) for name, make in contestants.items()}
    print(*checks.values(), sep="\n", flush=True)
    return checks


@dataclass(frozen=True)
class Contestant:
    """A process that trains, and the file to which it writes the seconds of its steps."""

    name: str
    process: subprocess.Popen[bytes]
    metrics: Path

    @classmethod
    def start(cls, name: str, words: list[str], metrics: Path) -> Contestant:
        """Starts a Python command in its own session."""
        command = [sys.executable, *words]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        return cls(name, process, metrics)

    def seconds(self) -> list[float]:
        """Returns the seconds of the steps so far."""
        if not self.metrics.exists():
            return []
        rows = self.metrics.read_text().split("\n")[:-1]
        return [float(json.loads(row)["step_seconds"]) for row in rows]

    def running(self) -> bool:
        """Returns whether the process is still running."""
        return self.process.poll() is None

    def send(self, number: int) -> None:
        """Sends the process a signal, if it exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def take_turns(contestants: Sequence[Contestant], turn: float) -> None:
    """Lets the processes run to their ends, one at a time."""
    while any(one.running() for one in contestants):
        for one in contestants:
            if one.running():
                one.send(signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # what comes before the first steps is not compared
                    one.process.wait(turn if len(one.seconds()) >= WARMUP else 4 * turn)
                one.send(signal.SIGSTOP)
        done = ", ".join(f"{one.name} {len(one.seconds())}" for one in contestants)
        print(f"steps: {done}", end="\r", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for one in contestants:
        if one.process.returncode:
            raise SystemExit(f"{one.name} ended with exit code {one.process.returncode}.")


def main() -> None:
    """Alternates between the processes and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of each process (150)")
    parser.add_argument("--turn", type=float, default=1.5, help="seconds per turn (1.5)")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="only compare steps with the twin")
    parser.add_argument("options", nargs="*", help="options of ranvier train")
    asked = parser.parse_args()
    run, cores = RunConfig(), len(os.sched_getaffinity(0))
    if asked.plain:
        train_plain(asked.steps, cores, asked.plain, fused=asked.fused)
        return
    if asked.smoke:
        torch.set_num_threads(1)
        shape = Shape.of(2, 64, 4, 96, kv_heads=2, vocab=256, max_seq=32)
        task = Task.of(shape, 2, torch.device("cpu"), clip=True, lr=LR)
        batches = tuple(
            Batch(tokens, targets, *packed_documents(tokens)) for tokens, targets in task.pairs
        )
        pairs = [(batch.tokens, batch.targets) for batch in batches]
        check_contestants(Job(shape, 2, task.device, pairs, True, LR, batches))
        print("skipped: the processes in turns, which need minutes")
        return
    checks = check_contestants(Job.load(1, run))
    with tempfile.TemporaryDirectory(prefix="default-job-") as name:
        folder, steps = Path(name), ["--steps", str(asked.steps)]
        ours = [
            "-m",
            "ranvier",
            "train",
            "--train.steps",
            str(asked.steps),
            "--train.sample-prompt",
            "",
        ]
        ours += ["--train.output-dir", str(folder / "run"), *asked.options]
        theirs = [__file__, *steps, "--plain"]
        fused = [*theirs, str(folder / "fused"), "--fused"]
        contestants: list[Contestant] = []
        try:
            for title, words, metrics in (
                ("ranvier", ours, folder / "run" / "metrics.jsonl"),
                ("plain PyTorch", [*theirs, str(folder / "plain")], folder / "plain"),
                ("plain PyTorch, fused AdamW", fused, folder / "fused"),
            ):
                contestants.append(Contestant.start(title, words, metrics))
            take_turns(contestants, asked.turn)
            found = {
                one.name: [x for x in one.seconds()[WARMUP:] if x < asked.turn]
                for one in contestants
            }
        finally:
            for one in contestants:
                one.send(signal.SIGKILL)
                one.process.wait()
    tokens = run.plan.global_batch * run.data.seq_len
    mine = statistics.median(found["ranvier"])
    print(f"{tokens} tokens per step, {cores} cores")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ratio = ""
        if name != "ranvier":
            ratio = f"ranvier is {checked_ratio(median / mine, [checks['ranvier'], checks[name]])}"
        print(
            f"{name:<28} {len(seconds):>4} steps, median {median * 1e3:.1f} ms, "
            f"{tokens / median:,.0f} tokens/s  {ratio}"
        )


if __name__ == "__main__":
    main()
