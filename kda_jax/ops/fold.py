"""Deferred commit: the verify that follows a step commits it first, so a state moves once in and once out."""

from kda_jax.ops._checks import Dims, check_fp32, choose
from kda_jax.ops._kernels import check_gate_params, find_kernel, gate_arguments
from kda_jax.ops.commit import kda_commit
from kda_jax.ops.conv import conv_case, conv_commit, conv_step
from kda_jax.ops.gate import GateParams
from kda_jax.ops.plan import CommitPlan, check_plan, plan_arguments
from kda_jax.ops.verify import Records, check_window_inputs, kda_verify


def kda_verify_after_commit(
    q,
    k,
    v,
    raw_gate,
    raw_beta,
    gate: GateParams,
    state_pool,
    slots,
    lengths,
    pending: Records,
    plan: CommitPlan,
    *,
    implementation=None,
):
    """``kda_commit`` of the step before, then ``kda_verify`` of this one, in one pass over the states.

    Args:
      q, k, v, raw_gate, raw_beta, gate, slots, lengths: as in ``kda_verify``.
      state_pool: [N, HV, V, K]; donate it to update it in place.
      pending: the records of the step before, of the same rows ([R, HV, W', V] and so on).
      plan: its commit, with ``writes_boundaries`` False. A row with ``commit_length`` 0 has nothing pending: its state
        is read as it is. For the others ``final_slot`` is the slot this verify reads, where it reads one; a row of
        length 0 or of the null slot only commits.

    Returns:
      ``o`` [R, W, HV, V] and ``Records`` as from ``kda_verify``, and the next pool.

    Raises:
      ValueError: a shape or dtype that does not fit, naming the argument; a plan that may write boundary states, which
        need a commit of their own.
    """
    operation = "kda_verify_after_commit"
    choose(operation, implementation)
    dims = check_window_inputs(q, k, v, raw_gate, raw_beta, state_pool)
    dims.check("slots", slots, "R", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    check_gate_params(dims, gate)
    dims.check("pending.correction", pending.correction, "R HV P V")
    check_fp32("pending.correction", pending.correction)
    dims.check("pending.key", pending.key, "R H P K")
    dims.check("pending.raw_gate", pending.raw_gate, "R HV P K")
    _check_foldable(dims, plan)
    sizes = {name: dims[name] for name in ("K", "V", "W")}
    kernel = None
    if dims["P"] == dims["W"]:  # kernels hold one window
        kernel = find_kernel(operation, implementation, dtype=v.dtype, state_dtype=state_pool.dtype, **sizes)
    if kernel is None:
        state_pool = kda_commit(state_pool, pending, gate, plan, implementation=implementation)
        tokens = q, k, v, raw_gate, raw_beta
        o, records = kda_verify(*tokens, gate, state_pool, slots, lengths, implementation=implementation)
        return o, records, state_pool
    arrays = pending.correction, pending.key, pending.raw_gate, *plan_arguments(plan), slots, lengths
    o, *records, state_pool = kernel(q, k, v, raw_gate, raw_beta, *gate_arguments(gate), state_pool, *arrays)
    return o, Records(*records), state_pool


def conv_step_after_commit(
    x, weight, history_pool, slots, lengths, pending_x, plan: CommitPlan, *, implementation=None
):
    """``conv_commit`` of the step before, then ``conv_step`` of this one, in one pass over the histories.

    Args:
      x, weight, slots, lengths: as in ``conv_step``.
      history_pool: [N, Wc-1, C]; donate it to update it in place.
      pending_x: [R, W', C], the inputs of the step before, of the same rows.
      plan: as in ``kda_verify_after_commit``.

    Returns:
      ``y`` [R, W, C] as from ``conv_step``, and the next pool.

    Raises:
      ValueError: as ``kda_verify_after_commit``.
    """
    operation = "conv_step_after_commit"
    choose(operation, implementation)
    dims = Dims()
    dims.check("x", x, "R W C")
    dims.check("weight", weight, "C Wc")
    dims.check("history_pool", history_pool, f"N {dims['Wc'] - 1} C")
    dims.check("slots", slots, "R", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    dims.check("pending_x", pending_x, "R P C")
    _check_foldable(dims, plan)
    kernel = find_kernel(operation, implementation, **conv_case(x, weight.shape[1], history_pool))
    if kernel is None:
        history_pool = conv_commit(history_pool, pending_x, plan, implementation=implementation)
        return conv_step(x, weight, history_pool, slots, lengths, implementation=implementation), history_pool
    return kernel(x, weight, history_pool, pending_x, *plan_arguments(plan), slots, lengths)


def _check_foldable(dims: Dims, plan: CommitPlan) -> None:
    check_plan(dims, plan)
    if plan.writes_boundaries:
        raise ValueError("plan.writes_boundaries must be False: a plan with boundary states needs a commit of its own")
