"""The engine on a GPU, with CUDA graphs and compiled blocks, says what plain PyTorch says."""

from __future__ import annotations

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
SHAPE: dict[str, Any] = {
    "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 96, "vocab": 257
}  # fmt: skip
MODELS = {
    "llama": SHAPE,
    "window": SHAPE | {"sliding_window": 20},
    "cap": SHAPE | {"attn_logit_softcap": 5.0, "final_logit_softcap": 4.0},
    "mixture": SHAPE | {"experts": 4, "experts_per_token": 2},
}
LENGTHS = (1, 3, 17, 40, 64)
COUNT = 20


def build(name: str) -> Decoder:
    torch.manual_seed(2)
    model = Decoder(DecoderConfig(**MODELS[name], max_seq=128)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    return model


def prompts() -> list[tuple[int, ...]]:
    return [
        tuple((11 * n + 5 * i * i) % 257 for i in range(size)) for n, size in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    ("compile_blocks", "graphs"), [("off", "off"), ("off", "first_use"), ("on", "first_use")]
)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_pytorch(
    name: str, compile_blocks: Any, graphs: Any, block_size: int
) -> None:
    serial = build(name).double()
    plan = Plan(data=1, compile=compile_blocks)
    model = parallelize(build(name), Grid({}), plan, device="cuda", dtype=torch.float32).eval()
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    config = EngineConfig(block_size=block_size, cuda_graphs=graphs, max_num_batched_tokens=50)
    found: dict[str, list[tuple[int, float]]] = {}
    with open_engine(model, config, num_blocks=60) as engine:
        for i, prompt in enumerate(prompts()):
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            for output in engine.step():
                pairs = zip(output.token_ids, output.logprobs, strict=True)
                found.setdefault(output.request_id, []).extend(
                    (token, score.logprob) for token, score in pairs
                )
        uses_graphs = engine.runner.decode_graphs is not None
        assert uses_graphs == (graphs != "off" and name != "mixture")
    for i, prompt in enumerate(prompts()):
        tokens = [token for token, _ in found[str(i)]]
        with torch.no_grad():
            logits = serial(torch.tensor([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]
        want = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        have = torch.tensor([score for _, score in found[str(i)]]).double()
        assert float((have - want).abs().max()) < 1e-3, (i, have, want)
        assert (
            float((logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max())
            < 1e-4
        )
