"""A mixture of experts: a router sends each token to a few of many MLPs; plain PyTorch.

    p = softmax(l) or sigmoid(l), l = g x Wᵀ scores, in fp32 (float64 stays); g: router_gain
    experts = top k of p + bias              the bias chooses, it does not weight
    y = Σ_k w_k · expert_k(x) + shared(x)    w: scores of the chosen, divided by their sum

All that balances the experts is defined for one sequence (or, the bias, for a whole step), so it
depends neither on the grid nor on micro-batches. With f_e the share of the choices of a sequence of
s tokens that fell on expert e and P_e its mean score,

    extra = s · (balance · E · Σ_e f_e P_e + router_z · mean_t logsumexp(logits_t)²)

summed over sequences, is added to the loss, which is a sum over tokens.

Shapes: b sequences, s tokens, t = b·s, d embed, E experts, k of them a token, f their mlp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.config import GATED_ACTIVATIONS, DecoderConfig
from ranvier.models.feed_forward import GATED_FUNCTIONS, UNGATED_FUNCTIONS, GatedMLP, UngatedMLP


@dataclass(frozen=True)
class Routes:
    """Where tokens go."""

    scores: Tensor
    """`[t, E]`."""
    weights: Tensor
    """Of what the chosen experts give, `[t, k]`."""
    experts: Tensor
    """The chosen, `[t, k]`."""


@dataclass(frozen=True)
class Router:
    """How logits become routes; the same on one device and on a grid."""

    num_experts: int
    top_k: int
    score_function: str = "softmax"
    norm_topk_prob: bool = True
    route_scale: float = 1.0
    capacity_factor: float = 0.0
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    jitter: float = 0.0
    bias_update_rate: float = 0.0
    logit_scale: float = 1.0

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Router:
        """That of a model."""
        return cls(
            config.experts,
            config.experts_top,
            config.router,
            config.router_norm,
            config.router_scale,
            config.capacity,
            config.balance,
            config.router_z,
            config.router_jitter,
            config.router_bias,
            config.router_gain,
        )

    @property
    def has_aux_loss(self) -> bool:
        """Whether it adds to the loss."""
        return self.aux_loss_coeff > 0.0 or self.z_loss_coeff > 0.0

    def expert_capacity(self, seq: int) -> int:
        """Tokens of a sequence that an expert takes at most."""
        if self.capacity_factor == 0.0:
            return seq
        return min(math.ceil(self.capacity_factor * seq * self.top_k / self.num_experts), seq)

    def compute_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """gain · x Wᵀ, wide; of a part of the features a part of the sum. x: `[t, d]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        found = F.linear(x.to(wide), weight.to(wide))  # (t, E)
        if self.logit_scale == 1.0:
            return found
        return found * self.logit_scale

    def route_tokens(self, logits: Tensor, bias: Tensor | None = None) -> Routes:
        """logits: `[t, E]`, wide; bias: `[E]`."""
        if self.score_function == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
        if bias is None:
            wanted = scores.detach()
        else:
            wanted = scores.detach() + bias.to(scores.dtype)
        experts = wanted.topk(self.top_k, dim=-1).indices  # (t, k)
        weights = scores.gather(1, experts)
        if self.norm_topk_prob:
            floor = torch.finfo(weights.dtype).tiny  # sigmoids may all be 0
            weights = weights / weights.sum(1, keepdim=True).clamp(min=floor)
        return Routes(
            scores, weights * self.route_scale if self.route_scale != 1.0 else weights, experts
        )

    def count_choices(self, routes: Routes, sequences: int) -> Tensor:
        """Choices of each expert in each sequence (or the part of it that is here): `[b, E]`."""
        chosen = routes.experts.new_zeros(sequences, self.num_experts)
        flat = routes.experts.view(sequences, -1)
        return chosen.scatter_add_(1, flat, torch.ones_like(flat))

    def capacity_mask(
        self, routes: Routes, sequences: int, seq: int, before: Tensor | None
    ) -> Tensor:
        """Which choices find a slot, `[t, k]`: the first in the order of the sequence.

        seq: tokens of whole sequences; before: choices of earlier parts of them, `[b, E]`.
        """
        hot = F.one_hot(routes.experts.view(sequences, -1), self.num_experts)  # (b, s·k, E)
        if before is None:
            place = hot.cumsum(1)
        else:
            place = hot.cumsum(1) + before.unsqueeze(1)
        mine = place.gather(2, routes.experts.view(sequences, -1, 1)).view_as(routes.experts)
        return mine <= self.expert_capacity(seq)

    def compute_aux_loss(self, logits: Tensor, routes: Routes, counts: Tensor, seq: int) -> Tensor:
        """What is added to the loss for these tokens: a sum over them.

        counts: choices of whole sequences, `[b, E]`; logits: of the tokens here, `[t, E]`.
        """
        shares = counts.to(logits.dtype) / (seq * self.top_k)  # (b, E)
        scores = routes.scores
        if self.score_function == "sigmoid":
            scores = scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        sums = scores.view(len(counts), -1, self.num_experts).sum(1)  # (b, E)
        found = self.aux_loss_coeff * self.num_experts * (shares * sums).sum()
        if self.z_loss_coeff > 0.0:
            return found + self.z_loss_coeff * logits.logsumexp(-1).square().sum()
        return found


class MoELayer(nn.Module):
    """y = Σ_k w_k · down_k(f(gate_k x) · up_k x) + shared(x); without gates down_k(f(up_k x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d = config.embed
        f = config.expert_width
        e = config.experts
        self.rule = Router.from_config(config)
        self.has_gate = config.activation in GATED_ACTIVATIONS
        self.activation = config.activation
        self.function: Callable[[Tensor], Tensor] = {**GATED_FUNCTIONS, **UNGATED_FUNCTIONS}[
            config.activation
        ]
        self.router = nn.Linear(d, e, bias=False)
        self.gate = nn.Parameter(torch.empty(e, f, d)) if self.has_gate else None
        self.up = nn.Parameter(torch.empty(e, f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))
        for weight in (self.gate, self.up, self.down):
            if weight is not None:  # as nn.Linear begins
                nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)
        made = GatedMLP if self.has_gate else UngatedMLP
        self.shared = made(replace(config, mlp=config.shared_mlp)) if config.shared_mlp else None
        self.bias: Tensor | None
        self.register_buffer("bias", torch.zeros(e) if config.router_bias > 0.0 else None)
        self.aux_loss: Tensor | None = None
        """What the last forward pass adds to the loss; whoever adds it takes it away."""
        self.tokens_per_expert: Tensor | None = None
        """Choices of each expert since the last step, `[E]`."""

    def forward(self, x: Tensor) -> Tensor:
        """x, y: `[b, s, d]`."""
        rule, (b, s, d) = self.rule, x.shape
        flat = x.reshape(-1, d)
        logits = rule.compute_logits(flat, self.router.weight)  # (t, E)
        if self.training and rule.jitter > 0.0:
            logits = logits * (1.0 + rule.jitter * self.router_noise(logits))
        routes = rule.route_tokens(logits, self.bias)
        counts = rule.count_choices(routes, b)  # (b, E)
        kept = torch.ones_like(routes.experts, dtype=torch.bool)
        if rule.capacity_factor > 0.0:
            kept = rule.capacity_mask(routes, b, s, None)
        if self._adds_aux_loss:
            self.aux_loss = rule.compute_aux_loss(logits, routes, counts, s)
        else:
            self.aux_loss = None
        if self.training and self.bias is not None:
            found = counts.sum(0)
            if self.tokens_per_expert is None:
                self.tokens_per_expert = found
            else:
                self.tokens_per_expert = self.tokens_per_expert + found
        y = torch.zeros_like(flat, dtype=logits.dtype)  # (t, d)
        for e in range(rule.num_experts):
            token, slot = torch.nonzero((routes.experts == e) & kept, as_tuple=True)
            out = self._apply_expert(e, flat[token])
            y = y.index_add(0, token, out.to(y.dtype) * routes.weights[token, slot].unsqueeze(1))
        found = y.to(x.dtype).view_as(x)
        return found if self.shared is None else found + self.shared(x)

    def router_noise(self, logits: Tensor) -> Tensor:
        """Random numbers in [-1, 1); here torch's, on a grid of (seed, layer, sample, token)."""
        return 2.0 * torch.rand_like(logits) - 1.0

    @property
    def _adds_aux_loss(self) -> bool:
        return self.training and self.rule.has_aux_loss and torch.is_grad_enabled()

    def _apply_expert(self, e: int, x: Tensor) -> Tensor:
        up = F.linear(x, self.up[e])  # (n, f)
        if self.gate is None:
            return F.linear(self.function(up), self.down[e])
        return F.linear(self.function(F.linear(x, self.gate[e])) * up, self.down[e])

    @torch.no_grad()
    def update_expert_bias(self) -> None:
        """After a step: experts that got fewer tokens than the mean are chosen more readily."""
        if self.bias is not None and self.tokens_per_expert is not None:
            self.bias.copy_(
                next_expert_bias(self.bias, self.tokens_per_expert, self.rule.bias_update_rate)
            )
            self.tokens_per_expert = None


def next_expert_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """The bias after a step in which experts got these numbers of tokens: `[E]` each."""
    wide = loads.to(torch.float64)
    return bias + rate * (wide.mean() - wide).sign().to(bias.dtype)
