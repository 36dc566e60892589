"""Models: plain PyTorch with named dims. A model is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ranvier.models.adapter import AdapterConfig, adapters_of, attach, build
from ranvier.models.decoder import Decoder, DecoderConfig

__all__ = ["EXAMPLES", "SIZES", "AdapterConfig", "Decoder", "DecoderConfig", "build"]

_GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True}
_LLAMA3 = {"kv_heads": 8, "vocab": 128256, "max_seq": 8192, "rope_theta": 500000.0}
_QWEN3 = {"kv_heads": 8, "head_dim": 128, "vocab": 151936, "max_seq": 40960} | {
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
    "qk_norm": True,
}
_GEMMA2 = {"norm_shift": 1.0, "norms": "both", "activation": "geglu", "embed_scale": 4.0} | {
    "attention_cap": 5.0,
    "logit_cap": 3.0,
    "attention_scale": 8.0,
    "window": 3,
    "window_layers": (0,),
}


def _size(layers: int, embed: int, heads: int, mlp: int, **rest: object) -> DecoderConfig:
    shape = {"layers": layers, "embed": embed, "heads": heads, "mlp": mlp}
    return DecoderConfig(**{"kv_heads": heads, "head_dim": embed // heads, **shape, **rest})  # type: ignore[arg-type]


SIZES: dict[str, DecoderConfig] = {
    "tiny": _size(4, 192, 8, 512, kv_heads=2, vocab=4096),
    "gpt2": _size(12, 768, 12, 3072, vocab=50257, max_seq=1024, **_GPT2),
    "llama3-1b": _size(16, 2048, 32, 8192, tied=True, rope_scale=32.0, **_LLAMA3),
    "llama3-8b": _size(32, 4096, 32, 14336, **_LLAMA3),
    "llama3-70b": _size(80, 8192, 64, 28672, **_LLAMA3),
    "llama3-405b": _size(126, 16384, 128, 53248, rope_scale=8.0, **_LLAMA3),
    "qwen3-0.6b": _size(28, 1024, 16, 3072, tied=True, **_QWEN3),
    "qwen3-8b": _size(36, 4096, 32, 12288, **_QWEN3),
}


def _small(**changes: object) -> Callable[[], nn.Module]:
    shape = {
        "layers": 2,
        "embed": 16,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 4,
        "mlp": 24,
        "vocab": 29,
    }
    return lambda: Decoder(DecoderConfig(**{"max_seq": 16, **shape, **changes}))  # type: ignore[arg-type]


def _adapted(lora: AdapterConfig, **changes: object) -> Callable[[], nn.Module]:
    """A model with adapters that add something: nothing of theirs is at its initial value."""

    def make() -> nn.Module:
        model = _small(**changes)()
        assert isinstance(model, Decoder)
        attach(model, lora)
        for _, adapter, layer in adapters_of(model):
            adapter.measure(layer)
            for weight in (*adapter.b.parameters(), *adapter.m.parameters()):
                nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.2)
        return model

    return make


EXAMPLES: dict[str, Callable[[], nn.Module]] = {
    "llama": _small(),
    "gpt2": _small(kv_heads=8, **_GPT2),
    "qwen3": _small(qk_norm=True, tied=True, vocab=32),
    "biased": _small(bias=True, activation="gelu", norm="layer"),
    "olmo2": _small(qk_whole=True, norms="after"),
    "gemma2": _small(tied=True, vocab=32, **_GEMMA2),
    "lora": _adapted(AdapterConfig(rank=3, on=("heads", "v", "mlp"))),
    "dora": _adapted(AdapterConfig(rank=3, dora=True, shared=True), bias=True),
}
"""Small models with which the generic tests try every grid.

A new model is one file and one line here.
"""
