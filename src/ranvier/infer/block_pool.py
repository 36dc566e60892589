"""Blocks of the KV cache: free, in use by sequences, and named by their content for reuse.

A block holds the keys and values of `block_size` consecutive tokens. A full block can be named by a
hash of all tokens up to its end, which later requests with the same prefix look up. It keeps its
name after the last sequence has given it back, until it is allocated again: free blocks without a
name are allocated first, then named ones, the least recently used first.

The pool only counts. All ranks of a replica use the same block numbers for their shards of the
cache, so it exists once per replica. Every operation is O(1) per block.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

PADDING_BLOCK = 0
"""Block that padding rows of a step write to; never allocated."""


def block_hash(
    parent_hash: bytes, tokens: Sequence[int], salt: str = "", adapter: str = "", model: str = ""
) -> bytes:
    """Returns the name of a block, which depends on all tokens up to its end.

        h_i = sha256(h_(i-1), tokens of block i, salt, adapter, model)

    parent_hash: name of the previous block; empty for the first one.
    model: what else the keys and values depend on, such as the checkpoint.
    """
    # Every part is preceded by its length, so that different parts never give the same bytes.
    digest = hashlib.sha256(struct.pack("<Q", len(parent_hash)))
    digest.update(parent_hash)
    digest.update(struct.pack(f"<Q{len(tokens)}q", len(tokens), *tokens))
    for text in (salt, adapter, model):
        # Text from JSON may have lone surrogates, which UTF-8 does not encode by itself.
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(encoded)))
        digest.update(encoded)
    return digest.digest()


class BlockPool:
    """Reference counts and names of the blocks 1 to `num_blocks - 1`; block 0 is for padding."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2 and block_size >= 1, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free_unnamed = deque(range(PADDING_BLOCK + 1, num_blocks))
        self._free_named: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """Number of blocks that sequences can use."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that no sequence uses, with and without a name."""
        return len(self._free_unnamed) + len(self._free_named)

    @property
    def num_cached(self) -> int:
        """Number of blocks with a name, free and in use."""
        return len(self._block_of_hash)

    def ref_count(self, block: int) -> int:
        """Returns the number of sequences that use a block."""
        return self._ref_counts[block]

    def find_longest_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks with these names, up to the first name that is not cached."""
        found = []
        for name in hashes:
            block = self._block_of_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def acquire(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are cached or in use; vLLM calls it touch."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                # Only a named block can be found while it is free.
                del self._free_named[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks without a name and with one reference; raises if too few are
        free.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"{count} blocks are needed, but {self.num_free} are free. A step must fit into "
                "the free blocks. Preempt a sequence first."
            )
        blocks = []
        for _ in range(count):
            if self._free_unnamed:
                block = self._free_unnamed.popleft()
            else:
                block, _ = self._free_named.popitem(last=False)
                self._drop_name(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def cache_block(self, block: int, name: bytes) -> None:
        """Names a full block in use by its content.

        If another block has the same content, that one keeps the name and this one stays unnamed.
        """
        assert self._ref_counts[block] > 0, f"Block {block} is free and cannot be named."
        if self._hashes[block] is None and name not in self._block_of_hash:
            self._hashes[block] = name
            self._block_of_hash[name] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Removes a reference from the blocks of a sequence, given in the order of its tokens.

        The last block becomes the oldest of them, because a prefix is useful without what follows
        it, but not the other way round.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"Block {block} is already free."
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._hashes[block] is None:
                self._free_unnamed.append(block)
            else:
                self._free_named[block] = None

    def reset_prefix_cache(self) -> None:
        """Removes all names, so that nothing computed so far is found again."""
        self._free_unnamed.extend(self._free_named)
        self._free_named.clear()
        for block in self._block_of_hash.values():
            self._hashes[block] = None
        self._block_of_hash.clear()

    def _drop_name(self, block: int) -> None:
        """Removes the name of a block."""
        name = self._hashes[block]
        assert name is not None, block
        del self._block_of_hash[name]
        self._hashes[block] = None
