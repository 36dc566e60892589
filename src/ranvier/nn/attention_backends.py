"""Attend: causal attention by the libraries that have it, and which of them is fastest here.

Each way is a plain function of q `[b, s, h, k]` and k, v `[b, s, g, k]` with a result like q, also
while torch.compile traces it. h is a multiple of g; query heads share keys in order.

    auto        what torch would take
    cudnn       NVIDIA's library
    flash       the kernel that torch brings along
    efficient   another such kernel, for 32 bits: there torch itself writes all scores

Not handled: documents inside a sample, masks, dropout.
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
"""Largest head dim that all these devices have a backward pass for."""


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as torch chooses; q, y: `[b, s, h, k]`, k, v: `[b, s, g, k]`."""
    shared = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y.transpose(1, 2)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `auto`, by cuDNN, which knows shared keys itself."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # no bias, with what backward needs, no dropout, causal
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    y: Tensor = attend(q, k, v, None, True, 0.0, True)[0]
    return y.transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `auto`, by torch's own kernel, which knows shared keys itself."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # no dropout, causal
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    y: Tensor = attend(q, k, v, 0.0, True)[0]
    return y.transpose(1, 2)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `auto`, by torch's kernel for any type; shared keys are copied for each query head."""
    count = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(count, 2) if count > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (b, h, s, k)
    # no bias, with what backward needs, no dropout, causal
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
"""Types that a way is for."""


def supports_inputs(name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a way runs on such tensors, forward and backward."""
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
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return False
    if name == "flash":
        return True
    # the others add gradients in any order; cuDNN has no way for a single token
    exact = torch.are_deterministic_algorithms_enabled()
    library = name != "cudnn" or (torch.backends.cudnn.is_available() and q.shape[1] > 1)
    return library and not exact


def backend_with_fallback(name: str) -> AttentionFunction:
    """A way for whatever comes: inputs it does not take go the way of torch."""
    function = BACKENDS[name]
    if name == "auto":
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # what is compiled is what was tried; a graph cannot ask about the device
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
    """The fastest way, forward and backward, for b samples of s tokens; k is the head dim."""
    device = torch.device(device)
    sizes = [(b, s, h, k), (b, s, g, k), (b, s, g, k), (b, s, h, k)]
    shapes = [torch.empty((), dtype=dtype, device=device).expand(n) for n in sizes[:3]]
    names = [name for name in BACKENDS if supports_inputs(name, *shapes)]
    if len(names) == 1 or torch.are_deterministic_algorithms_enabled():
        return names[-1]  # what is measured may be otherwise next time

    @functools.cache  # made with the first call only: a known shape costs neither time nor memory
    def operands() -> list[Tensor]:
        q, keys, values, dy = random_tensors(sizes, dtype, device)
        return [q.requires_grad_(), keys.requires_grad_(), values.requires_grad_(), dy]

    def timed(function: AttentionFunction) -> TimedCall:
        def both() -> object:
            *inputs, dy = operands()
            return torch.autograd.grad(function(*inputs), inputs, dy)

        return both

    key = f"b{b} s{s} h{h} g{g} k{k} {str(dtype).removeprefix('torch.')}"
    with torch.inference_mode(False), torch.enable_grad():
        ways = {name: timed(BACKENDS[name]) for name in names}
        return fastest.choose_fastest("attention", key, ways, "auto")
