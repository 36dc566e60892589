"""Scores and texts of a run's checkpoint: on every grid what one process gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation import serial, trained
from pool import Pool
from ranvier.config.plan import Plan
from ranvier.errors import CheckpointError, OtherRankError
from ranvier.grid import Grid
from ranvier.infer.generate import generate_tokens
from ranvier.infer.load import find_checkpoint, load_model
from ranvier.infer.logprobs import score_sequences
from ranvier.infer.sampling_params import SamplingParams
from ranvier.nn.cross_entropy import VocabShard, score_each_token

GRIDS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"row": 2, "depth": 2}, {}),
    ({"col": 2, "data": 2}, {}),
    ({"row": 2, "col": 2, "depth": 2}, {"inner": "features"}),
    ({"pipe": 2, "row": 2, "data": 2}, {}),
    ({"pipe": 2, "col": 2}, {"spread": True}),
    ({"context": 2, "row": 2}, {}),
    ({"context": 4}, {}),
    ({"pipe": 2, "context": 2}, {}),
    ({"context": 2, "col": 2}, {}),
]
SEQUENCES = [
    [(7 * n + i * i) % 257 for i in range(length)]
    for n, length in enumerate([1, 2, 5, 17, 16, 9] * 2)
]


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, tmp_path_factory.mktemp("run"), model__tie_embeddings=True)


def cut_of(options: dict[str, Any], grid: Grid) -> Plan:
    """The plan of what is loaded."""
    inner = {"col_splits": options["inner"]} if "inner" in options else {}
    plan = Plan(vocab_over_pipe=options.get("spread", False), **inner)
    return plan.with_degrees(grid.degrees)


PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45], [7], [250, 3, 9], [100, 101]]
COUNT = 6


def sampled(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=COUNT, temperature=temperature, top_k=40, top_p=0.9, seed=3)


def asked(
    grid: Grid, folder: str, options: dict[str, Any], stops: dict[float, int]
) -> tuple[list[Any], list[Any]]:
    """Scores in micro-batches of 1 and 3, texts at temperatures up to what stops them."""
    model = load_model(Path(folder), grid, "cpu", plan=cut_of(options, grid))
    scored = [
        [
            (one.logprobs.tolist(), one.is_greedy.tolist())
            for one in score_sequences(model, SEQUENCES, batch=batch)
        ]
        for batch in (1, 3)
    ]
    assert not model.parallel.step_context.per_token_loss  # type: ignore[union-attr]
    said = [
        generate_tokens(model, PROMPTS, sampled(t), is_finished=lambda said: stop in said)  # noqa: B023
        for t, stop in stops.items()
    ]
    return scored, said


def texts(folder: Path, temperature: float) -> list[list[int]]:
    """What one process says after each prompt alone."""
    model = load_model(folder, Grid({}), "cpu")
    return [
        generate_tokens(model, [prompt], sampled(temperature), streams=[number])[0]
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        pytest.param(*g, marks=pytest.mark.full if i in (1, 2, 4, 6, 7, 8) else ())
        for i, g in enumerate(GRIDS)
    ],
)
def test_scores_and_texts_are_those_of_one_process(
    pool: Pool, folder: Path, degrees: dict[str, int], options: dict[str, Any]
) -> None:
    model = serial(folder)
    free = {temperature: texts(folder, temperature) for temperature in (0.0, 1.0)}
    stops = {temperature: said[1][2] for temperature, said in free.items()}
    told = pool.on_grid(degrees, asked, str(folder), options, stops)
    assert all(one == told[0] for one in told), "all ranks know all"
    for said, (temperature, stop) in zip(told[0][1], stops.items(), strict=True):
        assert said == [
            one[: one.index(stop) + 1] if stop in one else one for one in free[temperature]
        ]
    for found in told[0][0]:
        for tokens, (log, greedy) in zip(SEQUENCES, found, strict=True):
            ids = torch.tensor(tokens)
            with torch.no_grad():
                logits = model(ids[None, :-1])[0] if len(tokens) > 1 else torch.zeros(0, 257)
            wanted = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
            assert len(log) == len(tokens) - 1
            torch.testing.assert_close(
                torch.tensor(log, dtype=torch.float64), wanted.double(), rtol=1e-12, atol=1e-12
            )
            assert greedy == (logits.argmax(-1) == ids[1:]).tolist()


def test_a_target_is_greedy_only_if_it_is_the_first_of_the_likeliest(pool: Pool) -> None:
    told = pool.on_grid({"row": 4}, tied_logits)
    assert told == [[[True, False, False, True]]] * 4


def tied_logits(grid: Grid) -> list[list[bool]]:
    """Rank by rank columns of a vocabulary of 8, the last three of which are padding."""
    whole, targets = torch.zeros(4, 8, dtype=torch.float64), torch.tensor([0, 1, 4, 4])
    whole[:, 5:] = 9.0  # padding counts nothing
    whole[3, 4] = 1.0
    axis = grid.axis("row")
    first = 2 * axis.index
    mine = VocabShard(axis, grid.axis(), first, max(min(5 - first, 2), 0))
    found = score_each_token(whole[:, first : first + 2].contiguous(), targets, mine)
    wanted = whole[:, :5].log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-12)
    return [(found[1] > 0).tolist()]


def damaged(grid: Grid, folder: str) -> str:
    try:
        load_model(Path(folder), grid, "cpu")
    except (CheckpointError, OtherRankError) as error:
        return type(error).__name__
    return ""


def test_a_damaged_part_is_an_error_on_all_ranks(pool: Pool, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    path = sorted(find_checkpoint(copy).glob("rank-*.safetensors"))[0]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    told = pool.on_grid({"pipe": 4}, damaged, str(copy))
    assert set(told) <= {"DamageError", "OtherRankError"} and "DamageError" in told
