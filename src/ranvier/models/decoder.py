"""A decoder in plain PyTorch, which also runs on one device; imports only torch.

Two tables make it parallel: `dims` names the dims of each layer's weights, and `sizes` has the
number of their units. `parallelize` reads both and replaces the layers; the code below does not
change. On a grid the shapes are

    residual stream       [b, s/row, d/col]
    heads, hidden, logits [b/col, s, n/row]   or   [b, s, n/(row·col)]

Shapes: b samples, s tokens, d embed, h heads, g kv heads, k head dim, f mlp, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.config import DecoderConfig
from ranvier.models.document_attention import (
    Documents,
    TokenLayout,
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
from ranvier.models.paged_attention import (
    KVCache,
    PagedAttention,
    PagedSequences,
    PagePartAttention,
    attend_to_own_pages,
    paged_attention,
)
from ranvier.models.parscale import (
    StreamAggregation,
    copy_layout_to_streams,
    copy_to_streams,
)
from ranvier.models.prefix_attention import (
    paged_prefix_attention,
    prefix_rows,
    prefixed_attention,
)
from ranvier.models.rope import RotaryEmbedding, apply_rotary
from ranvier.models.segment_attention import SegmentAttention


class LMHead(nn.Linear):
    """The language-model head: logits over the vocabulary, or the sum of the token losses."""

    def __init__(self, embed: int, vocab: int, bias: bool = False, cap: float = 0.0) -> None:
        super().__init__(embed, vocab, bias=bias)
        self.cap = cap
        """Soft cap: logits become cap · tanh(logits / cap); 0 disables it."""

    def forward(
        self, x: Tensor, targets: Tensor | None = None, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        """Returns logits `[b, s, v]`, or the loss if targets are given. x: `[b, s, d]`.

        logits_to_keep: the tokens of each sample whose logits are computed, `[b, n]`.
        """
        if logits_to_keep is not None:
            x = x.take_along_dim(logits_to_keep.unsqueeze(-1), 1)
        logits = super().forward(x)
        if self.cap > 0.0:
            logits = torch.tanh(logits / self.cap) * self.cap
        if targets is None:
            return logits
        return cross_entropy(logits, targets)


class CrossEntropy(nn.Module):
    """Cross-entropy loss, summed over tokens; targets of -100 are ignored."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the token losses. logits: `[b, s, v]`, targets: `[b, s]`."""
        return cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of the token losses. logits: `[b, s, v]`, targets: `[b, s]`."""
    logits = logits.flatten(0, 1)
    # As on a grid, log-sum-exp over the vocabulary is computed in fp32.
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=-100)


class OffsetRMSNorm(nn.RMSNorm):
    """y = (offset + w) · x / sqrt(mean(x²) + eps); w is initially 1 - offset."""

    def __init__(self, size: int, eps: float | None = None, shift: float = 1.0) -> None:
        super().__init__(size, eps=eps)
        self.weight_offset = shift
        nn.init.constant_(self.weight, 1.0 - shift)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes x, `[..., d]`."""
        if x.dtype in (torch.bfloat16, torch.float16):
            wide = x.float()
        else:
            wide = x
        weight = self.weight_offset + self.weight.to(wide.dtype)
        return F.rms_norm(wide, self.normalized_shape, weight, self.eps).to(x.dtype)


class AttentionCore(nn.Module):
    """Rotary position embedding and causal attention, within documents if they are given."""

    segment_attention = SegmentAttention
    """Kernel of a grid whose context axis splits samples."""
    prefix_rows = staticmethod(prefix_rows)
    """Returns the keys or values of the prefix of each sample."""

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
        """Factor of queries: attention divides by sqrt(head_dim), and this factor changes the
        divisor to sqrt(query_pre_attn_scalar)."""
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        """Attention over whole samples; replaced by the fastest backend on the device."""
        self.is_recurrent = False
        """Whether the layer runs several times on a token."""
        self.kv_caches: tuple[KVCache, ...] = ()
        """Keys and values of the tokens of `PagedSequences`, set by an inference engine: one cache,
        or, in a layer that runs several times on a token, one for each iteration. Iteration i uses
        number i mod n of n caches."""
        self.attend_paged: PagedAttention = paged_attention
        """Attention to the cache; replaced by the fastest backend on the device."""
        self.attend_own_pages: PagePartAttention = attend_to_own_pages
        """Attention to the pages of this rank of context; replaced likewise."""
        self.prefix_k: nn.Parameter | None = None
        """Learned keys of each stream, `[P, g, n, k]`; None if samples have one stream."""
        self.prefix_v: nn.Parameter | None = None
        if config.streams > 1:
            shape = (config.streams, config.kv_heads, config.parscale_prefix_tokens, self.head_dim)
            self.prefix_k = nn.Parameter(torch.randn(shape) * config.init_std)
            self.prefix_v = nn.Parameter(torch.randn(shape) * config.init_std)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
        *,
        is_rotated: bool = False,
        prefix: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Computes attention. q: `[b, s, h, k]`; k, v: `[b, s, g, k]`; y: `[b, s, h·k]`.

        angles: output of `RotaryEmbedding`, or positions `[b, s]`. documents: `Documents`, ids
        `[b, s]`, or `PagedSequences`, whose keys and values are in `kv_caches`. is_rotated: q and k
        are results of `rotate`. prefix: keys and values of the prefix of each sample, `[b·n, g,
        k]`; by default those of the streams.
        """
        if not is_rotated:
            q, k = self.rotate(q, k, angles)
        if prefix is None and self.prefix_k is not None and self.prefix_v is not None:
            both = (self.prefix_k, self.prefix_v)
            prefix_k, prefix_v = (prefix_rows(x, 0, q.shape[0]) for x in both)
            prefix = (prefix_k, prefix_v)
        if isinstance(documents, PagedSequences):
            cache = self.kv_cache_of(documents)
            if prefix is not None:
                how = (self.attend_own_pages, cache, documents, self.window, self.cap)
                return paged_prefix_attention(q, k, v, prefix, *how).flatten(2)
            flat, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # (T, h, k)
            y = self.attend_paged(flat, keys, values, cache, documents, self.window, self.cap)
            return y.view(q.shape).flatten(2)
        if isinstance(documents, Tensor):
            documents = Documents.from_ids(documents)
        # With a window that covers the whole sequence, use causal attention, which has faster
        # kernels.
        if self.window >= q.shape[1]:
            window = 0
        else:
            window = self.window
        if prefix is not None:
            assert documents is None or isinstance(documents, Documents), type(documents)
            return prefixed_attention(q, k, v, *prefix, documents, window, self.cap).flatten(2)
        # The varlen kernel supports windows; SDPA would need a mask of all scores.
        if documents is None and window and can_use_flash_kernel(q, self.cap):
            documents = Documents.one_per_sample(q.shape[0], q.shape[1], q.device)
        if documents is None:
            if not window and self.cap == 0.0:
                return self.attend(q, k, v).flatten(2)
            return causal_attention(q, k, v, window, self.cap).flatten(2)
        assert isinstance(documents, Documents), f"attention over {type(documents)}"
        flat, keys, values = (x.flatten(0, 1) for x in (q, k, v))  # (b·s, h, k)
        y = document_attention(flat, keys, values, documents, window, self.cap)
        return y.view(q.shape).flatten(2)

    def attend_to_own_pages(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: PagedSequences
    ) -> tuple[Tensor, Tensor]:
        """Attends from rotated queries to the pages of the cache that this rank of context stores.

        q, o: `[T, h, k]`; k, v: `[T, g, k]`; log-sum-exps: `[h, T]`.
        """
        cache = self.kv_cache_of(sequences)
        return self.attend_own_pages(q, k, v, cache, sequences, self.window, self.cap)

    def kv_cache_of(self, sequences: PagedSequences) -> KVCache:
        """Returns the cache that this iteration of a step reads and writes."""
        return self.kv_caches[sequences.iteration % len(self.kv_caches)]

    def rotate(self, q: Tensor, k: Tensor, angles: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns scaled queries and keys, rotated by their positions."""
        if self.rotary is not None:
            if angles is None:
                angles = torch.arange(q.shape[1], device=q.device).unsqueeze(0)
            # Integers are positions. The decoder computes angles once for all layers; a core that
            # is called separately (as in tests) computes its own.
            if not angles.is_floating_point():
                angles = self.rotary(angles, q.dtype)
            q = apply_rotary(q, angles)
            k = apply_rotary(k, angles)
        if self.scale != 1.0:
            q = q * self.scale
        return q, k


class Attention(nn.Module):
    """Multi-head attention with grouped kv heads.

    Args:
        config: Configuration of the decoder.
        layer: Index of the block, which determines its sliding window.
    """

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
        qk_bias = bias or config.qk_bias
        self.head_dim = k
        self.norms_all_heads = config.qk_norm == "full"
        self.qkv = FusedLinear(
            {
                "q": nn.Linear(d, config.heads * k, bias=qk_bias),
                "k": nn.Linear(d, config.kv_heads * k, bias=qk_bias),
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
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
    ) -> Tensor:
        """Computes attention; x, y: `[b, s, d]`."""
        q, k, v = self.project_qkv(x)
        return self.project_output(self.core(q, k, v, angles, documents))

    def project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[b, s, h, k]`, keys and values `[b, s, g, k]`, not rotated yet."""
        # Norms over all heads run before heads are split, norms per head run after.
        q, k, v = apply_with_adapter(self, "qkv", x)
        if self.norms_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # (b, s, h, k)
        if not self.norms_all_heads:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v

    def project_output(self, attended: Tensor) -> Tensor:
        """Projects the result of attention to the residual stream; attended: `[b, s, h·k]`."""
        out: Tensor = apply_with_adapter(self, "o", attended)
        return out


def build_rms_norm(config: DecoderConfig, size: int) -> nn.Module:
    """Returns an RMSNorm over `size` elements."""
    if config.norm_weight_offset != 0.0:
        return OffsetRMSNorm(size, config.norm_eps, config.norm_weight_offset)
    return nn.RMSNorm(size, eps=config.norm_eps)


def build_norm(config: DecoderConfig) -> nn.Module:
    """Returns a norm for the residual stream."""
    if config.norm == "rms":
        return build_rms_norm(config, config.embed)
    return nn.LayerNorm(config.embed, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    `norm_position` can also move the norms to the outputs of attention and MLP, or use both.

    With a ladder residual each module reads the stream without the output of the module before it,
    so that the reduction of that output over ranks overlaps with the module (Zhang et al. 2025):

        a = attention(norm(x));  x = x + addend;  m = mlp(norm(x));  x = x + a

    where `addend` is the MLP output of the previous block, and `m` is the addend of the next one.
    """

    can_defer_add = True
    """Whether the last operation is an add, which a compiled block may leave to the next one."""
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
        self.is_ladder = config.is_ladder_layer(layer)
        self.receives_addend = config.receives_addend(layer)
        """Whether the block before leaves the addition of its MLP output to this one."""
        self.returns_addend = config.receives_addend(layer + 1)
        """Whether the block leaves the addition of its MLP output to the next one."""
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
            # Set on the instance, as the dense blocks share the class attribute.
            self.dims = self.dims | {"mlp": ("expert", "mlp", "embed")}
        else:
            self.mlp = (GatedMLP if config.activation in GATED_FUNCTIONS else UngatedMLP)(config)
        if after:
            self.after2 = build_norm(config)
        else:
            self.after2 = nn.Identity()
        self.dropout1, self.dropout2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
        addend: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the block; x, addend, y: `[b, s, d]`.

        With `returns_addend` it returns the residual stream and the output of the MLP, which is not
        added yet. On a grid the reduction of that output may be pending (`nn.pending_output`).
        """
        if self.is_ladder:
            x, more = self.forward_ladder(x, angles, documents, addend)
        else:
            x, more = self.forward_without_add(x, angles, documents)
        if self.returns_addend:
            return x, more
        return x + more

    def forward_ladder(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
        addend: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream after attention, and the output of the MLP to be added.

        The first block of a model has no addend.
        """
        y = self.attention(self.norm1(x), angles, documents)
        if addend is not None:
            x = x + addend
        more = self.mlp_to_residual(self.mlp(self.norm2(x)))
        return x + self.attention_to_residual(y), more

    @property
    def deferred_outputs(self) -> tuple[str, ...]:
        """Layers whose output is added after the next module has run, and not read before."""
        # A norm, dropout or adapter reads the output at once.
        found = []
        if (
            self.is_ladder
            and isinstance(self.after1, nn.Identity)
            and self.dropout1.p == 0.0
            and "o" not in getattr(self.attention, "adapters", ())
        ):
            found.append("attention.o")
        if (
            (self.is_ladder or self.returns_addend)
            and isinstance(self.mlp, GatedMLP | UngatedMLP)
            and isinstance(self.after2, nn.Identity)
            and self.dropout2.p == 0.0
            and "down" not in getattr(self.mlp, "adapters", ())
        ):
            found.append("mlp.down")
        return tuple(found)

    def forward_without_add(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream after attention, and the output of the MLP to be added."""
        x, y = self.forward_attention(x, angles, documents)
        return x, self.mlp_to_residual(self.mlp(y))

    def add_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output y of the MLP to the residual stream."""
        return x + self.mlp_to_residual(y)

    def forward_attention(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream after attention, and the input of the MLP."""
        y = self.attention(self.norm1(x), angles, documents)
        x = x + self.attention_to_residual(y)
        return x, self.norm2(x)

    # Everything but attention treats tokens alike, so the part before it and the part after it can
    # run on some tokens at a time.
    def forward_before_attention(
        self, x: Tensor, angles: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries and keys, and values; x: `[b, s, d]`."""
        q, k, v = self.attention.project_qkv(self.norm1(x))
        q, k = self.attention.core.rotate(q, k, angles)
        return q, k, v

    def forward_after_attention(
        self, x: Tensor, attended: Tensor, addend: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the output of the block.

        x, addend: its inputs; attended: the result of attention.
        """
        y = self.attention_to_residual(self.attention.project_output(attended))
        # The order of the sums is that of `forward`.
        if self.is_ladder:
            x = x if addend is None else x + addend
            more = self.mlp_to_residual(self.mlp(self.norm2(x)))
            x = x + y
        else:
            x = x + y
            more = self.mlp_to_residual(self.mlp(self.norm2(x)))
        if self.returns_addend:
            return x, more
        return x + more

    def attention_to_residual(self, y: Tensor) -> Tensor:
        """Applies the norm and dropout that follow attention."""
        out: Tensor = self.dropout1(self.after1(y))
        return out

    def mlp_to_residual(self, y: Tensor) -> Tensor:
        """Applies the norm and dropout that follow the MLP."""
        out: Tensor = self.dropout2(self.after2(y))
        return out


class SandwichBlock(Block):
    """A transformer block with norms behind its additions (Huginn).

    x = after1(x + attention(norm1(x))), then x = after2(x + mlp(norm2(x))).
    """

    can_defer_add = False

    def forward(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
        addend: Tensor | None = None,
    ) -> Tensor:
        """Runs the block; x, y: `[b, s, d]`. It has no ladder residual, so no addend."""
        x, y = self.forward_attention(x, angles, documents)
        return self.add_mlp(x, self.mlp(y))

    def forward_attention(
        self,
        x: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns the residual stream after attention, and the input of the MLP."""
        x = self.after1(x + self.dropout1(self.attention(self.norm1(x), angles, documents)))
        return x, self.norm2(x)

    def forward_after_attention(
        self, x: Tensor, attended: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        """Returns the output of the block; x: its input; attended: the result of attention."""
        x = self.after1(x + self.dropout1(self.attention.project_output(attended)))
        return self.add_mlp(x, self.mlp(self.norm2(x)))

    def add_mlp(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds the output y of the MLP to the residual stream."""
        out: Tensor = self.after2(x + self.dropout2(y))
        return out


def build_block(config: DecoderConfig, layer: int) -> Block:
    """Returns a block with the norms of a config."""
    kind = SandwichBlock if config.norm_position == "sandwich" else Block
    return kind(config, layer)


class Decoder(nn.Module):
    """A decoder-only language model: embedding, blocks, final norm, head and loss.

    It covers GPT-2, Llama, Qwen, Gemma, OLMo, Mixtral and similar models, depending on its config.

    Args:
        config: Sizes and options of the model, e.g. `MODEL_SIZES["llama3-8b"]`.

    Example:
        >>> import torch
        >>> from ranvier.models import MODEL_SIZES, Decoder
        >>> model = Decoder(MODEL_SIZES["tiny"])
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 4096])
    """

    returns_head_loss = True
    """Whether `forward` runs the blocks in sequence and returns the loss of the head unchanged."""
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
        self.blocks = nn.ModuleList(self.build_blocks(config))
        self.norm = build_norm(config)
        self.aggregation = StreamAggregation(config) if config.streams > 1 else None
        self.rotary = RotaryEmbedding(config) if config.position_embedding == "rope" else None
        self.head = LMHead(config.embed, config.vocab, cap=config.final_logit_softcap)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        # As in GPT-2, the 2 · layers outputs that are added to the residual stream are scaled.
        out = config.init_std / (2 * config.unrolled_layers) ** 0.5
        self.aux_loss: Tensor | None = None
        """The auxiliary losses of MoE layers in the last loss."""
        self.init: dict[str, float | tuple[float, float]] = {}
        if config.experts:
            # Experts are parameters of the MoE layer, not the `weight` of a layer, so their entry
            # has the name of the parameter and is (mean, std).
            self.init[".mlp.down"] = (0.0, out)
            self.init[".mlp.router"] = config.init_std / config.router_logit_scale
        self.init |= {".o": out, ".down": out, "": config.init_std}
        """Standard deviation of initial weights by suffix of the layer's name; the first match
        counts."""

    def build_blocks(self, config: DecoderConfig) -> Iterable[nn.Module]:
        """Returns the blocks, in order."""
        return (build_block(config, i) for i in range(config.layers))

    @property
    def moe_layers(self) -> list[MoELayer]:
        """The serial MoE layers, in order; empty on a grid, where parallel layers replace them."""
        if not self.config.experts:
            # Iterating over all modules takes 2 ms per step.
            return []
        return [one for one in self.modules() if isinstance(one, MoELayer)]

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """Names of the layers of each part, in order: embedding, each block, norm and head."""
        blocks = [(f"blocks.{i}",) for i in range(len(self.blocks))]
        return [("embed", "position", "dropout"), *blocks, ("norm", "aggregation", "head")]

    @property
    def streams(self) -> dict[str, int]:
        """Samples of these layers, and of those in them, for each sample of a batch; others: 1."""
        count = self.config.streams
        return {"blocks": count, "norm": count} if count > 1 else {}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | TokenLayout | Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Returns logits `[b, s, v]`, or the sum of the token losses if targets are given.

        Args:
            tokens: Token ids, `[b, s]`.
            targets: Next tokens, `[b, s]`; tokens with a target of -100 are ignored.
            positions: Position of each token, `[b, s]`; 0, 1, 2, ... by default.
            documents: Document of each token, as ids `[b, s]` or `Documents`. Tokens attend only to
                tokens of the same document. `PagedSequences` also attend to a cache.
            logits_to_keep: The tokens of each sample whose logits are computed, `[b, n]`; all by
                default.
        """
        everything = slice(0, len(self.blocks) + 2)
        return self.segment(None, everything, tokens, targets, positions, documents, logits_to_keep)

    def segment(
        self,
        x: Tensor | None,
        parts: slice,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | TokenLayout | Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        *,
        scored: bool = True,
    ) -> Tensor:
        """Runs a range of `parts`, e.g. a pipeline stage.

        Before a ladder layer the stream and its addend are one tensor, `[2, b, s, d]`.

        Args:
            x: Output of the previous parts, `[b, s, d]`; for the first part None, or the embedded
                tokens.
            parts: The parts to run.
            tokens: As in `forward`.
            targets: As in `forward`.
            positions: As in `forward`.
            documents: As in `forward`.
            logits_to_keep: As in `forward`.
            scored: Whether the last part runs the head. If False, it returns the input of the head.
        """
        x, angles, documents = self.prepare_inputs(
            x, tokens, positions, documents, embeds=parts.start == 0
        )
        # Part 0 is the embedding, part i is block i - 1, and the last part is norm and head.
        addend = None
        if parts.start > 0 and self.config.receives_addend(parts.start - 1):
            x, addend = x.unbind(0)
        for block in self.blocks[max(parts.start - 1, 0) : parts.stop - 1]:
            if block.is_ladder:
                x = block(x, angles, documents, addend)
            else:
                x = block(x, angles, documents)
            if block.returns_addend:
                x, addend = x
            else:
                addend = None
        if addend is not None:
            # The next stage gets complete tensors: nothing is pending between stages.
            x = torch.stack([x, addend])
        if parts.stop > len(self.blocks) + 1:
            x = self.norm(x)
            if self.aggregation is not None:
                x = self.aggregation(x)  # (b, s, d)
            if scored:
                x = self.head(x, targets, logits_to_keep)
            if targets is not None and scored:
                x = self._add_aux_loss(x)
        assert x is not None
        return x

    def prepare_inputs(
        self,
        x: Tensor | None,
        tokens: Tensor,
        positions: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
        *,
        embeds: bool = True,
    ) -> tuple[Tensor, Tensor | None, Documents | TokenLayout | None]:
        """Returns the input of the blocks, rotary angles and documents.

        embeds: whether x is embedded here; it may have been looked up before.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        if embeds:
            x = self.embed(tokens) if x is None else x  # (b, s, d)
            if self.config.embed_scale != 1.0:
                # The factor is rounded to the dtype of x first, as in Gemma.
                x = x * x.new_full((), self.config.embed_scale)
            if self.position is not None:
                x = x + self.position(positions)
            x = self.dropout(x)
        assert isinstance(x, Tensor), type(x)
        documents = normalize_documents(documents)
        if self.config.streams > 1:
            if embeds:
                x = copy_to_streams(x, self.config.streams)  # (b·P, s, d)
            positions, documents = copy_layout_to_streams(positions, documents, self.config.streams)
        # Rotary angles are computed once for all layers.
        angles = None
        if self.rotary is not None:
            if self.config.rope == "longrope":
                # The factors of LongRoPE depend on the length of each document.
                long = document_lengths(documents, positions.device)
            else:
                long = None
            angles = self.rotary(positions, x.dtype, long)
        return x, angles, documents

    def _add_aux_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss plus the auxiliary losses of the MoE layers."""
        extra = loss.new_zeros(())
        for mixture in self.moe_layers:
            if mixture.aux_loss is not None:
                extra = extra + mixture.aux_loss.to(loss.dtype)
                # Reset, so that another loss does not add it again, and its graph is freed.
                mixture.aux_loss = None
        self.aux_loss = extra.detach()
        if extra.requires_grad:
            return loss + extra
        return loss
