"""Which rows of a verify stand, and where their states go."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from kda_jax.ops._checks import Dims, choose
from kda_jax.ops._slots import read_slots, write_slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CommitPlan:
    """What one commit does to each row; all int32 [R]. A row that commits nothing has zeros throughout.

    ``writes_boundaries`` is static: False promises that every ``boundary_slot`` is 0, so nothing is computed for them.
    """

    commit_length: jax.Array  # tokens folded into the state
    source_slot: jax.Array  # slot of the checkpoint that verify read
    final_slot: jax.Array  # slot of the state after ``commit_length`` tokens
    boundary_slot: jax.Array  # slot of the state at the block boundary crossed, 0: none
    boundary_length: jax.Array  # tokens up to that boundary
    writes_boundaries: bool = dataclasses.field(default=True, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AlignRows:
    """Align mode's view of the rows: whole blocks of ``block_size`` tokens, one state each.

    ``block_table`` int32 [R, columns] (0: not allocated), ``num_computed`` int32 [R] tokens before the step,
    ``block_size`` tokens, static. ``may_cross``, static: False promises that no row can reach the end of the block it
    starts in, whatever is accepted, so that no boundary state is planned.
    """

    block_table: jax.Array
    num_computed: jax.Array
    block_size: int = dataclasses.field(metadata={"static": True})
    may_cross: bool = dataclasses.field(default=True, metadata={"static": True})


def plan_commit(num_accepted, lengths, slots, *, align: AlignRows | None = None, implementation=None) -> CommitPlan:
    """Turn accepted counts into a commit plan (the RecoverSSM contract).

    ``n = min(max(num_accepted, 0), length, W)``; a row is valid when its slot is not null and ``n > 0``. Without
    ``align`` the state returns to its slot. With it, the final state goes to the block that holds the last committed
    token, ``(c + n - 1) // block_size``, and if the row reaches the end of the block it started in, the state at that
    boundary goes to that block's slot.

    Args:
      num_accepted: int [R], query rows that stand: accepted drafts plus the row they were drafted from; 0 for a row
        that sampled nothing.
      lengths: int [R], query rows of the step (0..W).
      slots: int [R], the checkpoint each row was verified from.
      align: ``AlignRows`` or None.

    Raises:
      ValueError: a shape or dtype that does not fit, or a block size below 1, naming the argument.
    """
    choose("plan_commit", implementation)
    dims = Dims()
    dims.check("num_accepted", num_accepted, "R", kind="int")
    dims.check("lengths", lengths, "R", kind="int")
    dims.check("slots", slots, "R", kind="int")
    n = jnp.minimum(jnp.maximum(num_accepted, 0), lengths).astype(jnp.int32)
    n = jnp.where(slots > 0, jnp.maximum(n, 0), 0)
    source = jnp.where(n > 0, slots, 0).astype(jnp.int32)
    zero = jnp.zeros_like(n)
    if align is None:
        return _checked(CommitPlan(n, source, source, zero, zero, writes_boundaries=False))
    dims.check("align.block_table", align.block_table, "R columns", kind="int")
    dims.check("align.num_computed", align.num_computed, "R", kind="int")
    if align.block_size < 1:
        raise ValueError(f"align.block_size must be at least 1, got {align.block_size}")

    def slot_at(column):
        inside = (column >= 0) & (column < align.block_table.shape[1])
        clipped = jnp.clip(column, 0, align.block_table.shape[1] - 1)
        slot = jnp.take_along_axis(align.block_table, clipped[:, None], axis=1)[:, 0]
        return jnp.where(inside, slot, 0).astype(jnp.int32)

    computed = align.num_computed.astype(jnp.int32)
    final = jnp.where(n > 0, slot_at((computed + n - 1) // align.block_size), 0)
    if not align.may_cross:
        return _checked(CommitPlan(n, source, final, zero, zero, writes_boundaries=False))
    boundary = (computed // align.block_size + 1) * align.block_size
    crosses = (n > 0) & (computed + n >= boundary)
    boundary_slot = jnp.where(crosses, slot_at(boundary // align.block_size - 1), 0)
    boundary_length = jnp.where(boundary_slot > 0, boundary - computed, 0)
    return _checked(CommitPlan(n, source, final, boundary_slot, boundary_length))


def _checked(plan: CommitPlan) -> CommitPlan:
    fields = jax.tree.leaves(plan)
    chex.assert_rank(fields, 1)
    chex.assert_equal_shape(fields)
    chex.assert_type(fields, jnp.int32)
    return plan


def check_plan(dims: Dims, plan: CommitPlan) -> None:
    """Every field of ``plan`` is an integer array [R]; raises ``ValueError`` naming the one that is not."""
    for name in ("commit_length", "source_slot", "final_slot", "boundary_slot", "boundary_length"):
        dims.check(f"plan.{name}", getattr(plan, name), "R", kind="int")


def plan_arguments(plan: CommitPlan) -> list:
    """The plan as kernels take it; the two fields of the boundary are left out where none is written."""
    fields = [plan.commit_length, plan.source_slot, plan.final_slot]
    return [*fields, plan.boundary_slot, plan.boundary_length] if plan.writes_boundaries else fields


def write_committed(pool, plan: CommitPlan, advance):
    """Write each row's final and boundary state into ``pool`` [L, N, ...]; returns the next pool.

    ``advance(source [L, R, ...], length [R])`` gives the states [L, R, ...] after ``length`` tokens. All sources are
    read before anything is written, so a slot may be one row's source and another's target.
    """
    commits = plan.commit_length > 0
    source = read_slots(pool, jnp.where(commits, plan.source_slot, 0))
    targets = [(plan.final_slot, plan.commit_length)]
    if plan.writes_boundaries:
        targets.append((plan.boundary_slot, plan.boundary_length))
    for slots, length in targets:
        pool = write_slots(pool, jnp.where(commits, slots, 0), advance(source, length))
    return pool
