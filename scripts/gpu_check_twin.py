"""A decoder and optimizers as formulas in float64, with which `gpu_check.py` compares.

Nothing here uses the layers, kernels and optimizers of `ranvier`, so that an error there cannot be
here as well; from there come only configurations and numbers that a run draws from its seed.
Shapes: b samples, s tokens, h heads, k head dim, P streams, d embed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.config.run import RunConfig
from ranvier.models.config import DecoderConfig
from ranvier.models.recurrent_decoder import InitialState

SEED = 3
"""Of random weights and inputs."""


class _StraightThrough(torch.autograd.Function):
    """Rounds to a dtype; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def to_float8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to fp8, with the power of two as scale that just avoids an overflow."""
    x = x.to(torch.bfloat16).float()
    scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / float(x.abs().max())))
    return ((x * scale).to(dtype).double() / scale).double()


class _Float8Linear(torch.autograd.Function):
    """x Wᵀ in fp8: e4m3, and e5m2 for gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        x8, w8 = to_float8(x, torch.float8_e4m3fn), to_float8(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8 = ctx.saved_tensors
        dy8 = to_float8(dy, torch.float8_e5m2)
        return dy8 @ w8, dy8.flatten(0, -2).T @ x8.flatten(0, -2)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions; x: `[b, s, h, k]`, positions: `[b, s]`."""
    half = x.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double().unsqueeze(-1) * frequency).unsqueeze(2)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v with a mask.

    q: `[b, s, h, d]`; k, v: `[b, t, g, d]`; visible: `[b, s, t]`. A query that sees nothing gets 0.
    """
    groups = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, keys) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible.unsqueeze(1), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhst,bthd->bshd", weights, values)


class Twin:
    """A decoder as formulas in float64 on the CPU.

    Args:
        config: Its shape; rotary positions, RMSNorm, SwiGLU, softmax router.
        weights: By the names that `ranvier` gives them.
        dtype: The product rounds its weights to this type, and so does the twin.
        lora_scale: alpha / rank of adapters; only these are trained then.
        float8: Whether the linear layers of blocks multiply in fp8.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float64,
        lora_scale: float = 0.0,
        float8: bool = False,
    ) -> None:
        self.config, self.dtype = config, dtype
        self.lora_scale, self.float8 = lora_scale, float8
        self.masters = {name: x.double().cpu().clone() for name, x in weights.items()}
        for name, x in self.masters.items():
            x.requires_grad_(lora_scale == 0.0 or ".adapters." in name)
        self.recurrence: tuple[int, int] = (0, 0)
        """Iterations of a recurrent core without and with gradients."""
        self.seed = 0

    def weight(self, name: str) -> Tensor:
        """Returns a weight as the product computes with it."""
        x = self.masters[name]
        rounded: Tensor = _StraightThrough.apply(x, self.dtype)
        return rounded

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm."""
        mean = x.square().mean(-1, keepdim=True)
        return x * (mean + self.config.norm_eps).rsqrt() * self.weight(f"{name}.weight")

    def linear(self, module: str, group: str, leaf: str, x: Tensor) -> Tensor:
        """A linear layer and its adapter; group: the layers that read the same input, if any."""
        name = f"{module}.{group}.{leaf}" if group else f"{module}.{leaf}"
        weight = self.weight(f"{name}.weight")
        y: Tensor = _Float8Linear.apply(x, weight) if self.float8 else x @ weight.T
        adapter = f"{module}.adapters.{group or leaf}"
        if f"{adapter}.a.{leaf}.weight" in self.masters:
            low = x @ self.weight(f"{adapter}.a.{leaf}.weight").T
            y = y + self.lora_scale * (low @ self.weight(f"{adapter}.b.{leaf}.weight").T)
        return y

    def attention(self, module: str, x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Attention of a block."""
        config = self.config
        q, k, v = (
            self.linear(module, "qkv", leaf, x).unflatten(-1, (-1, config.head_dim))
            for leaf in "qkv"
        )
        q, k = (rotate(y, positions, config.rope_theta) for y in (q, k))
        if config.streams > 1:
            # Samples of all streams, in turn; a prefix has no positions and all tokens see it.
            copies = x.shape[0] // config.streams
            prefix_k, prefix_v = (
                self.weight(f"{module}.core.prefix_{one}").transpose(1, 2).repeat(copies, 1, 1, 1)
                for one in "kv"
            )
            k, v = torch.cat([prefix_k, k], 1), torch.cat([prefix_v, v], 1)
            seen = visible.new_ones(*visible.shape[:2], prefix_k.shape[1])
            visible = torch.cat([seen, visible], 2)
        return self.linear(module, "", "o", attend(q, k, v, visible).flatten(2))

    def mlp(self, module: str, x: Tensor) -> Tensor:
        """SwiGLU, or a mixture of them."""
        if f"{module}.router.weight" not in self.masters:
            gate, up = (self.linear(module, "enter", leaf, x) for leaf in ("gate", "up"))
            return self.linear(module, "", "down", F.silu(gate) * up)
        scores = (x @ self.weight(f"{module}.router.weight").T).softmax(-1)
        top, experts = scores.topk(self.config.experts_per_token, -1)
        top = top / top.sum(-1, keepdim=True)
        gate, up, down = (self.weight(f"{module}.{one}") for one in ("gate", "up", "down"))
        y = torch.zeros_like(x)
        for e in range(self.config.experts):
            share = (top * (experts == e)).sum(-1, keepdim=True)
            y = y + share * ((F.silu(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T)
        return y

    def blocks(self, names: Sequence[str], x: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Blocks one after another; with a ladder each module misses the output before it."""
        attended = mixed = torch.zeros(())
        is_ladder = self.config.residual == "ladder"
        for name in names:
            pending = mixed
            if not is_ladder:
                x, pending = x + mixed, torch.zeros(())
            attended = self.attention(
                f"{name}.attention", self.norm(f"{name}.norm1", x), positions, visible
            )
            x = x + pending if is_ladder else x + attended
            mixed = self.mlp(f"{name}.mlp", self.norm(f"{name}.norm2", x))
            x = x + attended if is_ladder else x
        return x + mixed

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """Returns the input of the head."""
        config = self.config
        b, s = tokens.shape
        if positions is None:
            positions = torch.arange(s).expand(b, s)
        visible = torch.ones(s, s, dtype=torch.bool).tril().expand(b, s, s)
        if documents is not None:
            visible = visible & (documents.unsqueeze(1) == documents.unsqueeze(2))
        x = self.weight("embed.weight")[tokens] * config.embed_scale
        if config.streams > 1:
            x, positions, visible = (
                y.repeat_interleave(config.streams, 0) for y in (x, positions, visible)
            )
        names = [f"blocks.{i}" for i in range(config.layers)]
        if config.is_recurrent:
            x = self.iterate_core(x, positions, visible, samples)
        else:
            x = self.norm("norm", self.blocks(names, x, positions, visible))
        if config.streams > 1:
            streams = x.unflatten(0, (b, config.streams)).transpose(1, 2)  # (b, s, P, d)
            hidden = self.weight("aggregation.hidden.weight").flatten(1)
            into = streams.flatten(2) @ hidden.T + self.weight("aggregation.hidden.bias")
            scores = F.silu(into) @ self.weight("aggregation.scores.weight").T
            scores = scores + self.weight("aggregation.scores.bias")
            epsilon = config.parscale_smoothing
            weights = scores.softmax(-1) * (1 - epsilon) + epsilon / config.streams
            x = (streams * weights.unsqueeze(-1)).sum(2)
        return x

    def iterate_core(
        self, x: Tensor, positions: Tensor, visible: Tensor, samples: Tensor | None
    ) -> Tensor:
        """A recurrent core between a prelude and a coda, up to the last norm."""
        config = self.config
        first = config.prelude_layers
        prelude = [f"blocks.{i}" for i in range(first)]
        core = [f"blocks.{first}.layers.{i}" for i in range(config.core_layers)]
        coda = [f"blocks.{first + 1 + i}" for i in range(config.coda_layers)]
        injected = self.blocks(prelude, x, positions, visible) @ self.weight("inject.weight").T
        # In an engine all tokens count as those of sample 0 at their positions.
        start = InitialState()
        start.seed, start.samples = self.seed, samples
        state = start(injected.detach(), positions if samples is None else None)
        without, with_grad = self.recurrence
        for i in range(without + with_grad):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= without):
                state = state @ self.weight(f"blocks.{first}.adapter.weight").T + injected
                state = self.blocks(core, state, positions, visible)
        x = self.blocks(coda, self.norm("norm", state), positions, visible)
        return self.norm("norm", x)

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits of all tokens of samples without documents."""
        return self.hidden(tokens) @ self.weight("head.weight").T

    def loss(self, batches: Sequence[Any]) -> Tensor:
        """Returns the mean loss over the targets of all batches."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            hidden = self.hidden(batch.tokens, batch.positions, batch.documents, batch.samples)
            logits = hidden @ self.weight("head.weight").T
            targets = batch.targets.flatten()
            total = total + F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
            count += int((targets != -100).sum())
        return total / count

    def gradients(self, batches: Sequence[Any]) -> tuple[float, dict[str, Tensor]]:
        """Returns the loss, and the gradient of each trained weight."""
        trained = {name: x for name, x in self.masters.items() if x.requires_grad}
        loss = self.loss(batches)
        grads = torch.autograd.grad(loss, list(trained.values()))
        return loss.item(), dict(zip(trained, grads, strict=True))


class TwinOptimizer:
    """AdamW, SGD with momentum, or Muon for the matrices of blocks, as formulas in float64."""

    def __init__(self, twin: Twin, run: RunConfig) -> None:
        self.twin, self.run = twin, run
        self.states: dict[str, list[Tensor]] = {}
        self.num_updates = 0

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: float) -> float:
        """Updates the twin; returns the norm of the gradients before they are clipped."""
        optim = self.run.optim
        self.num_updates += 1
        norm = float(torch.stack([x.norm() for x in grads.values()]).norm())
        clip = min(1.0, optim.max_grad_norm / norm)
        for name, grad in grads.items():
            master = self.twin.masters[name]
            decays = master.dim() >= 2 and "embed" not in name
            decay = self.run.weight_decay if decays else 0.0
            states = self.states.setdefault(name, [torch.zeros_like(master) for _ in range(2)])
            grad = grad * clip
            if optim.name == "sgd":
                momentum = self.run.momentum * states[0] + grad + decay * master
                states[0] = momentum
                master.sub_(lr * momentum)
                continue
            master.mul_(1.0 - lr * decay)
            is_hidden = master.dim() == 2 and name.startswith("blocks.") and "router" not in name
            if optim.name == "muon" and is_hidden:
                beta = self.run.momentum
                states[0] = beta * states[0] + (1 - beta) * grad
                update = beta * states[0] + (1 - beta) * grad
                master.sub_(lr * 0.2 * math.sqrt(max(master.shape)) * self.orthogonalize(update))
                continue
            states[0] = optim.beta1 * states[0] + (1 - optim.beta1) * grad
            states[1] = optim.beta2 * states[1] + (1 - optim.beta2) * grad.square()
            mean = states[0] / (1 - optim.beta1**self.num_updates)
            square = states[1] / (1 - optim.beta2**self.num_updates)
            master.sub_(lr * mean / (square.sqrt() + optim.eps))
        return norm

    def orthogonalize(self, x: Tensor) -> Tensor:
        """The Newton-Schulz iteration of Muon."""
        a, b, c = self.run.optim.muon_coefficients
        y = x / x.norm()
        for _ in range(self.run.optim.muon_steps):
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        return y


def draw_weights(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Returns random weights by name, representable in bf16; all of them matter for the loss."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            x = 1.0 + 0.2 * noise
        elif len(shape) == 1:
            x = 0.2 * noise
        elif "embed" in name or "prefix" in name:
            x = noise
        else:
            # Scores with a standard deviation of about 2: attention and routers are not uniform.
            x = noise * (1.4 if re.search(r"qkv\.[qk]\.|router", name) else 1.0)
            x = x / math.sqrt(math.prod(shape[1:]) if len(shape) == 2 else shape[-1])
            x = x * (0.3 if ".adapters." in name else 1.0)
        weights[name] = x.to(torch.bfloat16).double()
    return weights
