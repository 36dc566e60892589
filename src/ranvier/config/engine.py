"""Settings of the inference engine, with the names of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ranvier.setting import setting

SchedulingPolicyName = Literal["decode_first", "prefill_first", "static"]
CudaGraphs = Literal["auto", "startup", "first_use", "off"]
AsyncScheduling = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The inference engine: its KV cache, and how requests share its steps."""

    kv_cache_gib: float = setting(0.0, minimum=0.0, unit="GiB")
    """Memory of the KV cache on each rank. 0 means gpu_memory_utilization on a GPU, and 1 GiB on a
    CPU."""
    gpu_memory_utilization: float = setting(0.9, minimum=0.05, maximum=0.98)
    """Fraction of the memory of a GPU that weights, activations and KV cache may use together."""
    block_size: int = setting(64, minimum=1, maximum=1024, unit="tokens")
    """Tokens of a block of the KV cache, on each rank of context. Only full blocks are shared
    between requests."""
    max_num_batched_tokens: int = setting(1024, minimum=1, unit="tokens")
    """Maximum number of tokens of a step. A longer prompt is computed in several steps, between
    which the other requests advance: fewer tokens mean shorter gaps between the tokens of others,
    and more a shorter time to the first token."""
    target_itl_ms: float = setting(0.0, minimum=0.0, maximum=60_000.0, unit="ms")
    """Inter-token latency to keep: a step that computes tokens of running requests gets as many
    tokens of prompts as keep its time below this, by the times of the last steps, and at most
    max_num_batched_tokens. 0 means no target."""
    max_num_seqs: int = setting(256, minimum=1, unit="requests")
    """Maximum number of requests that run at the same time."""
    max_model_len: int = setting(0, minimum=0, unit="tokens")
    """Maximum number of tokens of a request, prompt and answer together. 0 means all positions of
    the model, or as many as fit into the KV cache."""
    scheduling_policy: SchedulingPolicyName = "decode_first"
    """Order in which tokens are computed: decode_first (one token of each running request, then
    prompts, in the order of arrival), prefill_first (prompts alone, before running requests) or
    static (batches that run until all of their requests have ended)."""
    enable_prefix_caching: bool = True
    """Whether requests that begin with the same tokens share their keys and values."""
    cuda_graphs: CudaGraphs = "auto"
    """Whether steps on one GPU are replayed as CUDA graphs: startup (graphs for all sizes are
    captured before the first request), first_use (a graph is captured when a step first has its
    size), off, or auto (startup in a server, otherwise first_use)."""
    async_scheduling: AsyncScheduling = "auto"
    """Whether the next step is scheduled while the device computes the last one: on, off or auto
    (on a GPU). Tokens are the same."""
    batch_invariant: bool = False
    """Whether log-probabilities are bitwise the same whatever else runs. It needs one GPU, and
    takes longer."""
    step_log: str = ""
    """JSON lines file to which the tokens and the seconds of each step are appended, as `ranvier
    simulate serving --steps` reads them. If empty, none is written."""
    seed: int = setting(0, minimum=0, maximum=2**63 - 1)
    """Source of the seeds of requests that have none: with the same seed and the same order of
    requests, the answers are the same."""
