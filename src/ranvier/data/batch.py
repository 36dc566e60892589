"""Batches: samples of a step or of a micro-batch as tensors.

SampleBatch: the interface of batches that training needs, for any kind of model.
Batch: tokens and their targets. Window: one sample of a corpus.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ranvier.comm.autograd import local_slice
from ranvier.config.kinds import find_kind
from ranvier.config.plan import ContextOrder
from ranvier.config.run import RunConfig
from ranvier.config.sections import ModelConfig
from ranvier.errors import ShardingError
from ranvier.grid import Axis, Grid
from ranvier.models.document_attention import Documents
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.cross_entropy import IGNORE_INDEX
from ranvier.sharding import REPLICA_AXES, ShardingTable, TokenOrder, order_tokens

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Window:
    """A sample; all int64 `[seq]`."""

    tokens: Ints
    targets: Ints
    """The next token; IGNORE_INDEX where there is none."""
    positions: Ints
    """Position within the document, counted from its first token in this window; without a
    document mask, within the window."""
    documents: Ints
    """Index of the document within this window."""

    @classmethod
    def without_targets(cls, seq: int) -> Window:
        """A window without any target."""
        zeros = np.zeros(seq, np.int64)
        return cls(zeros, np.full(seq, IGNORE_INDEX, np.int64), np.arange(seq), zeros)


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """Samples of a step or of a micro-batch; the first dim of every tensor counts the samples.

    Each kind of model has its own fields.
    """

    samples: Tensor | None = None
    """Index of each sample in the run `[b]`."""

    @classmethod
    @abstractmethod
    def blank(cls, run: RunConfig, size: int) -> Self:
        """A micro-batch of `size` samples for measurements: shapes matter, values do not."""

    @classmethod
    @abstractmethod
    def random(cls, run: RunConfig) -> Self:
        """A global batch of random samples, some without targets; equal on every rank."""

    @abstractmethod
    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model on one process."""

    @abstractmethod
    def count_targets(self, axis: Axis | None = None) -> Tensor:
        """Number of targets that the loss averages over; axis: of this rank's share along it."""

    def local_inputs(self, grid: Grid, table: ShardingTable) -> dict[str, Any]:
        """Keyword arguments of the model on this rank; by default equal in a replica."""
        return self.model_inputs()

    def select(self, rows: slice) -> Self:
        """A slice of the samples."""
        return self.map_tensors(lambda x: x[rows])

    def to(self, device: torch.device | str) -> Self:
        """The batch on a device."""
        return self.map_tensors(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The batch in pinned memory, for asynchronous copies to a device."""
        return self.map_tensors(lambda x: x.pin_memory())

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The batch with a function applied to each of its tensors."""
        values = ((one.name, getattr(self, one.name)) for one in fields(self))
        changed: Any = {name: change(x) for name, x in values if isinstance(x, Tensor)}
        return replace(self, **changed)

    def shard_over_context(self, grid: Grid, order: ContextOrder) -> Self:
        """This rank's part of each sample, if context splits it; by default samples are whole."""
        if grid.degrees["context"] > 1:
            raise ShardingError(
                f"{type(self).__name__} cannot be split over context={grid.degrees['context']}. "
                "Only batches of tokens can. Use context=1."
            )
        return self

    def split_micro_batches(
        self, grid: Grid, size: int, order: ContextOrder = "balanced"
    ) -> list[Self]:
        """This rank's micro-batches: its contiguous share of the samples, `size` at a time.

        order: which tokens of a sample the ranks of context get.
        """
        axis = grid.axis_without_group(*REPLICA_AXES)
        share, rest = divmod(self.num_samples, axis.size)
        assert rest == 0 and share % size == 0, (self.num_samples, axis.size, size)
        mine = self.select(slice(axis.index * share, (axis.index + 1) * share))
        mine = mine.shard_over_context(grid, order)
        return [mine.select(slice(i, i + size)) for i in range(0, share, size)]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        tensors = (getattr(self, one.name) for one in fields(self))
        return next(x.shape[0] for x in tensors if isinstance(x, Tensor))


@dataclass(frozen=True)
class Batch(SampleBatch):
    """Tokens and their targets; all `[b, s]`."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    documents: Documents | ContextDocuments | Tensor | None = None
    """Document ids, equal for neighbors in one document; on a device the document boundaries. If
    context splits the samples, `[b, s/context]`, the order of their tokens over context."""

    @classmethod
    def blank(cls, run: RunConfig, size: int) -> Self:
        """Zeros, with two documents per sample if documents are packed."""
        tokens = torch.zeros(size, run.data.seq_len, dtype=torch.int64)
        samples = torch.arange(size)
        # Over context, one document has most keys to fetch.
        if not run.data.document_mask or run.data.seq_len < 2 or run.plan.context > 1:
            return cls(tokens, tokens, samples=samples)
        positions = torch.arange(run.data.seq_len).expand(size, -1)
        documents = (positions >= run.data.seq_len // 2).long()
        return cls(tokens, tokens, positions.contiguous(), documents, samples=samples)

    @classmethod
    def random(cls, run: RunConfig) -> Self:
        """Random tokens; some have no target."""
        drawn = torch.Generator().manual_seed(run.train.seed + 1)
        shape = (run.plan.global_batch, run.data.seq_len)
        vocab = run.decoder.vocab
        tokens = torch.randint(0, vocab, shape, generator=drawn)
        targets = torch.randint(0, vocab, shape, generator=drawn)
        targets[torch.rand(shape, generator=drawn) < 0.2] = IGNORE_INDEX
        if not run.data.document_mask:
            return cls(tokens, targets, samples=torch.arange(shape[0]))
        starts = torch.rand(shape, generator=drawn) < 0.25
        starts[:, 0] = True
        index = torch.arange(shape[1]).expand(shape)
        # Position within the document: distance to the latest document start.
        positions = index - torch.where(starts, index, 0).cummax(1).values
        documents = starts.long().cumsum(1)
        return cls(tokens, targets, positions, documents, samples=torch.arange(shape[0]))

    @classmethod
    def from_windows(cls, windows: Sequence[Window], *, packed: bool) -> Self:
        """The samples of windows; packed: with their documents."""

        def stack_field(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(window, name) for window in windows]))

        if not packed:
            return cls(stack_field("tokens"), stack_field("targets"))
        return cls(*map(stack_field, ("tokens", "targets", "positions", "documents")))

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model."""
        names = ("tokens", "targets", "positions", "documents")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    def count_targets(self, axis: Axis | None = None) -> Tensor:
        """Number of tokens with a target."""
        targets = self.targets if axis is None else local_slice(self.targets, axis, 0)
        return (targets != IGNORE_INDEX).sum()

    def select(self, rows: slice) -> Self:
        """A slice of the samples."""
        batch = super().select(rows)
        if isinstance(self.documents, Documents | ContextDocuments):
            # Also the lengths on the host.
            return replace(batch, documents=self.documents.select_samples(rows))
        return batch

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The batch with a function applied to each of its tensors."""
        batch = super().map_tensors(change)
        if isinstance(self.documents, ContextDocuments):
            return replace(batch, documents=self.documents.map_tensors(change))
        return batch

    def shard_over_context(self, grid: Grid, order: ContextOrder) -> Self:
        """This rank's tokens of each sample, `[b, s/context]`, in the given order over context."""
        ranks = grid.degrees["context"]
        if ranks == 1:
            return self
        orders = [order_tokens(lengths, ranks, order) for lengths in self._document_lengths()]
        return self.shard_by_orders(orders, grid.index["context"])

    def shard_by_orders(self, orders: Sequence[TokenOrder], index: int) -> Self:
        """The tokens of one rank of context, with an order for each sample."""
        device = self.tokens.device
        documents = ContextDocuments.from_orders(orders, index).map_tensors(lambda x: x.to(device))
        numbers = documents.token_numbers
        positions = self.positions
        if positions is None:
            positions = torch.arange(self.tokens.shape[1], device=device).expand(self.tokens.shape)
        return replace(
            self,
            tokens=self.tokens.gather(1, numbers),
            targets=self.targets.gather(1, numbers),
            positions=positions.gather(1, numbers),
            documents=documents,
        )

    def _document_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Number of tokens of each document of each sample."""
        if self.documents is None:
            return ((self.tokens.shape[1],),) * len(self.tokens)
        if isinstance(self.documents, Tensor):
            return Documents.from_ids(self.documents, "cpu").lengths
        assert isinstance(self.documents, Documents), "the batch is sharded already"
        return self.documents.lengths

    def to(self, device: torch.device | str) -> Self:
        """The batch on a device, with the boundaries of its documents."""
        batch = self
        if isinstance(self.documents, Tensor):
            batch = replace(self, documents=Documents.from_ids(self.documents, device))
        return super(Batch, batch).to(device)


def batch_type(model: ModelConfig) -> type[SampleBatch]:
    """The batch class of a kind of model."""
    found: type[SampleBatch] = find_kind(model.kind).batch.load()
    return found


BatchT = TypeVar("BatchT", bound=SampleBatch)
BatchT_co = TypeVar("BatchT_co", bound=SampleBatch, covariant=True)


class SampleSource(Protocol[BatchT_co]):
    """Numbered samples of a kind of model."""

    def read_batch(self, numbers: Sequence[int], end: int | None = None) -> BatchT_co:
        """The samples with these numbers; samples from `end` on are blank, without targets."""


@runtime_checkable
class PackedSamples(Protocol):
    """Samples of packed documents, whose lengths are known without reading them."""

    def document_lengths(self, number: int) -> tuple[int, ...]:
        """Number of tokens of each document of a sample; padding is a document."""

    def padding_length(self, number: int) -> int:
        """Number of tokens at the end of a sample that are padding."""


class WindowSource(Protocol):
    """A source of windows: a mixture or a stream of tokens."""

    @property
    def seq(self) -> int:
        """Tokens per sample."""

    @property
    def document_mask(self) -> bool:
        """Whether attention and positions stay within a document."""

    def read_sample(self, number: int) -> Window:
        """The sample with this number."""


def read_windows(source: WindowSource, numbers: Sequence[int], end: int | None = None) -> Batch:
    """The windows with these numbers as a batch; windows from `end` on have no targets."""
    blank = Window.without_targets(source.seq)
    windows = [
        blank if end is not None and number >= end else source.read_sample(number)
        for number in numbers
    ]
    batch = Batch.from_windows(windows, packed=source.document_mask)
    return replace(batch, samples=torch.tensor(numbers))
