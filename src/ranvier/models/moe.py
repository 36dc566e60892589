"""A mixture of experts: a router sends each token to a few of many MLPs; plain PyTorch.

    p = softmax(l) or sigmoid(l)             scores; l = g x Wᵀ with g = router_logit_scale, in
                                             fp32 or float64
    experts = top k of p + bias              the bias affects the choice, not the weights
    y = Σ_k w_k · expert_k(x) + shared(x)    w: scores of the chosen experts, divided by their sum

The balancing losses are defined per sequence and the bias per step, so they do not depend on the
grid or on micro-batches. With f_e the fraction of the choices of expert e in a sequence of s tokens
and P_e its mean score,

    aux_loss = s · (aux_loss_coeff · E · Σ_e f_e P_e
                    + z_loss_coeff · mean_t logsumexp(logits_t)²)

summed over sequences, is added to the loss, which is a sum over tokens.

Shapes: b sequences, s tokens, t = b·s, d embed, E experts, k experts per token, f expert mlp.
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
    """Scores of all experts, `[t, E]`."""
    weights: Tensor
    """Weights of the outputs of the chosen experts, `[t, k]`."""
    experts: Tensor
    """The chosen experts, `[t, k]`."""


@dataclass(frozen=True)
class Router:
    """Chooses the experts of each token from logits; the same on one device and on a grid."""

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
        """Creates the router of a model."""
        return cls(
            config.experts,
            config.experts_per_token,
            config.router,
            config.router_norm,
            config.router_scale,
            config.capacity_factor,
            # The loss counts a token once, also if it is routed in several streams.
            config.aux_loss_coeff / config.streams,
            config.z_loss_coeff / config.streams,
            config.router_jitter,
            config.expert_bias_update_rate,
            config.router_logit_scale,
        )

    @property
    def has_aux_loss(self) -> bool:
        """Whether the router adds an auxiliary loss."""
        return self.aux_loss_coeff > 0.0 or self.z_loss_coeff > 0.0

    def expert_capacity(self, seq: int) -> int:
        """Returns the maximum number of tokens of a sequence per expert."""
        if self.capacity_factor == 0.0:
            return seq
        # A token chooses an expert at most once, so `seq` slots are always enough.
        return min(math.ceil(self.capacity_factor * seq * self.top_k / self.num_experts), seq)

    def compute_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Returns logit_scale · x Wᵀ, at least in fp32; x: `[t, d]`, y: `[t, E]`.

        For a part of the features the result is a partial sum.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        found = F.linear(x.to(wide), weight.to(wide))  # (t, E)
        if self.logit_scale == 1.0:
            return found
        return found * self.logit_scale

    def route_tokens(self, logits: Tensor, bias: Tensor | None = None) -> Routes:
        """Chooses experts. logits: `[t, E]`, at least fp32; bias: `[E]`."""
        if self.score_function == "softmax":
            scores = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
        if bias is None:
            wanted = scores.detach()
        else:
            # The bias affects which experts are chosen; weights are the scores without it.
            wanted = scores.detach() + bias.to(scores.dtype)
        experts = wanted.topk(self.top_k, dim=-1).indices  # (t, k)
        weights = scores.gather(1, experts)
        if self.norm_topk_prob:
            # All sigmoid scores may underflow to 0.
            floor = torch.finfo(weights.dtype).tiny
            weights = weights / weights.sum(1, keepdim=True).clamp(min=floor)
        return Routes(
            scores, weights * self.route_scale if self.route_scale != 1.0 else weights, experts
        )

    def count_choices(self, routes: Routes, sequences: int) -> Tensor:
        """Returns the choices per sequence (or its part on this rank) and expert, `[b, E]`."""
        chosen = routes.experts.new_zeros(sequences, self.num_experts)
        flat = routes.experts.view(sequences, -1)
        return chosen.scatter_add_(1, flat, torch.ones_like(flat))

    def capacity_mask(
        self, routes: Routes, sequences: int, seq: int, before: Tensor | None
    ) -> Tensor:
        """Returns which choices are within the capacity, in sequence order, `[t, k]`.

        seq: tokens of whole sequences; before: choices in earlier parts of them, `[b, E]`.
        """
        # Cumulative number of choices of each expert along the sequence.
        hot = F.one_hot(routes.experts.view(sequences, -1), self.num_experts)  # (b, s·k, E)
        if before is None:
            place = hot.cumsum(1)
        else:
            place = hot.cumsum(1) + before.unsqueeze(1)
        # `place` counts from 1: the n-th choice of an expert in its sequence has place n.
        mine = place.gather(2, routes.experts.view(sequences, -1, 1)).view_as(routes.experts)
        return mine <= self.expert_capacity(seq)

    def compute_aux_loss(self, logits: Tensor, routes: Routes, counts: Tensor, seq: int) -> Tensor:
        """Returns the auxiliary loss, summed over the local tokens.

        counts: choices of whole sequences, `[b, E]`; logits: of the local tokens, `[t, E]`.
        """
        shares = counts.to(logits.dtype) / (seq * self.top_k)  # (b, E)
        scores = routes.scores
        if self.score_function == "sigmoid":
            # Sigmoid scores do not sum to 1; P_e must be comparable to f_e.
            scores = scores / scores.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        # The sum of scores, s · P_e, instead of their mean, as the loss is a sum over tokens.
        sums = scores.view(len(counts), -1, self.num_experts).sum(1)  # (b, E)
        found = self.aux_loss_coeff * self.num_experts * (shares * sums).sum()
        if self.z_loss_coeff > 0.0:
            return found + self.z_loss_coeff * logits.logsumexp(-1).square().sum()
        return found


class MoELayer(nn.Module):
    """A mixture of experts, y = Σ_k w_k · down_k(f(gate_k x) · up_k x) + shared(x).

    Without gates an expert is down_k(f(up_k x)). x, y: `[b, s, d]`.
    """

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
        """Auxiliary loss of the last forward pass; reset when it is added to the loss."""
        self.tokens_per_expert: Tensor | None = None
        """Number of choices of each expert since the last step, `[E]`."""

    def forward(self, x: Tensor) -> Tensor:
        """Routes tokens to experts and sums their outputs; x, y: `[b, s, d]`."""
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
        # Counted only if `update_expert_bias` will use it.
        if self.training and self.bias is not None:
            found = counts.sum(0)
            if self.tokens_per_expert is None:
                self.tokens_per_expert = found
            else:
                self.tokens_per_expert = self.tokens_per_expert + found
        # Summed over experts in the dtype of the logits, at least fp32.
        y = torch.zeros_like(flat, dtype=logits.dtype)  # (t, d)
        for e in range(rule.num_experts):
            token, slot = torch.nonzero((routes.experts == e) & kept, as_tuple=True)
            out = self._apply_expert(e, flat[token])
            y = y.index_add(0, token, out.to(y.dtype) * routes.weights[token, slot].unsqueeze(1))
        found = y.to(x.dtype).view_as(x)
        return found if self.shared is None else found + self.shared(x)

    def router_noise(self, logits: Tensor) -> Tensor:
        """Returns random numbers in [-1, 1); parallel layers derive them from the sample index."""
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
        """Updates the bias after an optimizer step.

        It increases for experts with fewer tokens than the mean and decreases for the others.
        """
        if self.bias is not None and self.tokens_per_expert is not None:
            self.bias.copy_(
                next_expert_bias(self.bias, self.tokens_per_expert, self.rule.bias_update_rate)
            )
            self.tokens_per_expert = None


def next_expert_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Returns the bias after a step in which the experts got `loads` tokens, `[E]` each."""
    wide = loads.to(torch.float64)
    return bias + rate * (wide.mean() - wide).sign().to(bias.dtype)
