"""Faults that other systems shipped, put back on purpose: a run of requests must then go wrong, and without them not.

Some can't be put back: an absent group has no mask or count to disagree with, and a pending commit is folded before
whatever does not fold it itself.
"""

import dataclasses

import jax
import numpy as np
import pytest

from kda_jax import ops
from kda_jax.metadata_builder import MetadataBuilder
from kda_jax.ops import plan as plan_module
from kda_jax.ops._checks import Dims
from tests.compiling import quick  # noqa: F401
from tests.small_models import healthy_params
from tests.step_driver import BLOCK, Driver, NotANumber
from tests.test_step import PROMPTS, SMALL, W, alone


def change(built, group, **fields):
    """``built`` with fields of a group replaced, if it is there and each function likes it."""
    rows = getattr(built.metadata, group)
    if rows is None:
        return built
    rows = dataclasses.replace(rows, **{name: f(rows) for name, f in fields.items()})
    return built._replace(metadata=dataclasses.replace(built.metadata, **{group: rows}))


def right(driver, schedule, **options):
    """Whether every request gets its own tokens, from logits that are numbers.
    A "+n" is n right drafts; a request whose fault keeps it in its prompt goes on with it."""
    truth = alone()
    for work in schedule:
        planned = []
        for request, own, w in zip(driver.requests, truth, work, strict=True):
            drafts = isinstance(w, str) and w[0] == "+"
            if w != "idle" and request.prefilling and not isinstance(w, int):
                w = 8
            elif w != "idle" and not request.prefilling and isinstance(w, int):
                w = None
            planned.append(own[len(request.emitted) :][: int(w[1:])] if drafts and isinstance(w, str) else w)
        try:
            driver.step(planned, **options)
        except NotANumber:
            return False
    return all(r.emitted == truth[: len(r.emitted)] for r, truth in zip(driver.requests, alone(), strict=True))


MIXED = [
    [1, 4, 8, 8],
    ["+3", "+2", 1, 8],
    ["+1", None, "+2", 5],
    [None, "+3", None, "+3"],
    ["+3", None, "+1", None],
    [None] * 4,
    [None] * 4,
]
ORDER = [2, 0, 3, 1]


def shifted(rows):
    """Rows of the group taken for rows of the batch."""
    return np.arange(len(rows.request_rows), dtype=np.int32)


def padded_lengths(rows):
    """A chunk's padding run as prompt."""
    return np.where(rows.lengths > 0, 8, 0).astype(np.int32)


def other_slots(slots):
    """Padding that points at a live slot."""

    def tamper(rows):
        found = getattr(rows, slots)
        return np.where(found == 0, found.max(), found).astype(np.int32)

    return tamper


TAMPERED = {
    "spec row i taken for batch row i": ("spec", {"request_rows": shifted}),
    "a prompt's padding run as prompt": ("prefill", {"lengths": padded_lengths}),
    "short windows one position late": ("spec", {"computed": lambda rows: rows.computed + (rows.lengths < W)}),
    "the next row's slot": ("spec", {"slots": lambda rows: np.roll(rows.slots, 1)}),
}


@pytest.mark.parametrize("order", [None, ORDER], ids=["in order", "permuted"])
def test_the_schedule_is_right_as_it_is(order):
    assert right(Driver(SMALL, healthy_params, PROMPTS, window=W), MIXED, order=order, defer=True)


@pytest.mark.parametrize("fault", TAMPERED)
def test_a_step_that_was_tampered_with_goes_wrong(fault):
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W)
    group, fields = TAMPERED[fault]
    driver.tamper = lambda built: change(built, group, **fields)
    assert not right(driver, MIXED, order=ORDER)


class ByShape(MetadataBuilder):
    """Rows classified by the length of their query: one token, or a window's length, verifies."""

    def _classify(self, rows, ids):
        looks = (rows.query_lengths == 1) | (rows.query_lengths == self.base.window)
        active = rows.query_lengths > 0
        return np.flatnonzero(active & looks), np.zeros(0, int), np.flatnonzero(active & ~looks)


@pytest.mark.parametrize("first", [[1, 8, "idle", "idle"], ["idle", 4, "idle", "idle"]], ids=["one token", "a window"])
def test_classifying_by_shape_goes_wrong(first):
    """A fresh prompt of one token, or of exactly the window's length, in a slot that another request left."""
    schedule = [first, *[[None if w != "idle" else w for w in first]] * 3]
    for faulty in (False, True):
        driver = Driver(SMALL, healthy_params, PROMPTS, window=W, poison=0.5)
        if faulty:
            driver.builder = ByShape(driver.base)
        assert right(driver, schedule) != faulty


def last_token_exclusive(num_accepted, lengths, slots, *, align=None, implementation=None):
    """The final column taken from the number of tokens instead of the last of them, and no state at the boundary, which
    would be the same one."""
    found = ORIGINAL(num_accepted, lengths, slots, align=align)
    if align is None:
        return found
    column = (align.num_computed + found.commit_length) // align.block_size
    table = align.block_table
    slot = np.take_along_axis if isinstance(table, np.ndarray) else jax.numpy.take_along_axis
    column = jax.numpy.minimum(column, table.shape[1] - 1)
    final = slot(table, column[:, None], 1)[:, 0]
    final = jax.numpy.where(found.commit_length > 0, final, 0)
    return dataclasses.replace(found, final_slot=final, boundary_slot=0 * final)


def unclamped(num_accepted, lengths, slots, *, align=None, implementation=None):
    found = ORIGINAL(num_accepted, lengths, slots, align=align)
    return dataclasses.replace(found, commit_length=jax.numpy.asarray(num_accepted, "int32"))


ORIGINAL = ops.plan_commit


@pytest.mark.parametrize("faulty", [False, True])
def test_a_run_that_ends_on_a_boundary_would_lose_its_state(faulty, monkeypatch):
    if faulty:
        monkeypatch.setattr(ops, "plan_commit", last_token_exclusive)
        jax.clear_caches()
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W, mode="align")
    assert driver.requests[1].computed == 0
    schedule = [["idle", 4, "idle", "idle"], ["idle", "+3", "idle", "idle"], *[["idle", None, "idle", "idle"]] * 3]
    assert len(PROMPTS[1]) + W == BLOCK
    found = right(driver, schedule)
    jax.clear_caches()
    assert found != faulty


def test_more_accepted_than_there_are_rows_is_clamped():
    slots, lengths = jax.numpy.asarray([3, 4]), jax.numpy.asarray([2, 3])
    plan = ops.plan_commit(jax.numpy.asarray([9, -1]), lengths, slots)
    assert plan.commit_length.tolist() == [2, 0]
    assert plan.final_slot.tolist() == [3, 0]
    faulty = unclamped(jax.numpy.asarray([9, -1]), lengths, slots)
    assert faulty.commit_length.tolist() != plan.commit_length.tolist()
    plan_module.check_plan(Dims(), plan)


@pytest.mark.parametrize("faulty", [False, True])
def test_padding_that_points_at_a_live_slot(faulty):
    """Null rows read and write nothing; rows of the same padding that named the last live slot would overwrite it."""
    driver = Driver(SMALL, healthy_params, PROMPTS[:3], window=W)
    if faulty:
        tamper = {"final_slots": other_slots("final_slots"), "lengths": lambda rows: np.maximum(rows.lengths, 1)}
        driver.tamper = lambda built: change(built, "prefill", **tamper)
    schedule = [[1, 4, 8], ["idle", "idle", 1], [None] * 3, [None] * 3]
    truth = alone()
    try:
        for work in schedule:
            driver.step(work)
        found = all(r.emitted == truth[i][: len(r.emitted)] for i, r in enumerate(driver.requests))
    except NotANumber:
        found = False
    assert found != faulty


def test_a_warm_up_leaves_no_trace():
    """Every composition of groups, run on null rows: nothing changes, nothing is left pending."""
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W, poison=2.5)
    before = jax.tree.map(np.asarray, driver.cache)
    driver.tamper = lambda built: built._replace(metadata=built.metadata.nulled(built.batch))
    driver.step([1, 4, 8, 8])
    driver.step([[1, 2], None, 1, 8])
    driver.step([[1, 2], [1], None, 5])
    for ours, theirs in zip(jax.tree.leaves(driver.cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert driver.cache.pending is None
