"""Attention backends: implementations of causal attention, and the choice of the fastest one.

Each backend is a function of q `[b, s, h, k]` and k, v `[b, s, g, k]` that returns a tensor like q;
torch.compile can trace it. h is a multiple of g; query heads share keys in order.

    auto        torch's own choice (SDPA)
    cudnn       the kernel of NVIDIA's cuDNN
    flash       torch's flash-attention kernel
    efficient   torch's memory-efficient kernel, for fp32, where SDPA would materialize all scores

Not supported: documents inside a sample, masks, dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ranvier.nn.autotune import Autotuner, TimedCall, random_tensors

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 128
"""Largest head dim for which all supported devices have a backward pass."""


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's SDPA; q, y: `[b, s, h, k]`, k, v: `[b, s, g, k]`."""
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y.transpose(1, 2)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by cuDNN, which supports grouped kv heads; see `sdpa_attention`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # Arguments: attn_bias, compute_log_sumexp (for backward), dropout_p, is_causal.
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    y: Tensor = attend(q, k, v, None, True, 0.0, True)[0]
    return y.transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's flash kernel, which supports grouped kv heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # Arguments: dropout_p, is_causal.
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    y: Tensor = attend(q, k, v, 0.0, True)[0]
    return y.transpose(1, 2)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by torch's memory-efficient kernel; copies kv heads for each query head."""
    count = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(count, 2) if count > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # Arguments: attn_bias, compute_log_sumexp (for backward), dropout_p, is_causal.
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    y: Tensor = attend(q, k, v, None, True, 0.0, True)[0]
    return y.transpose(1, 2)


BACKENDS: dict[str, AttentionFunction] = {
    "auto": sdpa_attention,
    "cudnn": cudnn_attention,
    "flash": flash_attention,
    "efficient": efficient_attention,
}
BACKEND_DTYPES = {"cudnn": HALF_DTYPES, "flash": HALF_DTYPES, "efficient": (torch.float32,)}
"""Dtypes for which a backend is used."""


def supports_inputs(name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a backend supports these tensors, forward and backward."""
    if name == "auto":
        return True
    alike = k.shape == v.shape and q.dtype == k.dtype == v.dtype
    if (
        q.device.type != "cuda"
        or torch.version.hip
        or q.dtype not in BACKEND_DTYPES[name]
        or not alike
    ):
        return False
    if q.shape[-1] % 8 or q.shape[-1] > MAX_HEAD_DIM or q.shape[2] % k.shape[2]:
        return False
    # All of these kernels need an Ampere GPU or newer.
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    if name == "flash":
        return True
    # The other backends sum gradients in a nondeterministic order; cuDNN does not support a single
    # token.
    exact = torch.are_deterministic_algorithms_enabled()
    library = name != "cudnn" or (torch.backends.cudnn.is_available() and q.shape[1] > 1)
    return library and not exact


def backend_with_fallback(name: str) -> AttentionFunction:
    """Returns a backend for any input; SDPA computes inputs that it does not support."""
    function = BACKENDS[name]
    if name == "auto":
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Compiled shapes are the tuned shapes; a graph cannot query the device.
        good = torch.compiler.is_compiling() or supports_inputs(name, q, k, v)
        if good:
            return function(q, k, v)
        return sdpa_attention(q, k, v)

    return attend


def choose_backend(
    b: int,
    s: int,
    h: int,
    g: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device | str,
    fastest: Autotuner,
) -> str:
    """Returns the fastest backend (forward and backward) for b samples of s tokens, head dim k."""
    device = torch.device(device)
    sizes = [(b, s, h, k), (b, s, g, k), (b, s, g, k), (b, s, h, k)]
    # Expanded scalars have the right shape, dtype and device but take no memory.
    shapes = [torch.empty((), dtype=dtype, device=device).expand(n) for n in sizes[:3]]
    names = [name for name in BACKENDS if supports_inputs(name, *shapes)]
    if len(names) == 1 or torch.are_deterministic_algorithms_enabled():
        # A measured choice may differ in the next run, so deterministic mode does not measure.
        return names[-1]

    # Only the first timed call allocates them: a cached shape costs neither time nor memory.
    @functools.cache
    def operands() -> list[Tensor]:
        q, keys, values, dy = random_tensors(sizes, dtype, device)
        return [q.requires_grad_(), keys.requires_grad_(), values.requires_grad_(), dy]

    def timed(function: AttentionFunction) -> TimedCall:
        def both() -> object:
            *inputs, dy = operands()
            return torch.autograd.grad(function(*inputs), inputs, dy)

        return both

    key = f"b{b} s{s} h{h} g{g} k{k} {str(dtype).removeprefix('torch.')}"
    # The backward pass is also timed, in any grad mode of the caller.
    with torch.inference_mode(False), torch.enable_grad():
        ways = {name: timed(BACKENDS[name]) for name in names}
        return fastest.choose_fastest("attention", key, ways, "auto")
