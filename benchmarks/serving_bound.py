"""The least time of a serving step, from the bytes that it reads and the FLOPs that it computes.

A step with D decoding sequences that have c tokens on average, and prompts of P_1, P_2, ... tokens
without cached ones, P in all, takes at least

    linear     max(W / B, (2 · body · (D + P) + 2 · head · samples) / F)
    attention  D · c · kv / B + Σ 4 · layers · heads · head_dim · P_i · P_i / 2 / F_a

W: bytes of the weights of all matmuls (the input embedding is not read, unless it is also the
head); body, head: their numbers of weights; kv = 2 · kv_heads · head_dim · bytes · layers: bytes of
the keys and values of a token; B: bandwidth of a copy, reads and writes counted; F: FLOPs per
second of a large matmul; F_a: of the flash attention kernel. All three are measured in the same
run. The bound of a workload is the sum over its steps: all prompts in one step, which samples a
token of each request, and then a step for each further token, with the requests that still run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ranvier.models import DecoderConfig

ITEMSIZE = 2
"""Bytes of a bf16 number."""


@dataclass(frozen=True)
class Rates:
    """What the device can do, measured in the same run."""

    bandwidth: float
    """Bytes read and written per second by a copy."""
    matmul: float
    """FLOPs per second of a large matmul."""
    attention: float
    """FLOPs per second of causal flash attention; masked products do not count."""


SPEC_RATES = Rates(bandwidth=4.3e12, matmul=710e12, attention=350e12)
"""Rates of one H200 for which the expected bounds were computed."""


@dataclass(frozen=True)
class Bound:
    """Bounds of the steps of a dense decoder with gated feed-forward layers."""

    config: DecoderConfig
    rates: Rates
    itemsize: int = ITEMSIZE

    @property
    def body_weights(self) -> int:
        """Number of weights of the matmuls of all layers."""
        config = self.config
        width = config.heads * config.head_dim
        qkv = config.embed * (width + 2 * config.kv_heads * config.head_dim)
        return config.layers * (qkv + width * config.embed + 3 * config.embed * config.mlp)

    @property
    def head_weights(self) -> int:
        """Number of weights of the head, tied or not."""
        return self.config.vocab * self.config.embed

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return self.itemsize * (self.body_weights + self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of a token, all layers."""
        config = self.config
        return 2 * config.layers * config.kv_heads * config.head_dim * self.itemsize

    def decode_seconds(self, sequences: int, tokens: float) -> float:
        """Returns the bound of a decode step. tokens: of all sequences together."""
        flops = 2 * (self.body_weights + self.head_weights) * sequences
        linear = max(self.weight_bytes / self.rates.bandwidth, flops / self.rates.matmul)
        return linear + tokens * self.kv_bytes / self.rates.bandwidth

    def prefill_seconds(self, lengths: Sequence[int]) -> float:
        """Returns the bound of a step with whole prompts, which samples one token of each."""
        config = self.config
        flops = 2 * self.body_weights * sum(lengths) + 2 * self.head_weights * len(lengths)
        linear = max(self.weight_bytes / self.rates.bandwidth, flops / self.rates.matmul)
        products = sum(length * length / 2 for length in lengths)
        width = config.heads * config.head_dim
        return linear + 4 * config.layers * width * products / self.rates.attention

    def workload_seconds(self, lengths: Sequence[tuple[int, int]]) -> float:
        """Returns the bound of requests that come at once. lengths: tokens in and out of each."""
        total = self.prefill_seconds([tokens for tokens, _ in lengths])
        for step in range(1, max(count for _, count in lengths)):
            running = [tokens + step for tokens, count in lengths if count > step]
            total += self.decode_seconds(len(running), sum(running))
        return total


def draw_lengths(count: int, low: int, high: int, seed: int = 0) -> list[tuple[int, int]]:
    """Returns uniform numbers of tokens in and out of each request."""
    rng = random.Random(seed)
    return [(rng.randint(low, high), rng.randint(low, high)) for _ in range(count)]


def draw_prompts(lengths: Sequence[int], vocab: int, seed: int) -> list[list[int]]:
    """Returns random prompts; other seeds share no prefix, so that nothing is cached."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab) for _ in range(length)] for length in lengths]


def check_anchors(sizes: dict[str, DecoderConfig]) -> list[str]:
    """Returns the expected bounds of the H200 as text; raises if this module computes others."""
    small, large = (Bound(sizes[name], SPEC_RATES) for name in ("qwen3-0.6b", "llama3-8b"))
    lengths = draw_lengths(256, 100, 1024)
    generated = sum(count for _, count in lengths)
    found = {
        "llama3-8b, batch 1": (1 / large.decode_seconds(1, 0), 286),
        "llama3-1b, batch 1": (
            1 / Bound(sizes["llama3-1b"], SPEC_RATES).decode_seconds(1, 0),
            1740,
        ),
        "llama3-8b, 64 x 2,048": (64 / large.decode_seconds(64, 64 * 2048), 8549),
        "qwen3-0.6b, 256 requests": (generated / small.workload_seconds(lengths), 35400),
        "llama3-8b, 256 requests": (generated / large.workload_seconds(lengths), 12800),
        "llama3-8b, prefill of 4 x 2,048": (8192 / large.prefill_seconds([2048] * 4), 32600 / 0.7),
    }
    lines = []
    for name, (value, expected) in found.items():
        if abs(value / expected - 1.0) > 0.02:
            raise ValueError(f"{name}: {value:,.0f} tok/s instead of {expected:,.0f}.")
        lines.append(f"{name}: {value:,.0f} tok/s (expected {expected:,.0f})")
    return lines
