"""Who holds which slot, on the host: state slots and latent pages alike. Slot 0 is the null slot.

A slot is free, held (by one or more holders), or idle: nobody holds it, but it keeps a finished block under its content
key, until an allocation evicts it, least recently used first. A block gets a key only after it was written.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np

from kda_jax.checks import check_integer

ROOT_KEY = b""
_INT32_MAX = 2**31 - 1


def block_key(parent: bytes, tokens, salt: bytes = b"") -> bytes:
    """The content key of a block of token ids whose prefix has key ``parent`` (``ROOT_KEY`` for none): 16 bytes.

    Keys chain, so that equal keys mean equal prefixes, among blocks of one size; ``salt`` keeps apart what must not be
    shared.

    Raises:
      ValueError: tokens that are not token ids [n], or more than 64 bytes of salt, naming the argument.
    """
    if len(salt) > 64:
        raise ValueError(f"salt must be at most 64 bytes, got {len(salt)}")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be integers of shape [n], n at least 1, got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() > _INT32_MAX:
        raise ValueError(f"tokens must be in [0, {_INT32_MAX}], got {ids.min()} to {ids.max()}")
    digest = hashlib.blake2b(parent, digest_size=16, key=salt)
    digest.update(ids.astype("<i4").tobytes())
    return digest.digest()


def hit_length(num_prompt_tokens: int, block_size: int, *, drop_last_block: bool = False) -> int:
    """The most prompt tokens a cache hit may cover: whole blocks, and one token is always left to compute.

    At ``m * block_size`` tokens and at one less it is ``(m - 1) * block_size``, at one more ``m * block_size``.
    ``drop_last_block`` leaves out one block more, for drafters that need its tokens computed.
    """
    check_integer("num_prompt_tokens", int(num_prompt_tokens), 0)
    check_integer("block_size", block_size, 1)
    blocks = max(num_prompt_tokens - 1, 0) // block_size
    return max(blocks - drop_last_block, 0) * block_size


def columns_needed(computed: int, query: int, block_size: int) -> int:
    """Columns a request of ``computed`` tokens must hold for a step of ``query`` tokens, drafts included."""
    for name, value, low in (("computed", computed, 0), ("query", query, 0), ("block_size", block_size, 1)):
        check_integer(name, int(value), low)
    return max(computed + query - 1, 0) // block_size + 1


@dataclasses.dataclass
class PoolStats:
    """Counts since the pool was made: blocks looked up and found or not, and idle blocks given up."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


class SlotPool:
    """Bookkeeping of ``num_slots`` slots, the null slot included."""

    def __init__(self, num_slots: int):
        check_integer("num_slots", num_slots, 2)
        self.num_slots = num_slots
        self.stats = PoolStats()
        self._free = list(range(num_slots - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._written: set[int] = set()
        self._key_of: dict[int, bytes] = {}
        self._slot_of: dict[bytes, int] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first

    @property
    def available(self) -> int:
        """Slots an allocation can get: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return len(self._holders)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` slots with one holder each, or None, and nothing changed, where there are not as many."""
        check_integer("count", count, 0)
        if count > self.available:
            return None
        slots = []
        for _ in range(count):
            if not self._free:
                slot, _ = self._idle.popitem(last=False)
                self._forget(slot)
                self.stats.evictions += 1
                self._free.append(slot)
            slot = self._free.pop()
            self._holders[slot] = 1
            self._written.discard(slot)
            slots.append(slot)
        return slots

    def share(self, slot: int) -> None:
        """One more holder of a held slot."""
        self._held(slot)
        self._holders[slot] += 1

    def free(self, slots: Iterable[int]) -> None:
        """One holder less of each slot. The last one gone, a block with a key becomes idle, any other slot free.

        Of the blocks of a prefix give back the last first: what is idle longest is evicted first, and a block is of no
        use without those before it. Raises ``ValueError``, and nothing changed, for more than there are holders.
        """
        slots = [int(slot) for slot in slots]
        for slot, count in collections.Counter(slots).items():
            self._held(slot)
            if count > self._holders[slot]:
                raise ValueError(f"slot {slot} must be held to be freed, got {count} of {self._holders[slot]} holders")
        for slot in slots:
            self._holders[slot] -= 1
            if self._holders[slot]:
                continue
            del self._holders[slot]
            if slot in self._key_of:
                self._idle[slot] = None
            else:
                self._written.discard(slot)
                self._free.append(slot)

    def is_shared(self, slot: int) -> bool:
        """Somebody else would see a write: another holder, or whoever finds the block by its key."""
        self._held(slot)
        return self._holders[slot] > 1 or slot in self._key_of

    def copy_on_write(self, slot: int) -> tuple[int, bool] | None:
        """A slot its holder may write: the same one if it is not shared, else a new one, and whether the content must
        be copied there. None, and nothing changed, where there is no slot left.

        A published block stays as it is; only where there is no slot left and nobody else holds it, its key goes. The
        slot to write is not a finished block: it has to be marked as written before it is published.
        """
        if self.is_shared(slot) and self._holders[slot] == 1 and not self.available:
            self._forget(slot)
        if not self.is_shared(slot):
            self._written.discard(slot)
            return slot, False
        new = self.allocate(1)
        if new is None:
            return None
        self.free([slot])
        return new[0], True

    def mark_written(self, slot: int) -> None:
        """The slot's block is complete: a step that wrote it was started. ``ValueError`` where others see the write."""
        if self.is_shared(slot):
            what = "published" if slot in self._key_of else f"held by {self._holders[slot]}"
            raise ValueError(f"slot {slot} must be copied before it is written, it is {what}")
        self._written.add(slot)

    def publish(self, slot: int, key: bytes) -> None:
        """Let others find the block by ``key``. Of several blocks with one key the first is found."""
        self._held(slot)
        if slot not in self._written:
            raise ValueError(f"slot {slot} must be written before it is published")
        if self._key_of.get(slot, key) != key:
            raise ValueError(f"slot {slot} is published under another key already")
        if key not in self._slot_of:
            self._slot_of[key] = slot
            self._key_of[slot] = key

    def find(self, key: bytes) -> int | None:
        """The slot of a published block, without taking it."""
        return self._slot_of.get(key)

    def lookup(self, key: bytes) -> int | None:
        """Take a published block: its slot with one holder more, or None. Counted as hit or miss."""
        slot = self._slot_of.get(key)
        if slot is None:
            self.stats.misses += 1
            return None
        self.stats.hits += 1
        self._idle.pop(slot, None)
        self._holders[slot] = self._holders.get(slot, 0) + 1
        return slot

    def clear(self) -> None:
        """Forget every published block and all that was written, as after a change of weights; idle slots are free."""
        for slot in list(self._idle):
            del self._idle[slot]
            self._free.append(slot)
        for slot in list(self._key_of):
            self._forget(slot)
        self._written.clear()

    def check(self) -> None:
        """Raises ``AssertionError`` where the books don't add up."""
        free, held, idle = set(self._free), set(self._holders), set(self._idle)
        assert len(free) == len(self._free), "a slot is free twice"
        assert len(free) + len(held) + len(idle) == len(free | held | idle), "a slot is in two states"
        assert free | held | idle == set(range(1, self.num_slots)), "a slot is lost, or the null slot is handed out"
        assert all(count > 0 for count in self._holders.values()), "a held slot without holder"
        assert {key: slot for slot, key in self._key_of.items()} == self._slot_of, "keys and slots disagree"
        assert set(self._key_of) <= held | idle, "a key of a free slot"
        assert idle <= set(self._key_of), "an idle slot without key"
        assert set(self._key_of) <= self._written, "a key of a block that was not written"
        assert self._written <= held | idle, "a free slot counts as written"

    def _forget(self, slot: int) -> None:
        self._slot_of.pop(self._key_of.pop(slot))
        self._written.discard(slot)

    def _held(self, slot: int) -> None:
        if slot not in self._holders:
            what = "the null slot" if slot == 0 else "not held" if 0 < slot < self.num_slots else "not of this pool"
            raise ValueError(f"slot {slot} must be held, it is {what}")
