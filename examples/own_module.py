"""Train your own module in your own loop on any grid, with full batches and full outputs.

python examples/own_module.py
torchrun --nproc-per-node 4 examples/own_module.py --row 2
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, mse_loss

from ranvier import call_on_full_batch, parallelize
from ranvier.grid import Grid
from ranvier.launch.external_launch import build_grid
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model


class MLP(nn.Module):
    """Plain PyTorch, with the names of its dims."""

    dims = {"norm": ("embed",), "up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": 32, "mlp": 128}
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, 32]`."""
        return x + self.down(gelu(self.up(self.norm(x))))


def main(grid: Grid) -> list[float]:
    """Runs on each rank; returns the losses."""
    torch.manual_seed(0)  # every rank builds the same model and draws the same batches
    model = parallelize(MLP(), grid)
    optimizer = Optimizer(get_parallel_model(model).bucket_scheduler, lr=1e-2, clip=1.0)
    losses = []
    for _ in range(20):
        x = torch.randn(8, 16, 32)  # the full batch
        loss = mse_loss(call_on_full_batch(model, x), x.roll(1, -1))
        loss.backward()
        norm = optimizer.step()
        losses.append(loss.item())
    if grid.rank == 0:
        axes = {axis: size for axis, size in grid.degrees.items() if size > 1}
        print(f"grid {axes or 'of one rank'}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        print(f"gradient norm of the last step: {norm.item():.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--col", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    asked = parser.parse_args()
    main(build_grid(vars(asked), device="cpu")[0])
