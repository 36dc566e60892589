"""Engines of many shapes, one after another in one process: each answers, and leaves no memory."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import open_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder, DecoderConfig
from ranvier.parallel.parallelize import parallelize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # The compiler of torch imports deprecated modules, and recommends TF32.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
NUM_ENGINES = 20
SETTLED = 3
"""Number of engines after which libraries have allocated their workspaces."""
ROOM = 32 << 20
"""Bytes that the device may report in addition: kernels of later shapes are code on the device."""
MAX_GRAPHS = 16
"""Graphs of an engine at most: its sizes are dynamic, so that classes of steps share graphs."""
BATCHES = (1, 2, 5, 16, 33, 64, 100, 256)


def draw_engine(number: int) -> tuple[dict[str, Any], int, Any]:
    """Returns the shape of a model, a batch limit, and when CUDA graphs are captured."""
    draw = random.Random(number)
    kv_heads = draw.choice((1, 2, 4))
    shape = {
        "layers": 2,
        "embed": draw.choice((64, 128, 192)),
        "heads": kv_heads * draw.choice((1, 2, 4)),
        "kv_heads": kv_heads,
        "head_dim": draw.choice((32, 64, 128)),
        "mlp": draw.choice((96, 256)),
        "vocab": draw.choice((257, 1000)),
    }
    return shape, BATCHES[number % len(BATCHES)], ("off", "first_use", "startup")[number % 3]


def answer(number: int) -> None:
    """Opens an engine and compares its greedy tokens with those of the plain model."""
    shape, max_batch, graphs = draw_engine(number)
    torch.manual_seed(number)
    serial = Decoder(DecoderConfig(**shape, max_seq=256)).eval()
    with torch.no_grad():
        for weight in serial.parameters():
            weight.normal_(std=0.2)
    plain = Decoder(DecoderConfig(**shape, max_seq=256)).double().eval()
    plain.load_state_dict(serial.state_dict())
    plan = Plan(data=1, compile="on", compile_errors="raise")
    model = parallelize(serial, Grid({}), plan, device="cuda", dtype=torch.float32).eval()
    config = EngineConfig(block_size=16, cuda_graphs=graphs, max_num_seqs=max_batch)
    prompts = [tuple((7 * i + 3 * n) % shape["vocab"] for i in range(5 + n % 40)) for n in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens = dict[str, list[int]]()
    graphs_before = count_graphs()
    with open_engine(model, config, num_blocks=200) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            for output in engine.step():
                assert not output.error, output.error
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        assert engine.stats().compile_failure == ""
    assert 0 < count_graphs() - graphs_before <= MAX_GRAPHS, (number, shape, max_batch, graphs)
    for i, prompt in enumerate(prompts):
        have = torch.tensor(tokens[str(i)])
        with torch.no_grad():
            logits = plain(torch.tensor([[*prompt, *tokens[str(i)][:-1]]]))[0, len(prompt) - 1 :]
        gap = logits.amax(1) - logits.gather(1, have[:, None])[:, 0]
        assert float(gap.max()) < 1e-3, (number, i, gap)


def count_graphs() -> int:
    """Returns the number of graphs that this process has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def device_bytes() -> tuple[int, int, int]:
    """Returns the bytes of tensors, of the allocator with all pools, and of the whole device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free


def test_many_engines_answer_and_leave_no_memory() -> None:
    used = []
    for number in range(NUM_ENGINES):
        answer(number)
        used.append(device_bytes())
    allocated, reserved, on_device = (
        last - settled for last, settled in zip(used[-1], used[SETTLED - 1], strict=True)
    )
    assert allocated <= 0, used
    assert reserved <= 0, used
    assert on_device <= ROOM, used
