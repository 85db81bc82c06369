"""plan_commit: which slots a step writes, and after how many tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax import ops
from tests import oracle
from tests.ops.harness import jitted

OPS = ("plan_commit",)
FIELDS = oracle.Plan._fields


def i32(*values):
    return np.array(values, np.int32)


def check(plan, want):
    for name in FIELDS:
        got = np.asarray(getattr(plan, name))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, getattr(want, name), err_msg=name)


def test_mode_none(implementation):
    """Accepted less than, equal to and more than the length; none; negative; empty row; null slot."""
    accepted, lengths, slots = i32(2, 4, 9, 0, -1, 1, 3), i32(4, 4, 4, 4, 4, 0, 4), i32(5, 6, 7, 8, 9, 10, 0)
    plan = jitted("plan_commit", implementation=implementation)(accepted, lengths, slots)
    zero = [0] * 7
    check(plan, oracle.Plan(i32(2, 4, 4, 0, 0, 0, 0), i32(5, 6, 7, 0, 0, 0, 0), i32(5, 6, 7, 0, 0, 0, 0), zero, zero))


# (computed, accepted) -> final column, boundary column or None, boundary length; block size 2048
EXAMPLES = {
    "crosses, ends on the boundary": (8188, 4, 3, 3, 4),
    "crosses": (8190, 4, 4, 3, 2),
    "stays": (8180, 4, 3, None, 0),
    "one short of the boundary": (8188, 3, 3, None, 0),
    "starts on a boundary": (8192, 4, 4, None, 0),
    "starts from nothing": (0, 4, 0, None, 0),
    "first boundary": (2047, 1, 0, 0, 1),
    "past the first boundary": (2047, 2, 1, 0, 1),
}


def test_align_examples(implementation):
    """Column j of row r is slot 10 r + j + 1."""
    cases = list(EXAMPLES.values())
    table = (10 * np.arange(len(cases))[:, None] + np.arange(5) + 1).astype(np.int32)
    computed, accepted = (np.array([c[i] for c in cases], np.int32) for i in (0, 1))
    slots = table[np.arange(len(cases)), np.maximum(computed - 1, 0) // 2048]
    align = ops.AlignRows(table, computed, 2048)
    plan = jitted("plan_commit", implementation=implementation)(accepted, np.full_like(slots, 4), slots, align=align)
    check(
        plan,
        oracle.Plan(
            accepted,
            slots,
            table[np.arange(len(cases)), [c[2] for c in cases]],
            [0 if c[3] is None else table[r, c[3]] for r, c in enumerate(cases)],
            [c[4] for c in cases],
        ),
    )


def test_align_rows_that_commit_nothing(implementation):
    """They sit where a crossing would be, and past the end of their table."""
    table = np.arange(1, 13, dtype=np.int32).reshape(4, 3)
    align = ops.AlignRows(table, i32(7, 7, 7, 500), 8)
    slots = i32(1, 0, 7, 10)
    plan = jitted("plan_commit", implementation=implementation)(i32(0, 3, 2, 0), i32(4, 4, 0, 4), slots, align=align)
    check(plan, oracle.Plan(*(i32(0, 0, 0, 0) for _ in FIELDS)))


rows = st.lists(
    st.tuples(st.integers(-2, 7), st.integers(0, 5), st.integers(0, 27), st.booleans()), min_size=6, max_size=6
)


@settings(max_examples=100)
@given(rows=rows)
def test_any_rows(implementation, rows):
    """Blocks of 8 tokens, 4 columns, windows of up to 5."""
    accepted, lengths, computed, live = map(np.array, zip(*rows, strict=True))
    table = np.arange(1, 25, dtype=np.int32).reshape(6, 4)
    slots = np.where(live, table[np.arange(6), np.maximum(computed - 1, 0) // 8], 0).astype(np.int32)
    accepted, lengths, computed = (x.astype(np.int32) for x in (accepted, lengths, computed))
    run = jitted("plan_commit", implementation=implementation)
    check(run(accepted, lengths, slots), oracle.plan_commit(accepted, lengths, slots))
    align = ops.AlignRows(table, computed, 8)
    want = oracle.plan_commit(accepted, lengths, slots, table, computed, 8)
    check(run(accepted, lengths, slots, align=align), want)


def _align(**change):
    good = {"block_table": np.ones((3, 4), np.int32), "num_computed": i32(1, 2, 3), "block_size": 8}
    return lambda: {"align": ops.AlignRows(**(good | change))}


BAD = {
    "accepted dtype": (r"\bnum_accepted\b", lambda: {"num_accepted": np.ones(3, np.float32)}),
    "accepted rank": (r"\bnum_accepted\b", lambda: {"num_accepted": np.ones((3, 1), np.int32)}),
    "lengths rows": (r"\blengths\b", lambda: {"lengths": i32(1, 1)}),
    "slots rows": (r"\bslots\b", lambda: {"slots": i32(1, 1)}),
    "slots dtype": (r"\bslots\b", lambda: {"slots": np.ones(3, np.float32)}),
    "table rank": (r"\bblock_table\b", _align(block_table=np.ones(3, np.int32))),
    "table rows": (r"\bblock_table\b", _align(block_table=np.ones((2, 4), np.int32))),
    "table dtype": (r"\bblock_table\b", _align(block_table=np.ones((3, 4), np.float32))),
    "computed rows": (r"\bnum_computed\b", _align(num_computed=i32(1, 2))),
    "block size": (r"\bblock_size\b", _align(block_size=0)),
    "implementation": (r"\bimplementation\b.*cuda", lambda: {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    good = {"num_accepted": i32(1, 2, 3), "lengths": i32(4, 4, 4), "slots": i32(1, 2, 3)}
    with pytest.raises(ValueError, match=match):
        ops.plan_commit(**(good | change()))
