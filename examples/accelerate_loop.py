"""Run a Hugging Face Accelerate loop on a grid: only the Accelerator changes.

python examples/accelerate_loop.py
torchrun --nproc-per-node 4 examples/accelerate_loop.py --row 2 --depth 2
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader


def texts() -> list[dict[str, torch.Tensor]]:
    """Returns samples as a tokenizer would."""
    rows = [torch.arange(start, start + 16) for start in range(40, 72)]
    return [{"input_ids": row, "labels": row} for row in rows]


def unmodified() -> Any:
    """Returns a tiny Llama from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads))


def main(accelerator: Any) -> list[float]:
    """Trains with a loop that is not aware of the grid; returns the losses."""
    model = unmodified()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 16)
    batches: Any = DataLoader(texts(), batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    losses = []
    for _ in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    if accelerator.is_main_process:
        print(f"{accelerator.num_processes} process(es): loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    from ranvier import Accelerator

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", type=int, default=1)
    parser.add_argument("--depth", type=int, default=1)
    asked = parser.parse_args()
    main(Accelerator({"row": asked.row, "depth": asked.depth}, device="cpu"))
