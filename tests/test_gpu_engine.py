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
        uses_graphs = engine.runner.step_graphs is not None
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


@pytest.mark.parametrize("graphs", ["off", "first_use", "startup"])
@pytest.mark.parametrize("ahead", ["off", "on"])
def test_draws_do_not_depend_on_how_steps_run(graphs: Any, ahead: Any) -> None:
    """Penalties wait for tokens, filters and plain draws do not; all are drawn in every mode."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.7},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 0.8, "presence_penalty": 1.0},
        {"temperature": 0.0},
    ]
    plan = Plan(data=1)
    model = parallelize(build("llama"), Grid({}), plan, device="cuda", dtype=torch.float32).eval()

    def run(config: EngineConfig) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        with open_engine(model, config, num_blocks=60) as engine:
            for i, kind in enumerate(kinds):
                params = SamplingParams(max_tokens=COUNT, ignore_eos=True, seed=i, **kind)
                prompt = prompts()[i % len(LENGTHS)]
                engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
            while engine.has_unfinished:
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        return found

    want = run(EngineConfig(cuda_graphs="off", async_scheduling="off"))
    have = run(EngineConfig(cuda_graphs=graphs, async_scheduling=ahead, max_num_seqs=8))
    assert have == want


def test_batch_invariant_log_probabilities() -> None:
    """A request gets the same bits alone, among others, from the cache, in chunks, preempted."""
    plan = Plan(data=1)
    shape = {**SHAPE, "embed": 256, "mlp": 512, "head_dim": 64, "vocab": 1000}
    torch.manual_seed(3)
    serial = Decoder(DecoderConfig(**shape, max_seq=512)).eval()
    model = parallelize(serial, Grid({}), plan, device="cuda", dtype=torch.bfloat16).eval()
    prompt = tuple((7 * i) % 1000 for i in range(150))
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=3)

    def run(others: int, num_blocks: int = 1500, warm: bool = False, **options: Any) -> Any:
        config = EngineConfig(batch_invariant=True, block_size=16, **options)
        with open_engine(model, config, num_blocks=num_blocks) as engine:
            for repeat in range(1 + warm):
                found = []
                engine.add(Request(request_id="own", prompt_token_ids=prompt, params=params))
                for i in range(others):
                    other = tuple((11 * i + 3 * j) % 1000 for j in range(5 + 3 * i))
                    name = f"{repeat}-{i}"
                    engine.add(Request(request_id=name, prompt_token_ids=other, params=params))
                while engine.has_unfinished:
                    for output in engine.step():
                        if output.request_id == "own":
                            found += [*zip(output.token_ids, output.logprobs, strict=True)]
            return found, engine.stats().num_preemptions

    want, _ = run(0)
    assert run(64)[0] == want
    assert run(64, max_num_batched_tokens=64)[0] == want
    assert run(64, max_num_batched_tokens=2048)[0] == want
    assert run(64, warm=True)[0] == want
    assert run(10, cuda_graphs="off")[0] == want
    found, preemptions = run(64, num_blocks=90)
    assert preemptions > 0
    assert found == want


def test_compiled_kernels_wait_for_their_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that lets its successor start, and has not waited, would break the order of all."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the device starts kernels one after another")
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import fresh_cache

    codes: list[str] = []
    monkeypatch.setattr(GraphLowering, "save_output_code", staticmethod(codes.append))
    plan = Plan(data=1, compile="on")
    model = parallelize(build("llama"), Grid({}), plan, device="cuda", dtype=torch.bfloat16).eval()
    with fresh_cache(), open_engine(model, EngineConfig(), num_blocks=60) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        for i, prompt in enumerate(prompts()):
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            engine.step()
    kernels = [
        kernel.partition("''', device_str=")[0]
        for code in codes
        for kernel in code.split("@triton.jit")[1:]
    ]
    assert len(kernels) > 1
    for kernel in kernels:
        wait, launch = kernel.find("gdc_wait()"), kernel.find("gdc_launch_dependents()")
        assert 0 <= wait < launch, kernel
