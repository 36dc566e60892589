"""Seconds of a serving step, from the limits of a device.

A step with D decoding tokens of mean context c and P prompt tokens takes at least

    linear     max(bytes of weights / B, 2 · parameters · (D + P) / F)
    attention  D · c · kv / B + 4 · layers · heads · head_dim · Σ n (s + n/2) / F_a

where a prompt chunk has n tokens that start at position s, kv is the bytes of keys and values per
token, B the memory bandwidth, F and F_a the FLOPs per second of matmuls and of attention. The head
is computed only for tokens that are sampled from. Real steps reach a fraction of this, the
efficiency. All numbers are per rank. A home is a set of requests whose tokens are one row of a
step; homes are padded to the one with the most tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MIN_CONTEXT_TOKENS = 64
"""Tokens per rank of context from which the tokens of a step are split over context."""


def count_own_tokens(num_tokens: int, context: int) -> int:
    """Returns the tokens of a step that a rank of context computes outside of attention."""
    if num_tokens < MIN_CONTEXT_TOKENS * context:
        return num_tokens
    return -(-num_tokens // context)


class StepLoad(NamedTuple):
    """The tokens of a step in one home."""

    decode_tokens: int = 0
    """Number of sequences with a single token."""
    mean_context: float = 0.0
    """Mean position of these tokens."""
    prompt_tokens: int = 0
    prompt_pairs: float = 0.0
    """Pairs of a prompt token and a token it attends to: Σ n (s + n/2) over chunks."""
    num_sampled: int = 0
    """Number of sequences that get a new token."""

    @property
    def num_tokens(self) -> int:
        """Number of all tokens."""
        return self.decode_tokens + self.prompt_tokens


class StepCost(Protocol):
    """Predicts the seconds of steps."""

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        """Returns the seconds of a step, with a load for each home."""


class AttentionWork(NamedTuple):
    """Attention layers with the same window."""

    kv_bytes: float
    """Bytes of keys and values per token, of all these layers."""
    flops_per_pair: float
    """FLOPs per pair of a query and a key, of all these layers."""
    window: int = 0
    """Sliding window in tokens; 0 means full causal attention."""


class StepCommunication(Protocol):
    """Predicts the seconds that a rank communicates in a step."""

    def seconds(self, tokens: int, sampled: int) -> float:
        """Returns the seconds for a number of tokens and of sampled tokens per home."""


@dataclass(frozen=True, kw_only=True)
class RooflineCost:
    """A step at a fraction of the limits of a rank."""

    weight_bytes: float
    """Bytes of weights that every step reads: blocks without experts, and the head."""
    flops_per_token: float
    """FLOPs of the blocks per token of a home, including the experts of a token."""
    head_flops: float
    """FLOPs of the head per sampled token of a home."""
    attention: tuple[AttentionWork, ...]
    expert_bytes: float = 0.0
    """Bytes of the weights of all experts of a rank."""
    expert_share: float = 1.0
    """Fraction of all experts that a token uses."""
    num_token_homes: int = 1
    """Number of homes whose tokens go through the experts of a rank."""
    bandwidth: float
    """Bytes per second."""
    flops: float
    """FLOPs per second of matmuls."""
    attention_flops: float
    """FLOPs per second of attention over prompts."""
    efficiency: float = 0.7
    host_seconds: float = 0.4e-3
    """Time per step in which the device waits for the host."""
    communication: StepCommunication | None = None
    """Collectives of a step; None on one rank."""
    context: int = 1
    """Number of ranks that share the keys of a sequence, and the tokens of large steps."""

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        """Returns the seconds of a step. Homes with fewer tokens are padded to the fullest."""
        tokens = max(load.num_tokens for load in loads)
        sampled = max(load.num_sampled for load in loads)
        used = 1.0 - (1.0 - self.expert_share) ** (tokens * self.num_token_homes)
        bytes_read = self.weight_bytes + used * self.expert_bytes
        flops = count_own_tokens(tokens, self.context) * self.flops_per_token
        flops += sampled * self.head_flops
        linear = max(bytes_read / self.bandwidth, flops / self.flops)
        attention = max(self._attention_seconds(load) for load in loads)
        spent = (linear + attention) / self.efficiency + self.host_seconds
        if self.communication is not None:
            spent += self.communication.seconds(tokens, sampled)
        return spent

    def _attention_seconds(self, load: StepLoad) -> float:
        """Returns the seconds of attention in one home."""
        total = 0.0
        for work in self.attention:
            seen = load.mean_context
            pairs = load.prompt_pairs
            if work.window:
                seen = min(seen, work.window)
                pairs = min(pairs, float(load.prompt_tokens * work.window))
            total += load.decode_tokens * seen * work.kv_bytes / self.bandwidth
            total += pairs * work.flops_per_pair / self.attention_flops
        return total


def largest_budget(
    cost: StepCost, decodes: StepLoad, target_seconds: float, *, most: int, multiple: int = 64
) -> int:
    """Returns the largest number of tokens per step that takes at most `target_seconds`.

    It is a multiple of `multiple`, at least one of it and at most `most`.

    decodes: the decoding tokens of a typical step; the rest of the budget are prompt tokens.
    """
    low = 1
    high = max(1, most // multiple)
    while low < high:
        middle = (low + high + 1) // 2
        prompts = max(0, middle * multiple - decodes.decode_tokens)
        load = decodes._replace(prompt_tokens=prompts, prompt_pairs=prompts**2 / 2)
        if cost.seconds([load]) <= target_seconds:
            low = middle
        else:
            high = middle - 1
    return min(low * multiple, most)
