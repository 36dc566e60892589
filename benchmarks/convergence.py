"""Compares the losses of faster training variants with the eager reference.

The reference computes operation by operation in bf16 with fp32 master weights. Each variant takes
the same steps on the same text from the same initial weights. The reference also runs with another
seed of its weights. The mean absolute difference of the losses over the last quarter of the steps
must not be larger between a variant and the reference than between the two seeds. The mean loss of
fp8 must be within 0.5% of the same compiled step in bf16, which differs only in precision.

    python benchmarks/convergence.py --corpus data/corpus --size 0.5b --batch 2 --steps 200
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch
from one_gpu import SIZES, TOY
from peers import Shape, run_of
from script_parser import ScriptParser

from ranvier.data.dataset import open_data
from ranvier.data.prepare import prepare_corpus
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

EAGER = {"plan.compile": "off"}
VARIANTS: dict[str, dict[str, str]] = {
    "eager": EAGER,
    "other seed": {**EAGER, "train.seed": "1"},
    "compiled": {},
    "fp8 tensorwise": {"train.float8": "tensorwise"},
}


def settings() -> argparse.Namespace:
    parser = ScriptParser(
        __doc__,
        smoke="--size toy --steps 4 --corpus {folder}/corpus --json {folder}/losses.json "
        "--variants eager 'other seed' compiled",
        skipped="fp8, which needs a GPU; blocks are not compiled on a CPU",
    )
    parser.add_argument("--corpus", required=True, help="directory from `ranvier data prepare`")
    parser.add_argument("--size", default="0.5b", help=f"one of {', '.join([*SIZES, *TOY])}")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS])
    parser.add_argument("--json", help="file to write all losses to")
    return parser.parse_args()


def write_corpus(folder: Path) -> None:
    """Writes a small corpus of bytes."""
    texts = folder.with_suffix(".jsonl")
    texts.write_text(f"{json.dumps({'text': Path(__file__).read_text()})}\n" * 20)
    prepare_corpus([texts], folder, ByteTokenizer())


def losses(asked: argparse.Namespace, shape: Shape, changes: dict[str, str]) -> list[float]:
    """Returns the loss of each step of a variant."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {
        "train.steps": str(asked.steps),
        "train.eval_interval": "0",
        "data.document_mask": "true",
        **changes,
    }
    run = resolve_run(
        run_of(shape, asked.batch, options, device.type),
        ResolveContext(world_size=1, device=device),
    )
    data = open_data([asked.corpus], seq=shape.max_seq, seed=0, held_out=0.0)  # one order for all
    trainer = Trainer.from_run(run, Grid({}), device, data)
    found = [float(row["loss"]) for row in trainer.run_steps()]
    del trainer
    torch._dynamo.reset()
    gc.collect()
    return found


def main() -> None:
    asked = settings()
    known = {**SIZES, **TOY}
    if asked.size not in known:
        raise SystemExit(f"--size {asked.size} is not known. Use one of {', '.join(known)}.")
    shape = known[asked.size][0]
    curves, tail = dict[str, list[float]](), slice(3 * asked.steps // 4, None)
    if asked.smoke:
        write_corpus(Path(asked.corpus))
    for name in asked.variants:
        changes = VARIANTS[name]
        curves[name] = losses(asked, shape, changes)
        mean = statistics.mean(curves[name][tail])
        print(f"{name:20} mean loss of the last quarter {mean:.5f}", flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(curves))
    good = judged({name: curve[tail] for name, curve in curves.items()})
    raise SystemExit(0 if good or asked.smoke else 1)


def judged(tails: dict[str, list[float]]) -> bool:
    """Prints the differences; returns whether every variant is close enough."""
    means = {name: statistics.mean(curve) for name, curve in tails.items()}
    gaps = {
        name: statistics.mean(abs(a - b) for a, b in zip(curve, tails["eager"], strict=True))
        for name, curve in tails.items()
    }
    good = True
    for name, gap in gaps.items():
        shift = means[name] / means["eager"] - 1.0
        words = f"{name:20} mean difference to eager {gap:.5f}, mean loss changed by {shift:+.3%}"
        if name.startswith("fp8"):
            change = means[name] / means["compiled"] - 1.0
            words += f", by {change:+.3%} relative to compiled bf16 (at most 0.5%)"
            good &= abs(change) <= 0.005
        good &= gap <= gaps["other seed"]
        print(words)
    print("pass" if good else "FAIL: a variant differs more than the other seed, or by over 0.5%")
    return good


if __name__ == "__main__":
    main()
