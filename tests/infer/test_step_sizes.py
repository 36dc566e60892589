"""Sizes of steps with a CUDA graph: every step has one, and all of them are captured at a start."""

from __future__ import annotations

import pytest

from ranvier.infer.step_sizes import MIXED_TOKENS, StepSizes


@pytest.mark.parametrize(
    ("max_batch", "max_tokens"), [(1, 1024), (1, 1), (7, 64), (256, 1024), (300, 257), (1024, 300)]
)
def test_all_sizes_are_those_of_all_steps(max_batch: int, max_tokens: int) -> None:
    sizes = StepSizes(max_batch, max_tokens)
    needed = {sizes.decode_size(num_rows) for num_rows in range(1, max_batch + 1)}
    for num_tokens in range(1, max_tokens + 1):
        for num_rows in range(1, min(num_tokens, max_batch) + 1):
            size = sizes.mixed_size(num_tokens, num_rows)
            assert size is not None
            assert size.num_tokens >= num_tokens and size.num_rows >= num_rows
            needed.add(size)
    all_sizes = sizes.all_sizes()
    assert len(all_sizes) == len(needed) and {*all_sizes} == needed
    mixed = [size for size in all_sizes if not size.is_decode]
    decode = [size for size in all_sizes if size.is_decode]
    assert all_sizes == mixed + decode, "decode steps use the memory of larger steps"
    for group in (mixed, decode):
        assert group == sorted(group, reverse=True)


def test_steps_are_padded_little() -> None:
    sizes = StepSizes(1024, 4096)
    rows = [sizes.decode_size(num_rows).num_rows for num_rows in range(1, 1025)]
    assert rows == sorted(rows)
    assert all(padded - num_rows < 16 for num_rows, padded in enumerate(rows, 1))
    assert [sizes.decode_size(n).num_rows for n in (1, 2, 3, 8, 9, 64, 65)] == [
        1,
        2,
        4,
        8,
        16,
        64,
        80,
    ]
    assert sizes.mixed_size(MIXED_TOKENS[-1] + 1, 3) is None
