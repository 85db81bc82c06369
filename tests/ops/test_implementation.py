"""The choice of implementation: unknown names and routes that don't exist are refused, never replaced."""

import jax
import numpy as np
import pytest

from kda_jax import ops
from tests import oracle
from tests.ops.conftest import IMPLEMENTATIONS
from tests.ops.harness import plan_of, records_of
from tests.ops.inputs import F32, gate, rng, sequence, states, tokens

I = np.array([1, 2], np.int32)


def arguments(op):
    """Good positional arguments of the operation `op`."""
    g, params = gate(1), gate(1).params(ops)
    x, one = tokens(1, 2, 3, g=g), tokens(1, 2, 1, g=g)
    pool, plan = states(1, 4), plan_of(oracle.plan_commit(I, I, I))
    records = records_of(oracle.verify(*x, g, pool, I, I)[1])
    foldable = plan_of(oracle.plan_commit(I, I, I), writes_boundaries=False)
    rows, weight = rng(1).normal(size=(2, 3, 6)).astype(F32), rng(2).normal(size=(6, 4)).astype(F32)
    history_pool = np.zeros((4, 3, 6), F32)
    s = sequence(1, 3)
    recurrence = [s[name] for name in ("q", "k", "v", "log_decay", "beta")]
    return {
        "kda_gate": lambda: (x[3], g.A_log, g.dt_bias),
        "kda_recurrent": lambda: recurrence,
        "kda_chunked": lambda: recurrence,
        "kda_decode": lambda: (*(a[:, 0] for a in one), params, pool, I),
        "kda_verify": lambda: (*x, params, pool, I, I),
        "kda_verify_native": lambda: (*x, params, pool, I, np.zeros((2, 3), np.int32), I),
        "kda_commit": lambda: (pool, records, params, plan),
        "kda_verify_after_commit": lambda: (*x, params, pool, I, I, records, foldable),
        "conv_step_after_commit": lambda: (rows, weight, history_pool, I, I, rows, foldable),
        "plan_commit": lambda: (I, I, I),
        "conv_prefill": lambda: (rows, weight),
        "conv_step": lambda: (rows, weight, history_pool, I, I),
        "conv_commit": lambda: (history_pool, rows, plan),
    }[op]()


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_unknown(op):
    with pytest.raises(ValueError, match=r"implementation.*triton"):
        getattr(ops, op)(*arguments(op), implementation="triton")


@pytest.mark.parametrize("op", [op for op, names in IMPLEMENTATIONS.items() if "pallas" not in names])
def test_pallas_without_a_kernel(op):
    with pytest.raises(ValueError, match=r"implementation.*pallas"):
        getattr(ops, op)(*arguments(op), implementation="pallas")


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_none_is_the_best_that_runs_here(op):
    """Traced, not run: it is accepted, and the operation takes plain numpy arrays."""
    jax.eval_shape(lambda: getattr(ops, op)(*arguments(op), implementation=None))
