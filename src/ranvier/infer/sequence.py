"""A sequence of the engine: known tokens, and the number of them whose keys and values exist.

Prefill, chunks of it, decode, hits of the prefix cache, recomputing after preemption and forced
tokens are all the same: `num_computed` catches up with the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ranvier.infer.block_pool import block_hash
from ranvier.infer.request import Request

SequenceStatus = Literal["waiting", "running", "finished"]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of a request in the engine. The scheduler changes it."""

    request: Request
    block_size: int
    max_model_len: int
    """Maximum number of tokens, prompt and output together."""
    model: str = ""
    """What else keys and values depend on, for the names of blocks: the checkpoint, and the
    frequencies of LongRoPE."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt, generated tokens and, at the end, draft tokens."""
    num_draft_tokens: int = 0
    """Tokens at the end of `token_ids` that are not confirmed; the next step decides."""
    num_computed: int = 0
    """Number of tokens whose keys and values exist, by steps that have finished."""
    num_in_flight: int = 0
    """Number of tokens that steps in flight compute, after the computed ones."""
    num_steps_in_flight: int = 0
    num_pending_tokens: int = 0
    """Number of tokens that steps in flight sample and that are not known yet."""
    waits_for_tokens: bool = False
    """Whether a next step needs the sampled token on the host, for example for a grammar."""
    discards_in_flight: bool = False
    """Whether the results of steps in flight are not used, because the sequence starts again."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Names of the full blocks so far; see `extend_hashes`."""
    iterations: dict[int, int] = field(default_factory=dict)
    """Number of iterations of generated tokens, by position, with early exits."""
    num_named_blocks: int = 0
    """Number of blocks that were offered to the prefix cache, or came from it."""
    home: int = 0
    """Index of the block pool, while running."""
    status: SequenceStatus = "waiting"
    arrival: int = -1
    """Number of sequences that were added before."""
    parent: Sequence | None = None
    """Sequence with the same prompt whose blocks are shared once they are computed."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache when it was first admitted."""
    num_preemptions: int = 0
    was_admitted: bool = False
    """Whether it has run before, so that it waits because of a preemption or a restart."""
    request_id: str = field(init=False)
    priority: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    """Number of tokens at which the sequence has reached its length limit."""

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.priority = self.request.priority
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.max_num_tokens = max_total_tokens(
            self.num_prompt_tokens, self.request.params.max_tokens, self.max_model_len
        )
        if not self.token_ids:
            self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute so far, including those that steps in flight sample.

        The last token that the length limit allows is never computed.
        """
        return min(len(self.token_ids) + self.num_pending_tokens, self.max_num_tokens - 1)

    @property
    def num_confirmed(self) -> int:
        """Number of known tokens without drafts."""
        return len(self.token_ids) - self.num_draft_tokens

    @property
    def num_generated(self) -> int:
        """Number of confirmed tokens after the prompt."""
        return self.num_confirmed - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        """Confirmed tokens after the prompt."""
        return self.token_ids[self.num_prompt_tokens : self.num_confirmed]

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the sequence uses."""
        return len(self.block_ids)

    @property
    def age(self) -> tuple[int, int]:
        """Sort key of sequences, the oldest first; a lower priority number counts as older."""
        return self.priority, self.arrival

    @property
    def takes_tokens(self) -> bool:
        """Whether tokens sampled by steps in flight are used."""
        return self.status == "running" and not self.discards_in_flight

    @property
    def waits_for_parent(self) -> bool:
        """Whether the prompt of the parent, whose blocks are shared, is not computed yet."""
        parent = self.parent
        if parent is None or parent.status == "finished":
            return False
        return parent.num_computed < parent.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.request.params.prompt_logprobs is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether blocks of others are used; log-probabilities of a prompt need all its logits."""
        return not self.is_scored

    def append_tokens(self, token_ids: Iterable[int]) -> None:
        """Appends tokens that need no sampling, such as those a grammar leaves no choice for."""
        assert not self.num_pending_tokens and not self.num_draft_tokens, self.request_id
        self.token_ids.extend(token_ids)

    def append_drafts(self, token_ids: Iterable[int]) -> None:
        """Appends draft tokens, which the next step confirms or drops."""
        assert not self.num_in_flight and not self.num_draft_tokens, self.request_id
        known = len(self.token_ids)
        self.token_ids.extend(token_ids)
        # The length limit holds with the token that is sampled after the drafts.
        del self.token_ids[max(known, self.max_num_tokens - 1) :]
        self.num_draft_tokens = len(self.token_ids) - known

    def accept_tokens(self, token_ids: Iterable[int]) -> None:
        """Replaces the draft tokens by the tokens of a step: the accepted ones and a new one."""
        if self.num_draft_tokens:
            del self.token_ids[self.num_confirmed :]
            self.num_draft_tokens = 0
        self.token_ids.extend(token_ids)

    def extend_hashes(self, num_blocks: int) -> list[bytes]:
        """Returns the names of the first `num_blocks` blocks, which must be full of confirmed
        tokens.
        """
        size = self.block_size
        assert num_blocks * size <= self.num_confirmed, (num_blocks, self.num_confirmed)
        while len(self.block_hashes) < num_blocks:
            start = len(self.block_hashes) * size
            self.block_hashes.append(
                block_hash(
                    self.block_hashes[-1] if self.block_hashes else b"",
                    self.token_ids[start : start + size],
                    self.request.cache_salt,
                    self.request.adapter,
                    self.model,
                )
            )
        return self.block_hashes[:num_blocks]


def max_total_tokens(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """Returns the maximum length of a sequence, prompt and output together."""
    if max_tokens is None:
        return max_model_len
    return min(num_prompt_tokens + max_tokens, max_model_len)
