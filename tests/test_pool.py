"""Slots: who holds them, which are found by content, which go first."""

import collections

import numpy as np
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


@pytest.mark.parametrize(
    ("tokens", "salt", "message"),
    [
        ([], b"", "tokens must be integers of shape"),
        ([[1]], b"", "tokens must be integers of shape"),
        ([1.5], b"", "tokens must be integers of shape"),
        ([-1], b"", r"tokens must be in \[0, 2147483647\], got -1"),
        ([1 << 32], b"", r"tokens must be in \[0, 2147483647\], got 4294967296"),
        ([1], b"x" * 65, "salt must be at most 64 bytes, got 65"),
    ],
)
def test_what_has_no_key(tokens, salt, message):
    with pytest.raises(ValueError, match=message):
        block_key(ROOT_KEY, tokens, salt)


def test_keys_do_not_depend_on_how_tokens_are_held():
    keys = {block_key(ROOT_KEY, np.asarray([1, 2, 3, 4], dtype)[::2]) for dtype in ("<i4", ">i4", "<i8", "u2")}
    assert keys == {block_key(ROOT_KEY, [1, 3])}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hit_length(-1, 4), "num_prompt_tokens must be an integer at least 0, got -1"),
        (lambda: hit_length(4, 0), "block_size must be an integer at least 1, got 0"),
        (lambda: columns_needed(-1, 1, 4), "computed must be an integer at least 0, got -1"),
        (lambda: columns_needed(1, -1, 4), "query must be an integer at least 0, got -1"),
        (lambda: columns_needed(1, 1, 0), "block_size must be an integer at least 1, got 0"),
        (lambda: SlotPool(1), "num_slots must be an integer at least 2, got 1"),
        (lambda: SlotPool(4).allocate(-1), "count must be an integer at least 0, got -1"),
    ],
)
def test_numbers_out_of_range(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(1),
        lambda pool: pool._free.append(0),
        lambda pool: pool._free.pop(),
        lambda pool: pool._holders.update({1: 0}),
        lambda pool: pool._key_of.update({1: b"other"}),
        lambda pool: pool._slot_of.clear(),
        lambda pool: pool._written.clear(),
        lambda pool: pool._written.add(4),
        lambda pool: pool._idle.update({1: None}),
    ],
)
def test_check_sees_damage(damage):
    pool = SlotPool(5)
    one, two = pool.allocate(2)
    assert (one, two) == (1, 2)
    pool.mark_written(two)
    pool.publish(two, b"key")
    pool.free([two])
    pool.check()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check()


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


def test_freeing_more_often_than_held_changes_nothing():
    pool = SlotPool(4)
    one, two = pool.allocate(2)
    pool.share(one)
    with pytest.raises(ValueError, match=f"slot {one} must be held to be freed, got 3 of 2 holders"):
        pool.free([two, one, one, one])
    assert pool.held == 2
    pool.free(np.asarray([one, two, one]))
    assert pool.held == 0
    assert all(type(slot) is int for slot in pool.allocate(3))


def test_what_others_see_is_not_written():
    pool = SlotPool(4)
    one, two = pool.allocate(2)
    pool.share(one)
    with pytest.raises(ValueError, match=f"slot {one} must be copied before it is written, it is held by 2"):
        pool.mark_written(one)
    pool.mark_written(two)
    pool.mark_written(two)
    pool.publish(two, b"key")
    with pytest.raises(ValueError, match=f"slot {two} must be copied before it is written, it is published"):
        pool.mark_written(two)


def test_a_slot_taken_to_be_written_again_is_not_a_finished_block():
    pool = SlotPool(3)
    first, second = pool.allocate(2)
    for slot in (first, second):  # the second block with a key: kept by its holder alone
        pool.mark_written(slot)
        pool.publish(slot, b"key")
    assert pool.copy_on_write(second) == (second, False)
    with pytest.raises(ValueError, match="must be written before"):
        pool.publish(second, b"other")


def test_a_full_pool_gives_up_the_key_of_a_block_that_its_only_holder_writes():
    pool = SlotPool(2)
    (slot,) = pool.allocate(1)
    pool.mark_written(slot)
    pool.publish(slot, b"key")
    assert pool.copy_on_write(slot) == (slot, False)
    assert pool.find(b"key") is None
    with pytest.raises(ValueError, match="must be written before"):
        pool.publish(slot, b"key")
    pool.check()


def test_free_slots_go_first_and_then_the_block_idle_longest():
    pool = SlotPool(5)
    slots = pool.allocate(3)
    for slot, key in zip(slots, (b"a", b"b", b"c"), strict=True):
        pool.mark_written(slot)
        pool.publish(slot, key)
    pool.free(slots)
    pool.free([pool.lookup(b"a")])  # used again: now the youngest

    def kept():
        return [key for key in (b"a", b"b", b"c") if pool.find(key) is not None]

    pool.allocate(1)
    assert (kept(), pool.stats.evictions) == ([b"a", b"b", b"c"], 0)
    pool.allocate(1)
    assert kept() == [b"a", b"c"]
    pool.allocate(1)
    assert (kept(), pool.stats.evictions) == ([b"a"], 2)
    assert pool.lookup(b"b") is None
    assert (pool.stats.hits, pool.stats.misses) == (1, 1)


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
    """A pool beside a model of it: owners are a multiset, published blocks a table, idle ones a list by last use."""

    SLOTS = 6

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(1 + self.SLOTS)
        self.owned = []  # one entry a holder
        self.content = {}  # slot -> None, or the version of the finished block in it
        self.table = {}  # key -> (slot, version)
        self.idle = []  # keys, oldest first
        self.versions = 0

    def key_of(self, slot):
        return next((key for key, (at, _) in self.table.items() if at == slot), None)

    def took(self, slots):
        """``slots`` came from an allocation: free ones first, then the blocks idle longest."""
        assert len(set(slots)) == len(slots)
        assert 0 not in slots
        assert not set(slots) & set(self.owned)
        free = self.SLOTS - len(set(self.owned)) - len(self.idle)
        evicted, self.idle = self.idle[: max(len(slots) - free, 0)], self.idle[max(len(slots) - free, 0) :]
        assert {self.table.pop(key)[0] for key in evicted} <= set(slots)
        assert not set(slots) & {slot for slot, _ in self.table.values()}
        self.owned += slots
        self.content.update(dict.fromkeys(slots))

    def gave_back(self, slot):
        self.owned.remove(slot)
        if slot not in self.owned and self.key_of(slot) is not None:
            self.idle.append(self.key_of(slot))

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        slots = self.pool.allocate(count)
        assert (slots is None) == (count > self.SLOTS - len(set(self.owned)))
        self.took(slots or [])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def share(self, data):
        slot = data.draw(st.sampled_from(self.owned))
        self.pool.share(slot)
        self.owned.append(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(self.owned))
        self.pool.free([slot])
        self.gave_back(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def write(self, data):
        slot = data.draw(st.sampled_from(self.owned))
        shared = self.owned.count(slot) > 1 or self.key_of(slot) is not None
        assert self.pool.is_shared(slot) == shared
        if shared:
            with pytest.raises(ValueError, match="must be copied before it is written"):
                self.pool.mark_written(slot)
        else:
            self.pool.mark_written(slot)
            self.versions += 1
            self.content[slot] = self.versions

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"]))
    def publish(self, data, key):
        slot = data.draw(st.sampled_from(self.owned))
        if self.content[slot] is None or self.key_of(slot) not in (None, key):
            with pytest.raises(ValueError, match=r"written before|another key"):
                self.pool.publish(slot, key)
            return
        self.pool.publish(slot, key)
        self.table.setdefault(key, (slot, self.content[slot]))

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"]))
    def lookup(self, key):
        assert self.pool.find(key) == self.table.get(key, (None,))[0]
        slot = self.pool.lookup(key)
        if key not in self.table:
            assert slot is None
            return
        assert (slot, self.content[slot]) == self.table[key]  # what was published is what is found
        if key in self.idle:
            self.idle.remove(key)
        self.owned.append(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def copy_on_write(self, data):
        slot = data.draw(st.sampled_from(self.owned))
        full = len(set(self.owned)) == self.SLOTS
        held_by_others, key = self.owned.count(slot) > 1, self.key_of(slot)
        found = self.pool.copy_on_write(slot)
        if held_by_others and full:
            assert found is None
            return
        new, copied = found
        assert copied == (new != slot) == (held_by_others or (key is not None and not full))
        if copied:
            self.took([new])
            self.gave_back(slot)
        else:
            self.table.pop(key, None)
            self.content[slot] = None

    @invariant()
    def adds_up(self):
        self.pool.check()
        holders = collections.Counter(self.owned)
        assert self.pool._holders == holders
        assert (self.pool.held, self.pool.available) == (len(holders), self.SLOTS - len(holders))
        assert list(self.pool._idle) == [self.table[key][0] for key in self.idle]

    def teardown(self):
        self.pool.free(self.owned)
        self.pool.check()
        assert (self.pool.held, self.pool.available) == (0, self.SLOTS)


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
    with pytest.raises(ValueError, match="must be written before"):  # what it holds is as old
        pool.publish(b, b"b")
