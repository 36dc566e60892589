"""Tiny published models with PEFT's adapters, and the same training by PEFT and by us.

Runs inside workers but for PEFT's own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier.checkpoint.hf.peft_read import read_adapter
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models import AdapterConfig, DecoderConfig, build_decoder
from ranvier.models.hf.registry import find_family
from ranvier.models.lora import named_adapters
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward
from states import assemble

VOCAB, STEPS, LR = 32, 10, 3e-3
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCAB} | {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def published(kind: str) -> Any:
    """A tiny model of a family, the same on every call; biases and norms have values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SHAPE))
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, mean=1.0 if param.dim() == 1 else 0.0, std=0.2)
    return model


def converted(model: Any) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Our config and weights of a published model."""
    theirs = model.config.to_dict()
    family = find_family(theirs)
    config = family.config_from_hf(theirs)
    state, found = model.state_dict(), {}
    for entry in family.tensor_mappings(config):
        whole = state[entry.name].T if entry.is_transposed else state[entry.name]
        rows = [_rows(config, name) for name in entry.our_names]
        parts = whole.split(rows) if len(rows) > 1 else [whole]
        found |= {n: x.detach().clone() for n, x in zip(entry.our_names, parts, strict=True)}
    return config, found


def _rows(config: DecoderConfig, name: str) -> int:
    with torch.device("meta"):
        return int(build_decoder(config, AdapterConfig()).get_parameter(name).shape[0])


def batch(samples: int = 8, seq: int = 8) -> Batch:
    drawn = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCAB, (samples, seq + 1), generator=drawn)
    targets = tokens[:, 1:].contiguous()
    return Batch(tokens[:, :-1], targets, samples=torch.arange(samples))


def trained_by_peft(model: Any) -> list[float]:
    """Losses of PEFT's own training."""
    given, losses = batch(), []
    weights = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(given.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.targets.flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def model_on(
    grid: Grid,
    config: DecoderConfig,
    lora: AdapterConfig,
    base: Mapping[str, Tensor],
    start: str,
    inner: str,
) -> Any:
    """Our model with the weights of the base and the adapter of a directory."""
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)  # type: ignore[arg-type]
    model = parallelize(build_decoder(config, lora), grid, plan)
    parallel = model.parallel
    with torch.no_grad():
        for name, weight in parallel.weights.items():
            if name in base:
                weight.param.copy_(weight.shard.slice_from(base[name]))
    for _, adapter, layer in named_adapters(model):
        adapter.init_magnitudes(layer)
    mine = {n: (w.param.data, w.shard) for n, w in parallel.weights.items() if ".adapters." in n}
    if start:
        read_adapter(Path(start), config).fill_state(mine)
    parallel.bucket_scheduler.begin_step("")
    return model


def train(
    grid: Grid,
    config: DecoderConfig,
    lora: AdapterConfig,
    base: Mapping[str, Tensor],
    start: str,
    inner: str = "samples",
) -> tuple[list[float], Any]:
    """Losses of our training, and my part of all weights after it."""
    model = model_on(grid, config, lora, base, start, inner)
    parallel = model.parallel
    optimizer = Optimizer(
        parallel.bucket_scheduler, lr=LR, betas=(0.9, 0.95), eps=1e-8, decay=0.0, clip=0.0
    )
    given = batch()
    share = 8 // grid.axis("data", "expert", "depth").size
    losses = []
    for _ in range(STEPS):
        losses.append(forward_backward(model, given.split_micro_batches(grid, share)).item())
        optimizer.step()
    return losses, {n: (x.clone(), place) for n, (x, place) in parallel.sharded_state().items()}


def logits(config: DecoderConfig, lora: AdapterConfig, weights: Mapping[str, Tensor]) -> Tensor:
    """Of our plain model with whole weights."""
    model = build_decoder(config, lora)
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({n: x for n, x in weights.items() if n in names}, strict=False)
    with torch.no_grad():
        return model.eval()(batch().tokens)


def whole(results: list[Any]) -> dict[str, Tensor]:
    """Whole weights from the parts of all ranks."""
    return assemble(state for _, state in results)
