"""Training loops as people write them for one process; nothing in them knows of a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ranvier.models import Decoder, DecoderConfig
from use_models import VOCAB, gpt2, llama, loss_of, tokens

STEPS, BATCH, SEQ = 10, 8, 9
SMALL = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24}


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of different lengths, filled up."""

    def __init__(self, count: int = 24, *, masked: bool = True) -> None:
        self.ids, self.masked = tokens(count, SEQ, seed=11), masked

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """A text; every third one is shorter."""
        ids, mask = self.ids[index], torch.ones(SEQ, dtype=torch.int64)
        if self.masked and index % 3 == 0:
            mask[SEQ - 2 :] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(mask == 0, -100),
        }


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same texts, one after the other."""

    def __iter__(self) -> Any:
        texts = Texts()
        return (texts[i] for i in range(len(texts)))


def loader_of(kind: str = "shuffled") -> Any:
    """Batches of the whole loop; shuffled: in another order each time."""
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH)
    return DataLoader(Texts(), batch_size=BATCH, shuffle=kind == "shuffled")


def model_of(kind: str, rank: int = 0) -> nn.Module:
    """A model; other ranks than the first would begin elsewhere."""
    if kind == "decoder":
        torch.manual_seed(4 + rank)
        return Decoder(DecoderConfig(**SMALL, vocab=VOCAB)).double()
    model: Any = gpt2() if kind == "gpt2" else llama(torch.float32, initializer_range=0.1)
    if kind == "gpt2":  # theirs rounds to float32
        model.loss_function = lambda logits, labels, *_, **__: loss_of(logits, labels)
    if rank:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.1 * rank)
    return model.train()


def adamw_of(model: nn.Module, *, grouped: bool = False) -> torch.optim.AdamW:
    """With decay of all weights, or of all but vectors, with a learning rate of their own."""
    if not grouped:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    vectors = [p for p in model.parameters() if p.dim() == 1]
    rest = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=0.0,
    )


def fabric_loop(fabric: Any, kind: str, *, folder: str = "", resume: str = "") -> dict[str, Any]:
    """A loop of Fabric: clipped, with a scheduler, saved in the middle."""
    model = model_of(kind, fabric.global_rank)
    optimizer = adamw_of(model, grouped=kind == "gpt2")
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    torch.manual_seed(20 + 7 * fabric.global_rank)
    loader = fabric.setup_dataloaders(loader_of("stream" if kind == "decoder" else "shuffled"))
    state: dict[str, Any] = {"model": model, "step": 0, "scheduler": scheduler}
    state["optimizer"] = optimizer
    losses, norms = [], []
    if resume:
        assert fabric.load(resume, state) == {}
    while state["step"] < STEPS:
        for batch in loader:
            if state["step"] == STEPS:
                break
            loss = loss_in(model, batch, kind)
            fabric.backward(loss)
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(fabric.all_reduce(loss.detach())))
            state["step"] += 1
            if folder and state["step"] == 6:
                fabric.save(folder, state)
    return {"losses": losses, "norms": norms, "model": model}


def loss_in(model: Any, batch: dict[str, Tensor], kind: str) -> Tensor:
    """Labels for a model of transformers; a sum that the loop divides itself for ours."""
    if kind != "decoder":
        loss: Tensor = model(**batch).loss
        return loss
    ids = batch["input_ids"]
    summed: Tensor = model(ids[:, :-1], ids[:, 1:])
    return summed / ids[:, 1:].numel()


def accelerate_loop(accelerator: Any, kind: str, *, folder: str = "") -> dict[str, Any]:
    """A loop of Accelerate: two batches an update, loss outside of the model."""
    model = model_of(kind, accelerator.process_index)
    optimizer = adamw_of(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    torch.manual_seed(20)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader_of("in order"), scheduler
    )
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["input_ids"]).logits
                loss = nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
                )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach()).mean()))
    model.eval()
    with torch.no_grad():
        whole = accelerator.gather(model(batch["input_ids"]).logits)
    if folder:
        accelerator.save_state(Path(folder))
    return {"losses": losses, "logits": whole, "rate": optimizer.param_groups[0]["lr"]}
