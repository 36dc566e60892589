"""LongRoPE: which factors a text has depends on its own length, not on its batch or its grid.

Transformers chooses them once for a batch, so each text is given to it alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pool import Pool
from published_models import CASES, VOCAB, quiet, save, theirs
from ranvier import from_pretrained
from ranvier.config.engine import EngineConfig
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.logprobs import score_sequences
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder, DecoderConfig

ORIGINAL = 9
"""Tokens up to which a text is short: row does not divide it."""
LENGTHS = [9, 4, 13, 8, 10]
COUNT = 4
GRIDS: list[dict[str, int]] = [
    {},
    {"expert": 2, "depth": 2},
    {"depth": 2, "row": 2},
    *(
        pytest.param(degrees, marks=pytest.mark.full)  # type: ignore[list-item]
        for degrees in ({"row": 2}, {"row": 4}, {"col": 2, "data": 2}, {"pipe": 2, "row": 2})
    ),
]
TEXTS = [[(11 * n + 3 * i * i) % VOCAB for i in range(size)] for n, size in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers in float64, and where it is stored."""
    kind, config = CASES["phi3 long, tied"]
    model = theirs(kind, config | {"original_max_position_embeddings": ORIGINAL}).double()
    return model, save(model, tmp_path_factory.mktemp("phi3"))


@torch.no_grad()
def alone(model: Any) -> dict[str, Any]:
    """What transformers makes of each text alone: logits, log-probabilities, likeliest tokens."""
    found: dict[str, Any] = {"logits": [], "scores": [], "said": []}
    for text in TEXTS:
        known = list(text)
        found["logits"].append(model(torch.tensor([text]), use_cache=False).logits[0])
        logits = model(torch.tensor([text[:-1]]), use_cache=False).logits[0]
        found["scores"].append(logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None]))
        for _ in range(COUNT):
            logits = model(torch.tensor([known]), use_cache=False).logits
            known.append(int(logits[0, -1].argmax()))
        found["said"].append(known[len(text) :])
    return found


def batch_of(side: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """All texts as one batch, filled up at a side; tokens, mask, positions."""
    longest = max(LENGTHS)
    ids, mask = (torch.zeros(len(TEXTS), longest, dtype=torch.int64) for _ in range(2))
    for row, text in enumerate(TEXTS):
        start = longest - len(text) if side == "left" else 0
        ids[row, start : start + len(text)] = torch.tensor(text)
        mask[row, start : start + len(text)] = 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0) if side == "left" else None


@torch.no_grad()
def asked(grid: Grid, folder: str) -> dict[str, Any]:
    """The same on a grid: alone, and in batches that are filled up."""
    model = from_pretrained(folder, grid=grid, dtype=torch.float64)
    found: dict[str, Any] = {"logits": [], "scores": [], "said": []}
    found["logits"].append([model(torch.tensor([text])).logits[0] for text in TEXTS])
    for side in ("left", "right"):
        ids, mask, positions = batch_of(side)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        kept = zip(logits, mask, strict=True)
        found["logits"].append([one[ones > 0] for one, ones in kept])
    for batch in (1, 3, 8):
        found["scores"].append(
            [one.logprobs for one in score_sequences(model.model, TEXTS, batch=batch)]
        )
        found["said"].append(
            generate_tokens(
                model.model,
                TEXTS,
                SamplingParams(max_tokens=COUNT, temperature=0.0),
                config=EngineConfig(max_num_batched_tokens=batch, block_size=4),
            )
        )
    ids, mask, _ = batch_of("left")
    text = model.generate(ids, max_new_tokens=COUNT, attention_mask=mask, eos_token_id=[])
    found["said"].append(text[:, max(LENGTHS) :].tolist())
    return found


@pytest.fixture(scope="module")
def wanted(published: tuple[Any, Path]) -> dict[str, Any]:
    """What one process of ours makes of each text alone, which is what transformers does."""
    quiet()
    one, theirs = asked(Grid({}), str(published[1])), alone(published[0])
    for kind in ("logits", "scores"):
        for have, want in zip(one[kind][0], theirs[kind], strict=True):
            far = float((have.view_as(want) - want).abs().max() / want.abs().max())
            assert far <= 1e-6, "transformers has angles and norms in float32"
    return {**one, "logits": one["logits"][0], "scores": one["scores"][0], "said": theirs["said"]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_a_text_is_as_long_as_it_is(
    pool: Pool, published: tuple[Any, Path], wanted: dict[str, Any], degrees: dict[str, int]
) -> None:
    for told in pool.on_grid(degrees, asked, str(published[1])):
        assert all(said == wanted["said"] for said in told["said"])
        for kind in ("logits", "scores"):
            for found in told[kind]:
                for have, want in zip(found, wanted[kind], strict=True):
                    assert float((have - want).abs().max()) <= 1e-12 * float(want.abs().max())


def test_positions_say_how_long_a_text_is() -> None:
    """In plain PyTorch: of each sample its own, wherever they begin."""
    shape = {"layers": 2, "embed": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 16}
    factors: dict[str, Any] = {"rope_short": (1.0,) * 4, "rope_long": (1.5, 2.0, 4.0, 8.0)}
    torch.manual_seed(0)
    config = DecoderConfig(
        **shape, vocab=VOCAB, rope="longrope", original_max_position=8, **factors
    )
    model = Decoder(config).double().eval()
    short, long = (torch.randint(0, VOCAB, (1, size)) for size in (6, 12))
    both = torch.cat([torch.nn.functional.pad(short, (0, 6)), long])
    places = torch.arange(12).expand(2, -1).clone()
    places[0, 6:] = 0
    with torch.no_grad():
        have, alone = model(both, positions=places), (model(short), model(long))
        shifted = model(short, positions=torch.arange(6)[None] + 6)
    torch.testing.assert_close(have[0, :6], alone[0][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(have[1], alone[1][0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(shifted, alone[0]), "the far end of a longer text"
