"""A decoder: plain PyTorch, runs on one device as it stands, imports torch only.

What makes it parallel is the inert tables: `dims` names the dims of each layer's weights, `sizes`
counts their units. `parallelize` reads both and swaps the layers; the code below does not change.
On a grid

    residual stream       [b, s/row, d/col]
    heads, hidden, logits [b/col, s, n/row]   or   [b, s, n/(row·col)]

Shapes: b samples, s tokens, d embed, h heads, g kv heads, k head dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.documents import Documents, causal, inside, several


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a decoder."""

    layers: int = 2
    """Blocks."""
    embed: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key and value heads; fewer than heads is grouped-query attention."""
    head_dim: int = 16
    """Elements of a head."""
    mlp: int = 160
    """Width of the hidden layer of the MLP."""
    vocab: int = 256
    """Tokens the model knows."""
    max_seq: int = 2048
    """Longest sequence (rows of learned positions)."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    positions: Literal["rope", "learned"] = "rope"
    """Rotary or learned positions."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scale: float = 1.0
    """Llama 3.1 scaling of low rotary frequencies; 1 is none."""
    qk_norm: bool = False
    """Normalise each query and key head."""
    activation: Literal["swiglu", "gelu"] = "swiglu"
    """Gated SiLU, or GELU."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    tied: bool = False
    """The head is the embedding."""
    dropout: float = 0.0
    """Dropped share of embeddings and of what blocks add to the residual stream."""
    init_std: float = 0.02
    """Deviation of initial weights; layers that leave a block divide it by sqrt(2 · layers)."""


class Siblings(nn.ModuleDict):
    """Layers that read the same value, and their outputs in order."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Apply each to x."""
        return tuple(layer(x) for layer in self.values())


class Head(nn.Linear):
    """Logits over the vocabulary, or the sum of the losses of tokens."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """x: `[b, s, d]`, targets: `[b, s]`."""
        logits = super().forward(x)
        return logits if targets is None else cross_entropy(logits, targets)


class CrossEntropy(nn.Module):
    """Sum over the tokens with a target (not -100) of their negative log-likelihood."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: `[b, s, v]`, targets: `[b, s]`."""
        return cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """What CrossEntropy computes."""
    logits = logits.flatten(0, 1)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


class Rotary(nn.Module):
    """Cosines and sines of the rotary angles of positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scale = (
            config.head_dim,
            config.rope_theta,
            config.rope_scale,
        )

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """positions: `[b, s]`; cosines of a head, then sines: `[b, s, 1, 2k]`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=wide)
        frequency = self.theta ** (-steps / self.head_dim)
        if self.scale != 1.0:
            frequency = llama3_frequencies(frequency, self.scale)
        angle = positions.unsqueeze(-1).to(wide) * frequency  # (b, s, k/2)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos, sin, sin], -1).unsqueeze(2).to(dtype)


class Core(nn.Module):
    """Rotary positions and causal attention, inside documents if they are given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = Rotary(config) if config.positions == "rope" else None
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal
        """How whole samples attend; a faster way of the same may take its place."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Documents | Tensor | None,
    ) -> Tensor:
        """q: `[b, s, h, k]`; k, v: `[b, s, g, k]`; y: `[b, s, h·k]`.

        angles: what `Rotary` makes of positions `[b, s]`, or these; documents also as `[b, s]`.
        """
        if self.rotary is not None:
            if angles is None:
                angles = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
            if not angles.is_floating_point():
                angles = self.rotary(angles, q.dtype)
            q, k = rotate(q, angles), rotate(k, angles)
        if isinstance(documents, Tensor):
            documents = Documents.of(documents)
        if documents is None:
            return self.attend(q, k, v).flatten(2)
        y = inside(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), documents)  # (b·s, h, k)
        return y.view(q.shape).flatten(2)


class Rotate(torch.autograd.Function):
    """The two halves of each head rotated; x: `[b, s, h, k]`, angles: `[b, s, 1, 2k]`.

    The gradient is rotated back, which a compiler turns into as good a kernel as the way there;
    what autograd derives takes more than twice the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        (left, right), (cos, sin) = x.chunk(2, -1), angles.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (left, right), (cos, sin) = dy.chunk(2, -1), ctx.saved_tensors[0].chunk(2, -1)
        return dy * cos + torch.cat([right, -left], -1) * sin, None


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate each head by the angles of its position, as `Rotate`."""
    y: Tensor = Rotate.apply(x, angles)  # type: ignore[no-untyped-call]
    return y


def llama3_frequencies(frequency: Tensor, scale: float) -> Tensor:
    """The rotary frequencies of Llama 3.1.

    Those below 1 turn in 8192 tokens are slowed by `scale`, above 4 kept, between mixed.
    """
    turns = 8192 * frequency / (2 * torch.pi)
    mix = ((turns - 1.0) / 3.0).clamp(0.0, 1.0)
    return frequency * (mix + (1.0 - mix) / scale)


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

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, k, bias = config.embed, config.head_dim, config.bias
        self.head_dim = k
        self.qkv = Siblings(
            {
                "q": nn.Linear(d, config.heads * k, bias=bias),
                "k": nn.Linear(d, config.kv_heads * k, bias=bias),
                "v": nn.Linear(d, config.kv_heads * k, bias=bias),
            }
        )
        self.q_norm = nn.RMSNorm(k, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(k, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.core = Core(config)
        self.o = nn.Linear(config.heads * k, d, bias=bias)

    def forward(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        qkv = adapted(self, "qkv", x)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in qkv)  # (b, s, h, k)
        y = self.core(self.q_norm(q), self.k_norm(k), v, angles, documents)
        out: Tensor = adapted(self, "o", y)
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    dims = {"enter.gate": ("mlp", "embed"), "enter.up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, f, bias = config.embed, config.mlp, config.bias
        self.enter = Siblings(
            {"gate": nn.Linear(d, f, bias=bias), "up": nn.Linear(d, f, bias=bias)}
        )
        self.down = nn.Linear(f, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        gate, up = adapted(self, "enter", x)  # (b, s, f)
        out: Tensor = adapted(self, "down", F.silu(gate) * up)
        return out


class GELU(nn.Module):
    """down(gelu(up(x)))."""

    dims = {"up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.embed, config.mlp, bias=config.bias)
        self.down = nn.Linear(config.mlp, config.embed, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        out: Tensor = adapted(self, "down", F.gelu(adapted(self, "up", x), approximate="tanh"))
        return out


def adapted(module: nn.Module, name: str, x: Tensor) -> Any:
    """What a layer of a module makes of x, with what an adapter beside it adds, if there is one."""
    layer, adapters = getattr(module, name), getattr(module, "adapters", None)
    y = layer(x)
    return y if adapters is None or name not in adapters else adapters[name](x, y, layer)


def norm(config: DecoderConfig) -> nn.Module:
    """A norm of the residual stream."""
    if config.norm == "rms":
        return nn.RMSNorm(config.embed, eps=config.norm_eps)
    return nn.LayerNorm(config.embed, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    dims = {
        "norm1": ("embed",),
        "dropout1": ("embed",),
        "norm2": ("embed",),
        "dropout2": ("embed",),
    }

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm1, self.attention = norm(config), Attention(config)
        self.norm2, self.mlp = (
            norm(config),
            (SwiGLU if config.activation == "swiglu" else GELU)(config),
        )
        self.dropout1, self.dropout2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        x, more = self.halves(x, angles, documents)
        return x + more

    def halves(
        self, x: Tensor, angles: Tensor | None, documents: Documents | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after attention, and what the MLP adds to it."""
        x = x + self.dropout1(self.attention(self.norm1(x), angles, documents))
        return x, self.dropout2(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """Embedding, blocks, norm, head, loss."""

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
        self.sizes = {
            "embed": config.embed,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "mlp": config.mlp,
            "vocab": config.vocab,
        }
        self.embed = nn.Embedding(config.vocab, config.embed)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.max_seq, config.embed) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = norm(config)
        self.rotary = Rotary(config) if config.positions == "rope" else None
        self.head = Head(config.embed, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        out = config.init_std / (2 * config.layers) ** 0.5
        self.init = {".o": out, ".down": out, "": config.init_std}
        """Deviation of initial weights by the end of the layer's name, first match."""

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

        documents: attention stays inside equal numbers (or cuts); positions: default 0, 1, 2, ...
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
        """Some of the parts; x: what those before them gave, `[b, s, d]`. Else as `forward`.

        x with the first part: the rows of the tokens. scored=False: what the head would get.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        if parts.start == 0:
            x = self.embed(tokens) if x is None else x  # (b, s, d)
            if self.position is not None:
                x = x + self.position(positions)
            x = self.dropout(x)
        assert isinstance(x, Tensor), type(x)
        angles = None if self.rotary is None else self.rotary(positions, x.dtype)  # once for all
        documents = several(documents)
        for block in self.blocks[max(parts.start - 1, 0) : parts.stop - 1]:
            x = block(x, angles, documents)
        if parts.stop > len(self.blocks) + 1:
            x = self.norm(x)
            x = self.head(x, targets) if scored else x
        assert x is not None
        return x
