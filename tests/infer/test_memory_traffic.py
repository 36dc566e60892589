"""Bytes that a step reads, as the metrics show them."""

from __future__ import annotations

import pytest
import torch
from engine_cases import serve
from prometheus_client.parser import text_string_to_metric_families

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import open_engine
from ranvier.infer.load import build_empty_model
from ranvier.infer.memory_traffic import measure_bandwidth
from ranvier.infer.request import EngineStats, Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.server.metrics import ServerMetrics
from ranvier.models import DecoderConfig

SHAPE = {"layers": 3, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24}
VOCAB = 60


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_weights_and_the_keys_and_values_of_its_sequences(tied: bool) -> None:
    config = DecoderConfig(
        **SHAPE, vocab=VOCAB, tie_embeddings=tied, sliding_window=8, window_layers=(1,), max_seq=64
    )
    model = build_empty_model(config, Grid({}), "cpu", plan=Plan(), dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    request = Request(request_id="a", prompt_token_ids=(1,) * 20, params=params)
    with open_engine(model, EngineConfig(block_size=16), num_blocks=9) as engine:
        stats = serve(engine, [request]).stats
    weights = sum(x.numel() for x in model.parameters())
    if not tied:
        weights -= VOCAB * SHAPE["embed"]
    # Two steps, of 20 tokens and of one after them; one of three layers has a window of 8.
    kv = 2 * SHAPE["kv_heads"] * SHAPE["head_dim"]
    assert stats.bytes_read == 4 * (2 * weights + kv * (2 * (20 + 21) + 2 * 8))
    assert stats.host_seconds > 0.0


def test_the_metrics_show_host_time_and_the_share_of_the_bandwidth() -> None:
    metrics = ServerMetrics("tiny")
    after = EngineStats(
        num_steps=1,
        num_computed_tokens=4,
        num_generated_tokens=4,
        host_seconds=0.002,
        bytes_read=3_000,
    )
    metrics.observe_step(1e6, EngineStats(), after, 0.004)
    # Without a known bandwidth there is no share.
    metrics.observe_step(0.0, after, after, 0.004)
    found = {
        sample.name.removeprefix("ranvier:"): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }
    assert found["host_seconds_sum"] == pytest.approx(0.002) and found["host_seconds_count"] == 2
    assert found["bandwidth_share_sum"] == pytest.approx(0.75)
    assert found["bandwidth_share_count"] == 1


def test_a_copy_has_a_bandwidth() -> None:
    assert measure_bandwidth(torch.device("cpu")) > 1e6
