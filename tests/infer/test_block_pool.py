"""The block pool against a simple model, and the names of blocks."""

from __future__ import annotations

import random

import pytest

from ranvier.infer.block_pool import PADDING_BLOCK, BlockPool, block_hash


class PoolModel:
    """A pool in a few lines: lists that are searched."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.names: dict[int, bytes] = {}
        self.order = [*self.refs]  # free blocks, the oldest first

    def allocate(self) -> int:
        self.order.sort(key=lambda block: block in self.names)  # stable: unnamed ones first
        block = self.order.pop(0)
        self.names.pop(block, None)
        self.refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        self.order = [one for one in self.order if one != block]
        self.refs[block] += 1

    def free(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.order.append(block)

    def reset(self) -> None:
        self.order.sort(key=lambda block: block in self.names)
        self.names.clear()


def play(num_operations: int, seed: int, num_blocks: int) -> None:
    """Random operations of sequences on the pool and the model; both must agree after each."""
    chance = random.Random(seed)
    pool = BlockPool(num_blocks, 4)
    model = PoolModel(num_blocks)
    held: list[list[int]] = []
    names = [bytes([i]) for i in range(2 * num_blocks)]
    for _ in range(num_operations):
        kind = chance.choices(["allocate", "hit", "name", "free", "reset"], [30, 20, 30, 30, 0.3])[
            0
        ]
        if kind == "allocate":
            count = chance.randint(0, 4)
            if count > pool.num_free:
                with pytest.raises(RuntimeError, match=f"{count} blocks are needed"):
                    pool.allocate(count)
            else:
                held.append(pool.allocate(count))
                assert held[-1] == [model.allocate() for _ in range(count)]
        elif kind == "hit":
            wanted = [chance.choice(names) for _ in range(chance.randint(1, 3))]
            blocks = pool.find_longest_prefix(wanted)
            by_name = {name: block for block, name in model.names.items()}
            known = [by_name.get(name) for name in wanted]
            assert blocks == known[: len(blocks)] and None in [*known, None][len(blocks) :][:1]
            pool.acquire(blocks)
            for block in blocks:
                model.acquire(block)
            held.append(blocks)
        elif kind == "name" and any(held):
            block = chance.choice([block for blocks in held for block in blocks])
            name = chance.choice(names)
            pool.cache_block(block, name)
            if block not in model.names and name not in model.names.values():
                model.names[block] = name
        elif kind == "free" and held:
            blocks = held.pop(chance.randrange(len(held)))
            pool.free(blocks)
            for block in reversed(blocks):
                model.free(block)
        elif kind == "reset":
            pool.reset_prefix_cache()
            model.reset()
        assert pool.num_free == len(model.order) and pool.num_cached == len(model.names)
    for blocks in held:
        pool.free(blocks)
    assert pool.num_free == pool.num_usable == num_blocks - 1
    everything = pool.allocate(pool.num_usable)
    assert sorted(everything) == [*range(1, num_blocks)] and pool.num_cached == 0
    assert PADDING_BLOCK not in everything


@pytest.mark.parametrize("num_blocks", [2, 5, 24])
def test_pool_agrees_with_the_model(num_blocks: int) -> None:
    play(7_000, seed=num_blocks, num_blocks=num_blocks)


@pytest.mark.full
@pytest.mark.parametrize("num_blocks", [2, 3, 8, 24, 60])
def test_pool_agrees_with_the_model_for_long(num_blocks: int) -> None:
    play(200_000, seed=num_blocks, num_blocks=num_blocks)


def test_least_recently_used_content_is_overwritten_first() -> None:
    pool = BlockPool(8, 4)
    first = pool.allocate(3)
    second = pool.allocate(2)
    for block in (*first, *second):
        pool.cache_block(block, bytes([block]))
    pool.free(first)
    pool.free(second)
    # Two blocks were never used, then the tail of the sequence that was freed first.
    assert pool.allocate(4) == [6, 7, first[2], first[1]]
    assert pool.find_longest_prefix([bytes([first[0]])]) == [first[0]]
    pool.acquire([first[0]])  # used again, so the second sequence is older now
    pool.free([first[0]])
    assert pool.allocate(3) == [second[1], second[0], first[0]]


def test_equal_content_is_named_once() -> None:
    pool = BlockPool(4, 4)
    (one,) = pool.allocate(1)
    (two,) = pool.allocate(1)
    pool.cache_block(one, b"same")
    pool.cache_block(two, b"same")
    assert pool.num_cached == 1 and pool.find_longest_prefix([b"same"]) == [one]
    pool.free([one])
    pool.free([two])
    # The unnamed copy is allocated before the named block.
    assert pool.allocate(2) == [3, two]
    assert pool.find_longest_prefix([b"same"]) == [one]


def test_a_shared_block_is_free_after_its_last_sequence() -> None:
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.cache_block(blocks[0], b"prefix")
    pool.acquire(blocks)
    pool.free(blocks)
    assert pool.num_free == 1 and pool.ref_count(blocks[0]) == 1
    pool.free(blocks)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="already free"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="cannot be named"):
        pool.cache_block(blocks[0], b"other")


def test_names_differ_in_every_part() -> None:
    parts = [
        (b"", (1, 2), "", "", ""),
        (b"", (1, 2, 0), "", "", ""),
        (b"", (2, 1), "", "", ""),
        (b"", (258,), "", "", ""),
        (b"\1", (2,), "", "", ""),
        (b"", (1, 2), "a", "", ""),
        (b"", (1, 2), "", "a", ""),
        (b"", (1, 2), "", "", "a"),
        (b"", (1, 2), "ab", "c", ""),
        (b"", (1, 2), "a", "bc", ""),
        (b"", (1, 2), "\ud800", "", ""),
    ]
    names = [block_hash(*part) for part in parts]
    assert len({*names}) == len(parts) and {len(name) for name in names} == {32}
    assert block_hash(*parts[8]) == names[8]
    assert block_hash(names[0], (3, 4)) != block_hash(names[1], (3, 4))
