"""Run a Lightning Fabric loop on a grid: only one line is new.

python examples/fabric.py                                 # one process
python examples/fabric.py --devices 4 --row 2 --col 2     # Fabric starts the other processes
torchrun --nproc-per-node 4 examples/fabric.py --devices 4 --row 2 --col 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader


def unmodified() -> Any:
    """Returns a tiny Llama from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def texts() -> list[dict[str, torch.Tensor]]:
    """Returns samples as a tokenizer would."""
    rows = [torch.arange(start, start + 16) for start in range(40, 72)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(fabric: Any) -> list[float]:
    """Trains with a loop that is not aware of the grid; returns the losses."""
    model = unmodified()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(1)
    batches: Any = DataLoader(texts(), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    loader = fabric.setup_dataloaders(batches)
    losses = []
    for _ in range(4):
        for batch in loader:
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if fabric.global_rank == 0:
        print(f"{fabric.world_size} process(es): loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    from lightning_fabric import Fabric

    from ranvier import RanvierStrategy

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--col", type=int, default=1)
    asked = parser.parse_args()
    strategy = RanvierStrategy(row=asked.row, col=asked.col)  # the new line
    fabric = Fabric(strategy=strategy, devices=asked.devices, accelerator="cpu")
    fabric.launch()
    main(fabric)
