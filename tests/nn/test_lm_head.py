"""The head: in chunks as in one, with gradients made in forward, and logits as ever."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from equivalence import ONE_PASS, batch_of, copied, flow_of, gradients, micros_of, worst
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.cost import linear
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.nn import lm_head
from ranvier.nn.matmul import PlainMatmul
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardedStateDict
from ranvier.trace import communication_events, diff_events
from ranvier.train.step import evaluate, forward_backward

CONFIG = DecoderConfig(layers=1, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)
BATCH = batch_of("llama", samples=4, packed=False, seq=10)
"""Some targets are -100."""


def decoder(grid: Grid, *, frozen: str = "", inner: Any = "samples") -> Any:
    """A decoder; frozen: which weights are not trained, by the whole name."""
    torch.manual_seed(1)
    model = Decoder(CONFIG).double()
    for name, param in model.named_parameters():
        param.requires_grad_(not (frozen and re.fullmatch(frozen, name)))
    return parallelize(model, grid, Plan(col_splits=inner).with_degrees(grid.degrees))


def compared(have: ShardedStateDict, want: ShardedStateDict) -> list[str]:
    """What differs between gradients."""
    lines = [] if [*have] == [*want] else [f"{[*have]} instead of {[*want]}"]
    for name, (part, place) in want.items():
        assert have[name][1] == place
        lines += worst(name, have[name][0], part, ONE_PASS)
    return lines


def chunked(grid: Grid, inner: str) -> tuple[list[str], list[int], float]:
    """What chunks of 4 tokens of each sample change; chunks with and without; the loss."""
    lines, found, counts = list[str](), [], []
    for tokens in (0, 4):
        model = decoder(grid, inner=inner)
        row = 8 * model.head.handles["weight"].sharding.unsharded_shape[0]
        size = row * tokens * (1 if model.head.keeps_logits_local else 4)
        with patch.object(linear, "MAX_CHUNK_BYTES", size or linear.MAX_CHUNK_BYTES):
            flow = flow_of(BATCH, grid, 1)
            with grid.trace.record_events() as events:
                loss = forward_backward(model, micros_of(BATCH, grid, 1))
            mine = [e for e in communication_events(events) if not e.where.startswith("step.")]
            lines += diff_events(model.parallel.events(flow), mine)
            counts.append(len(model.head.cost_model.chunk_tokens(flow)))
        found.append((loss.item(), copied(gradients(model.parallel))))
    (want, wanted), (have, grads) = found
    lines += [] if abs(have - want) <= ONE_PASS * want else [f"loss {have} instead of {want}"]
    return lines + compared(grads, wanted), counts, have


@pytest.mark.parametrize(
    ("degrees", "inner", "count"),
    [
        ({}, "samples", 10),  # 40 tokens, samples are not told apart
        ({"row": 2, "col": 2}, "samples", 3),  # 4, 4 and 2 tokens
        ({"row": 2, "col": 2}, "features", 3),
    ],
    ids=["one", "samples", "features"],
)
def test_chunks_change_nothing(pool: Pool, degrees: dict[str, int], inner: str, count: int) -> None:
    """Loss and gradients are those of one chunk, events are those predicted."""
    model = decoder(Grid({})).requires_grad_(False)
    with torch.no_grad():
        want = model(**BATCH.model_inputs()).item() / (BATCH.targets != -100).sum().item()
    for lines, counts, loss in pool.on_grid(degrees, chunked, inner):
        assert lines == [] and counts == [1, count]
        assert loss == pytest.approx(want, rel=ONE_PASS)


def test_many_tokens_are_never_whole() -> None:
    """From some size on there are two chunks at least, each a power of two but the last."""
    sizes = [
        [cut.stop - cut.start for cut in linear.chunk_slices(tokens, row)]
        for tokens, row in ((100, 1 << 10), (100, 1 << 25), (3 << 10, 1 << 20), (5, 1 << 33))
    ]
    assert sizes == [[100], [32, 32, 32, 4], [1024, 1024, 1024], [1] * 5]


class Forward(PlainMatmul):
    """The products of a layer that is not trained."""

    def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        """Nobody needs it."""
        raise AssertionError("dX without gradients")

    def grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        """Nobody needs it."""
        raise AssertionError("dW without gradients")


def test_without_gradients_none_are_made() -> None:
    model = decoder(Grid({}))
    want = forward_backward(model, [BATCH])
    model.head.matmul_backend = Forward()
    with torch.no_grad():
        loss = model(**BATCH.model_inputs())
    assert loss.grad_fn is None and not loss.requires_grad
    mean = loss / (BATCH.targets != -100).sum()
    torch.testing.assert_close(mean, want, rtol=ONE_PASS, atol=0)
    torch.testing.assert_close(evaluate(model, [BATCH]), want, rtol=ONE_PASS, atol=0)


def gradients_of(model: Any, factor: Tensor, known: Tensor | None) -> ShardedStateDict:
    """Gradients of a loss that is multiplied by a factor, which the head may know before."""
    model.parallel.bucket_scheduler.begin_step("")
    model.parallel.step_context.loss_scale = known
    loss = model(**BATCH.model_inputs())
    model.parallel.step_context.loss_scale = None
    loss.backward(factor)
    return copied(gradients(model.parallel))


def test_a_frozen_head_passes_gradients_on() -> None:
    one = torch.ones((), dtype=torch.float64)
    want = gradients_of(decoder(Grid({})), one, None)
    have = gradients_of(decoder(Grid({}), frozen=r"head\.weight"), one, None)
    assert {*want} - {*have} == {"head.weight"}
    assert compared(have, {name: want[name] for name in have}) == []


def test_a_head_alone_can_be_trained() -> None:
    """Nothing before it needs a gradient."""
    one = torch.ones((), dtype=torch.float64)
    want = gradients_of(decoder(Grid({})), one, None)["head.weight"]
    model = decoder(Grid({}), frozen=r"(?!head).*")
    assert compared(gradients_of(model, one, None), {"head.weight": want}) == []


@pytest.mark.parametrize("cap", [0.0, 0.5])
def test_rows_of_logits_are_aligned(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """29 columns become 30 where 16 bytes are two numbers; loss and gradients stay."""
    one, widths = torch.ones((), dtype=torch.float64), list[int]()

    class Watched(PlainMatmul):
        """Products that tell how wide the logits are."""

        def grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
            widths.append(dy.shape[1])
            return super().grad_x(dy, w)

    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(lm_head, "ALIGNED_DEVICES", devices)
        model = decoder(Grid({}))
        model.head.matmul_backend, model.head.cap = Watched(), cap
        scores = evaluate(model, [BATCH])
        found.append((scores, gradients_of(model, one, None)))
    (want, wanted), (have, grads) = found
    assert widths == [29, 30]
    torch.testing.assert_close(have, want, rtol=ONE_PASS, atol=0)
    assert compared(grads, wanted) == []


def test_a_factor_known_before_changes_nothing() -> None:
    factor = torch.tensor(0.37, dtype=torch.float64)
    model = decoder(Grid({}))
    want = gradients_of(model, factor, None)
    assert compared(gradients_of(model, factor, factor), want) == []
    plain = gradients_of(model, torch.ones_like(factor), None)
    assert compared({n: (g * factor, p) for n, (g, p) in plain.items()}, want) == []


def test_logits_are_those_of_the_plain_model() -> None:
    torch.manual_seed(1)
    plain, model = Decoder(CONFIG).double(), decoder(Grid({}))
    logits, want = model(BATCH.tokens), plain(BATCH.tokens)
    assert logits.shape == (4, 10, 29) and logits.requires_grad
    torch.testing.assert_close(logits, want, rtol=0, atol=ONE_PASS)
    loss = F.cross_entropy(logits.flatten(0, 1), BATCH.targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(**BATCH.model_inputs()), loss, rtol=ONE_PASS, atol=0)
