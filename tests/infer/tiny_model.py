"""A tiny model with random weights in Hugging Face format, whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from infer.fake_server import write_model
from ranvier.data.tokenizer import ByteTokenizer

EMBED = 32
MLP = 64
HEADS = 4
LAYERS = 2
POSITIONS = 512


def write_tiny_model(folder: Path, *, seed: int = 0, positions: int = POSITIONS) -> Path:
    """Writes weights, config, tokenizer and chat template of a llama."""
    write_model(folder)
    vocab = ByteTokenizer().vocab_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": EMBED,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": ByteTokenizer().eos_token_id,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    half = EMBED // 2
    tensors = {
        "model.embed_tokens.weight": draw(vocab, EMBED),
        "model.norm.weight": torch.ones(EMBED),
        "lm_head.weight": draw(vocab, EMBED),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(EMBED),
            f"{layer}.post_attention_layernorm.weight": torch.ones(EMBED),
            f"{layer}.self_attn.q_proj.weight": draw(EMBED, EMBED),
            f"{layer}.self_attn.k_proj.weight": draw(half, EMBED),
            f"{layer}.self_attn.v_proj.weight": draw(half, EMBED),
            f"{layer}.self_attn.o_proj.weight": draw(EMBED, EMBED),
            f"{layer}.mlp.gate_proj.weight": draw(MLP, EMBED),
            f"{layer}.mlp.up_proj.weight": draw(MLP, EMBED),
            f"{layer}.mlp.down_proj.weight": draw(EMBED, MLP),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
