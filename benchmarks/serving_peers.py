"""Peers of `serving.py`: transformers, and a plain compiled loop after gpt-fast.

All have random weights of the same shape on the same device. Compilation and the first tokens after
it are not timed. The rates of decode steps exclude the prompt, as those of Ranvier do.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from peers import LAYER_NAME, Location, load_model, same_name
from right_step import TwinWeights
from serving_bound import draw_prompts
from torch import Tensor, nn

from ranvier.models import DecoderConfig
from ranvier.models.hf.registry import find_fitting_family

FULL_RUN_SECONDS = 60.0
"""A workload that is predicted to take longer is extrapolated from shorter answers."""


def wait_for(device: torch.device) -> None:
    """Waits until a device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(*, forgets_compiled: bool = True) -> None:
    """Frees memory that nothing uses any more, and compiled code, which keeps weights alive."""
    if forgets_compiled:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Returns the median time of some work on a device."""
    times = []
    for _ in range(repeats):
        wait_for(device)
        start = time.perf_counter()
        work()
        wait_for(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# ---- transformers -------------------------------------------------------------------------------


def import_transformers() -> None:
    """Imports what `transformers_model` uses, for seconds, if transformers is installed."""
    with suppress(ImportError):
        import_module("torch._dynamo")
        import_module("transformers.models.auto.modeling_auto")
        import_module("transformers.models.llama.modeling_llama")


@contextmanager
def transformers_model(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype
) -> Iterator[Any]:
    """Context with a model of transformers with the weights of the twin."""
    from transformers import AutoConfig, AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    family, table = find_fitting_family(config)
    with torch.device(device):
        made = AutoConfig.for_model(**{"model_type": family.model_type, **table})
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
    load_model(model, TwinWeights(config, device), same_name)
    # All tokens are generated, whatever they are.
    for one in (model.config, model.generation_config):
        one.eos_token_id = None
        one.pad_token_id = 0
    try:
        yield model.eval()
    finally:
        del model
        free_memory()


def sequence_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns the logits `[s, v]` of a sequence."""
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def static_cache_answers(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """Returns the greedy tokens of transformers with a compiled static cache."""
    tokens = torch.tensor(prompts, device=model.device)
    with torch.inference_mode():
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=static_cache_options(new_tokens),
        )
    answers: list[list[int]] = found[:, tokens.shape[1] :].tolist()
    return answers


def static_cache_options(new_tokens: int) -> Any:
    """Returns the options of greedy decoding with a compiled static cache."""
    from transformers import CompileConfig, GenerationConfig

    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=CompileConfig(),
    )


class StepClock:
    """A logits processor that notes when step `skip` of `generate` begins."""

    def __init__(self, device: torch.device, skip: int) -> None:
        self.device = device
        self.skip = skip
        self.num_calls = 0
        self.start = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores unchanged."""
        if self.num_calls == self.skip:
            wait_for(self.device)
            self.start = time.perf_counter()
        self.num_calls += 1
        return scores


def static_cache_steps(
    model: Any, prompts: Sequence[Sequence[int]], *, new_tokens: int, skip: int, repeats: int
) -> tuple[float, float]:
    """Returns the seconds of a decode step of transformers with a static cache, and of `generate`.

    Both are medians. The model is compiled with CUDA graphs (`reduce-overhead`). The first `skip`
    steps of each call are not timed, because they may capture again.
    """
    from transformers import LogitsProcessorList

    options = static_cache_options(new_tokens)
    tokens = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(tokens)
    steps = []
    calls = []
    for _ in range(repeats + 1):
        clock = StepClock(model.device, skip)
        wait_for(model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                tokens,
                attention_mask=mask,
                generation_config=options,
                logits_processor=LogitsProcessorList([clock]),
            )
        wait_for(model.device)
        stop = time.perf_counter()
        generated = found.shape[1] - tokens.shape[1]
        if generated != new_tokens:
            raise ValueError(f"generate has returned {generated} tokens, not {new_tokens}")
        steps.append((stop - clock.start) / (new_tokens - 1 - skip))
        calls.append(stop - start)
    # The first call compiles.
    return statistics.median(steps[1:]), statistics.median(calls[1:])


def forward_seconds(model: Any, prompts: Sequence[Sequence[int]], repeats: int) -> float:
    """Returns the seconds of the compiled forward pass of transformers, with the last logits."""
    tokens = torch.tensor(prompts, device=model.device)
    forward = torch.compile(model.forward) if model.device.type == "cuda" else model.forward
    with torch.inference_mode():

        def work() -> object:
            return forward(input_ids=tokens, use_cache=False, logits_to_keep=1).logits

        for _ in range(2):
            work()
        return median_seconds(work, model.device, repeats)


def continuous_batching_seconds(
    model: Any, lengths: Sequence[tuple[int, int]]
) -> tuple[float, dict[str, Any]]:
    """Returns the seconds of a workload with transformers' continuous batching, and how.

    `generate_batch` gives all requests the same length, so that the requests are added one by one
    to the manager that it uses. If the workload would take long, its time is extrapolated from two
    runs with shorter answers, linearly in the number of tokens: contexts get no longer in it, which
    favors transformers.
    """
    vocab = model.config.vocab_size
    sizes = [tokens for tokens, _ in lengths]
    total = sum(count for _, count in lengths)
    with _running_manager(model, max(count for _, count in lengths)) as manager:
        _run_batch(manager, draw_prompts(sizes[:8], vocab, 100), [8] * len(sizes[:8]))  # warms up
        runs = []
        for seed, divisor in ((101, 64), (102, 24)):
            counts = [max(2, count // divisor) for _, count in lengths]
            seconds = _run_batch(manager, draw_prompts(sizes, vocab, seed), counts)
            runs.append((sum(counts), seconds))
        (few, short), (more, longer) = runs
        seconds = longer + (total - more) * max(longer - short, 0.0) / max(more - few, 1)
        extrapolated = seconds > FULL_RUN_SECONDS
        if not extrapolated:
            counts = [count for _, count in lengths]
            seconds = _run_batch(manager, draw_prompts(sizes, vocab, 103), counts)
    return seconds, {"extrapolated": extrapolated, "runs": runs}


@contextmanager
def _running_manager(model: Any, new_tokens: int) -> Iterator[Any]:
    """Context with a manager of continuous batching that runs in its thread."""
    manager = _make_manager(model, new_tokens)
    # Older versions capture graphs at their first use.
    if hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=10)
        # Older versions free the cache with the manager.
        if hasattr(manager, "destroy"):
            manager.destroy()
        model.set_attn_implementation("sdpa")


def _run_batch(manager: Any, prompts: Sequence[list[int]], counts: Sequence[int]) -> float:
    """Returns the seconds of requests that come at once, each with its own number of tokens."""
    start = time.perf_counter()
    for prompt, count in zip(prompts, counts, strict=True):
        manager.add_request(prompt, max_new_tokens=count)
    finished = 0
    generated = 0
    while finished < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the thread of continuous batching has stopped")
        elif result.is_finished():
            finished += 1
            generated += len(result.generated_tokens)
            if result.error is not None:
                raise RuntimeError(str(result.error))
    seconds = time.perf_counter() - start
    if generated != sum(counts):
        raise ValueError(f"{generated} tokens instead of {sum(counts)} were generated")
    return seconds


def _make_manager(model: Any, new_tokens: int) -> Any:
    """Returns a manager of continuous batching with paged SDPA."""
    from transformers import GenerationConfig

    options = GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    more: dict[str, Any] = {}
    if model.device.type == "cpu":
        from transformers import ContinuousBatchingConfig

        # By default its masks take most of the memory of the host.
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
        more = {"continuous_batching_config": small}
    # Its name depends on the version.
    names = ("paged|sdpa", "sdpa")
    for i, name in enumerate(names):
        try:
            model.set_attn_implementation(name)
            return model.init_continuous_batching(generation_config=options, **more)
        except ValueError:
            if i == len(names) - 1:
                raise
    raise AssertionError(names)


# ---- a plain compiled loop ----------------------------------------------------------------------


class PlainLayer(nn.Module):
    """A layer of a Llama for one token, with a static cache of keys and values."""

    keys: Tensor
    values: Tensor

    def __init__(self, config: DecoderConfig, max_len: int) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.attn_norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.qkv = nn.Linear(config.embed, width + 2 * kv_width, bias=False)
        self.o = nn.Linear(width, config.embed, bias=False)
        self.mlp_norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.gate_up = nn.Linear(config.embed, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, config.embed, bias=False)
        shape = (1, config.kv_heads, max_len, config.head_dim)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(
        self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        """x, y: `[1, d]`; position: `[1]`; cos, sin: `[1, k / 2]`; mask: `[1, L]`."""
        config = self.config
        heads = self.qkv(self.attn_norm(x)).view(-1, config.head_dim)  # (h + 2 g, k)
        q, k, v = heads.split([config.heads, config.kv_heads, config.kv_heads])
        q = rotate(q, cos, sin)
        # `index_copy_` with a position on the device can be captured.
        self.keys.index_copy_(2, position, rotate(k, cos, sin)[None, :, None])
        self.values.index_copy_(2, position, v[None, :, None])
        # The heads that share keys are the rows of one product, as there is one token.
        grouped = q.view(1, config.kv_heads, -1, config.head_dim)  # (1, g, h / g, k)
        y = F.scaled_dot_product_attention(grouped, self.keys, self.values, attn_mask=mask)
        x = x + self.o(y.reshape(1, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        x += self.down(F.silu(gate) * up)
        return x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads `[h, k]` rotated by their position."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class PlainDecoder(nn.Module):
    """A Llama that computes the most likely next token of one sequence."""

    angles: Tensor
    places: Tensor

    def __init__(self, config: DecoderConfig, max_len: int, dtype: torch.dtype) -> None:
        super().__init__()
        if config.qk_norm != "none":
            raise ValueError("the plain loop has no norms of queries and keys")
        self.embed = nn.Embedding(config.vocab, config.embed)
        self.layers = nn.ModuleList(PlainLayer(config, max_len) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.embed, eps=config.norm_eps)
        self.head = nn.Linear(config.embed, config.vocab, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.to(dtype)
        # Angles stay in fp32.
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(max_len).float(), config.rope_theta**-exponents)
        self.register_buffer("angles", angles)
        self.register_buffer("places", torch.arange(max_len))

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next token and its position. token, position: int64 `[1]`."""
        angles = self.angles[position]
        cos = angles.cos()
        sin = angles.sin()
        mask = (self.places <= position).unsqueeze(0)  # (1, L)
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x, position, cos, sin, mask)
        return self.head(self.norm(x)).argmax(-1), position + 1


PLAIN_NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "o",
    "mlp.down_proj": "down",
}


def plain_location(config: DecoderConfig, name: str) -> Location:
    """Returns where the plain loop has a tensor."""
    module = name.removesuffix(".weight")
    layer = LAYER_NAME.fullmatch(module)
    if layer is None:
        return Location(f"{PLAIN_NAMES[module]}.weight")
    prefix, inner = f"layers.{layer[1]}", layer[2]
    packed = packed_location(config, prefix, inner, "qkv", "gate_up")
    return packed or Location(f"{prefix}.{PLAIN_NAMES[inner]}.weight")


def _take_part(x: Tensor, sizes: list[int], number: int) -> Tensor:
    return x.split(sizes)[number]


def packed_location(
    config: DecoderConfig, prefix: str, inner: str, qkv: str, gate_up: str
) -> Location | None:
    """Returns where a model has q, k and v, or gate and up, as rows of one matrix."""
    widths = [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)]
    groups = {
        qkv: (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), widths),
        gate_up: (("mlp.gate_proj", "mlp.up_proj"), [config.mlp, config.mlp]),
    }
    for parameter, (members, sizes) in groups.items():
        if inner in members:
            number = members.index(inner)
            split = partial(_take_part, sizes=sizes, number=number)
            return Location(f"{prefix}.{parameter}.weight", split)
    return None


def plain_loop(
    config: DecoderConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
    tunes: bool,
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
) -> tuple[float, list[list[int]]]:
    """Returns the seconds of a step of a compiled loop at batch 1, and its answers to prompts.

    The seconds are the median of some runs. tunes: search the parameters of the compiler's kernels,
    as gpt-fast does.
    """
    length = max(prompt_tokens + new_tokens, len(prompts[0]) + answer_tokens)
    with torch.device(device):
        model = PlainDecoder(config, length, dtype)
    load_model(model, TwinWeights(config, device), partial(plain_location, config))
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model
    if device.type == "cuda":
        step = torch.compile(
            model,
            fullgraph=True,
            options={"triton.cudagraphs": True, "coordinate_descent_tuning": tunes},
        )
    with torch.no_grad():
        token = torch.ones(1, dtype=torch.int64, device=device)
        position = torch.zeros_like(token)
        for _ in range(prompt_tokens):
            token, position = (x.clone() for x in step(token, position))

        def work() -> None:
            tokens = token
            places = position
            for _ in range(new_tokens):
                tokens, places = (x.clone() for x in step(tokens, places))

        seconds = median_seconds(work, device, repeats) / new_tokens
        answers = []
        for prompt in prompts:
            generated = list(prompt)
            for i in range(len(prompt) + answer_tokens - 1):
                token = torch.tensor([generated[i]], device=device)
                following, _ = step(token, torch.tensor([i], device=device))
                if i >= len(prompt) - 1:
                    generated.append(int(following))
            answers.append(generated[len(prompt) :])
    return seconds, answers
