"""Inputs of the sampler other than the logits: small tensors from the host, equal on all ranks.

A `SamplingState` follows one request and describes its next draw as a `SamplingRow`;
`SamplingInputs.from_rows` puts the rows of a step into tensors. Only the leader of a grid needs the
requests: `pack` turns the tensors into one of integers and one of floating-point numbers for a
broadcast, and `unpack` is its inverse.

`SamplingFlags` are known on the host. They select the work, so that a batch of greedy requests
costs one argmax, and they are hashable: a CUDA graph is captured for each.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ranvier.counter_rng import random_key
from ranvier.infer.sampling_params import SamplingParams

MAX_CANDIDATES = 1024
"""Number of largest logits of each vocabulary part among which filters are looked for first."""
IGNORED_TOKEN = -1
"""Token of an entry that changes nothing, to pad the entries of a CUDA graph."""


def token_bitmask(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """Returns a bitmask of tokens: int32 words, token i is bit i mod 32 of word i div 32."""
    bits = np.zeros(num_mask_words(vocab) * 32, dtype=np.uint8)
    bits[np.fromiter(tokens, dtype=np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def num_mask_words(vocab: int) -> int:
    """Returns the number of int32 words of a bitmask; it is even, so that it can be packed."""
    return 2 * -(-vocab // 64)


@dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """What the draw of one token depends on, in addition to its logits."""

    params: SamplingParams
    key: int
    """Hash of the seed and the stream of the request."""
    position: int
    """Number of tokens that were generated before."""
    forbidden_token_ids: Collection[int] = ()
    """Tokens that must not be drawn here: end tokens before `min_tokens`, ends of bad words."""
    masks: Sequence[np.ndarray] = ()
    """Bitmasks of allowed tokens; a token must be in all of them."""
    output_counts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    """How often each token was generated; only read if there are penalties."""
    prompt_token_ids: Collection[int] = ()
    """Different tokens of the prompt; only read if there is a repetition penalty."""


class SamplingState:
    """The state of one request that its draws depend on."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        stream: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Collection[int],
        vocab: int,
    ) -> None:
        self.params = params
        self.key = random_key(params.seed, "draw", stream)
        self.output_token_ids: list[int] = []
        self._output_counts: Counter[int] = Counter()
        self._prompt_token_ids: frozenset[int] = frozenset()
        if params.repetition_penalty != 1.0:
            self._prompt_token_ids = frozenset(prompt_token_ids)
        # A bad word may begin in the prompt.
        longest = max((len(word) for word in params.bad_words), default=1)
        self._context = list(prompt_token_ids[max(len(prompt_token_ids) - longest + 1, 0) :])
        self._end_token_ids = params.stop_token_ids
        if not params.ignore_eos:
            self._end_token_ids = self._end_token_ids | frozenset(end_token_ids)
        self._masks: list[np.ndarray] = []
        if params.allowed_token_ids is not None:
            self._masks.append(token_bitmask(params.allowed_token_ids, vocab))

    @property
    def needs_last_token(self) -> bool:
        """Whether the next draw depends on tokens so far, not only on their number."""
        return self.params.has_penalties or any(len(word) > 1 for word in self.params.bad_words)

    def changes_at(self, position: int) -> bool:
        """Whether draws after this position depend on other parameters than the one there."""
        has_words = bool(self.params.bad_words)
        return self.params.has_penalties or has_words or position < self.params.min_tokens

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.output_token_ids.append(token)
        if self.params.has_penalties:
            self._output_counts[token] += 1

    def next_row(
        self, *, position: int | None = None, mask: np.ndarray | None = None
    ) -> SamplingRow:
        """Returns the next draw.

        position: number of tokens generated before, if some of them are not known yet. mask: tokens
        that the grammar allows.
        """
        if position is None:
            position = len(self.output_token_ids)
        masks = self._masks
        if mask is not None:
            masks = [*masks, mask]
        return SamplingRow(
            params=self.params,
            key=self.key,
            position=position,
            forbidden_token_ids=self._forbidden_tokens(position),
            masks=masks,
            output_counts=self._output_counts,
            prompt_token_ids=self._prompt_token_ids,
        )

    def _forbidden_tokens(self, position: int) -> set[int]:
        forbidden: set[int] = set()
        if position < self.params.min_tokens:
            forbidden |= self._end_token_ids
        for *head, last in self.params.bad_words:
            known = [*self._context, *self.output_token_ids[-len(head) :]] if head else []
            if known[len(known) - len(head) :] == head:
                forbidden.add(last)
        return forbidden


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Properties of a batch that select the work of the sampler."""

    is_greedy: bool = True
    """Whether all rows take the most likely token."""
    is_bounded: bool = False
    """Whether all other rows have a top_k or top_p, so that they may draw from candidates alone."""
    has_top_p: bool = False
    has_min_p: bool = False
    num_candidates: int = 0
    """Number of largest logits of each vocabulary part to look at for filters; 0 means none."""
    may_need_all: bool = False
    """Whether the candidates may be too few, so that all logits must be looked at."""
    has_bias: bool = False
    has_masks: bool = False
    has_penalties: bool = False
    num_logprobs: int = -1
    """Number of most likely tokens to report, in addition to the drawn one; -1 reports nothing."""

    @classmethod
    def from_params(
        cls,
        params: Sequence[SamplingParams],
        vocab: int,
        *,
        has_bias: bool,
        has_masks: bool,
    ) -> SamplingFlags:
        """Returns the flags of a batch of requests with these parameters."""
        drawn = [one for one in params if not one.is_greedy]
        top_k = [top_k_limit(one, vocab) for one in drawn]
        # Beyond the candidates top_k does not help: it takes all logits.
        may_need_all = any(
            k > MAX_CANDIDATES or (one.top_p < 1.0 and k == 0)
            for one, k in zip(drawn, top_k, strict=True)
        )
        num_candidates = min(max(top_k, default=0), MAX_CANDIDATES)
        if may_need_all:
            num_candidates = MAX_CANDIDATES
        # Powers of two, so that there are few different flags.
        elif num_candidates:
            num_candidates = 1 << (num_candidates - 1).bit_length()
        has_min_p = any(one.min_p > 0.0 for one in drawn)
        return cls(
            is_greedy=not drawn,
            is_bounded=bool(drawn)
            and all(one.top_p < 1.0 or k > 0 for one, k in zip(drawn, top_k, strict=True)),
            has_top_p=any(one.top_p < 1.0 for one in drawn),
            has_min_p=has_min_p,
            # The largest logit is what min_p needs.
            num_candidates=max(num_candidates, int(has_min_p)),
            may_need_all=may_need_all,
            has_bias=has_bias,
            has_masks=has_masks,
            has_penalties=any(one.has_penalties for one in params),
            num_logprobs=max(
                (one.logprobs for one in params if one.logprobs is not None), default=-1
            ),
        )


def top_k_limit(params: SamplingParams, vocab: int) -> int:
    """Returns top_k, or 0 if it keeps all tokens."""
    if params.top_k >= vocab:
        return 0
    return params.top_k


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingInputs:
    """Parameters of the draws of n rows of logits. A greedy row has no filters."""

    flags: SamplingFlags
    temperatures: Tensor
    """float64 `[n]`; 0 takes the most likely token."""
    top_k: Tensor
    """int64 `[n]`; 0 means all tokens."""
    top_p: Tensor
    """float64 `[n]`."""
    log_min_p: Tensor
    """Logarithm of min_p, float64 `[n]`; -inf means no filter."""
    keys: Tensor
    """Hashes of seeds and streams, int64 `[n]`."""
    positions: Tensor
    """Numbers of tokens generated before, int64 `[n]`."""
    bias_entries: Tensor
    """Row and token of each addition to a logit, int64 `[a, 2]`; a pair occurs once."""
    bias_values: Tensor
    """What is added, float64 `[a]`; -inf forbids the token."""
    mask_rows: Tensor
    """Rows with a bitmask, int64 `[m]`."""
    masks: Tensor
    """Bitmasks of allowed tokens, int32 `[m, words]`."""
    penalty_entries: Tensor
    """Row, token, count in the output, and 1 if it is in the prompt: int64 `[e, 4]`."""
    presence_penalties: Tensor
    """float64 `[n]`."""
    frequency_penalties: Tensor
    """float64 `[n]`."""
    repetition_penalties: Tensor
    """float64 `[n]`."""

    @property
    def num_rows(self) -> int:
        """Number of rows of logits."""
        return len(self.keys)

    @classmethod
    def from_rows(
        cls, rows: Sequence[SamplingRow], vocab: int, *, num_rows: int | None = None
    ) -> SamplingInputs:
        """Returns the inputs of these rows.

        vocab: number of tokens of the model. num_rows: number of rows of logits if there are more,
        as in a CUDA graph; the others are greedy.
        """
        extra = 0 if num_rows is None else num_rows - len(rows)
        assert extra >= 0, (num_rows, len(rows))
        greedy = SamplingParams(temperature=0.0)
        params = [row.params for row in rows] + [greedy] * extra
        bias = [_bias_of(row) for row in rows]
        masked = [i for i, row in enumerate(rows) if row.masks]
        penalized = [i for i, row in enumerate(rows) if row.params.has_penalties]
        entries = [entry for i in penalized for entry in _penalty_entries(i, rows[i])]
        words = num_mask_words(vocab)
        masks = np.zeros((len(masked), words), dtype=np.int32)
        for place, i in enumerate(masked):
            masks[place] = _combine_masks(rows[i].masks, words)
        # Filters do not change a greedy row, but cost time.
        drawn = [one if not one.is_greedy else greedy for one in params]

        def floats(values: Iterable[float]) -> Tensor:
            return torch.tensor([*values], dtype=torch.float64)

        def integers(values: Iterable[object]) -> Tensor:
            return torch.tensor([*values], dtype=torch.int64)

        return cls(
            flags=SamplingFlags.from_params(
                params, vocab, has_bias=any(bias), has_masks=bool(masked)
            ),
            temperatures=floats(one.temperature for one in params),
            top_k=integers(top_k_limit(one, vocab) for one in drawn),
            top_p=floats(one.top_p for one in drawn),
            log_min_p=floats(
                math.log(one.min_p) if one.min_p > 0.0 else -math.inf for one in drawn
            ),
            keys=integers([*(row.key for row in rows), *[0] * extra]),
            positions=integers([*(row.position for row in rows), *[0] * extra]),
            bias_entries=integers((i, token) for i, one in enumerate(bias) for token in one).view(
                -1, 2
            ),
            bias_values=floats(value for one in bias for value in one.values()),
            mask_rows=integers(masked),
            masks=torch.from_numpy(masks),
            penalty_entries=integers(entries).view(-1, 4),
            presence_penalties=floats(one.presence_penalty for one in params),
            frequency_penalties=floats(one.frequency_penalty for one in params),
            repetition_penalties=floats(one.repetition_penalty for one in params),
        )

    @classmethod
    def without_entries(cls, flags: SamplingFlags, **fields: Tensor) -> SamplingInputs:
        """Returns inputs of rows without masks, biases and penalties, as in a CUDA graph."""
        keys = fields["keys"]
        zeros = torch.zeros(keys.shape, dtype=torch.float64, device=keys.device)
        return cls(
            flags=flags,
            **fields,
            bias_entries=keys.new_zeros(0, 2),
            bias_values=zeros[:0],
            mask_rows=keys.new_zeros(0),
            masks=torch.zeros(0, 2, dtype=torch.int32, device=keys.device),
            penalty_entries=keys.new_zeros(0, 4),
            presence_penalties=zeros,
            frequency_penalties=zeros,
            repetition_penalties=zeros + 1.0,
        )

    def to(self, device: torch.device | str) -> SamplingInputs:
        """Returns the inputs on a device, with one transfer that does not wait for the device."""
        device = torch.device(device)
        if device.type == self.keys.device.type:
            return self
        own = {name: getattr(self, name) for name in _TENSORS}
        words = [x.flatten().view(torch.int64) for x in own.values()]
        flat = torch.cat(words)
        if device.type == "cuda":
            flat = flat.pin_memory()
        parts = flat.to(device, non_blocking=True).split([len(x) for x in words])
        moved = {
            name: part.view(x.dtype).view(x.shape)
            for (name, x), part in zip(own.items(), parts, strict=True)
        }
        return dataclasses.replace(self, **moved)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Returns everything as an int64 tensor and a float64 tensor, for a broadcast."""
        sizes = [self.num_rows, len(self.bias_values), len(self.mask_rows), self.masks.shape[1]]
        sizes += [len(self.penalty_entries)]
        header = [*sizes, *(int(value) for value in dataclasses.astuple(self.flags))]
        integers = [torch.tensor(header, dtype=torch.int64)]
        integers += [getattr(self, name).flatten() for name in _INTEGERS]
        integers += [self.masks.flatten().view(torch.int64)]
        return torch.cat(integers), torch.cat([getattr(self, name) for name in _FLOATS])

    @classmethod
    def unpack(cls, integers: Tensor, floats: Tensor) -> SamplingInputs:
        """Returns the inputs that were packed into these tensors on the host."""
        kinds = dataclasses.fields(SamplingFlags)
        header = integers[: 5 + len(kinds)].tolist()
        rows, biases, masked, words, penalties = header[:5]
        flags: dict[str, Any] = {
            one.name: bool(value) if isinstance(one.default, bool) else value
            for one, value in zip(kinds, header[5:], strict=True)
        }
        shapes = dict.fromkeys((*_INTEGERS, *_FLOATS), (rows,)) | {
            "bias_entries": (biases, 2),
            "bias_values": (biases,),
            "mask_rows": (masked,),
            "penalty_entries": (penalties, 4),
        }
        parts: dict[str, Tensor] = {}
        for names, packed, start in ((_INTEGERS, integers, len(header)), (_FLOATS, floats, 0)):
            for name in names:
                end = start + math.prod(shapes[name])
                parts[name] = packed[start:end].view(shapes[name])
                start = end
        masks = integers[len(integers) - masked * words // 2 :].view(torch.int32)
        return cls(flags=SamplingFlags(**flags), masks=masks.view(masked, words), **parts)


_INTEGERS = ("top_k", "keys", "positions", "bias_entries", "mask_rows", "penalty_entries")
_FLOATS = (
    *("temperatures", "top_p", "log_min_p", "bias_values"),
    *("presence_penalties", "frequency_penalties", "repetition_penalties"),
)
_TENSORS = (*_INTEGERS, *_FLOATS, "masks")


def _bias_of(row: SamplingRow) -> dict[int, float]:
    """Returns what is added to the logits of a row, by token."""
    return {**row.params.logit_bias, **dict.fromkeys(row.forbidden_token_ids, -math.inf)}


def _penalty_entries(index: int, row: SamplingRow) -> list[tuple[int, int, int, int]]:
    counts = row.output_counts
    entries = [(index, token, n, int(token in row.prompt_token_ids)) for token, n in counts.items()]
    if row.params.repetition_penalty != 1.0:
        entries += [(index, token, 0, 1) for token in row.prompt_token_ids if token not in counts]
    return entries


def _combine_masks(masks: Sequence[np.ndarray], words: int) -> np.ndarray:
    """Returns the tokens that all masks allow; words that a mask lacks allow nothing."""
    combined = np.full(words, -1, dtype=np.int32)
    for mask in masks:
        short = min(len(mask), words)
        combined[:short] &= mask[:short].view(np.int32)
        combined[short:] = 0
    return combined
