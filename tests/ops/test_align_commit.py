"""Mode align, every place of a block: states and histories after a commit, against recomputing them token by token."""

import itertools

import numpy as np

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, jitted, records_of
from tests.ops.inputs import DIMS, F32, gate, rng, states, tokens
from tests.tolerances import tolerance

OPS = ("kda_commit", "conv_commit")
BLOCK, W, WIDTH = 6, 4, 4
# position in the block, accepted count from none to more than there is, whether the next column is allocated
CASES = list(itertools.product(range(BLOCK), range(W + 3), (True, False)))


def setup():
    computed = np.array([BLOCK + place for place, _, _ in CASES], np.int32)
    table = np.arange(1, 3 * len(CASES) + 1, dtype=np.int32).reshape(-1, 3)
    table = rng(0).permutation(table.reshape(-1)).astype(np.int32).reshape(-1, 3)
    owned = table.copy()
    owned[[not allocated for _, _, allocated in CASES], 2] = 0
    slots = owned[np.arange(len(CASES)), (computed - 1) // BLOCK]
    accepted = np.array([n for _, n, _ in CASES], np.int32)
    return computed, table, owned, slots, accepted


def expected(computed, owned, slots, accepted, step):
    """Slot -> state after the tokens that belong there, by ``step(row, n)``, from the rules in words."""
    written = {}
    for row, (c, n) in enumerate(zip(computed, np.clip(accepted, 0, W), strict=True)):
        for count in range(1, n + 1):
            ends_block, is_last = (c + count) % BLOCK == 0, count == n
            column = (c + count - 1) // BLOCK
            first_boundary = column == c // BLOCK  # a window crosses one boundary at most
            if (is_last or (ends_block and first_boundary)) and owned[row, column]:
                written[owned[row, column]] = step(row, count)
    return written


def test_states_at_every_place(implementation):
    computed, table, owned, slots, accepted = setup()
    g = gate(3)
    x = tokens(3, len(CASES), W, DIMS, F32, g)
    lengths = np.full(len(CASES), W, np.int32)
    pool = states(3, table.max() + 1, nan_slots=(0, *np.setdiff1d(table, slots)))  # whatever is not read is NaN
    records = oracle.verify(*x, g, pool, slots, lengths)[1]
    align = ops.AlignRows(owned, computed, BLOCK)
    plan = jitted("plan_commit")(accepted, lengths, slots, align=align)
    found = jitted("kda_commit", implementation=implementation)(pool, records_of(records), g.params(ops), plan)

    def step(row, n):
        plan = oracle.plan_commit([n], lengths[:1], slots[row : row + 1])
        return oracle.commit(pool, *(a[row : row + 1] for a in x), g, plan)[slots[row]]

    written = expected(computed, owned, slots, accepted, step)
    assert len(written) > 80
    assert_pool(found, pool, written, tolerance(F32).state)


def test_histories_at_every_place(implementation):
    computed, table, owned, slots, accepted = setup()
    r = rng(5)
    pool = r.normal(size=(table.max() + 1, WIDTH - 1, 7)).astype(np.float32)
    pool[[0, *np.setdiff1d(table, slots)]] = np.nan
    x = r.normal(size=(len(CASES), W, 7)).astype(np.float32)
    lengths = np.full(len(CASES), W, np.int32)
    align = ops.AlignRows(owned, computed, BLOCK)
    plan = jitted("plan_commit")(accepted, lengths, slots, align=align)
    found = jitted("conv_commit", implementation=implementation)(pool, x, plan)

    def step(row, n):
        return np.concatenate([pool[slots[row]], x[row, :n]])[-(WIDTH - 1) :]

    assert_pool(found, pool, expected(computed, owned, slots, accepted, step), 0.0)
