"""Settings of the inference engine, with the names of vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ranvier.errors import PlanError
from ranvier.setting import setting

SchedulingPolicyName = Literal["decode_first", "prefill_first", "static"]
CudaGraphs = Literal["auto", "startup", "first_use", "off"]
AsyncScheduling = Literal["auto", "on", "off"]
ExitKind = Literal["kl", "entropy", "argmax"]
"""What an early exit compares after each iteration: the KL divergence of the distributions of the
next token, the change of their entropy, or how often the most likely token stayed the same."""


@dataclass(frozen=True)
class ExitCriterion:
    """When a token of a model with recurrent depth needs no further iteration."""

    kind: ExitKind
    threshold: float
    """A token exits when its value is below this; for argmax, when its most likely token has been
    the same this many times in a row."""

    @classmethod
    def parse(cls, text: str) -> ExitCriterion:
        """Returns the criterion of a text such as `kl:5e-4`."""
        name, _, value = text.partition(":")
        try:
            threshold = float(value)
        except ValueError:
            threshold = math.nan
        kinds = get_args(ExitKind)
        is_count = name != "argmax" or (threshold >= 1.0 and threshold.is_integer())
        if name not in kinds or not 0.0 <= threshold < math.inf or not is_count:
            raise PlanError(
                f"exit={text!r} is invalid. It must be a criterion and its threshold: kl:VALUE or "
                "entropy:VALUE with a value of at least 0, or argmax:COUNT with a whole number of "
                "at least 1. Use e.g. kl:5e-4, entropy:1e-3 or argmax:5."
            )
        return cls(name, threshold)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RecurrenceOptions:
    """How often the core of a model with recurrent depth runs on each token."""

    recurrence: int = setting(-1, minimum=-1, maximum=4096, unit="iterations")
    """Number of iterations of the core of a model with recurrent depth. -1 means
    model.mean_recurrence."""
    exit: str = ""
    """When a new token needs no further iterations: kl:VALUE (the KL divergence between the
    distributions of the next token after two iterations is below the value; 5e-4 is usual),
    entropy:VALUE (the change of their entropy) or argmax:COUNT (the most likely token was the same
    that many times). If empty, all tokens have all iterations."""
    kv_share: int = setting(0, minimum=0, maximum=4096, unit="iterations")
    """Number of iterations whose keys and values are stored: iteration i uses those of i mod
    kv_share. Fewer take less memory and change the result. 0 stores all."""

    def num_iterations(self, mean_recurrence: int) -> int:
        """Returns the number of iterations of a model; 1 if it has no recurrent depth."""
        if mean_recurrence == 0:
            return 1
        return self.recurrence if self.recurrence > 0 else mean_recurrence

    def num_caches(self, mean_recurrence: int) -> int:
        """Returns the number of iterations whose keys and values are stored."""
        count = self.num_iterations(mean_recurrence)
        return min(self.kv_share or count, count)

    @property
    def exit_criterion(self) -> ExitCriterion | None:
        """When tokens exit; None if all have all iterations."""
        return ExitCriterion.parse(self.exit) if self.exit else None

    def check_recurrence(self, mean_recurrence: int) -> None:
        """Raises if the options do not fit a model."""
        default = RecurrenceOptions()
        given = [
            f"{name}={value!r}"
            for name in ("recurrence", "exit", "kv_share")
            if (value := getattr(self, name)) != getattr(default, name)
        ]
        if given and not mean_recurrence:
            raise PlanError(
                f"{', '.join(given)}, but the model has no recurrent depth. Only the core of a "
                "model with model.mean_recurrence runs several times. Remove the option."
            )
        if self.recurrence == 0:
            raise PlanError(
                "recurrence=0 is invalid. The core of the model runs at least once. Use "
                f"{mean_recurrence}, its mean in training, or another positive number."
            )
        # An invalid criterion raises here.
        _ = self.exit_criterion


@dataclass(frozen=True, kw_only=True)
class EngineConfig(RecurrenceOptions):
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
