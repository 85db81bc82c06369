"""Slots: who holds them, which are found by content, which go first."""

import collections

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kda_jax.pool import ROOT_KEY, SlotPool, block_key, columns_needed, hit_length

BLOCK = 16


@pytest.mark.parametrize("m", [1, 2, 5])
def test_hit_lengths_around_a_block_boundary(m):
    assert hit_length(m * BLOCK - 1, BLOCK) == (m - 1) * BLOCK
    assert hit_length(m * BLOCK, BLOCK) == (m - 1) * BLOCK
    assert hit_length(m * BLOCK + 1, BLOCK) == m * BLOCK
    assert hit_length(m * BLOCK + 1, BLOCK, drop_last_block=True) == (m - 1) * BLOCK


def test_short_prompts_hit_nothing():
    assert [hit_length(n, BLOCK, drop_last_block=drop) for n in (0, 1, 16) for drop in (False, True)] == [0] * 6


def test_columns_count_the_lookahead():
    # the example of a run that ends past a boundary: 8190 + 4 tokens touch the fifth block of 2048
    assert columns_needed(8188, 4, 2048) == 4
    assert columns_needed(8190, 4, 2048) == 5
    assert columns_needed(0, 1, 2048) == 1


def test_keys_chain_and_tell_prefixes_apart():
    first = block_key(ROOT_KEY, [1, 2])
    assert first == block_key(ROOT_KEY, [1, 2])
    assert len(first) == 16
    keys = {first, block_key(ROOT_KEY, [2, 1]), block_key(first, [1, 2]), block_key(ROOT_KEY, [1, 2], b"user")}
    assert len(keys) == 4
    assert block_key(block_key(ROOT_KEY, [1]), [2]) != block_key(ROOT_KEY, [1, 2])


def test_allocate_is_all_or_nothing_and_never_null():
    pool = SlotPool(4)
    assert pool.allocate(4) is None
    assert pool.available == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


@pytest.mark.parametrize(("slot", "what"), [(0, "the null slot"), (2, "not held"), (9, "not of this pool")])
@pytest.mark.parametrize("act", ["free", "share", "mark_written", "copy_on_write", "is_shared"])
def test_a_slot_nobody_holds_is_refused(slot, what, act):
    pool = SlotPool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(ValueError, match=f"slot {slot} must be held, it is {what}"):
        getattr(pool, act)([slot] if act == "free" else slot)


def test_freeing_twice_is_refused():
    pool = SlotPool(4)
    (slot,) = pool.allocate(1)
    pool.free([slot])
    with pytest.raises(ValueError, match="must be held"):
        pool.free([slot])


def test_a_block_that_was_not_written_is_not_published():
    pool = SlotPool(4)
    (slot,) = pool.allocate(1)
    with pytest.raises(ValueError, match="must be written before"):
        pool.publish(slot, b"key")
    assert pool.find(b"key") is None
    pool.mark_written(slot)
    pool.publish(slot, b"key")
    assert pool.find(b"key") == slot
    with pytest.raises(ValueError, match="another key"):
        pool.publish(slot, b"other")


def test_what_a_slot_held_before_does_not_count_as_written():
    pool = SlotPool(2)
    (slot,) = pool.allocate(1)
    pool.mark_written(slot)
    pool.free([slot])
    assert pool.allocate(1) == [slot]
    with pytest.raises(ValueError, match="must be written before"):
        pool.publish(slot, b"key")


def test_writing_a_shared_block_takes_a_copy():
    pool = SlotPool(4)
    (slot,) = pool.allocate(1)
    assert pool.copy_on_write(slot) == (slot, False)
    pool.share(slot)
    new, copied = pool.copy_on_write(slot)
    assert copied
    assert new != slot
    assert pool.held == 2
    pool.mark_written(slot)
    pool.publish(slot, b"key")  # now whoever finds it would see the write
    assert pool.copy_on_write(slot)[1]
    pool.allocate(pool.available)
    pool.share(new)
    assert pool.copy_on_write(new) is None
    assert pool.is_shared(new)


class Pools(RuleBasedStateMachine):
    """A pool against plain lists."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(7)
        self.held = collections.Counter()
        self.written = set()
        self.keys = {}  # slot -> key
        self.idle = []  # oldest first
        self.next_key = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        free = 6 - len(self.held) - len(self.idle)
        slots = self.pool.allocate(count)
        if count > free + len(self.idle):
            assert slots is None
            return
        evicted = self.idle[: max(count - free, 0)]
        assert len(set(slots)) == count
        assert set(evicted) <= set(slots)
        for slot in evicted:
            self.idle.remove(slot)
            del self.keys[slot]
        for slot in slots:
            assert slot not in self.held
            assert slot not in self.idle
            self.held[slot] = 1
            self.written.discard(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free([slot])
        self.held[slot] -= 1
        if not self.held[slot]:
            del self.held[slot]
            if slot in self.keys:
                self.idle.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        if slot not in self.keys:
            self.pool.mark_written(slot)
            self.pool.publish(slot, bytes([self.next_key]))
            self.keys[slot] = bytes([self.next_key])
            self.next_key += 1

    @precondition(lambda self: self.next_key)
    @rule(data=st.data())
    def lookup(self, data):
        key = bytes([data.draw(st.integers(0, self.next_key - 1))])
        slot = self.pool.lookup(key)
        assert slot == next((s for s, k in self.keys.items() if k == key), None)
        if slot is not None:
            self.held[slot] += 1
            if slot in self.idle:
                self.idle.remove(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def write(self, data):
        slot = data.draw(st.sampled_from(sorted(self.held)))
        shared = self.held[slot] > 1 or slot in self.keys
        assert self.pool.is_shared(slot) == shared

    @invariant()
    def adds_up(self):
        self.pool.check()
        assert self.pool.held == len(self.held)
        assert self.pool.available == 6 - len(self.held)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_clear_forgets_and_keeps_holders():
    pool = SlotPool(4)
    a, b = pool.allocate(2)
    for slot, key in ((a, b"a"), (b, b"b")):
        pool.mark_written(slot)
        pool.publish(slot, key)
    pool.free([a])
    pool.clear()
    pool.check()
    assert pool.find(b"a") is None
    assert pool.find(b"b") is None
    assert pool.available == 2
    assert pool.held == 1
