"""kda_verify_native: the same outputs as kda_verify, and a state after every token."""

import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.harness import assert_pool, assert_zero_past, jitted
from tests.ops.inputs import BF16, F32, states
from tests.ops.test_verify import LENGTHS, SLOTS, draw
from tests.tolerances import assert_close, tolerance

OPS = ("kda_verify_native",)
W, N = 5, 48
# Row r writes slots 10 + 5 r + t, except that row 0 overwrites its source last and row 5 drops its first state.
TARGETS = (10 + 5 * np.arange(7)[:, None] + np.arange(W)[None]).astype(np.int32)
TARGETS[0, 4], TARGETS[5, 0] = SLOTS[0], 0


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_values(implementation, dtype, lower_bound):
    """Targets of null rows, of tokens past the length and of slot 0 are not written, and NaN elsewhere survives."""
    x, g = draw(1, W, LENGTHS, dtype=dtype, lower_bound=lower_bound)
    pool = states(1, N, nan_slots=(0, 5, *range(8, N)))
    run = jitted("kda_verify_native", implementation=implementation)
    o, new = run(*x, g.params(ops), pool, SLOTS, TARGETS, LENGTHS)
    live = np.where(SLOTS == 0, 0, LENGTHS)
    assert o.dtype == dtype
    assert_zero_past(o, live, "o")
    o_ref, _ = oracle.verify(*x, g, pool, SLOTS, LENGTHS)
    written = {}
    for r in np.flatnonzero(live):
        assert_close(o[r], o_ref[r], tolerance(dtype).output, f"o, row {r}")
        for t in range(live[r]):
            if TARGETS[r, t] != 0:
                alone = oracle.plan_commit([t + 1], [W], [SLOTS[r]])
                row = [a[r : r + 1] for a in x]
                written[int(TARGETS[r, t])] = oracle.commit(pool, *row, g, alone)[int(SLOTS[r])]
    assert_pool(new, pool, written, tolerance(dtype).state)


BAD = {
    "source rows": (r"\bsource_slots\b", {"source_slots": SLOTS[:6]}),
    "target window": (r"\btarget_slots\b", {"target_slots": TARGETS[:, :4]}),
    "target dtype": (r"\btarget_slots\b", {"target_slots": TARGETS.astype(F32)}),
    "lengths rows": (r"\blengths\b", {"lengths": LENGTHS[:6]}),
    "implementation": (r"\bimplementation\b.*cuda", {"implementation": "cuda"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    match, change = BAD[case]
    x, g = draw(1, W, LENGTHS)
    rest = {"source_slots": SLOTS, "target_slots": TARGETS, "lengths": LENGTHS} | change
    with pytest.raises(ValueError, match=match):
        ops.kda_verify_native(*x, g.params(ops), states(1, N), **rest)
