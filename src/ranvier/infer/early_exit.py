"""Early exits of a model with recurrent depth: tokens that need no further iteration.

After each iteration the distributions of the next token are compared with those after the
iteration before (at first, with the uniform distribution). A token whose criterion holds keeps its
state while others continue. Later iterations see it through the keys and values of its last one.

Only tokens that an engine generates, or scores, may exit. The tokens of a prompt have all
iterations, and a token that is computed again, after a preemption, has as many as before. Tokens
that may exit are computed one after the other: a token decides when those before it have decided.
Results therefore depend neither on the batch nor on how a prompt is divided into steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ranvier.comm import collectives
from ranvier.config.engine import ExitCriterion
from ranvier.grid import Axis
from ranvier.infer.sampler import gather_vocab_parts, valid_columns
from ranvier.models.paged_attention import KVCache, PagedSequences
from ranvier.nn.cross_entropy import VocabShard

DECIDE = 0
"""Number of iterations of a token that the criterion decides."""


@dataclass(frozen=True)
class Distributions:
    """What is compared of the distributions of some tokens, `[n, V/p]` and `[n]`."""

    logprobs: Tensor
    """Log-probabilities of the columns of this rank, -inf for padding."""
    entropies: Tensor
    most_likely: Tensor
    """The most likely token of each row."""

    @classmethod
    def of_logits(cls, logits: Tensor, shard: VocabShard) -> Distributions:
        """Returns the distributions of logits `[n, V/p]`.

        Communicates: all-gather of four numbers per row over the axis of the vocabulary.
        """
        x = valid_columns(logits, shard).double()
        peaks, columns = x.max(1)
        sums = (x - peaks.unsqueeze(1)).exp()
        # A rank that has only padding has one column of -inf.
        sums = sums.nan_to_num(0.0)
        parts = gather_vocab_parts(
            torch.stack([peaks, sums.sum(1), (columns + shard.first_column).double()], 1),
            shard.axis,
        )  # (p, n, 3)
        part_peaks, part_sums, part_tokens = parts.unbind(2)
        peak, owner = part_peaks.max(0)
        normalizers = ((part_peaks - peak).exp() * part_sums).sum(0).log() + peak
        logprobs = x - normalizers.unsqueeze(1)
        own = _expectation(logprobs, logprobs)
        entropies = -collectives.all_reduce(own, shard.axis).wait()
        tokens = part_tokens.gather(0, owner.unsqueeze(0)).squeeze(0).long()
        return cls(logprobs, entropies, tokens)


def _expectation(logprobs: Tensor, values: Tensor) -> Tensor:
    """Returns Σ p · value over the columns of this rank, `[n]`; columns with p = 0 count as 0."""
    return (logprobs.exp() * values).nan_to_num(0.0).sum(1)


class ExitTest:
    """Finds the rows whose criterion holds, iteration after iteration.

    Args:
        criterion: When a row exits.
        shard: The part of the vocabulary of this rank.
        vocab_size: Number of tokens of the vocabulary.
    """

    def __init__(self, criterion: ExitCriterion, shard: VocabShard, vocab_size: int) -> None:
        self.criterion = criterion
        self.shard = shard
        self.vocab_size = vocab_size
        self._last: Distributions | None = None
        self._num_equal: Tensor | None = None

    def update(self, logits: Tensor) -> Tensor:
        """Returns whether the criterion of each row holds after another iteration, bool `[n]`.

        logits: `[n, V/p]`. Communicates: all-gather of three numbers per row over the axis of the
        vocabulary, all-reduce of one, and, for kl, of another.
        """
        now = Distributions.of_logits(logits, self.shard)
        last = self._last
        self._last = now
        criterion = self.criterion
        uniform = -torch.log(torch.tensor(float(self.vocab_size), dtype=torch.float64))
        match criterion.kind:
            case "kl":
                # KL(p_{i-1} || p_i) = Σ p_{i-1} (log p_{i-1} - log p_i)
                before = torch.full_like(now.logprobs, float(uniform))
                if last is not None:
                    before = last.logprobs
                # Padding has no probability in either distribution.
                before = before.masked_fill(now.logprobs == -torch.inf, -torch.inf)
                own = _expectation(before, before - now.logprobs)
                divergence = collectives.all_reduce(own, self.shard.axis).wait()
                # Rounding can make that of almost equal distributions negative.
                return divergence.clamp(min=0.0) < criterion.threshold
            case "entropy":
                before = torch.full_like(now.entropies, -float(uniform))
                if last is not None:
                    before = last.entropies
                return (now.entropies - before).abs() < criterion.threshold
            case "argmax":
                count = torch.ones_like(now.most_likely)
                if last is not None and self._num_equal is not None:
                    same = now.most_likely == last.most_likely
                    count = torch.where(same, self._num_equal + 1, count)
                self._num_equal = count
                return count >= criterion.threshold


class EarlyExit:
    """Which tokens of a step still have iterations to run.

    Args:
        limits: Number of iterations of each token of each home, `[homes, T]`, on the host; `DECIDE`
            where the criterion decides, and 1 for padding.
        rows: Tokens of this home whose logits are computed.
        test: The criterion; None before the head, or if nothing is to be decided here.
        num_iterations: Number of iterations at most.
        home: Index of this home.
        local_tokens: Homes and tokens that this rank has in the residual stream.
        home_axis: Axis of the homes.
        context_axis: Axis whose ranks have the same tokens.
        caches: Keys and values of the recurrent layers, one tuple for each.
        device: Device of the states.
    """

    def __init__(
        self,
        limits: Tensor,
        rows: Sequence[int],
        test: ExitTest,
        *,
        num_iterations: int,
        home: int,
        local_tokens: tuple[slice, slice],
        home_axis: Axis,
        context_axis: Axis,
        caches: Sequence[tuple[KVCache, ...]],
        device: torch.device,
    ) -> None:
        self.decides = bool((limits == DECIDE).any())
        """Whether a token of the step is to be decided, so that logits are needed."""
        limits = limits.to(device)
        self._is_decided = limits != DECIDE
        self._limits = torch.where(self._is_decided, limits, num_iterations)
        self.iterations = self._limits.clone()
        """Number of iterations of each token, `[homes, T]`; final once the step has ended."""
        self._is_running = torch.ones_like(self._is_decided)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._test = test
        self._home = home
        self._local_tokens = local_tokens
        self._home_axis = home_axis
        self._context_axis = context_axis
        self._caches = caches
        self.num_iterations = num_iterations

    @property
    def own_iterations(self) -> Tensor:
        """Number of iterations of the tokens of this home whose logits are computed, `[n]`."""
        return self.iterations[self._home][self._rows]

    def keep_finished(self, before: Tensor, after: Tensor) -> Tensor:
        """Returns the states after an iteration, of finished tokens those before.

        before, after: `[b, s/row, d/col]`.
        """
        is_running = self._is_running[self._local_tokens].unsqueeze(-1)
        return torch.where(is_running, after, before)

    def hide_finished(self, sequences: PagedSequences) -> PagedSequences:
        """Returns the sequences of a step, with finished tokens writing into block 0."""
        is_running = self._is_running[self._home]
        return replace(sequences, slot_mapping=sequences.slot_mapping * is_running)

    def update(self, iteration: int, logits: Tensor | None, sequences: PagedSequences) -> bool:
        """Finds the tokens that exit after an iteration. Returns whether all have.

        iteration: from 0. logits: of the rows of this home `[1, n, V/p]`, if tokens are decided.
        Communicates: as `ExitTest.update`; all-gather of one number per token over homes.
        """
        done = iteration + 1
        own = self._is_running[self._home] & (self._limits[self._home] > done)
        if logits is not None and len(self._rows):
            exits = self._test.update(logits[0, : len(self._rows)])
            exits &= ~self._is_decided[self._home][self._rows]
            own[self._rows[exits]] = False
        # Where rounding differs between ranks of context, they could decide differently.
        own = collectives.broadcast(own.int(), self._context_axis).wait()
        running = collectives.all_gather(own, self._home_axis).wait()
        running = running.view(self._is_running.shape).bool()
        finished = self._is_running & ~running
        self.iterations[finished] = done
        self._is_running = running
        if done < self.num_iterations:
            self._copy_keys(iteration, sequences.slot_mapping[finished[self._home]])
        return not bool(running.any())

    def _copy_keys(self, iteration: int, slots: Tensor) -> None:
        """Copies the last keys and values of finished tokens to the later iterations."""
        if not len(slots):
            return
        for caches in self._caches:
            source = iteration % len(caches)
            later = {i % len(caches) for i in range(iteration + 1, self.num_iterations)}
            for i in later - {source}:
                caches[i].copy_slots(caches[source], slots)
