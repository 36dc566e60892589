"""The default job against plain PyTorch: the same model, batches and documents on the same cores.

Usage: python benchmarks/default_job.py [--turns 5] [--steps 30] [-- OPTIONS OF ranvier train]

Each turn runs `ranvier train` with its defaults for some steps, then a plain PyTorch loop in one
process with as many threads as there are cores: a model of torch.nn's modules with the same
sizes, scaled-dot-product attention with a mask for packed documents, cross_entropy, and AdamW in
its default form (and once more with `fused=True`). Both read the same batches. The first steps are
left out; printed are the medians of all steps of all turns, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier import launch
from ranvier.data.batch import Batch
from ranvier.data.dataset import open_data, stored_all
from ranvier.data.loader import micro_batches
from ranvier.grid import Grid
from ranvier.run import Run
from ranvier.settings import ModelConfig

WARMUP = 5
"""Steps that are left out."""


class Block(nn.Module):
    """A Llama block."""

    def __init__(self, config: ModelConfig) -> None:
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
    """Rotary positions."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Plain(nn.Module):
    """A Llama of torch's modules."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.embed)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, config.norm_eps)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Mean loss of a batch."""
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


def train_plain(steps: int, threads: int, *, fused: bool) -> None:
    """Print the seconds of each step and the last loss, as JSON."""
    torch.set_num_threads(threads)
    run = Run()
    folders = stored_all(
        list(run.data.corpus),
        cache=launch.cache(),
        tokenizer=run.data.tokenizer,
        max_bytes=run.data.max_bytes,
    )
    data = open_data(folders, seq=run.data.seq, seed=run.train.seed, held_out=run.data.held_out)
    size = run.plan.batch
    batches = [
        micro_batches(data.train, step * size, size, Grid({}), size)[0] for step in range(steps)
    ]
    torch.manual_seed(0)
    model = Plain(run.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None
    )
    seconds, loss = [], torch.zeros(())
    for batch in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds, "loss": loss.item()}))


def seconds_of_plain(steps: int, threads: int, *, fused: bool) -> list[float]:
    """Seconds of the steps of a plain loop in a process of its own."""
    command = [sys.executable, __file__, "--plain", str(threads), "--steps", str(steps)]
    command += ["--fused"] if fused else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return found[WARMUP:]


def seconds_of_ours(steps: int, options: list[str]) -> list[float]:
    """Seconds of the steps of `ranvier train`."""
    with tempfile.TemporaryDirectory(prefix="default-job-") as folder:
        command = [sys.executable, "-m", "ranvier", "train", "--train.steps", str(steps)]
        command += ["--train.out", f"{folder}/run", "--train.prompt", "", *options]
        subprocess.run(command, check=True, capture_output=True)
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["seconds"] for row in rows][WARMUP:]


def main() -> None:
    """Take turns; print medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of a turn (30)")
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of ranvier train")
    asked = parser.parse_args()
    if asked.plain:
        train_plain(asked.steps, asked.plain, fused=asked.fused)
        return
    run, cores = Run(), len(os.sched_getaffinity(0))
    ways = {
        "ranvier": lambda: seconds_of_ours(asked.steps, asked.options),
        "plain PyTorch": lambda: seconds_of_plain(asked.steps, cores, fused=False),
        "plain PyTorch, fused AdamW": lambda: seconds_of_plain(asked.steps, cores, fused=True),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.turns):
        for name, way in ways.items():
            found[name] += way()
            print(f"turn {turn + 1}: {name} {statistics.median(found[name]) * 1e3:.1f} ms a step")
    tokens = run.plan.batch * run.data.seq
    ours = statistics.median(found["ranvier"])
    print(f"\n{tokens} tokens a step, {cores} cores, medians of {len(found['ranvier'])} steps")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ratio = f"ranvier is {median / ours:.2f} x as fast" if name != "ranvier" else ""
        print(f"{name:<28} {tokens / median:>8,.0f} tokens/s  {ratio}")


if __name__ == "__main__":
    main()
