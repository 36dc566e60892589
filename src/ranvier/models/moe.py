"""A mixture of experts: a router sends each token to a few of many MLPs; plain PyTorch.

    p = softmax(l) or sigmoid(l), l = g x Wᵀ scores, in fp32 (float64 stays); g: router_logit_scale
    experts = top k of p + bias              the bias chooses, it does not weight
    y = Σ_k w_k · expert_k(x) + shared(x)    w: scores of the chosen, divided by their sum

All load balancing is defined per sequence (or, the bias, per step), so it depends neither on the
grid nor on micro-batches. With f_e the fraction of the choices of a sequence of s tokens that went
to expert e and P_e its mean score,

    aux_loss = s · (aux_loss_coeff · E · Σ_e f_e P_e
                    + z_loss_coeff · mean_t logsumexp(logits_t)²)

summed over sequences, is added to the loss, which is a sum over tokens.

Shapes: b sequences, s tokens, t = b·s, d embed, E experts, k of them per token, f their mlp.
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
    """The experts of each token and their weights."""

    scores: Tensor
    """`[t, E]`."""
    weights: Tensor
    """Factors of the chosen experts' outputs, `[t, k]`."""
    experts: Tensor
    """The chosen experts, `[t, k]`."""


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
        """The router of a model."""
        return cls(
            config.experts,
            config.experts_per_token,
            config.router,
            config.router_norm,
            config.router_scale,
            config.capacity_factor,
            config.aux_loss_coeff,
            config.z_loss_coeff,
            config.router_jitter,
            config.expert_bias_update_rate,
            config.router_logit_scale,
        )

    @property
    def has_aux_loss(self) -> bool:
        """Whether it adds to the loss."""
        return self.aux_loss_coeff > 0.0 or self.z_loss_coeff > 0.0

    def expert_capacity(self, seq: int) -> int:
        """Maximum number of tokens of a sequence that an expert takes."""
        if self.capacity_factor == 0.0:
            return seq
        # A token chooses an expert at most once, so `seq` slots are always enough.
        return min(math.ceil(self.capacity_factor * seq * self.top_k / self.num_experts), seq)

    def compute_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """gain · x Wᵀ in fp32 at least; from a part of the features, a partial sum. x: `[t, d]`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        found = F.linear(x.to(wide), weight.to(wide))  # (t, E)
        if self.logit_scale == 1.0:
            return found
        return found * self.logit_scale

    def route_tokens(self, logits: Tensor, bias: Tensor | None = None) -> Routes:
        """Choose experts; logits: `[t, E]`, fp32 at least; bias: `[E]`."""
        if self.score_function == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
        if bias is None:
            wanted = scores.detach()
        else:
            # The bias only affects which experts are chosen; weights come from the scores without
            # it.
            wanted = scores.detach() + bias.to(scores.dtype)
        experts = wanted.topk(self.top_k, dim=-1).indices  # (t, k)
        weights = scores.gather(1, experts)
        if self.norm_topk_prob:
            # Sigmoid scores may all underflow to 0.
            floor = torch.finfo(weights.dtype).tiny
            weights = weights / weights.sum(1, keepdim=True).clamp(min=floor)
        return Routes(
            scores, weights * self.route_scale if self.route_scale != 1.0 else weights, experts
        )

    def count_choices(self, routes: Routes, sequences: int) -> Tensor:
        """Choices of each expert in each sequence (or the part of it on this rank): `[b, E]`."""
        chosen = routes.experts.new_zeros(sequences, self.num_experts)
        flat = routes.experts.view(sequences, -1)
        return chosen.scatter_add_(1, flat, torch.ones_like(flat))

    def capacity_mask(
        self, routes: Routes, sequences: int, seq: int, before: Tensor | None
    ) -> Tensor:
        """Which choices are within the capacity, `[t, k]`: the first ones in sequence order.

        seq: tokens of whole sequences; before: choices of earlier parts of them, `[b, E]`.
        """
        # Running count of the choices of each expert along the sequence.
        hot = F.one_hot(routes.experts.view(sequences, -1), self.num_experts)  # (b, s·k, E)
        if before is None:
            place = hot.cumsum(1)
        else:
            place = hot.cumsum(1) + before.unsqueeze(1)
        # `place` counts from 1: the n-th choice of an expert in its sequence has place n.
        mine = place.gather(2, routes.experts.view(sequences, -1, 1)).view_as(routes.experts)
        return mine <= self.expert_capacity(seq)

    def compute_aux_loss(self, logits: Tensor, routes: Routes, counts: Tensor, seq: int) -> Tensor:
        """Auxiliary loss of these tokens: a sum over them.

        counts: choices of whole sequences, `[b, E]`; logits: of the local tokens, `[t, E]`.
        """
        shares = counts.to(logits.dtype) / (seq * self.top_k)  # (b, E)
        scores = routes.scores
        if self.score_function == "sigmoid":
            # Sigmoid scores do not sum to 1; P_e must be comparable to f_e.
            scores = scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        # A sum rather than a mean of scores: s · P_e, as the loss is a sum over tokens.
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
            # The same initial values as nn.Linear.
            if weight is not None:
                nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)
        made = GatedMLP if self.has_gate else UngatedMLP
        self.shared = (
            made(replace(config, mlp=config.shared_expert_mlp))
            if config.shared_expert_mlp
            else None
        )
        self.bias: Tensor | None
        self.register_buffer(
            "bias", torch.zeros(e) if config.expert_bias_update_rate > 0.0 else None
        )
        self.aux_loss: Tensor | None = None
        """Auxiliary loss of the last forward pass; whatever adds it to the loss resets it."""
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
        # Counted only where `update_expert_bias` will use it.
        if self.training and self.bias is not None:
            found = counts.sum(0)
            if self.tokens_per_expert is None:
                self.tokens_per_expert = found
            else:
                self.tokens_per_expert = self.tokens_per_expert + found
        # Summed in the dtype of the logits (fp32 at least), expert by expert.
        y = torch.zeros_like(flat, dtype=logits.dtype)  # (t, d)
        for e in range(rule.num_experts):
            token, slot = torch.nonzero((routes.experts == e) & kept, as_tuple=True)
            out = self._apply_expert(e, flat[token])
            y = y.index_add(0, token, out.to(y.dtype) * routes.weights[token, slot].unsqueeze(1))
        found = y.to(x.dtype).view_as(x)
        return found if self.shared is None else found + self.shared(x)

    def router_noise(self, logits: Tensor) -> Tensor:
        """Random numbers in [-1, 1) from torch; on a grid, of (seed, layer, sample, token)."""
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
        """After a step: raise the bias of experts that got fewer tokens than the mean.

        Lower that of the others.
        """
        if self.bias is not None and self.tokens_per_expert is not None:
            self.bias.copy_(
                next_expert_bias(self.bias, self.tokens_per_expert, self.rule.bias_update_rate)
            )
            self.tokens_per_expert = None


def next_expert_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """The bias after a step in which the experts got `loads` tokens: `[E]` each."""
    wide = loads.to(torch.float64)
    return bias + rate * (wide.mean() - wide).sign().to(bias.dtype)
