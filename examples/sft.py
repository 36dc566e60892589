"""Supervised fine-tuning in miniature: a tiny model learns to answer 84 questions.

    python examples/sft.py [--out DIR] [--questions N] [--steps N] [--nproc N]

Writes an instruction dataset and a tokenizer for it, trains on the answers only, with whole
conversations packed into samples, and asks every question again. It takes less than half a minute
on two CPU cores. The same as commands:

    ranvier data prepare OUT/chats.jsonl --tokenizer train --vocab 512 --output OUT/corpus
    ranvier train --data.sources OUT/corpus --data.loss-on assistant ... --train.output-dir OUT/run
    ranvier generate OUT/run --chat "What is 7 plus 8?" --temperature 0
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ranvier.cli.main import main as ranvier
from ranvier.infer.generate import TextGenerator

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Ghana": "Accra",
    "Japan": "Tokyo",
    "India": "Delhi",
    "Nepal": "Kathmandu",
    "Vietnam": "Hanoi",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Cuba": "Havana",
    "Canada": "Ottawa",
}
MODEL: dict[str, float] = {
    "layers": 2,
    "embed": 64,
    "heads": 4,
    "kv-heads": 2,
    "head-dim": 16,
    "mlp": 192,
    "init-std": 0.15,  # narrow layers need larger initial weights
}


def questions(count: int) -> dict[str, str]:
    """Returns questions, each with its only answer."""
    ranks = range(2, 10)
    sums = {f"What is {a} plus {b}?": f"It is {a + b}." for a in ranks for b in ranks}
    towns = {f"What is the capital of {x}?": f"{y} is." for x, y in CAPITALS.items()}
    found, draw = [*sums.items(), *towns.items()], random.Random(0)
    draw.shuffle(found)
    return dict(found[:count])


def run(*words: str) -> None:
    """Runs a ranvier command in this process."""
    try:
        ranvier(list(words))
    except SystemExit as end:
        if end.code:
            raise


def share(folder: Path, known: dict[str, str]) -> float:
    """Returns the fraction of questions that a run answers exactly, with greedy decoding."""
    speaker = TextGenerator.from_run(folder, "cpu")
    right = 0
    for question, answer in known.items():
        pieces = speaker.answer_question(question, tokens=32, temperature=0.0, top_k=0, seed=0)
        right += "".join(pieces) == answer
    return right / len(known)


def learned(out: Path, *, count: int, steps: int, nproc: int) -> float:
    """Trains on this many questions; returns the fraction of exact answers."""
    out.mkdir(parents=True, exist_ok=True)
    known = questions(count)
    with (out / "chats.jsonl").open("w", encoding="utf-8") as file:
        for question, answer in known.items():
            said = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")
    corpus, folder = out / "corpus", out / "run"
    files = [str(out / "chats.jsonl"), "--output", str(corpus)]
    run("data", "prepare", *files, "--tokenizer", "train", "--vocab", "512")
    vocab = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))["vocab"]
    shape = [f"--model.{name}={size}" for name, size in {**MODEL, "vocab": vocab}.items()]
    data = [
        "--data.sources",
        str(corpus),
        "--data.seq-len",
        "64",
        "--data.validation-fraction",
        "0",
    ]
    plan = ["--plan.global-batch", "8", "--optim.lr", "5e-3", "--optim.weight-decay", "0"]
    quiet = ["--train.eval-interval", "0", "--train.sample-prompt", ""]
    how = ["--train.steps", str(steps), "--nproc", str(nproc), "--train.output-dir", str(folder)]
    run("train", *shape, *data, *plan, *quiet, *how)
    return share(folder, known)


def main(words: Sequence[str] | None = None) -> float:
    """Parses the options, trains, and prints the fraction of exact answers."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--out", default="")
    options.add_argument("--questions", type=int, default=84)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--nproc", type=int, default=1)
    asked = options.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(asked.out or folder)
        right = learned(out, count=asked.questions, steps=asked.steps, nproc=asked.nproc)
    print(f"\n{right:.0%} of {asked.questions} questions answered exactly")
    return right


if __name__ == "__main__":
    main()
