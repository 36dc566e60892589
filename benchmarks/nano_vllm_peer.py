"""nano-vllm's engine on our attention kernels, as a peer of `serving.py` in its own process.

Its source is read from a directory (`--source`, a checkout); nothing of it is in this repository.
It needs two functions of flash-attn, which are implemented here on our decode kernel and on the
flash kernel of torch, and xxhash, which a hash of the standard library replaces where it is
missing. Blocks have 64 tokens instead of 256, which only flash-attn needs. Weights are random, and
there is no tokenizer: prompts are token ids.

    python benchmarks/nano_vllm_peer.py --source nano-vllm --size qwen3-0.6b

The last line of the output is a JSON object with the seconds of each run, and the greedy tokens of
the prompts that `serving.py` checks.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from peers import LAYER_NAME, Location, load_model
from right_step import TwinWeights
from right_tokens import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS
from serving_bound import draw_lengths, draw_prompts
from serving_peers import packed_location
from torch import Tensor, nn

from ranvier.models import MODEL_SIZES, DecoderConfig
from ranvier.models.hf.registry import find_fitting_family

BLOCK_SIZE = 64
MAX_MODEL_LEN = 4096


# ---- stand-ins of packages ----------------------------------------------------------------------


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Attends from one token per sequence `[n, 1, h, k]` to caches `[blocks, slot, g, k]`."""
    from ranvier.infer.paged_kernels import decode_attention
    from ranvier.models.paged_attention import KVCache

    assert causal and abs(softmax_scale - q.shape[-1] ** -0.5) < 1e-6, softmax_scale
    # The kernel takes any strides of blocks, heads and slots.
    cache = KVCache(k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    rows = torch.arange(len(q), device=q.device)
    return decode_attention(q[:, 0], cache, block_table, rows, cache_seqlens).unsqueeze(1)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor | None,
) -> Tensor:
    """Attends from prompts `[T, h, k]` to keys and values `[T, g, k]`, or to caches."""
    if block_table is not None:
        bounds = cu_seqlens_k.tolist()
        lengths = [stop - start for start, stop in pairwise(bounds)]
        k, v = (_gather_blocks(cache, block_table, lengths) for cache in (k, v))
    found: Tensor = torch.ops.aten._flash_attention_forward(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        causal,
        False,
        scale=softmax_scale,
    )[0]
    return found


def _gather_blocks(cache: Tensor, block_table: Tensor, lengths: list[int]) -> Tensor:
    """Returns the tokens of all sequences, one after the other."""
    parts = []
    for row, length in zip(block_table, lengths, strict=True):
        blocks = row[: -(-length // cache.shape[1])].long()
        parts.append(cache[blocks].flatten(0, 1)[:length])
    return torch.cat(parts)


class HashOf64Bits:
    """A hash with the interface of xxhash.xxh64."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def update(self, data: bytes) -> None:
        """Appends data."""
        self._hash.update(data)

    def intdigest(self) -> int:
        """Returns the hash as a number."""
        return int.from_bytes(self._hash.digest(), "little")


def add_module(name: str, **content: object) -> None:
    """Makes a module importable, in place of one that may be installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[name] = module


class NoTokenizer:
    """Replaces a tokenizer: prompts are token ids, and texts are not read."""

    eos_token_id = -1

    @classmethod
    def from_pretrained(cls, *_: object, **__: object) -> NoTokenizer:
        """Returns a tokenizer, whatever is asked for."""
        return cls()

    def decode(self, _: object) -> str:
        """Returns an empty text."""
        return ""


def location(config: DecoderConfig, name: str) -> Location:
    """Returns where nano-vllm has a tensor."""
    layer = LAYER_NAME.fullmatch(name.removesuffix(".weight"))
    if layer is None:
        return Location(name)
    prefix = f"model.layers.{layer[1]}"
    packed = packed_location(config, prefix, layer[2], "self_attn.qkv_proj", "mlp.gate_up_proj")
    return packed or Location(name)


def fill_weights(config: DecoderConfig, model: nn.Module, _: str) -> None:
    """Fills a model with the weights of the twin; takes the place of its loader."""
    device = next(model.parameters()).device
    load_model(model, TwinWeights(config, device), partial(location, config))


# ---- its engine ---------------------------------------------------------------------------------


def load_engine(source: Path, folder: Path, size: str, max_num_seqs: int) -> Any:
    """Returns nano-vllm's engine with the weights of the twin. folder: for its config.json."""
    family, table = find_fitting_family(MODEL_SIZES[size])
    if family.model_type != "qwen3":
        raise ValueError(f"{size} is a {family.model_type}; nano-vllm only has qwen3")
    table |= {"model_type": family.model_type, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")
    # transformers looks for flash-attn when it is imported, and must not find ours.
    import transformers  # noqa: F401

    add_module(
        "flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    if importlib.util.find_spec("xxhash") is None:
        add_module("xxhash", xxh64=HashOf64Bits)
    sys.path.insert(0, str(source))
    use_small_blocks(importlib.import_module("nanovllm.config").Config)
    runner: Any = importlib.import_module("nanovllm.engine.model_runner")
    engine: Any = importlib.import_module("nanovllm.engine.llm_engine")
    runner.load_model = partial(fill_weights, MODEL_SIZES[size])
    engine.AutoTokenizer = NoTokenizer
    return engine.LLMEngine(str(folder), max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs)


def use_small_blocks(config: Any) -> None:
    """Sets the number of tokens of a block after the check that only flash-attn needs."""
    check = config.__post_init__

    def check_and_set(self: Any) -> None:
        check(self)
        self.kvcache_block_size = BLOCK_SIZE

    config.__post_init__ = check_and_set


def run_workload(engine: Any, lengths: list[tuple[int, int]], seed: int, vocab: int) -> float:
    """Returns the seconds of a workload."""
    params: Any = importlib.import_module("nanovllm.sampling_params").SamplingParams
    prompts = draw_prompts([tokens for tokens, _ in lengths], vocab, seed)
    options = [params(temperature=0.6, ignore_eos=True, max_tokens=count) for _, count in lengths]
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = engine.generate(prompts, options, use_tqdm=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    generated = sum(len(one["token_ids"]) for one in outputs)
    expected = sum(count for _, count in lengths)
    if generated != expected:
        raise ValueError(f"{generated} tokens instead of {expected} were generated")
    return seconds


def smoke() -> None:
    """Finds a location for each tensor of the twin."""
    config = MODEL_SIZES["qwen3-0.6b"]
    weights = TwinWeights(config, torch.device("cpu"))
    parameters = {location(config, name).parameter for name in weights}
    print(f"{len(weights)} tensors are in {len(parameters)} parameters of nano-vllm")
    print("skipped: the engine, which needs a GPU and a checkout of nano-vllm")


def answer_prompts(engine: Any, vocab: int) -> list[list[int]]:
    """Returns the greedy tokens of the prompts that are checked."""
    params: Any = importlib.import_module("nanovllm.sampling_params").SamplingParams
    prompts = draw_prompts([PROMPT_TOKENS] * NUM_PROMPTS, vocab, 2026)
    # Temperature 0 is refused; at this one the best token always wins.
    option = params(temperature=1e-5, ignore_eos=True, max_tokens=NEW_TOKENS)
    outputs = engine.generate(prompts, [option] * NUM_PROMPTS, use_tqdm=False)
    return [list(one["token_ids"]) for one in outputs]


def main() -> None:
    """Runs the workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--source", type=Path, help="directory of nano-vllm's source")
    add("--smoke", action="store_true", help="check what does not need a GPU")
    add("--size", default="qwen3-0.6b")
    add("--requests", type=int, default=256)
    add("--low", type=int, default=100, help="fewest tokens in and out of a request")
    add("--high", type=int, default=1024, help="most tokens in and out of a request")
    add("--repeats", type=int, default=2)
    asked = parser.parse_args()
    if asked.smoke:
        smoke()
        return
    if asked.source is None:
        parser.error("--source is required. Give a checkout of nano-vllm.")
    lengths = draw_lengths(asked.requests, asked.low, asked.high)
    vocab = MODEL_SIZES[asked.size].vocab
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        engine = load_engine(asked.source, Path(folder), asked.size, asked.requests)
        ready = time.perf_counter() - start
        answers = answer_prompts(engine, vocab)
        # Compiles what depends on the number of tokens.
        run_workload(engine, [(tokens, 8) for tokens, _ in lengths], 1, vocab)
        times = [run_workload(engine, lengths, 2 + i, vocab) for i in range(asked.repeats)]
        print(
            json.dumps({"seconds": times, "ready_seconds": ready, "answers": answers}), flush=True
        )


if __name__ == "__main__":
    main()
