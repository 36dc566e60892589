#!/usr/bin/env python3
"""Shows that `gpu_check.py` sees errors: breaks a copy of the package, and runs the part for it.

    python scripts/gpu_breaks.py                       # all breaks
    python scripts/gpu_breaks.py --only rotary-gradient,lora-alpha

A break is a small edit of one file. The script copies `src` to a temporary folder, makes the edit
there, and runs `gpu_check.py --only PART` with that folder in PYTHONPATH. The part must fail. An
edit that no longer applies is an error as well: write another break. The same parts are run without
a break, and must pass: a part that always fails sees nothing. The exit status is 1 if the check has
missed a break, or fails without one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Break:
    """An edit, and the part that sees it."""

    name: str
    part: str
    file: str
    """In `src/ranvier`."""
    before: str
    after: str
    is_gpu_only: bool = False
    """Whether no CPU runs the code."""

    def is_skipped(self, device: str) -> bool:
        """Whether a device does not run the code."""
        return self.is_gpu_only and device == "cpu"

    def apply(self, source: Path) -> str:
        """Makes the edit in a copy of `src`; returns why it does not apply, or nothing."""
        path = source / "ranvier" / self.file
        if not path.is_file():
            return f"src/ranvier/{self.file} is gone"
        text = path.read_text("utf-8")
        if self.before not in text:
            return f"{self.before!r} is not in src/ranvier/{self.file}"
        path.write_text(text.replace(self.before, self.after, 1), "utf-8")
        return ""


BREAKS = [
    # torch 2.11 cannot trace an assert on a tuple of objects: the server did not start.
    Break(
        "traced-assert", "generate-compiled", "models/decoder.py",
        "        return self.kv_caches[sequences.iteration",
        '        assert self.kv_caches, "an engine sets the caches"\n'
        "        return self.kv_caches[sequences.iteration",
    ),
    Break(
        "decode-off-by-one", "paged-kernels", "infer/paged_kernels.py",
        "is_visible = key < end_cached", "is_visible = key < end_cached - 1",
        is_gpu_only=True,
    ),
    Break(
        "rotary-gradient", "train-compiled", "models/decoder.py",
        "q = apply_rotary(q, angles)", "q = apply_rotary(q.detach(), angles)",
    ),
    Break(
        "attention-scale", "train-compiled", "models/document_attention.py",
        "    longest = int(most)\n    q, k, v = map(contiguous_heads, (q, k, v))",
        "    longest = int(most)\n    q, k, v = map(contiguous_heads, (q * 1.05, k, v))",
        is_gpu_only=True,
    ),
    Break(
        "float8-scale", "float8", "nn/triton_kernels.py",
        "tl.store(inverse_at, tl.div_rn(1.0, scale))",
        "tl.store(inverse_at, 1.05 * tl.div_rn(1.0, scale))",
        is_gpu_only=True,
    ),
    Break(
        "graph-with-old-batch", "cuda-graph", "train/cuda_graph.py",
        "if value is not None:", 'if value is not None and one.name != "targets":',
    ),
    Break(
        "graph-with-old-rate", "cuda-graph", "train/cuda_graph.py",
        "        self.static_lr.fill_(lr)", "        self.static_lr.fill_(lr * 0.9)",
    ),
    Break(
        "engine-graph-with-old-input", "generate", "infer/step_graphs.py",
        "        self._update_table(home.chunks)\n        step.graph.replay()",
        "        step.graph.replay()\n        self._update_table(home.chunks)",
    ),
    Break(
        "routing-weight", "mixture", "nn/moe/triton_kernels.py",
        "    w = tl.load(weights + choice, mask=r < rows, other=0.0).to(tl.float32)",
        "    w = tl.load(weights + choice * 0, mask=r < rows, other=0.0).to(tl.float32)",
        is_gpu_only=True,
    ),
    Break(
        "lora-alpha", "lora", "models/config.py",
        "max(self.rank, 1))", "max(self.rank + 1, 1))",
    ),
    Break(
        "muon-rate", "muon", "optim/muon.py",
        "return 0.2 * math.sqrt(max(rows, cols))", "return 0.2 * math.sqrt(min(rows, cols))",
    ),
    Break(
        "neighbour-document", "packed-documents", "models/document_attention.py",
        "        q, k, v, bounds, bounds, longest, longest, 0.0, True, False, "
        "**kernel_window(window)",
        "        q, k, v, bounds[[0, -1]], bounds[[0, -1]], len(q), len(q), 0.0, True, False",
        is_gpu_only=True,
    ),
    Break(
        "old-optimizer-state", "offload", "optim/state_store.py",
        "            mine.copy_(slot.tensors[name], non_blocking=True)",
        '            if name != "square":\n'
        "                mine.copy_(slot.tensors[name], non_blocking=True)",
    ),
    Break(
        "dropped-micro-batch", "nccl-pipeline", "pipeline/step.py",
        "        for work in self.deferred_weight_grads.pop((job.chunk, job.micro)):\n"
        "            work()",
        "        for work in self.deferred_weight_grads.pop((job.chunk, job.micro)):\n"
        "            if job.micro != 1:\n"
        "                work()",
    ),
    Break(
        "resume-without-samples", "kill-and-resume", "train/resume/checkpointing.py",
        "state.step, state.samples = manifest.step, int(facts[\"samples\"])",
        "state.step, state.samples = manifest.step, 0",
    ),
    Break(
        "segment-alignment", "context-kernels", "models/segment_attention.py",
        "                self.causal,\n                False,\n",
        "                False,\n                False,\n",
        is_gpu_only=True,
    ),
]  # fmt: skip


def run_part(source: Path, part: str, device: str) -> subprocess.CompletedProcess[str]:
    """Runs a part of the check with the package in `source`, whose needs are in PYTHONPATH."""
    folders = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
    check = str(ROOT / "scripts" / "gpu_check.py")
    return subprocess.run(
        [sys.executable, check, "--device", device, "--only", part],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )


def try_break(one: Break, device: str) -> tuple[str, str]:
    """Returns the verdict on a break (red, GREEN or not applied), and the output of the check."""
    if one.is_skipped(device):
        return "skipped", "only a GPU runs this code"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-break-", ignore_cleanup_errors=True) as folder:
        source = Path(folder) / "src"
        shutil.copytree(
            ROOT / "src" / "ranvier",
            source / "ranvier",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        problem = one.apply(source)
        if problem:
            return "not applied", problem
        done = run_part(source, one.part, device)
    lines = done.stdout.splitlines()
    skipped = any(" skipped: " in line for line in lines[:1])
    reasons = [line.strip() for line in lines if line.startswith("        ")]
    seconds = f"{time.monotonic() - begin:.0f} s"
    if skipped:
        return "skipped", lines[0]
    # A part that could not begin has seen nothing.
    if done.returncode == 1 and reasons:
        return "red", f"{seconds}: {reasons[0]}"
    return "GREEN", f"{seconds}: {' '.join(lines[-2:])} {done.stderr[-300:]}"


def main(words: Sequence[str] | None = None) -> int:
    """Tries the breaks; returns 1 if one of them is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="try these breaks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parallel", type=int, default=4, help="breaks at once (default: 4)")
    options = parser.parse_args(words)
    names = [name for name in options.only.split(",") if name]
    unknown = {*names} - {one.name for one in BREAKS}
    if unknown:
        known = ", ".join(one.name for one in BREAKS)
        parser.error(f"--only {','.join(sorted(unknown))} is unknown. Known breaks are {known}.")
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU, and torch sees none. Run with --device cpu.")
    chosen = [one for one in BREAKS if not names or one.name in names]
    parts = {one.part for one in chosen if not one.is_skipped(options.device)}
    with ThreadPoolExecutor(options.parallel) as pool:
        unbroken = [pool.submit(run_part, ROOT / "src", part, options.device) for part in parts]
        futures = [(one, pool.submit(try_break, one, options.device)) for one in chosen]
        verdicts = []
        for one, future in futures:
            verdict, text = future.result()
            verdicts.append(verdict)
            print(f"{one.name:<28} {one.part:<18} {verdict:<12} {text}", flush=True)
    seen = verdicts.count("red")
    print(f"{seen} of {len(verdicts) - verdicts.count('skipped')} breaks turn the check red.")
    failures = [run.result() for run in unbroken if run.result().returncode != 0]
    if failures:
        print("Without a break these parts fail as well, so that their red says nothing:")
        for failure in failures:
            print(failure.stdout + failure.stderr[-2000:])
        return 1
    print(f"Without a break the {len(parts)} parts pass.")
    return 0 if seen + verdicts.count("skipped") == len(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
