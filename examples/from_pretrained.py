"""Load a pretrained model on any grid, generate from it, train it a little and save it.

    python examples/from_pretrained.py
    torchrun --nproc-per-node 4 examples/from_pretrained.py --row 2 --depth 2
    python examples/from_pretrained.py --model path/to/a/model

Without --model, a tiny Llama with random weights is created first, with transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import ranvier


def published(folder: Path) -> Path:
    """Creates a tiny model, stored as on the Hugging Face Hub."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(folder)
    return folder


def main(source: str, folder: Path, **how: Any) -> list[float]:
    """Runs on each rank; returns the losses."""
    model = ranvier.from_pretrained(source, **how)
    first = model.grid.rank == 0
    prompt = torch.arange(40, 48).unsqueeze(0)  # the same on all ranks
    before = model.generate(prompt, max_new_tokens=8)
    model.train()
    optimizer = model.optimizer(lr=3e-3)
    batch = torch.arange(40, 56).unsqueeze(0).repeat(2, 1)  # for this (data, depth) coordinate
    losses = []
    for _ in range(20):
        loss = model(batch, labels=batch).loss  # the mean over all coordinates
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    after = model.generate(prompt, max_new_tokens=8)
    model.save_pretrained(folder / "tuned")
    if first:
        axes = {axis: size for axis, size in model.grid.degrees.items() if size > 1}
        print(f"grid {axes or 'of one rank'}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"before {before[0, 8:].tolist()}\nafter  {after[0, 8:].tolist()}")
        print(f"saved {sorted(path.name for path in (folder / 'tuned').iterdir())}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="directory, file or Hugging Face Hub name")
    parser.add_argument("--out", default="", help="directory for the tuned model")
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(asked.out or own)
        source = asked.model or str(published(Path(own) / "model"))
        main(source, folder, plan={"row": asked.row, "depth": asked.depth})
