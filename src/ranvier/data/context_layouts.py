"""Builds the layouts of attention over context in the thread that loads batches.

Which keys a rank needs from which rank depends on the documents of a micro-batch. Attention would
find out in the first layer of each kind, while the device waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranvier.config.plan import ContextAttentionChoice
from ranvier.config.run import RunConfig
from ranvier.cost.context_attention import KeyShape, build_rows, choose_method
from ranvier.data.batch import Batch, SampleBatch
from ranvier.grid import Grid
from ranvier.nn.context_documents import ContextDocuments
from ranvier.sharding import ShardingTable, count_parts, local_range


def attention_key_shape(run: RunConfig, itemsize: int) -> KeyShape:
    """Returns the size of the heads of a rank of a decoder. itemsize: bytes of an activation."""
    config = run.decoder
    table = ShardingTable(run.plan.col_splits)
    parts = count_parts(table.feature_axes("heads"), run.plan.degrees)
    kv_heads = max(config.kv_heads // parts, 1)
    return KeyShape(config.heads // parts, kv_heads, config.head_dim, itemsize, 0)


@dataclass(frozen=True)
class ContextLayoutBuilder:
    """Builds what attention of a decoder derives from the documents of a micro-batch."""

    method: ContextAttentionChoice
    windows: frozenset[int]
    """Windows of the layers; 0: none."""
    key_shape: KeyShape
    samples: range
    """Samples of a micro-batch that this rank has in attention."""

    @classmethod
    def from_run(cls, run: RunConfig, grid: Grid, itemsize: int) -> ContextLayoutBuilder:
        """Returns the builder of a run. itemsize: bytes of an activation."""
        config = run.decoder
        axes = ShardingTable(run.plan.col_splits).axes_inside_replica("heads", "batch")
        samples = local_range(run.plan.micro_batch, axes, grid.degrees, grid.index)
        windows = frozenset(config.window_of_layer(layer) for layer in range(config.layers))
        shape = attention_key_shape(run, itemsize)
        return cls(run.plan.context_attention, windows, shape, samples)

    def build_layouts(self, batch: SampleBatch) -> None:
        """Builds the layouts of a micro-batch, which its copies on devices share."""
        if not isinstance(batch, Batch) or not isinstance(batch.documents, ContextDocuments):
            return
        documents = batch.documents
        tokens = documents.token_numbers.shape[1]
        if len(self.samples) < len(documents.orders):
            documents = documents.narrow(self.samples.start * tokens, len(self.samples) * tokens)
        for window in self.windows:
            # As attention does, which compares with the length of samples.
            window = window if window < sum(documents.orders[0].lengths) else 0
            method = choose_method(self.method, documents.orders, self.key_shape, window)
            build_rows(documents.find_layout(method, window))
