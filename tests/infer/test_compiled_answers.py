"""The engine with compiled blocks: tokens and scores of the eager engine, in float64.

On a CPU an engine does not compile by itself, as it has no kernels. Here it has attention that the
compiler can trace. The backend traces as the compiler does, and then runs one operation at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from traceable_attention import traceable_paged_attention

from equivalence import compile_with
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer import model_runner
from ranvier.infer.engine import open_engine
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.config import GEMMA2, GPT2
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("default"),  # compilers give some
]
SHAPE: dict[str, Any] = {
    "layers": 2,
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp": 48,
    "vocab": 61,
    "max_seq": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": "per_head", "tie_embeddings": True},
    "gemma2": GEMMA2,
    "gpt2": GPT2,
    "ladder": {"residual": "ladder"},
}
PROMPT_LENGTHS = (1, 3, 17)
MAX_TOKENS = 6


def generate(name: str, backend: str) -> list[tuple[str, int, float]]:
    """Returns request, token and log-probability of each step of an engine."""
    torch.manual_seed(2)
    model = Decoder(DecoderConfig(**SHAPE | MODELS[name])).double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    plan = Plan(data=1, compile="on" if backend else "off")
    model = compile_with(parallelize(model, Grid({}), plan, dtype=torch.float64).eval(), backend)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    config = EngineConfig(block_size=16, cuda_graphs="off", max_num_batched_tokens=12)
    answers = []
    with open_engine(model, config, num_blocks=12) as engine:
        for length in PROMPT_LENGTHS:
            prompt = tuple((7 * length + 5 * i * i) % 61 for i in range(length))
            request = Request(request_id=str(length), prompt_token_ids=prompt, params=params)
            engine.add(request)
        while engine.has_unfinished:
            for output in engine.step():
                pairs = zip(output.token_ids, output.logprobs, strict=True)
                answers += [(output.request_id, token, score.logprob) for token, score in pairs]
        blocks = get_parallel_model(model).compiled_blocks
        assert (blocks is not None and len(blocks.graphs) > 0) == bool(backend)
    return sorted(answers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_the_eager_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    eager = generate(name, "")
    monkeypatch.setattr(model_runner.ModelRunner, "_can_capture", lambda self: True)
    monkeypatch.setattr(
        model_runner, "choose_paged_attention", lambda *_: traceable_paged_attention
    )
    compiled = generate(name, "aot_eager")
    assert [answer[:2] for answer in compiled] == [answer[:2] for answer in eager]
    scores, eager_scores = (torch.tensor([x[2] for x in rows]) for rows in (compiled, eager))
    torch.testing.assert_close(scores, eager_scores, rtol=0.0, atol=1e-10)
