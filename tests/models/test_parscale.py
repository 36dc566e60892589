"""ParScale in one process against a restatement: prefixes are concatenated to keys and values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import training
from equivalence import worst
from ranvier.config.plan import Plan
from ranvier.errors import PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.decoder import Block
from ranvier.models.parscale import StreamAggregation
from ranvier.models.prefix_attention import prefix_rows, prefixed_attention
from ranvier.models.rope import apply_rotary
from ranvier.parallel.parallelize import parallelize

SHAPE: dict[str, Any] = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4}
SHAPE |= {"mlp": 24, "vocab": 29, "parscale_prefix_tokens": 3, "max_seq": 16}
PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [1, 1, 1, 1, 1, 1, 1, 1]])


def see_tokens(documents: Tensor, window: int) -> Tensor:
    """Whether each query sees each key, `[b, s, s]`."""
    seq = documents.shape[1]
    place = torch.arange(seq)
    ahead = place[:, None] - place[None]
    seen = (ahead >= 0) & ((ahead < window) if window else torch.ones(seq, seq, dtype=torch.bool))
    return seen & (documents[:, :, None] == documents[:, None, :])


def attend(block: Block, x: Tensor, angles: Tensor, stream: int, seen: Tensor) -> Tensor:
    """Attention of one stream to its prefix and to the tokens, with all scores in memory."""
    attention = block.attention
    core = attention.core
    assert core.prefix_k is not None and core.prefix_v is not None
    q, k, v = attention.project_qkv(x)
    q, k = apply_rotary(q, angles), apply_rotary(k, angles)
    samples, num_prefix = x.shape[0], core.prefix_k.shape[2]
    keys, values = (
        torch.cat([prefix[stream].transpose(0, 1).expand(samples, -1, -1, -1), one], 1)
        for prefix, one in ((core.prefix_k, k), (core.prefix_v, v))
    )
    shared = q.shape[2] // k.shape[2]
    keys, values = (one.repeat_interleave(shared, 2) for one in (keys, values))
    scores = torch.einsum("bshk,bthk->bhst", q, keys) * q.shape[-1] ** -0.5
    if core.cap > 0.0:
        scores = torch.tanh(scores / core.cap) * core.cap
    visible = torch.cat([torch.ones_like(seen[..., :num_prefix]), seen], -1)
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    y = torch.einsum("bhst,bthk->bshk", scores.softmax(-1), values)
    return attention.project_output(y.flatten(2))


def restate(model: Decoder, tokens: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
    """Logits by the equations of the paper, one stream after the other."""
    config = model.config
    assert model.rotary is not None and model.aggregation is not None
    embedded = model.embed(tokens)
    angles = model.rotary(positions, embedded.dtype)
    outputs = []
    for stream in range(config.parscale_streams):
        x = embedded
        for i, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            seen = see_tokens(documents, config.window_of_layer(i))
            x = x + attend(block, block.norm1(x), angles, stream, seen)
            x = x + block.mlp(block.norm2(x))
        outputs.append(model.norm(x))
    hidden, scores = model.aggregation.hidden, model.aggregation.scores
    inner = F.silu(torch.cat(outputs, -1) @ hidden.weight.T + hidden.bias)
    weights = (inner @ scores.weight.T + scores.bias).softmax(-1)
    smooth = config.parscale_smoothing
    weights = weights * (1 - smooth) + smooth / config.parscale_streams
    mean = sum(weights[..., i, None] * out for i, out in enumerate(outputs))
    y: Tensor = model.head(mean)
    return y


def build(streams: int, **changes: Any) -> Decoder:
    torch.manual_seed(3)
    config = DecoderConfig(**{**SHAPE, "parscale_streams": streams, **changes})
    model = Decoder(config).double()
    with torch.no_grad():
        # Larger than in the beginning, so that prefixes and scores matter.
        for name, param in model.named_parameters():
            if "prefix" in name or "aggregation" in name:
                param.normal_(std=0.5)
    return model


@pytest.mark.parametrize(
    ("streams", "changes"),
    [
        (2, {}),
        (4, {}),
        (2, {"sliding_window": 3}),
        (4, {"attn_logit_softcap": 2.0, "kv_heads": 1}),
    ],
    ids=["two", "four", "window", "cap"],
)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
def test_logits_and_gradients_equal_the_paper(
    streams: int, changes: dict[str, Any], packed: bool
) -> None:
    model = build(streams, **changes)
    tokens = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(5))
    documents = PACKED if packed else torch.ones_like(PACKED)
    place = torch.arange(8).expand(2, 8)
    starts = (documents.diff(dim=1, prepend=documents[:, :1] * 0) != 0).long() * place
    positions = place - starts.cummax(1).values
    results = []
    for run in (
        lambda: model(tokens, positions=positions, documents=documents),
        lambda: restate(model, tokens, documents, positions),
    ):
        logits = run()
        grads = torch.autograd.grad(logits.sin().sum(), list(model.parameters()))
        results.append((logits, grads))
    (logits, grads), (want, wanted) = results
    lines = worst("logits", logits, want, 1e-12)
    for (name, _), have, one in zip(model.named_parameters(), grads, wanted, strict=True):
        lines += worst(f"gradient of {name}", have, one, 1e-12)
    assert lines == []


def test_streams_differ_and_prefixes_matter() -> None:
    """Without its prefix a stream would equal the others: then their number changes nothing."""
    model = build(2)
    tokens = torch.randint(0, 29, (2, 8))
    before = model(tokens)
    with torch.no_grad():
        for block in model.blocks:
            assert isinstance(block, Block)
            core = block.attention.core
            assert core.prefix_k is not None and core.prefix_v is not None
            for prefix in (core.prefix_k, core.prefix_v):
                prefix[1] = prefix[0]
    same = model(tokens)
    assert not torch.allclose(before, same)
    aggregation = model.aggregation
    assert isinstance(aggregation, StreamAggregation)
    with torch.no_grad():
        aggregation.scores.bias[0] += 3.0
    assert torch.allclose(model(tokens), same)


def test_one_stream_is_the_dense_model() -> None:
    for streams in (0, 1):
        config = DecoderConfig(**{**SHAPE, "parscale_streams": streams})
        names = [name for name, _ in Decoder(config).named_parameters()]
        assert not [name for name in names if "prefix" in name or "aggregation" in name]


def test_prefixes_of_any_first_sample() -> None:
    """A rank may have samples from any stream on."""
    prefix = torch.randn(3, 2, 4, 5)
    whole = prefix_rows(prefix, 0, 9)
    for first, samples in itertools.product(range(4), (1, 2, 5)):
        want = whole[first * 4 : (first + samples) * 4]
        assert torch.equal(prefix_rows(prefix, first, samples), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_close(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 8, h, 8, generator=generator).double() for h in (4, 2, 2))
    prefix = [torch.randn(2 * 3, 2, 8, generator=generator).double() for _ in range(2)]
    want = prefixed_attention(q, k, v, *prefix, None)
    q, k, v, *prefix = (x.to(dtype) for x in (q, k, v, *prefix))
    have = prefixed_attention(q, k, v, *prefix, None)
    limit = 1e-5 if dtype == torch.float32 else 5e-2
    assert have.dtype == dtype and (have.double() - want).abs().max() < limit


# ---- what is refused ----------------------------------------------------------------------------


def test_settings_that_cannot_run_are_refused_by_name() -> None:
    with pytest.raises(ShardingError, match=r"compile='on' with context=2 .* 4 streams"):
        grid = Grid({"context": 2}, rank=0, connected=False)
        parallelize(build(4), grid, Plan(compile="on", context=2, data=1), materialize=False)
    with pytest.raises(PlanError, match=r"model\.parscale_smoothing=1\.5 is not"):
        training.run_of("", {}, 2, model__parscale_smoothing=1.5)
    recurrent = {"core_layers": 2, "mean_recurrence": 4, "backprop_depth": 2}
    (line,) = DecoderConfig(**{**SHAPE, **recurrent, "parscale_streams": 4}).find_problems()
    assert "parscale_streams=4 with a recurrent core" in line and "Use core_layers=0" in line
