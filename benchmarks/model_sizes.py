"""Speed and memory of every named model size on one device.

    python benchmarks/model_sizes.py --csv model_sizes.csv
    python benchmarks/model_sizes.py --sizes tiny gpt2 --device cpu

Each size is trained for a few steps by `ranvier train` with `--memory.auto`, which moves optimizer
states, weights or activations to the host where the model does not fit otherwise. A row has the
median of the steps after the first four, the peak bytes of tensors on the device, and where the
trainer put the optimizer states. Sizes that do not fit are listed with the message of the trainer.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from script_parser import ScriptParser

SIZES = {
    "gpt2": (1024, 64),
    "qwen3-0.6b": (4096, 16),
    "llama3-1b": (4096, 16),
    "llama3-8b": (4096, 16),
    "qwen3-8b": (4096, 16),
    "deepseek-moe-16b": (4096, 16),
}
"""Tokens per sequence and sequences per step."""
OTHER_SIZE = (96, 2)
"""Those of a size that is not in the table."""
WARMUP_STEPS = 4
GIB = 2**30


def measure_size(
    size: str, *, seq_len: int, batch: int, steps: int, device: str, extra: list[str]
) -> dict[str, Any]:
    """Trains a size for a few steps; returns its row."""
    row: dict[str, Any] = {"size": size, "seq_len": seq_len, "sequences_per_step": batch}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "ranvier", "train", "--model.size", size),
            *("--data.seq-len", str(seq_len), "--data.tokenizer", "bytes"),
            *("--plan.global-batch", str(batch), "--plan.data", "1", "--nproc", "1"),
            *("--train.steps", str(steps), "--train.device", device, "--train.dtype", "bf16"),
            *("--train.eval-interval", "0", "--train.sample-prompt", ""),
            *("--checkpoint.interval", "-1", "--memory.auto", "true"),
            *("--train.output-dir", folder + "/run", *extra),
        ]
        result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        metrics = Path(folder, "run", "metrics.jsonl")
        if result.returncode or not metrics.exists():
            return row | {"error": (result.stderr or result.stdout).strip()[-300:]}
        steps_taken = [json.loads(line) for line in metrics.read_text().splitlines()]
        facts = json.loads(Path(folder, "run", "run.json").read_text())
        settings = tomllib.loads(Path(folder, "run", "config.toml").read_text())
    measured = steps_taken[WARMUP_STEPS:]
    seconds = statistics.median(step["step_seconds"] for step in measured)
    return row | {
        "parameters": facts["parameters"],
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(seq_len * batch / seconds),
        "mfu": measured[-1]["mfu"],
        "peak_memory_gib": round(measured[-1]["peak_memory_bytes"] / GIB, 1),
        "micro_batch": settings["plan"]["micro_batch"],
        "recompute": settings["plan"]["recompute"],
        "optimizer_states": settings["memory"]["optimizer_states"],
        "parameters_on": settings["memory"]["parameters"],
        "activation_offload": settings["memory"]["activation_offload_fraction"],
        "device": facts["device"],
        "torch": facts["versions"]["torch"],
    }


def main() -> None:
    """Measures the sizes one after the other and prints a line for each."""
    parser = ScriptParser(
        __doc__, smoke="--sizes tiny --device cpu --steps 6 --csv {folder}/rows.csv"
    )
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="named model sizes")
    parser.add_argument("--steps", type=int, default=12, help="steps per size, at least 6")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    arguments, extra = parser.parse_known_args()
    rows = []
    for size in arguments.sizes:
        seq_len, batch = SIZES.get(size, OTHER_SIZE)
        row = measure_size(
            size,
            seq_len=seq_len,
            batch=batch,
            steps=arguments.steps,
            device=arguments.device,
            extra=extra,
        )
        print(json.dumps(row), flush=True)
        rows.append(row)
        if arguments.csv:
            names = list(dict.fromkeys(name for one in rows for name in one))
            with arguments.csv.open("w", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(rows)
    if arguments.smoke and any("error" in row for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
