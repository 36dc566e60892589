"""A plain float64 reference of the sampler, and random cases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ranvier.counter_rng import random_key
from ranvier.grid import Grid
from ranvier.infer.sampler import MIN_TEMPERATURE
from ranvier.infer.sampling_inputs import SamplingRow, token_bitmask
from ranvier.infer.sampling_params import SamplingParams
from ranvier.nn.cross_entropy import VocabShard


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def gumbel(key: int, position: int, token: int) -> float:
    uniform = ((splitmix(splitmix((key ^ position) % 2**64) ^ token) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def kept_tokens(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Tokens that filters keep, in descending order. x: float64 `[v]`."""
    scaled = (x - x.max()) / max(params.temperature, MIN_TEMPERATURE)
    kept: np.ndarray = np.argsort(-x, kind="stable")[: params.top_k or None]
    if params.top_p < 1.0:
        masses = np.exp(scaled[kept]).cumsum()
        kept = kept[: 1 + int((masses < (params.top_p - 1e-10) * masses[-1]).sum())]
    lowest = math.log(params.min_p) if params.min_p else -math.inf
    return np.compress(scaled[kept] >= lowest, kept)


def reference_token(logits: np.ndarray, row: SamplingRow) -> int:
    """The token of plain float64, for changed logits. logits: fp32 `[v]`."""
    x = logits.astype(np.float64)
    if row.params.is_greedy:
        return int(x.argmax())
    kept = kept_tokens(x, row.params)
    noise = [gumbel(row.key, row.position, int(token)) for token in kept]
    return int(kept[np.argmax(x[kept] / max(row.params.temperature, MIN_TEMPERATURE) + noise)])


def reference_logits(logits: np.ndarray, row: SamplingRow) -> np.ndarray:
    """Logits after masks, biases and penalties, each rounded to fp32."""
    x = logits.astype(np.float32)
    for mask in row.masks:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(x)]
        x[allowed == 0] = -np.inf
    for token, bias in row.params.logit_bias.items():
        x[token] = np.float64(x[token]) + bias
    x[list(row.forbidden_token_ids)] = -np.inf
    params = row.params
    for token in {*row.output_counts, *row.prompt_token_ids}:
        value, count = np.float64(x[token]), row.output_counts.get(token, 0)
        seen = count > 0 or params.repetition_penalty != 1.0
        if seen:
            value = (
                value / params.repetition_penalty
                if value > 0
                else value * params.repetition_penalty
            )
        value = value - params.frequency_penalty * count - params.presence_penalty * (count > 0)
        x[token] = value
    return x


def whole(vocab: int) -> VocabShard:
    axis = Grid({}).axis()
    return VocabShard(axis, axis, 0, vocab)


def row_of(stream: int = 0, position: int = 0, **params: Any) -> SamplingRow:
    made = SamplingParams(**params)
    return SamplingRow(params=made, key=random_key(made.seed, "draw", stream), position=position)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy with unused filters": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.3},
    "temperature": {"temperature": 0.8},
    "cold": {"temperature": 1e-3},
    "coldest": {"temperature": 1e-320},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1, "temperature": 2.0},
    "top_k of most": {"top_k": 1500},
    "top_k of more than all": {"top_k": 10**9},
    "top_p": {"top_p": 0.7},
    "high top_p": {"top_p": 0.97, "temperature": 1.7},
    "low top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p of one": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 7, "top_p": 0.6, "temperature": 1.3},
    "large top_k and top_p": {"top_k": 1200, "top_p": 0.9},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.1},
    "bias": {"logit_bias": {0: 3.0, 5: -100.0}},
}


def make_case(seed: int, vocab: int, count: int) -> tuple[np.ndarray, list[SamplingRow]]:
    """Random rows of logits, some with ties, and parameters of all kinds."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(count, vocab)) * random.choice([0.01, 1.0, 4.0], size=(count, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[::7] = 0.0
    logits[::11] *= -0.0
    rows = []
    for i in range(count):
        params = dict(KINDS[list(KINDS)[random.integers(len(KINDS))]])
        params["seed"] = int(random.integers(-(2**63), 2**63))
        if random.random() < 0.2:
            params["repetition_penalty"] = 1.3
        if random.random() < 0.2:
            params |= {"presence_penalty": 0.5, "frequency_penalty": -0.25}
        if vocab <= 5:
            params.pop("logit_bias", None)
        row = row_of(stream=i, position=int(random.integers(10**6)), **params)
        if random.random() < 0.3:
            allowed = random.choice(vocab, size=max(vocab // 2, 1), replace=False)
            row = dataclasses.replace(row, masks=[token_bitmask(allowed, vocab)])
        elif random.random() < 0.3 and vocab > 2:
            row = dataclasses.replace(row, forbidden_token_ids={0, int(logits[i].argmax())})
        if row.params.has_penalties:
            seen = random.integers(vocab, size=6).tolist()
            row = dataclasses.replace(
                row,
                output_counts={token: seen.count(token) for token in seen[:4]},
                prompt_token_ids=(
                    frozenset(seen[2:]) if row.params.repetition_penalty != 1.0 else ()
                ),
            )
        rows.append(row)
    return logits.astype(np.float32), rows


def expected(logits: np.ndarray, rows: list[SamplingRow]) -> list[int]:
    return [
        reference_token(reference_logits(x, row), row) for x, row in zip(logits, rows, strict=True)
    ]
