"""Which slots and pages each request of the engine holds, and which finished blocks others may reuse. Host only.

A request's latents are in pages of ``page_size`` tokens; its recurrent states are in one slot (mode "none"), in one
slot per block of ``block_size`` tokens of which only the newest are kept (mode "align"), and natively in one slot per
position of the window besides. Prefix caching keeps finished pages and the states at block ends under the content key
of the tokens up to there; a hit is the longest block end for which both kinds are there.
"""

import dataclasses

import numpy as np

from kda_jax.cache_options import CacheOptions
from kda_jax.pool import ROOT_KEY, SlotPool, block_key, columns_needed, hit_length


@dataclasses.dataclass
class Held:
    """What one request holds. ``table`` and ``pages`` have a slot per column, 0 where there is none."""

    table: np.ndarray
    pages: np.ndarray
    slots: list[int] = dataclasses.field(default_factory=list)
    keys: list[bytes] = dataclasses.field(default_factory=list)  # of the finished pages, in order


class Memory:
    """The pools behind an engine.

    ``native_window``: slots a request needs besides its columns, one per position; None with one checkpoint.
    """

    def __init__(
        self, options: CacheOptions, *, native_window: int | None, max_requests: int, max_length: int, lookahead: int
    ):
        self.options = options
        self.page_size, self.block_size = options.tokens_per_page, options.block_size
        self.own_slots = native_window or (1 if options.mode == "none" else 0)
        most = max_length + lookahead
        self.page_columns = columns_needed(0, most, self.page_size)
        self.block_columns = columns_needed(0, most, self.block_size) if options.mode == "align" else 0
        live = min(self.block_columns, LIVE_COLUMNS)
        kept = self.block_columns if options.prefix_caching else live
        num_slots = options.num_slots or 1 + max_requests * (self.own_slots + kept)
        num_pages = options.num_pages or 1 + max_requests * self.page_columns
        for name, size, least in (
            ("num_slots", num_slots, self.own_slots + live),
            ("num_pages", num_pages, self.page_columns),
        ):
            if size <= least:
                raise ValueError(f"{name} must be at least {least + 1}, enough for one request, got {size}")
        self.slots, self.pages = SlotPool(num_slots), SlotPool(num_pages)

    def new(self) -> Held:
        return Held(np.zeros(self.block_columns, np.int32), np.zeros(self.page_columns, np.int32))

    def keys_of(self, tokens: list[int], most: int) -> list[bytes]:
        """Keys of the pages of the whole blocks within the first ``most`` tokens."""
        if not self.options.prefix_caching:
            return []
        return page_keys(tokens, self.page_size, most // self.block_size * (self.block_size // self.page_size))

    def hit(self, held: Held, keys: list[bytes]) -> int:
        """Take the longest cached prefix with ``keys``; returns its length in tokens, 0 for none."""
        if not keys:
            return 0
        per_block, found = self.block_size // self.page_size, 0
        for block in range(len(keys) // per_block):
            pages = keys[block * per_block : (block + 1) * per_block]
            if any(self.pages.find(key) is None for key in pages):
                break
            if self.slots.find(keys[(block + 1) * per_block - 1]) is not None:
                found = block + 1
        for i, key in enumerate(keys[: found * per_block]):
            held.pages[i] = self.pages.lookup(key)
        if found:
            held.table[found - 1] = self.slots.lookup(keys[found * per_block - 1])
        else:
            self.slots.stats.misses += 1
        held.keys = keys[: found * per_block]
        return found * self.block_size

    def reserve(self, held: Held, computed: int, query: int) -> bool:
        """All that a step of ``query`` tokens after ``computed`` needs; False, and nothing changed, where it can't be
        had. Pages and columns already held stay."""
        pages = [i for i in range(columns_needed(computed, query, self.page_size)) if not held.pages[i]]
        columns = []
        if self.block_columns:
            first = max(computed - 1, 0) // self.block_size
            last = columns_needed(computed, query, self.block_size)
            columns = [i for i in range(first, last) if not held.table[i]]
        own = self.own_slots - len(held.slots)
        if len(pages) > self.pages.available or len(columns) + own > self.slots.available:
            return False
        held.pages[pages] = self.pages.allocate(len(pages))
        held.slots += self.slots.allocate(own)
        if columns:
            held.table[columns] = self.slots.allocate(len(columns))
        return True

    def advance(self, held: Held, tokens: list[int], before: int, after: int) -> None:
        """A step took the request from ``before`` to ``after`` committed tokens: publish what is finished, and give
        back columns that not even a commit still pending reads."""
        if self.options.prefix_caching:
            size = self.page_size
            for i in range(len(held.keys), after // size):
                key = block_key(held.keys[-1] if held.keys else ROOT_KEY, tokens[i * size : (i + 1) * size])
                held.keys.append(key)
                self.pages.mark_written(int(held.pages[i]))
                self.pages.publish(int(held.pages[i]), key)
            boundary = after // self.block_size * self.block_size
            if boundary > before:  # a step passes one block end at most, and its commit or chunk wrote the state there
                slot = int(held.table[boundary // self.block_size - 1])
                self.slots.mark_written(slot)
                self.slots.publish(slot, held.keys[boundary // size - 1])
        if self.block_columns:
            dead = np.flatnonzero(held.table[: max(before - 1, 0) // self.block_size])
            self.slots.free(held.table[dead].tolist())
            held.table[dead] = 0

    def shared(self, held: Held, computed: int, query: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the columns and pages that a step writes, those where somebody else would see it; bool, shaped as
        ``table`` and ``pages``, False elsewhere."""
        found = []
        for table, pool, size in ((held.table, self.slots, self.block_size), (held.pages, self.pages, self.page_size)):
            flags = np.zeros(len(table), bool)
            if len(table):
                for i in range(computed // size, columns_needed(computed, query, size)):
                    flags[i] = pool.is_shared(int(table[i]))
            found.append(flags)
        return found[0], found[1]

    def release(self, held: Held) -> None:
        """Give everything back. Published blocks stay findable until they are evicted."""
        self.slots.free([*held.slots, *held.table[held.table > 0].tolist()])
        # the newest first: a prefix is worth more than what follows it, so it is evicted last
        self.pages.free(held.pages[held.pages > 0].tolist()[::-1])

    def most_hit(self, num_tokens: int) -> int:
        """``pool.hit_length`` under these options."""
        if not self.options.prefix_caching:
            return 0
        return hit_length(num_tokens, self.block_size, drop_last_block=self.options.drop_last_block)


LIVE_COLUMNS = 4  # the running block, the one before it while a commit may be pending, and up to two of a window


def page_keys(tokens: list[int], size: int, count: int) -> list[bytes]:
    """Keys of the first ``count`` pages of ``tokens``."""
    keys, key = [], ROOT_KEY
    for i in range(count):
        key = block_key(key, tokens[i * size : (i + 1) * size])
        keys.append(key)
    return keys
