"""Compiled engines on a CPU: many in one process, and engines whose compiler or capture fails.

Blocks are compiled as on a GPU, with attention that the compiler can trace instead of kernels, and
a backend that only traces. A stand-in for CUDA graphs runs the captured work again.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from traceable_attention import traceable_paged_attention

from equivalence import compile_with
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer import model_runner
from ranvier.infer.engine import open_engine
from ranvier.infer.request import EngineStats, Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.feed_forward import GatedMLP
from ranvier.nn.compile import BlockGraph, CompiledBlocks
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize

CONFIG = DecoderConfig(
    layers=2, embed=16, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=61, max_seq=64
)
PROMPTS = ((5,), (1, 2, 3), tuple(range(20)))
BLOCK_SIZE = 16


class ReplayedGraph:
    """A stand-in for a CUDA graph: it runs the captured work again."""

    def __init__(self, run: Callable[[], Tensor], out: Tensor) -> None:
        self._run = run
        self._out = out

    def replay(self) -> None:
        self._out.copy_(self._run())


def capture(self: Any, run: Callable[[], Tensor]) -> Any:
    tokens = self._sampled_tokens.clone()
    out = run()
    self._sampled_tokens.copy_(tokens)
    return ReplayedGraph(run, out), out


def resolve_tokens(tokens: Tensor, sampled: Tensor) -> Tensor:
    return torch.where(tokens < 0, sampled[(-1 - tokens).clamp(min=0)], tokens)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU with what engines compile for."""
    kernels = SimpleNamespace(resolve_tokens=resolve_tokens)
    monkeypatch.setitem(sys.modules, "ranvier.infer.sampler_kernels", kernels)
    monkeypatch.delitem(sys.modules, "ranvier.infer.step_graphs", raising=False)
    monkeypatch.setattr(
        model_runner, "choose_paged_attention", lambda *_: traceable_paged_attention
    )
    monkeypatch.setattr(model_runner.ModelRunner, "_can_capture", lambda self: True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    torch._dynamo.reset()
    yield
    sys.modules.pop("ranvier.infer.step_graphs", None)
    torch._dynamo.reset()


@pytest.fixture
def captures(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is run again."""
    from ranvier.infer.step_graphs import StepGraphs

    monkeypatch.setattr(StepGraphs, "_capture", capture)


def build(errors: Any = "raise", backend: Any = "eager", compiled: bool = True) -> Any:
    torch.manual_seed(3)
    plan = Plan(data=1, compile="on" if compiled else "off", compile_errors=errors)
    model = parallelize(Decoder(CONFIG), Grid({}), plan, device="cpu", dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in get_parallel_model(model).bucket_scheduler.buckets:
            weight.data.mul_(5.0)
    return compile_with(model, backend if compiled else "")


def serve(model: Any, **options: Any) -> tuple[list[list[int]], EngineStats]:
    """Returns the greedy tokens of all prompts, and the statistics at the end."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64, **options
    )
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    tokens = dict[str, list[int]]()
    with open_engine(model, config, num_blocks=20) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
        while engine.has_unfinished:
            for output in engine.step():
                assert not output.error, output.error
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
        stats = engine.stats()
    return [tokens[str(i)] for i in range(len(PROMPTS))], stats


def count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.full
def test_many_engines_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither engines of one model, nor variants of its blocks, add to one limit of dynamo.

    The sizes of caches are constants of a graph, and differ between engines. When all engines and
    variants of a model had one code object, only the first engine had dynamic numbers of tokens:
    each later one added a graph for each class of steps, until the limit of 64 was reached.
    """
    monkeypatch.setattr("ranvier.nn.compile.RECOMPILE_LIMIT", 8)
    want, _ = serve(build(compiled=False), cuda_graphs="off")
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with torch._dynamo.config.patch(recompile_limit=8):
        model = build()
        before = count_graphs()
        for i in range(5):
            config = EngineConfig(block_size=BLOCK_SIZE, cuda_graphs="off", max_num_seqs=1 << i)
            tokens = list[int]()
            with open_engine(model, config, num_blocks=10 + i) as engine:
                engine.add(Request(request_id="0", prompt_token_ids=PROMPTS[2], params=params))
                while engine.has_unfinished:
                    tokens += [token for output in engine.step() for token in output.token_ids]
            assert tokens == want[2]
    assert count_graphs() - before >= 15, "each engine compiles: its cache has another size"


@pytest.mark.full
@pytest.mark.usefixtures("captures")
def test_a_step_of_every_class_has_few_graphs() -> None:
    """Sizes are dynamic: classes of steps differ in whether they decode, and in one token."""
    before = count_graphs()
    model = build()
    have, _ = serve(model, cuda_graphs="startup")
    assert count_graphs() - before <= 12
    assert have == serve(build(compiled=False), cuda_graphs="off")[0]


def test_a_closed_engine_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are freed, and so is a model that nobody else refers to."""
    model = build()
    compiled = get_parallel_model(model).compiled_blocks
    assert compiled is not None
    codes = list[weakref.ref[Any]]()
    build_graph = CompiledBlocks._build_graph

    def remember(self: CompiledBlocks, is_inference: bool) -> BlockGraph:
        graph = build_graph(self, is_inference)
        inner: Any = torch._dynamo.eval_frame.innermost_fn(graph.function)
        codes.append(weakref.ref(inner.__code__))
        return graph

    monkeypatch.setattr(CompiledBlocks, "_build_graph", remember)
    serve(model, cuda_graphs="off")
    assert len(codes) > 1 and not compiled.graphs
    gc.collect()
    # torch 2.11 keeps one of the code objects, which are equal, as the key of a cache.
    kept = [code for code in (code() for code in codes) if code is not None]
    assert len(kept) <= 1
    assert not any(_debug_get_cache_entry_list(code) for code in kept)
    del kept
    weights = [weakref.ref(weight) for weight in model.parameters()]
    del model, compiled
    gc.collect()
    assert not [weight for weight in weights if weight() is not None]


def break_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants what no version of torch can trace into one graph."""
    forward = GatedMLP.forward

    def broken(self: GatedMLP, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(GatedMLP, "forward", broken)


def failing_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError(f"no kernel in /home/user/cache/x.py of process 4711\n{graph}")


@pytest.mark.sample(2)
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("graphs", ["off", "first_use"])
@pytest.mark.parametrize("planted", ["trace", "backend"])
def test_blocks_that_cannot_be_compiled_run_eagerly(
    planted: str,
    graphs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    want, plain = serve(build(compiled=False), cuda_graphs="off")
    assert plain.compile_failure == ""
    backend: Any = "eager" if planted == "trace" else failing_backend
    if planted == "trace":
        break_mlp(monkeypatch)
    have, stats = serve(build("fallback", backend), cuda_graphs=graphs)
    assert have == want
    assert stats.compile_failure.startswith("Blocks run without a graph and are slower: ")
    reason = {"trace": "Unsupported: ", "backend": "RuntimeError: no kernel in ... of ..."}[planted]
    assert reason in stats.compile_failure
    lines = [line for line in capsys.readouterr().err.splitlines() if "without a graph" in line]
    assert lines == [f"warning: {stats.compile_failure}"]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        serve(build("raise", backend), cuda_graphs=graphs)


def test_a_step_that_cannot_be_captured_runs_without_a_graph(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work runs, and only its capture fails."""
    want, _ = serve(build(compiled=False), cuda_graphs="off")
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextlib.contextmanager
    def fail(graph: Any, pool: Any, stream: Any) -> Iterator[None]:
        yield
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    for name, stand_in in (
        ("Stream", lambda device: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda one: contextlib.nullcontext()),
        ("CUDAGraph", SimpleNamespace),
        ("graph", fail),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for when in ("first_use", "startup"):
        have, stats = serve(build("fallback", compiled=False), cuda_graphs=when)
        assert have == want
        assert "Steps of the engine run without a graph" in stats.compile_failure
        assert capsys.readouterr().err.count("without a graph") == 1
    with pytest.raises(RuntimeError, match="stream is capturing"):
        serve(build("raise", compiled=False), cuda_graphs="first_use")


def test_plain_attention_on_a_gpu_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "has_triton", lambda: False)
    for is_cuda in (False, True):
        assert capsys.readouterr().err == ""
        cache: Any = SimpleNamespace(keys=SimpleNamespace(is_cuda=is_cuda))
        model_runner.warn_of_plain_attention(cache)
    assert capsys.readouterr().err == (
        "warning: attention to the KV cache runs in plain PyTorch and is slower: "
        "Triton cannot be imported\n"
    )
