"""Small models that the generic tests run on every grid."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ranvier.models.config import GEMMA2, GPT2, AdapterConfig, DecoderConfig
from ranvier.models.decoder import Decoder
from ranvier.models.lora import attach_adapters, named_adapters


def _small_decoder(**changes: object) -> Callable[[], nn.Module]:
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


def _small_decoder_with_lora(lora: AdapterConfig, **changes: object) -> Callable[[], nn.Module]:
    """Returns a model with adapters whose parameters differ from their initial values.

    With B = 0 the output of an adapter would be zero, and tests would not find errors in it.
    """

    def make() -> nn.Module:
        model = _small_decoder(**changes)()
        assert isinstance(model, Decoder)
        attach_adapters(model, lora)
        for _, adapter, layer in named_adapters(model):
            adapter.init_magnitudes(layer)
            for weight in (*adapter.b.parameters(), *adapter.m.parameters()):
                nn.init.normal_(weight, mean=float(weight.detach().mean()), std=0.2)
        return model

    return make


EXAMPLES: dict[str, Callable[[], nn.Module]] = {
    "llama": _small_decoder(),
    "gpt2": _small_decoder(kv_heads=8, **GPT2),
    "qwen3": _small_decoder(qk_norm="per_head", tie_embeddings=True, vocab=32),
    "biased": _small_decoder(bias=True, activation="gelu", norm="layer"),
    "olmo2": _small_decoder(qk_norm="full", norm_position="post"),
    "gemma2": _small_decoder(tie_embeddings=True, vocab=32, **GEMMA2),
    "lora": _small_decoder_with_lora(AdapterConfig(rank=3, target_modules=("heads", "v", "mlp"))),
    "dora": _small_decoder_with_lora(AdapterConfig(rank=3, dora=True, shared=True), bias=True),
}
