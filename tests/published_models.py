"""Tiny random models as `transformers` makes and saves them, and what ours computes with them."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equivalence import gradients
from pool import device_of
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.comm import collectives
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.infer.load import build_empty_model
from ranvier.infer.logprobs import pad_vocab_shard
from ranvier.models import Decoder
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.pipeline.step import MicroBatch
from ranvier.sharding import ShardedStateDict
from ranvier.train.step import forward_backward

VOCAB, SEQ, SAMPLES = 61, 20, 4
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0} | {
    "original_max_position_embeddings": 16
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.1, 1.5],
    "long_factor": [1.3, 4.0],
    "factor": 8.0,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
"""Without the balancing loss, which is not part of what `computed` derives."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", BASE),
    "llama tied, biases": (
        "llama",
        BASE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3.1": ("llama", BASE | {"rope_parameters": LLAMA3, "head_dim": 12}),
    "llama linear": (
        "llama",
        BASE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 3.0}},
    ),
    "llama yarn": ("llama", BASE | {"rope_parameters": YARN, "hidden_act": "gelu"}),
    "mistral": ("mistral", BASE | {"sliding_window": None}),
    "mistral window": ("mistral", BASE | {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", BASE),
    "qwen2 window, tied": (
        "qwen2",
        BASE
        | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
        | {"tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", BASE | {"head_dim": 12}),
    "qwen3 tied, biases": (
        "qwen3",
        BASE | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmo2": ("olmo2", BASE),
    "olmo2 tied": ("olmo2", BASE | {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": (
        "gemma2",
        BASE | {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20},
    ),
    "gemma2 untied": (
        "gemma2",
        BASE
        | {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": 2.0}
        | {"tie_word_embeddings": False},
    ),
    "phi3": ("phi3", BASE | {"sliding_window": 7}),
    "phi3 long, tied": (
        "phi3",
        BASE
        | {"original_max_position_embeddings": 8, "rope_parameters": LONG}
        | {"tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", BASE | MIXED),
    "mixtral tied, window": (
        "mixtral",
        BASE
        | MIXED
        | {"num_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5, "head_dim": 12}
        | {"tie_word_embeddings": True},
    ),
    "qwen3_moe": ("qwen3_moe", BASE | MIXED | {"moe_intermediate_size": 24, "head_dim": 12}),
    "qwen3_moe mixed": (
        "qwen3_moe",
        BASE
        | MIXED
        | {"mlp_only_layers": [0], "norm_topk_prob": True, "moe_intermediate_size": 16}
        | {"attention_bias": True, "tie_word_embeddings": True},
    ),
    "olmoe": ("olmoe", BASE | MIXED),
    "olmoe norm": ("olmoe", BASE | MIXED | {"norm_topk_prob": True, "attention_bias": True}),
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": (
        "gpt2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 40},
    ),
}


def tokens() -> Tensor:
    """The same tokens for all."""
    return torch.randint(0, VOCAB, (SAMPLES, SEQ), generator=torch.Generator().manual_seed(3))


def theirs(kind: str, config: Mapping[str, Any]) -> Any:
    """A model of `transformers` with random weights, none of which is trivial."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet()
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, **json.loads(json.dumps(config)))
    made._experts_implementation = "eager"  # their grouped products do not take every shape
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * (0.15 if param.dim() > 1 else 0.4))
    return model.eval()


def quiet() -> None:
    """Words on special tokens outside of a tiny vocabulary are no news."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save as users of `transformers` do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


def computed(model: Any) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits, loss and gradients of a model of `transformers`."""
    x = tokens()
    logits = model(x, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), loss.item(), grads


def batch() -> Batch:
    """The same as a batch of ours."""
    x = tokens()
    targets = torch.cat([x[:, 1:], torch.full((SAMPLES, 1), -100)], 1)
    return Batch(x, targets, samples=torch.arange(SAMPLES))


def on_grid(
    grid: Grid, folders: Mapping[str, Path], inner: str = "samples"
) -> dict[str, tuple[Tensor, float, ShardedStateDict]]:
    """Logits, loss and gradients of published models on a grid, read by slices."""
    found = {}
    for name, folder in folders.items():
        model = loaded(grid, folder, inner)
        parallel: ParallelModel = model.parallel  # type: ignore[assignment]
        logits = whole_logits(parallel)
        share = SAMPLES // grid.axis("data", "expert", "depth").size
        least = grid.degrees["col"] if inner == "samples" else 1  # col divides samples
        micro = max(share // 2, least) if grid.degrees["pipe"] > 1 else share
        model.train()
        loss = forward_backward(model, batch().split_micro_batches(grid, micro)).item()
        found[name] = logits, loss, gradients(parallel)
        parallel.bucket_scheduler.begin_step("")
    return found


def loaded(
    grid: Grid, folder: Path, inner: Any = "samples", dtype: torch.dtype = torch.float32
) -> Decoder:
    """A published model on a grid."""
    plan = Plan(col_splits=inner, stage_time_jitter=0.0).with_degrees(grid.degrees)
    with PublishedModel.open(folder) as source:
        model = build_empty_model(source.config, grid, device_of(grid), plan=plan, dtype=dtype)
        parallel: ParallelModel = model.parallel  # type: ignore[assignment]
        source.fill_state(parallel.sharded_state())
    parallel.bucket_scheduler.load_count += 1
    parallel.bucket_scheduler.begin_step("")
    return model.eval()


@torch.no_grad()
def whole_logits(parallel: ParallelModel) -> Tensor:
    """Logits of all tokens `[b, s, v]`, on all ranks."""
    grid, region = parallel.grid, parallel.table.activation_rule("vocab")
    parallel.bucket_scheduler.begin_step("logits")
    found = parallel.pipeline.executor.run_forward([MicroBatch({"tokens": tokens()})])
    if found:
        y = collectives.all_gather(
            pad_vocab_shard(found[0], parallel), grid.axis(*region["vocab"]), -1
        ).wait()
        col = grid.axis(*(axis for axis in region["batch"] if axis == "col"))
        y = collectives.all_gather(y, col, 0).wait()[..., :VOCAB].contiguous()
    else:
        y = torch.zeros(SAMPLES, SEQ, VOCAB)
    pipe = grid.axis("pipe")
    return collectives.broadcast(y, pipe, index=pipe.size - 1).wait()
