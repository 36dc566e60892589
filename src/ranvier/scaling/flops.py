"""Training FLOPs per token of a decoder, counted as in the Gemstones suite.

Matrix products, rotary positions, causal scores (half of the square for QKᵀ), softmax, activations
and norms; backward costs twice forward, and 2.5 times for scores, which flash attention computes
again. Counting 6 N instead moves exponents: it ignores attention, and counts the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.models.config import GATED_ACTIVATIONS, GEMSTONE_HEAD_DIM, DecoderConfig, gemstone_size

GEMSTONE_VOCAB = 50304
GEMSTONE_SEQ = 2048


@dataclass(frozen=True)
class FlopShape:
    """Sizes that the FLOPs of a token depend on."""

    width: int
    depth: int
    heads: float
    kv_heads: float
    head_dim: int
    mlp: float
    gated: bool
    vocab: int
    seq: int

    @classmethod
    def from_config(cls, model: DecoderConfig, seq: int) -> FlopShape:
        """Returns the sizes of a decoder; of a mixture of experts, those that a token uses."""
        mixed = sum(map(model.has_experts, range(model.layers)))
        active = model.experts_per_token * model.expert_width + model.shared_expert_mlp
        mlp = (mixed * active + (model.layers - mixed) * model.mlp) / model.layers
        return cls(
            width=model.embed,
            depth=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            mlp=mlp,
            gated=model.activation in GATED_ACTIVATIONS,
            vocab=model.vocab,
            seq=seq,
        )

    @classmethod
    def gemstone(
        cls, width: int, depth: int, *, vocab: int = GEMSTONE_VOCAB, seq: int = GEMSTONE_SEQ
    ) -> FlopShape:
        """Returns the sizes of a model of the suite, with half a key/value head per query head.

        The suite counts so for all widths, also for an odd number of heads.
        """
        heads = width / GEMSTONE_HEAD_DIM
        return cls(
            width=width,
            depth=depth,
            heads=heads,
            kv_heads=heads / 2,
            head_dim=GEMSTONE_HEAD_DIM,
            mlp=4 * width,
            gated=True,
            vocab=vocab,
            seq=seq,
        )

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward per token."""
        size = self.head_dim * self.heads
        projections = 2 * self.width * self.head_dim * (self.heads + 2 * self.kv_heads)
        projections += 3.5 * self.head_dim * (self.heads + self.kv_heads)
        scores = 3 * self.seq * size + 3 * self.seq * self.heads
        out = 2 * self.width * size
        matrices = 3 if self.gated else 2
        mlp = 2 * matrices * self.width * self.mlp + 10 * self.mlp + 16 * self.width
        last = 7 * self.width + 2 * self.width * self.vocab
        return 3 * (self.depth * (projections + out + mlp) + last) + 3.5 * self.depth * scores


def gemstone_parameters(width: int, depth: int, vocab: int = GEMSTONE_VOCAB) -> int:
    """Returns the number of parameters of a model of the suite, norms included."""
    model = gemstone_size(f"gemstone-{width}x{depth}")
    keys_and_values = 2 * width * model.kv_heads * model.head_dim
    block = 2 * width * width + keys_and_values + 3 * width * model.mlp + 2 * width
    return depth * block + (2 * vocab + 1) * width
