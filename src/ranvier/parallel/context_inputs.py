"""Inputs over context: this rank's tokens of whole samples, and outputs in window order.

Every rank of context has the whole samples. A rank gets its tokens in the order of the plan
(`sharding.order_tokens`), with their positions, and `ContextDocuments` instead of document ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ranvier.models.document_attention import Documents
from ranvier.nn.context_documents import ContextDocuments
from ranvier.parallel.parallel_model import ParallelModel
from ranvier.sharding import order_tokens


def order_samples(
    shape: tuple[int, int],
    parallel: ParallelModel,
    device: torch.device,
    ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> ContextDocuments:
    """Returns the order of the tokens of samples `[b, s]` over context.

    ids: documents `[b, s]`; by default a sample is one document. positions: `[b, s]`.
    """
    samples, seq = shape
    if ids is None:
        lengths: tuple[tuple[int, ...], ...] = ((seq,),) * samples
    else:
        lengths = Documents.from_ids(ids, "cpu").lengths
    grid = parallel.grid
    ranks = grid.degrees["context"]
    # Samples with the same documents have the same order.
    orders = {some: order_tokens(some, ranks, parallel.token_order) for some in set(lengths)}
    documents = ContextDocuments.from_orders(
        [orders[some] for some in lengths], grid.index["context"]
    )
    if ids is None and positions is not None:
        # As in a sample that is not split: padding repeats a position and does not count.
        long = positions.to("cpu").amax(1, keepdim=True) + 1
        documents = replace(documents, rope_lengths=long.expand(documents.token_numbers.shape))
    return documents.map_tensors(lambda x: x.to(device))


def split_over_context(
    inputs: Mapping[str, Tensor], parallel: ParallelModel
) -> tuple[dict[str, Any], ContextDocuments | None]:
    """Returns this rank's tokens of the inputs of a language model, and their order over context.

    inputs: tokens, and perhaps targets, positions and documents, all `[b, s]` and the same on all
    ranks of context. If context is 1, they do not change.
    """
    if parallel.grid.degrees["context"] == 1:
        return dict(inputs), None
    tokens = inputs["tokens"]
    samples, seq = tokens.shape
    positions = inputs.get("positions")
    documents = order_samples(
        (samples, seq), parallel, tokens.device, inputs.get("documents"), positions
    )
    if positions is None:
        positions = torch.arange(seq, device=tokens.device)
    whole = {**inputs, "positions": positions.expand(samples, seq)}
    mine: dict[str, Any] = {
        name: x.gather(1, documents.token_numbers)
        for name, x in whole.items()
        if name != "documents"
    }
    # Layers whose random masks or capacity depend on the numbers of tokens read this.
    parallel.step_context.context_documents = documents
    return {**mine, "documents": documents}, documents


def permute_tokens(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the tokens of x `[b, s, ...]` in another order; rows: int64 `[b, s]`."""
    index = rows.to(x.device).view(*rows.shape, *(1 for _ in x.shape[2:]))
    return x.gather(1, index.expand(*rows.shape, *x.shape[2:]))


def restore_window_order(y: Tensor, documents: ContextDocuments | None) -> Tensor:
    """Returns outputs `[b, s, ...]` in window order, of the tokens of all ranks of context, one
    after the other."""
    if documents is None:
        return y
    return permute_tokens(y, documents.places)
