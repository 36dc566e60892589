"""A decoder: plain PyTorch, runs on one device as it stands, imports torch only.

What makes it parallel is the inert tables: `dims` names the dims of each layer's weights, `sizes`
counts their units. `parallelize` reads both and swaps the layers; the code below does not change.
On a grid

    residual stream       [b, s/row, d/col]
    heads, hidden, logits [b/col, s, n/row]   or   [b, s, n/(row·col)]

Shapes: b samples, s tokens, d embed, h heads, g kv heads, k head dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn


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


class CrossEntropy(nn.Module):
    """Sum over the tokens with a target (not -100) of their negative log-likelihood."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: `[b, s, v]`, targets: `[b, s]`."""
        logits = logits.flatten(0, 1)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


@dataclass(frozen=True, eq=False)
class Documents:
    """How samples are cut into documents: attention stays inside each, and costs what they do."""

    lengths: tuple[tuple[int, ...], ...]
    """Tokens of each document of each sample; the host knows them, so that no device is asked."""
    bounds: Tensor
    """Where documents begin when all samples are laid one after the other, and the end `[n + 1]`.
    """

    @classmethod
    def of(cls, ids: Tensor, device: torch.device | str | None = None) -> Documents:
        """From numbers `[b, s]`: equal neighbours are one document."""
        rows = (torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in ids)
        return cls.cut(tuple(map(tuple, rows)), ids.device if device is None else device)

    @classmethod
    def cut(cls, lengths: tuple[tuple[int, ...], ...], device: torch.device | str) -> Documents:
        """From the lengths in each sample."""
        ends = accumulate((n for sample in lengths for n in sample), initial=0)
        bounds = torch.tensor(list(ends), dtype=torch.int32)
        if torch.device(device).type == "cuda":
            bounds = bounds.pin_memory()
        return cls(lengths, bounds.to(device, non_blocking=True))

    def select(self, rows: slice) -> Documents:
        """Those of some samples."""
        return Documents.cut(self.lengths[rows], self.bounds.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest, rounded up to a power of two: few values, few compilations."""
        return int(1 << (max(n for sample in self.lengths for n in sample) - 1).bit_length())

    def groups(self) -> dict[int, list[int]]:
        """Starts of the documents of each length, in all samples laid one after the other."""
        starts, at = defaultdict(list), 0
        for length in (n for sample in self.lengths for n in sample):
            starts[length].append(at)
            at += length
        return starts


class Core(nn.Module):
    """Rotary positions and causal attention, inside documents if they are given."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotary = config.positions == "rope"
        self.theta, self.scale = config.rope_theta, config.rope_scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
        documents: Documents | Tensor | None,
    ) -> Tensor:
        """q: `[b, s, h, k]`; k, v: `[b, s, g, k]`; positions: `[b, s]`, documents also as such.

        y: `[b, s, h·k]`.
        """
        if self.rotary:
            if positions is None:
                positions = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
            cos, sin = self.angles(positions, q.dtype)  # (b, s, 1, k)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if isinstance(documents, Tensor):
            documents = Documents.of(documents)
        if documents is None or all(len(sample) == 1 for sample in documents.lengths):
            return causal(q, k, v).flatten(2)
        attend = packed_kernel if kernel_takes(q) else packed
        y = attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), documents)  # (b·s, h, k)
        return y.view(q.shape).flatten(2)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the rotary angles, `[b, s, 1, k]`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        steps = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=wide)
        frequency = self.theta ** (-steps / self.head_dim)
        if self.scale != 1.0:
            frequency = llama3_frequencies(frequency, self.scale)
        angle = positions.unsqueeze(-1).to(wide) * frequency  # (b, s, k/2)
        angle = torch.cat([angle, angle], -1).unsqueeze(2)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q, y: `[b, s, h, k]`, k, v: `[b, s, g, k]`."""
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y.transpose(1, 2)


def packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside documents, those of equal length together; all `[b·s, h, k]`."""
    outputs, places = [], []
    for length, starts in documents.groups().items():
        first = torch.tensor(starts, device=q.device).unsqueeze(1)
        place = first + torch.arange(length, device=q.device)  # (documents, length)
        outputs.append(causal(q[place], k[place], v[place]).flatten(0, 1))
        places.append(place.flatten())
    return torch.cat(outputs)[torch.cat(places).argsort()]


def kernel_takes(q: Tensor) -> bool:
    """Whether the kernel for ragged sequences runs here; elsewhere its twin `packed` does."""
    if q.device.type != "cuda" or torch.version.hip or q.dtype not in KERNEL_TYPES:
        return False
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


KERNEL_TYPES = (torch.bfloat16, torch.float16)
# torch 2.13 wants to be told that heads share keys, 2.11 has no word for it.
SHARED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


def packed_kernel(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """As `packed`, in one kernel whose work is that of the documents."""
    at, longest = documents.bounds, documents.longest
    out = varlen_attn(q, k, v, at, at, longest, longest, window_size=(-1, 0), **SHARED)
    assert isinstance(out, Tensor)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


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
        self, x: Tensor, positions: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x))  # (b, s, h, k)
        y = self.core(self.q_norm(q), self.k_norm(k), v, positions, documents)
        out: Tensor = self.o(y)
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
        gate, up = self.enter(x)  # (b, s, f)
        out: Tensor = self.down(F.silu(gate) * up)
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
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


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
        self, x: Tensor, positions: Tensor | None, documents: Documents | Tensor | None
    ) -> Tensor:
        """x, y: `[b, s, d]`."""
        x = x + self.dropout1(self.attention(self.norm1(x), positions, documents))
        y: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return y


class Decoder(nn.Module):
    """Embedding, blocks, norm, head, loss."""

    dims = {
        "embed": ("vocab", "embed"),
        "position": ("position", "embed"),
        "dropout": ("embed",),
        "norm": ("embed",),
        "head": ("vocab", "embed"),
        "loss": ("vocab",),
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
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.loss = CrossEntropy()
        out = config.init_std / (2 * config.layers) ** 0.5
        self.init = {".o": out, ".down": out, "": config.init_std}
        """Deviation of initial weights by the end of the layer's name, first match."""

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
        x = self.embed(tokens)  # (b, s, d)
        if self.position is not None:
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
            x = x + self.position(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, positions, documents)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)
