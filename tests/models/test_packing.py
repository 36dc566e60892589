"""Packed samples: documents attend to themselves only, and give the losses they have alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.corpora import corpus_of
from ranvier.data.loader import load_micro_batches
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.decoder import AttentionCore, apply_rotary
from ranvier.models.document_attention import (
    Documents,
    document_attention,
    packed_attention,
    packed_attention_backward,
)
from ranvier.nn.cross_entropy import IGNORE_INDEX


def masked(core: AttentionCore, q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """The same attention with a dense mask."""
    positions = torch.arange(q.shape[1]).unsqueeze(0)
    assert core.rotary is not None
    angles = core.rotary(positions, q.dtype)
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)).tril().unsqueeze(1)
    q, k, v = (x.transpose(1, 2) for x in (apply_rotary(q, angles), apply_rotary(k, angles), v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_attention_inside_documents_equals_a_mask(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    core = AttentionCore(DecoderConfig(head_dim=8))
    shapes = [(3, 17, 4, 8), (3, 17, 2, 8), (3, 17, 2, 8)]
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    ids = (torch.rand(3, 17, generator=generator) < share).cumsum(1)
    ours = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    y, z = core(*ours, None, Documents.from_ids(ids)), masked(core, *theirs, ids)
    weight = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    torch.testing.assert_close(y, z, rtol=0, atol=1e-14)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)


def test_cuts_of_some_samples() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [5, 6, 7, 7]])
    documents = Documents.from_ids(ids)
    assert documents.lengths == ((2, 2), (4,), (1, 1, 2))
    assert documents.cu_seqlens.tolist() == [0, 2, 4, 8, 9, 10, 12] and documents.max_seqlen == 4
    some = documents.select_samples(slice(1, 3))  # those of other samples have no tokens
    assert some.lengths == ((4,), (1, 1, 2)) and some.cu_seqlens.tolist() == [0, 0, 0, 4, 5, 6, 8]


def test_work_follows_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call attends over more than a document: the scores are the sum of squares of lengths."""
    sizes = []
    attend = F.scaled_dot_product_attention

    def counted(q: Tensor, *rest: Tensor, **options: bool) -> Tensor:
        sizes.append(q.shape[0] * q.shape[2] ** 2)
        return attend(q, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q = torch.randn(24, 2, 4)
    documents = Documents.from_ids(torch.tensor([[0] * 3 + [1] * 3 + [2] * 6, [0] * 12]))
    packed_attention(q, q, q, documents.cu_seqlens)
    assert sum(sizes) == 2 * 9 + 36 + 144


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_packed_documents_give_the_loss_of_unpacked_ones(tmp_path: Path, positions: str) -> None:
    generator = torch.Generator().manual_seed(11)
    lengths = [5, 1, 40, 13, 2, 16, 1, 7, 33]
    texts = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
    stream = corpus_of(tmp_path, texts).open_stream(16, 0.0, "train")
    assert stream is not None
    torch.manual_seed(5)
    config = DecoderConfig(vocab=50, max_seq=64, position_embedding=positions)  # type: ignore[arg-type]
    model = Decoder(config).double()
    (batch,) = load_micro_batches(stream, 0, stream.num_windows, Grid({}), stream.num_windows)
    together = model(**batch.model_inputs())
    alone = torch.zeros((), dtype=torch.float64)
    at = 0
    for text in texts:  # a document is cut where a window ends, and keeps its last target
        tokens, targets = torch.tensor(text), torch.tensor([*text[1:], IGNORE_INDEX])
        start = 0
        while start < len(text):
            stop = min(start + 16 - (at + start) % 16, len(text))
            alone = alone + model(tokens[None, start:stop], targets[None, start:stop])
            start = stop
        at += len(text)
    assert int((batch.targets != IGNORE_INDEX).sum()) == sum(n - 1 for n in lengths)
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)


def ragged(bounds: list[int], seed: int = 5) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values of documents that lie one after the other; bounds; a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(bounds[-1], heads, 8) for heads in (4, 2, 2, 4)]
    q, k, v, dy = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return [q, k, v], torch.tensor(bounds, dtype=torch.int32), dy


def by_autograd(inputs: list[Tensor], bounds: Tensor, dy: Tensor) -> list[Tensor]:
    """The result of `packed` and its gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = packed_attention(*leaves, bounds)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


CUTS = [
    [0, 17],
    [0, 3, 6, 12, 17],
    [0, 1, 2, 17],
    [0, 0, 5, 5, 5, 17, 17],  # some of no tokens, as where samples were selected
    [0, *range(1, 18)],
]


@pytest.mark.parametrize("bounds", CUTS, ids=str)
def test_the_gradient_of_packed_documents(bounds: list[int]) -> None:
    inputs, cuts, dy = ragged(bounds)
    _, *want = by_autograd(inputs, cuts, dy)
    for have, grad in zip(packed_attention_backward(dy, *inputs, cuts), want, strict=True):
        torch.testing.assert_close(have, grad, rtol=0, atol=1e-13)


def test_documents_of_no_tokens_change_nothing() -> None:
    inputs, cuts, dy = ragged([0, 5, 17])
    _, more, _ = ragged([0, 0, 5, 5, 5, 17, 17])
    for a, b in zip(by_autograd(inputs, cuts, dy), by_autograd(inputs, more, dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.compiled
def test_one_graph_attends_inside_any_documents() -> None:
    """Forward and backward; the number of documents is no part of the graph."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.testing import CompileCounter

    graphs = CompileCounter()

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs(graph, inputs)
        return aot_eager(graph, inputs)

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, most: Tensor) -> Tensor:
        return document_attention(q, k, v, Documents((), bounds, most))

    torch.compiler.reset()
    compiled = torch.compile(attend, backend=counting, fullgraph=True, dynamic=False)
    for cuts in CUTS:
        inputs, bounds, dy = ragged(cuts)
        torch._dynamo.maybe_mark_dynamic(bounds, 0)
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = compiled(*leaves, bounds, torch.tensor(32))
        have = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        for a, b in zip(have, by_autograd(inputs, bounds, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert graphs.frame_count == 1


def test_a_rotated_gradient_is_that_of_autograd() -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=draw, requires_grad=True)
    angles = torch.randn(2, 3, 1, 2, dtype=torch.float64, generator=draw)
    both = torch.cat([angles.cos(), angles.cos(), angles.sin(), angles.sin()], -1)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, both), (x,))
