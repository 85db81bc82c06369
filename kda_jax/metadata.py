"""The immutable description of one step: which batch rows do what, and where their states are.

A step has up to three groups of rows. A group that is empty is an absent field, ``None``: nothing else says so, and
counts are derived from the fields. Inside a group rows are in batch order; ``request_rows`` leads back to the batch.

Groups are padded with null rows: ``request_rows`` is the batch size (out of range: nothing is scattered from there),
slots are 0, lengths are 0.
"""

import dataclasses

import jax
import numpy as np

from kda_jax.ops.plan import AlignRows


def _pytree(cls):
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@_pytree
class PrefillRows:
    """Rows that compute prompt tokens, or anything longer than one token that is not a verify.

    A row's state is read from ``source_slots`` and written to ``final_slots``; they are the same in mode "none".
    """

    request_rows: jax.Array  # int32 [P]: row of the batch
    lengths: jax.Array  # int32 [P]: tokens of this step
    computed: jax.Array  # int32 [P]: tokens before this step
    source_slots: jax.Array | None  # int32 [P]: 0 for a fresh row, which starts from zero; None: every row is fresh
    final_slots: jax.Array  # int32 [P]
    pages: jax.Array | None = None  # int32 [P, n]: latent pages, 0: not allocated; None: row i has page i


@_pytree
class DecodeRows:
    """Rows that compute exactly one token, their state updated in place."""

    request_rows: jax.Array  # int32 [D]
    computed: jax.Array  # int32 [D]
    slots: jax.Array  # int32 [D]
    pages: jax.Array | None = None  # int32 [D, n]


@_pytree
class SpecRows:
    """Rows that verify a window: the last sampled token and its drafts (perhaps none)."""

    request_rows: jax.Array  # int32 [R]
    lengths: jax.Array  # int32 [R]: 1 + drafts, at most ``window``
    computed: jax.Array  # int32 [R]
    slots: jax.Array  # int32 [R]: the checkpoint read
    target_slots: jax.Array | None = None  # int32 [R, W]: native mode's state after each token; None: records
    align: AlignRows | None = None  # mode "align"; None: the state returns to its slot
    fold: "Fold | None" = None  # the pending commit is folded by this verify; None: before the step, if there is one
    pages: jax.Array | None = None  # int32 [R, n]
    parents: jax.Array | None = None  # int32 [R, W]: a tree of drafts, as ops.kda_verify takes it; None: chains
    window: int = dataclasses.field(kw_only=True, metadata={"static": True})
    # tokens of the group, at least the sum of lengths, where each can be computed on its own; None: R * W
    packed: int | None = dataclasses.field(default=None, kw_only=True, metadata={"static": True})


@_pytree
class Fold:
    """The pending commit continues in this step: all its live rows are speculative rows again."""

    # int32 [R]: the pending row each row continues, out of range for none; None: the same rows in the same order
    rows: jax.Array | None = None


@_pytree
class SlotCopies:
    """Persistent states copied before anything else in the step: shared slots about to be written, and decode rows
    that enter a new block. 0: no copy."""

    source: jax.Array  # int32 [n]
    target: jax.Array  # int32 [n]


@_pytree
class StepMetadata:
    """One step. Arrays are int32; a step with no row at all is allowed and changes nothing."""

    prefill: PrefillRows | None = None
    decode: DecodeRows | None = None
    spec: SpecRows | None = None
    copies: SlotCopies | None = None

    @property
    def window(self) -> int:
        """Logit rows a request gets: the window where there are speculative rows, else 1."""
        return 1 if self.spec is None else self.spec.window

    def nulled(self, batch: int) -> "StepMetadata":
        """The same step, a numpy one over ``batch`` rows, made of null rows: the same shapes, and nothing to do."""

        def null(rows):
            if rows is None:
                return None
            request_rows = np.full_like(rows.request_rows, batch)
            return dataclasses.replace(jax.tree.map(np.zeros_like, rows), request_rows=request_rows)

        return StepMetadata(null(self.prefill), null(self.decode), null(self.spec))

    def count(self, group: str, batch: int) -> int:
        """Real rows of ``group`` ("prefill", "decode" or "spec") of a concrete step over ``batch`` rows."""
        rows = getattr(self, group)
        return 0 if rows is None else int((rows.request_rows < batch).sum())
