"""Call `parallelize` on an unmodified transformers model: its layers are split over the grid.

python examples/huggingface.py
torchrun --nproc-per-node 4 examples/huggingface.py --row 2 --col 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from ranvier import Plan, parallelize
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.launch.external_launch import build_grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.step import forward_backward


def unmodified() -> Any:
    """Returns a tiny Llama from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def main(grid: Grid) -> list[float]:
    """Runs on each rank; returns the losses."""
    model = unmodified()
    whole = sum(p.numel() for p in model.parameters())
    plan = Plan(col_splits="features").with_degrees(grid.degrees)
    model = parallelize(model, grid, plan)
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler, lr=3e-3)
    mine = sum(p.numel() for p in model.parameters())
    text = torch.arange(40, 57).unsqueeze(0).repeat(8, 1)
    samples = Batch(text[:, :-1], text[:, 1:])  # of all ranks; each takes its part
    losses = []
    for _ in range(20):
        share = len(text) // grid.axis("data", "expert", "depth").size
        loss = forward_backward(model, samples.split_micro_batches(grid, share))
        optimizer.step()
        losses.append(loss.item())
    if grid.rank == 0:
        axes = {axis: size for axis, size in grid.degrees.items() if size > 1}
        print(f"grid {axes or 'of one rank'}: {mine:,} of {whole:,} weights on each rank")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--col", type=int, default=1)
    asked = parser.parse_args()
    main(build_grid({"row": asked.row, "col": asked.col}, inner="features", device="cpu")[0])
