"""A decoder: plain PyTorch, runs on one device as is, imports torch only.

What makes it parallel is two inert tables: `dims` names the dims of each layer's weights, `sizes`
counts their units. `parallelize` reads both and swaps the layers; the code below does not change.
On a grid

    residual stream       [b, s/row, d/col]
    heads, hidden, logits [b/col, s, n/row]   or   [b, s, n/(row·col)]

Shapes: b samples, s tokens, d embed, h heads, g kv heads, k head dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.config import DecoderConfig
from ranvier.models.document_attention import (
    Documents,
    can_use_flash_kernel,
    causal_attention,
    document_attention,
    document_lengths,
    normalize_documents,
)
from ranvier.models.feed_forward import (
    GATED_FUNCTIONS,
    FusedLinear,
    GatedMLP,
    UngatedMLP,
    apply_with_adapter,
)
from ranvier.models.moe import MoELayer
from ranvier.models.rope import RotaryEmbedding, apply_rotary


class LMHead(nn.Linear):
    """Logits over the vocabulary, or the sum of the token losses."""

    def __init__(self, embed: int, vocab: int, bias: bool = False, cap: float = 0.0) -> None:
        super().__init__(embed, vocab, bias=bias)
        self.cap = cap
        """Soft cap: logits are cap · tanh(logits / cap); 0 disables it."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """x: `[b, s, d]`, targets: `[b, s]`."""
        logits = super().forward(x)
        if self.cap > 0.0:
            logits = torch.tanh(logits / self.cap) * self.cap
        if targets is None:
            return logits
        return cross_entropy(logits, targets)


class CrossEntropy(nn.Module):
    """Sum over the tokens with a target (not -100) of their negative log-likelihood."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: `[b, s, v]`, targets: `[b, s]`."""
        return cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the token losses; logits: `[b, s, v]`, targets: `[b, s]`."""
    logits = logits.flatten(0, 1)
    # As on the grid: log-sum-exp over the vocabulary needs fp32.
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


class OffsetRMSNorm(nn.RMSNorm):
    """y = (offset + w) · x / sqrt(mean(x²) + eps); w starts at 0 for an offset of 1."""

    def __init__(self, size: int, eps: float | None = None, shift: float = 1.0) -> None:
        super().__init__(size, eps=eps)
        self.weight_offset = shift
        nn.init.constant_(self.weight, 1.0 - shift)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[.., d]`."""
        if x.dtype in (torch.bfloat16, torch.float16):
            wide = x.float()
        else:
            wide = x
        weight = self.weight_offset + self.weight.to(wide.dtype)
        return F.rms_norm(wide, self.normalized_shape, weight, self.eps).to(x.dtype)


class AttentionCore(nn.Module):
    """Rotary position embedding and causal attention, inside documents if they are given."""

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = RotaryEmbedding(config) if config.position_embedding == "rope" else None
        self.window = config.window_of_layer(layer)
        self.cap = config.attn_logit_softcap
        scale = config.query_pre_attn_scalar
        if scale > 0.0:
            self.scale = (config.head_dim / scale) ** 0.5
        else:
            self.scale = 1.0
        """Factor of queries: attention divides by sqrt(head_dim), which this replaces by
        sqrt(attention_scale)."""
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        """Attention over whole samples; replaced by the fastest backend on the device."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Documents | Tensor | None,
    ) -> Tensor:
        """q: `[b, s, h, k]`; k, v: `[b, s, g, k]`; y: `[b, s, h·k]`.

        angles: output of `RotaryEmbedding`, or positions `[b, s]`; documents also as ids `[b, s]`.
        """
        if self.rotary is not None:
            if angles is None:
                angles = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
            # Integers are positions. The decoder computes angles once for all layers; a core that
            # is called alone (as in tests) computes its own.
            if not angles.is_floating_point():
                angles = self.rotary(angles, q.dtype)
            q = apply_rotary(q, angles)
            k = apply_rotary(k, angles)
        if self.scale != 1.0:
            q = q * self.scale
        if isinstance(documents, Tensor):
            documents = Documents.from_ids(documents)
        # A window that covers the whole sequence is plain causal attention, which has faster
        # kernels.
        if self.window >= q.shape[1]:
            window = 0
        else:
            window = self.window
        # The varlen kernel supports windows; SDPA would need a mask of all scores.
        if documents is None and window and can_use_flash_kernel(q, self.cap):
            documents = Documents.one_per_sample(q.shape[0], q.shape[1], q.device)
        if documents is None:
            if not window and self.cap == 0.0:
                return self.attend(q, k, v).flatten(2)
            return causal_attention(q, k, v, window, self.cap).flatten(2)
        flat, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # (b·s, h, k)
        y = document_attention(flat, keys, values, documents, window, self.cap)
        return y.view(q.shape).flatten(2)


class Attention(nn.Module):
    """Multi-head attention with grouped kv heads."""

    dims = {
        "qkv.q": ("heads", "embed"),
        "qkv.k": ("kv_heads", "embed"),
        "qkv.v": ("kv_heads", "embed"),
        "q_norm": ("head_dim",),
        "k_norm": ("head_dim",),
        "core": ("heads",),
        "o": ("embed", "heads"),
    }

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        d = config.embed
        k = config.head_dim
        bias = config.has_bias("qkv")
        self.head_dim = k
        self.norms_all_heads = config.qk_norm == "full"
        self.qkv = FusedLinear(
            {
                "q": nn.Linear(d, config.heads * k, bias=bias),
                "k": nn.Linear(d, config.kv_heads * k, bias=bias),
                "v": nn.Linear(d, config.kv_heads * k, bias=bias),
            }
        )
        if self.norms_all_heads:
            widths = (config.heads * k, config.kv_heads * k)
        else:
            widths = (k, k)
        normed = config.qk_norm != "none"
        self.q_norm, self.k_norm = (
            build_rms_norm(config, width) if normed else nn.Identity() for width in widths
        )
        if self.norms_all_heads:
            self.dims = self.dims | {"q_norm": ("heads",), "k_norm": ("kv_heads",)}
        self.core = AttentionCore(config, layer)
        self.o = nn.Linear(config.heads * k, d, bias=config.has_bias("o"))

    def forward(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        # Norms over all heads come before heads are split, norms per head after.
        q, k, v = apply_with_adapter(self, "qkv", x)
        if self.norms_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # (b, s, h, k)
        if not self.norms_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out: Tensor = apply_with_adapter(self, "o", self.core(q, k, v, angles, documents))
        return out


def build_rms_norm(config: DecoderConfig, size: int) -> nn.Module:
    """An RMSNorm over `size` elements."""
    if config.norm_weight_offset != 0.0:
        return OffsetRMSNorm(size, config.norm_eps, config.norm_weight_offset)
    return nn.RMSNorm(size, eps=config.norm_eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    """A norm of the residual stream."""
    if config.norm == "rms":
        return build_rms_norm(config, config.embed)
    return nn.LayerNorm(config.embed, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or with norms on the outputs, or both."""

    dims: dict[str, tuple[str, ...]] = {
        "norm1": ("embed",),
        "after1": ("embed",),
        "dropout1": ("embed",),
        "norm2": ("embed",),
        "after2": ("embed",),
        "dropout2": ("embed",),
    }

    def __init__(self, config: DecoderConfig, layer: int = 0) -> None:
        super().__init__()
        before = config.norm_position != "post"
        after = config.norm_position != "pre"
        if before:
            self.norm1 = build_norm(config)
        else:
            self.norm1 = nn.Identity()
        self.attention = Attention(config, layer)
        if after:
            self.after1 = build_norm(config)
        else:
            self.after1 = nn.Identity()
        if before:
            self.norm2 = build_norm(config)
        else:
            self.norm2 = nn.Identity()
        if config.has_experts(layer):
            self.mlp: nn.Module = MoELayer(config)
            # On the instance: the class attribute is shared with the dense blocks.
            self.dims = self.dims | {"mlp": ("expert", "mlp", "embed")}
        else:
            self.mlp = (GatedMLP if config.activation in GATED_FUNCTIONS else UngatedMLP)(config)
        if after:
            self.after2 = build_norm(config)
        else:
            self.after2 = nn.Identity()
        self.dropout1, self.dropout2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        x, more = self.forward_without_add(x, angles, documents)
        return x + more

    def forward_without_add(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and what the MLP adds to it."""
        x, y = self.forward_attention(x, angles, documents)
        return x, self.mlp_to_residual(self.mlp(y))

    def forward_attention(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and the input of the MLP."""
        y = self.after1(self.attention(self.norm1(x), angles, documents))
        x = x + self.dropout1(y)
        return x, self.norm2(x)

    def mlp_to_residual(self, y: Tensor) -> Tensor:
        """What an output of the MLP adds to the residual stream."""
        out: Tensor = self.dropout2(self.after2(y))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, head, loss."""

    returns_head_loss = True
    """`forward` runs the blocks in sequence and returns the loss of its head as it is."""
    dims = {
        "embed": ("vocab", "embed"),
        "position": ("position", "embed"),
        "dropout": ("embed",),
        "norm": ("embed",),
        "head": ("vocab", "embed"),
    }

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.sizes = config.dim_units
        self.embed = nn.Embedding(config.vocab, config.embed)
        learned = config.position_embedding == "learned"
        self.position = nn.Embedding(config.max_seq, config.embed) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = build_norm(config)
        self.rotary = RotaryEmbedding(config) if config.position_embedding == "rope" else None
        self.head = LMHead(config.embed, config.vocab, cap=config.final_logit_softcap)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        # GPT-2's scaling of layers that add to the residual stream: it has 2 · layers additions.
        out = config.init_std / (2 * config.layers) ** 0.5
        self.aux_loss: Tensor | None = None
        """Part of the last loss that MoE layers have added."""
        self.init: dict[str, float | tuple[float, float]] = {}
        if config.experts:
            # Experts are parameters of the MoE layer itself, not a layer's `weight`, so they are
            # matched by their own name and given as (mean, std).
            self.init[".mlp.down"] = (0.0, out)
            self.init[".mlp.router"] = config.init_std / config.router_logit_scale
        self.init |= {".o": out, ".down": out, "": config.init_std}
        """Standard deviation of initial weights by suffix of the layer's name, first match."""

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The serial MoE layers, in order; none on a grid: parallel layers handle their losses."""
        if not self.config.experts:
            # Iterating over all modules takes 2 ms per step.
            return []
        return [one for one in self.modules() if isinstance(one, MoELayer)]

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Names of the layers that run together, in order: embedding, each block, norm and head."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("embed", "position", "dropout"), *blocks, ("norm", "head")]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | Tensor | None = None,
    ) -> Tensor:
        """Logits `[b, s, v]`, or with targets the sum of the token losses. All inputs: `[b, s]`.

        documents: attention stays inside equal ids (or `Documents`); positions: default 0, 1, 2,
        ...
        """
        everything = slice(0, len(self.blocks) + 2)
        return self.segment(None, everything, tokens, targets, positions, documents)

    def segment(
        self,
        x: Tensor | None,
        parts: slice,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | Tensor | None = None,
        *,
        scored: bool = True,
    ) -> Tensor:
        """Run some of the parts; x: output of those before them, `[b, s, d]`. Else as `forward`.

        x with the first part: the embedded tokens. scored=False: return the input of the head.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        if parts.start == 0:
            x = self.embed(tokens) if x is None else x  # (b, s, d)
            if self.config.embed_scale != 1.0:
                # The factor is rounded to x's dtype first, as Gemma does.
                x = x * x.new_full((), self.config.embed_scale)
            if self.position is not None:
                x = x + self.position(positions)
            x = self.dropout(x)
        assert isinstance(x, Tensor), type(x)
        documents = normalize_documents(documents)
        # Rotary angles are computed once for all layers.
        angles = None
        if self.rotary is not None:
            if self.config.rope == "longrope":
                # LongRoPE chooses its factors by the length of each document.
                long = document_lengths(documents, positions.device)
            else:
                long = None
            angles = self.rotary(positions, x.dtype, long)
        # Part 0 is the embedding, part i the block i - 1, the last part norm and head.
        for block in self.blocks[max(parts.start - 1, 0) : parts.stop - 1]:
            x = block(x, angles, documents)
        if parts.stop > len(self.blocks) + 1:
            x = self.norm(x)
            x = self.head(x, targets) if scored else x
            if targets is not None and scored:
                x = self._add_aux_loss(x)
        assert x is not None
        return x

    def _add_aux_loss(self, loss: Tensor) -> Tensor:
        """The loss plus the auxiliary losses of the MoE layers."""
        extra = loss.new_zeros(())
        for mixture in self.moe_layers:
            if mixture.aux_loss is not None:
                extra = extra + mixture.aux_loss.to(loss.dtype)
                # Consumed: a second loss must not add it once more, nor keep its graph alive.
                mixture.aux_loss = None
        self.aux_loss = extra.detach()
        if extra.requires_grad:
            return loss + extra
        return loss
