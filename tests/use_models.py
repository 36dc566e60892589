"""Small published models, and what transformers says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB, END = 29, 3
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """Grouped-query attention and a head of its own."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).to(dtype).eval()


def gpt2(dtype: torch.dtype = torch.float64, **changes: Any) -> GPT2LMHeadModel:
    """Learned positions, tied; its norms compute in float64, too."""
    torch.manual_seed(3)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shape = {"n_embd": 16, "n_head": 4, "n_inner": 24, "n_layer": 2, "n_positions": 64}
    rest = {"vocab_size": VOCAB, "initializer_range": 0.5, "bos_token_id": 1, "eos_token_id": END}
    config = GPT2Config(**{**drops, **shape, **rest, "pad_token_id": 0, **changes})
    return GPT2LMHeadModel(config).to(dtype).eval()


def stored(model: Any, folder: Path) -> Path:
    """Where it was saved."""
    model.save_pretrained(folder)
    return folder


def tokens(samples: int = 4, seq: int = 9, seed: int = 5) -> Tensor:
    """Random tokens, none of which ends a text."""
    found = torch.randint(8, VOCAB, (samples, seq), generator=torch.Generator().manual_seed(seed))
    return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of transformers, which rounds logits to float32 before, in their own type."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
