"""From what a server knows about its requests to one step's metadata, on the host and in numpy.

Rows are classified by what a request is doing, never by the shape of its query (the RecoverSSM contract):

* recover mode: every active decode is speculative, with drafts or without, because its checkpoint may still lack a
  deferred commit; the plain decode form must not read it;
* native mode: a row is speculative iff drafts were scheduled for it; if no draft token was scheduled at all, the step
  is an ordinary one;
* the other active rows take the decode form if every one of them is a true one-token decode, else all go through
  prefill. A prompt chunk of one token, or of exactly the window's length, is prefill.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from kda_jax.checks import check_choice, check_integer
from kda_jax.config import ModelConfig
from kda_jax.metadata import DecodeRows, Fold, PrefillRows, SlotCopies, SpecRows, StepMetadata
from kda_jax.ops._couplings import next_power_of_two
from kda_jax.ops.plan import AlignRows


class Smallest(NamedTuple):
    """The smallest buckets: sizes are rounded up to these, then to powers of two. Larger ones mean fewer programs."""

    rows: int = 1  # of the batch and of each group
    tokens: int = 1  # of a row's query
    columns: int = 1  # of block tables and of page tables


SMALLEST = Smallest()


@dataclasses.dataclass(frozen=True)
class BuilderBase:
    """Everything a builder is given; it keeps all of it.

    Attributes:
      config: the model's ``ModelConfig``.
      layer_names: one name per layer, in order.
      layout: what a sequence keeps (``CacheLayout``).
      window: tokens of a verify, 1 + drafts; None without speculation.
      recover: records and a commit (True), or a state per position (False).
      mode: ``"none"``: a request has one slot (natively ``window``). ``"align"``: one slot per ``block_size`` tokens.
      block_size: tokens of a state block; None in mode "none".
      page_size: tokens of a latent page; None: latents are contiguous, row by row.
      smallest: ``Smallest`` sizes of what a step is padded to.
      device: where the arrays go; not used here.
    """

    config: ModelConfig
    layer_names: tuple[str, ...]
    layout: Any
    window: int | None = None
    recover: bool = True
    mode: str = "none"
    block_size: int | None = None
    page_size: int | None = None
    smallest: Smallest = SMALLEST
    device: Any = None

    def __post_init__(self):
        if not isinstance(self.config, ModelConfig):
            raise ValueError(f"config must be a ModelConfig, got {type(self.config).__name__}")
        layers = self.config.num_kda_layers + self.config.num_mla_layers
        if not isinstance(self.layer_names, tuple) or len(self.layer_names) != layers:
            raise ValueError(f"layer_names must be a tuple of {layers} names, got {self.layer_names!r}")
        if self.layout is None:
            raise ValueError("layout must be given, got None")
        check_choice("mode", self.mode, ("none", "align"))
        if self.window is not None:
            check_integer("window", self.window, 2)
        if self.mode == "none":
            if self.block_size is not None:
                raise ValueError(f"block_size belongs to mode 'align', got {self.block_size!r}")
        else:
            check_integer("block_size", self.block_size, self.window or 1)
        if self.page_size is not None:
            check_integer("page_size", self.page_size, 1)
        for name, size in self.smallest._asdict().items():
            check_integer(f"smallest.{name}", size, 1)


class Built(NamedTuple):
    """One step. ``metadata`` has numpy leaves; ``batch`` and ``tokens`` are the bucketed shape of the token array.

    ``must_fold``: a pending commit concerns a row that this step's verify does not read; ``step``
    writes it first.
    """

    metadata: StepMetadata
    batch: int
    tokens: int
    must_fold: bool

    @property
    def may_defer(self) -> bool:
        """The commit of this step's speculative rows can wait for the next verify: they leave records, and none can
        reach a block boundary, whose state is written at once."""
        spec = self.metadata.spec
        return spec is not None and spec.target_slots is None and (spec.align is None or not spec.align.may_cross)


class Rows(NamedTuple):
    """What a step is built from; one entry per batch row.

    ``num_draft``: -1 where no drafting was scheduled, else 0 or more. ``slots`` [B] in mode "none", ``row_slots``
    [B, W] and ``last_accepted`` [B] natively, ``block_table`` [B, columns] in mode "align" (with ``shared``: the slots
    that somebody else holds too), ``pages`` [B, n] where latents are in pages. ``num_computed`` counts committed and
    pending tokens. ``request_ids`` name rows in messages and match ``pending``.
    """

    query_lengths: np.ndarray
    num_computed: np.ndarray
    is_prefilling: np.ndarray
    num_draft: np.ndarray
    slots: np.ndarray | None = None
    row_slots: np.ndarray | None = None
    last_accepted: np.ndarray | None = None
    block_table: np.ndarray | None = None
    shared: np.ndarray | None = None
    pages: np.ndarray | None = None
    shared_pages: np.ndarray | None = None
    request_ids: tuple | None = None


@dataclasses.dataclass(frozen=True)
class MetadataBuilder:
    """Builds steps; ``base`` holds all that it was given."""

    base: BuilderBase

    def __post_init__(self):
        if not isinstance(self.base, BuilderBase):
            raise ValueError(f"base must be a BuilderBase, got {type(self.base).__name__}")

    def build(self, rows: Rows, *, pending: tuple | None = None) -> Built:
        """One step's metadata.

        Args:
          rows: ``Rows``.
          pending: request ids of the deferred commit in its group's row order, None for its null rows; None: no commit
            is pending.

        Raises:
          ValueError: a row that breaks a rule, naming the request and the numbers; a block or page that the step needs
            and that is not allocated, or that it would write and somebody else holds too, naming request and column.
        """
        named = rows.request_ids
        rows, ids = self._checked(rows)
        spec, decode, prefill = self._classify(rows, ids)
        self._check_memory(rows, ids, spec)
        if self.base.page_size is None and self.base.config.num_mla_layers:
            for group in (spec, decode, prefill):
                if len(group) and not np.array_equal(group, np.arange(len(ids))):
                    which = f"rows {group.tolist()} of {len(ids)}"
                    raise ValueError(f"pages must be given where a group is not the whole batch, got {which}")
        batch = self.rows(len(ids))
        width = int(max([1, *rows.query_lengths[prefill]])) if len(prefill) else 1
        tokens = max(width, self.base.window if len(spec) else 1, self.base.smallest.tokens)
        source, target = self._slots(rows)
        fold, must_fold = self._fold(ids, spec, pending, named)
        metadata = StepMetadata(
            prefill=self._prefill_rows(rows, prefill, source, target, batch) if len(prefill) else None,
            decode=self._decode_rows(rows, decode, target, batch) if len(decode) else None,
            spec=self._spec_rows(rows, spec, source, fold, batch) if len(spec) else None,
            copies=self._copies(decode, source, target),
        )
        return Built(metadata, batch, next_power_of_two(tokens), must_fold)

    def rows(self, count: int) -> int:
        """Rows that a group of ``count`` is padded to."""
        return next_power_of_two(max(count, self.base.smallest.rows))

    def _columns(self, count: int) -> int:
        return next_power_of_two(max(count, self.base.smallest.columns))

    def _padded(self, values, group, *, fill: int = 0) -> np.ndarray:
        """``values`` of the rows of ``group``, padded to a bucket; of row numbers, ``values`` is ``group`` itself."""
        out = np.full(self.rows(len(group)), fill, np.int32)
        out[: len(group)] = group if values is group else values[group]
        return out

    def _table(self, values, group, columns: int) -> np.ndarray:
        """The first ``columns`` columns of ``values`` of the rows of ``group``, both padded to buckets."""
        out = np.zeros((self.rows(len(group)), self._columns(columns)), np.int32)
        held = values[group][:, : out.shape[1]]
        out[: len(group), : held.shape[1]] = held
        return out

    def _checked(self, rows: Rows) -> tuple[Rows, tuple]:
        base, B = self.base, len(rows.query_lengths)
        shapes = {"query_lengths": 1, "num_computed": 1, "num_draft": 1}
        native = base.window is not None and not base.recover
        if base.mode == "align":
            shapes["block_table"] = 2
        elif not native:
            shapes["slots"] = 1
        if native:
            shapes |= {"row_slots": 2, "last_accepted": 1}
        if base.page_size is not None:
            shapes["pages"] = 2
        arrays = {}
        for name, rank in shapes.items():
            array = getattr(rows, name)
            array = None if array is None else np.asarray(array)
            if array is None or array.ndim != rank or len(array) != B or array.dtype.kind not in "iu":
                got = "None" if array is None else f"{array.dtype} {array.shape}"
                raise ValueError(f"{name} must be integers of rank {rank} with {B} rows, got {got}")
            arrays[name] = array.astype(np.int32)
        arrays["is_prefilling"] = np.asarray(rows.is_prefilling, bool)
        if arrays["is_prefilling"].shape != (B,):
            raise ValueError(f"is_prefilling must be bool [{B}], got shape {arrays['is_prefilling'].shape}")
        for name, table in (("shared", "block_table"), ("shared_pages", "pages")):
            if getattr(rows, name) is not None:
                arrays[name] = np.asarray(getattr(rows, name), bool)
                if arrays[name].shape != arrays[table].shape:
                    raise ValueError(f"{name} must have the shape of {table}, got {arrays[name].shape}")
        ids = tuple(range(B)) if rows.request_ids is None else tuple(rows.request_ids)
        if len(ids) != B or len(set(ids)) != B:
            raise ValueError(
                f"request_ids must name {B} rows, each once, got {len(ids)}, {len(set(ids))} of them different"
            )
        for name in ("query_lengths", "num_computed"):
            for row in np.flatnonzero(arrays[name] < 0):
                raise ValueError(f"{name} of request {ids[row]!r} must be at least 0, got {arrays[name][row]}")
        if native and arrays["row_slots"].shape[1] < base.window:
            raise ValueError(f"row_slots must have window={base.window} columns, got {arrays['row_slots'].shape[1]}")
        over = arrays["last_accepted"] > base.window if native else np.zeros(B, bool)
        for row in np.flatnonzero(over):
            raise ValueError(
                f"last_accepted of request {ids[row]!r} must be at most window={base.window}, "
                f"got {arrays['last_accepted'][row]}"
            )
        return Rows(**arrays, request_ids=ids), ids

    def _classify(self, rows: Rows, ids):
        """Batch rows of the groups (spec, decode, prefill), each in batch order."""
        q, draft, window = rows.query_lengths, rows.num_draft, self.base.window
        drafted = draft >= 0
        for row in np.flatnonzero(drafted):
            if window is None:
                raise ValueError(f"num_draft of request {ids[row]!r} must be -1 without speculation, got {draft[row]}")
            if rows.is_prefilling[row]:
                raise ValueError(f"request {ids[row]!r} is prefilling and can't verify num_draft={draft[row]} drafts")
            if q[row] != 1 + draft[row]:
                raise ValueError(
                    f"request {ids[row]!r} has num_draft={draft[row]} and must have query length {1 + draft[row]}, "
                    f"got {q[row]}"
                )
        active = q > 0
        decoding = active & ~rows.is_prefilling
        for row in np.flatnonzero(decoding & (rows.num_computed == 0)):
            raise ValueError(f"request {ids[row]!r} has nothing computed: its tokens are a prompt, is_prefilling")
        if window is None:
            spec = np.zeros_like(active)
        elif self.base.recover:
            spec = drafted | decoding
        else:
            spec = drafted if (draft > 0).any() else np.zeros_like(active)
        for row in np.flatnonzero(spec & (q > (window or 0))):
            raise ValueError(f"request {ids[row]!r} has {q[row]} tokens to verify; the window is {window}")
        rest = active & ~spec
        ordinary = bool((rest & (rows.is_prefilling | (q > 1))).any())
        none = np.zeros_like(rest)
        decode, prefill = (none, rest) if ordinary else (rest, none)
        return np.flatnonzero(spec), np.flatnonzero(decode), np.flatnonzero(prefill)

    def _check_memory(self, rows: Rows, ids, spec) -> None:
        c, q, base = rows.num_computed, rows.query_lengths, self.base
        active = q > 0
        if base.mode == "align":
            block = base.block_size
            is_spec = np.isin(np.arange(len(q)), spec)
            crossing = active & ~is_spec & (c // block != (c + q - 1) // block)
            for row in np.flatnonzero(crossing):
                raise ValueError(
                    f"request {ids[row]!r} would compute tokens {c[row]} to {c[row] + q[row] - 1} over the block "
                    f"boundary at {(c[row] // block + 1) * block}; a chunk ends at the next boundary at the latest"
                )
            table = rows.block_table
            first_read = np.maximum(c - 1, 0) // block
            # a complete source block is only read: it may be shared
            _check_columns("block_table", table, rows.shared, active, first_read, c // block, (c + q - 1) // block, ids)
        if rows.row_slots is not None:
            for row in np.flatnonzero(active & (rows.row_slots[:, : base.window] <= 0).any(axis=1)):
                raise ValueError(f"row_slots of request {ids[row]!r} must be allocated, got {rows.row_slots[row]}")
        elif base.mode == "none":
            for row in np.flatnonzero(active & (rows.slots <= 0)):
                raise ValueError(f"slots of request {ids[row]!r} must be allocated, got {rows.slots[row]}")
        if base.page_size is not None:
            first, last = c // base.page_size, (c + q - 1) // base.page_size
            read = np.maximum(c - 1, 0) // base.page_size  # those before were checked when they were written
            _check_columns("pages", rows.pages, rows.shared_pages, active, read, first, last, ids)

    def _slots(self, rows: Rows):
        """Slots [B] that each active row's state is read from (0: fresh), and written to by decode and prefill."""
        c, q, base = rows.num_computed, rows.query_lengths, self.base
        if base.mode == "align":
            at, block = np.arange(len(c)), base.block_size
            last = rows.block_table.shape[1] - 1
            source = rows.block_table[at, np.clip((c - 1) // block, 0, last)]
            target = rows.block_table[at, np.clip((c + q - 1) // block, 0, last)]
        elif rows.row_slots is not None:
            source = rows.row_slots[np.arange(len(c)), np.maximum(rows.last_accepted, 1) - 1]
            target = source
        else:
            source = target = rows.slots
        return np.where((q > 0) & (c > 0), source, 0), np.where(q > 0, target, 0)

    def _fold(self, ids, spec, pending, named) -> tuple[Fold | None, bool]:
        if pending is None or all(name is None for name in pending):
            return None, False
        if named is None:
            raise ValueError("request_ids must be given with pending: it names requests, not rows")
        if self.base.window is None or not self.base.recover:
            return None, True
        place = {name: i for i, name in enumerate(pending) if name is not None}
        wanted = [place.pop(ids[row], len(pending)) for row in spec]
        if place:
            return None, True
        rows = np.full(self.rows(len(spec)), len(pending), np.int32)
        rows[: len(wanted)] = wanted
        same = len(rows) == len(pending) and all(
            at == i or (at == len(pending) and pending[i] is None) for i, at in enumerate(rows)
        )
        return Fold(None if same else rows), False

    def _pages(self, rows: Rows, group) -> np.ndarray | None:
        if self.base.page_size is None:
            return None
        needed = -(-(rows.num_computed + rows.query_lengths)[group] // self.base.page_size)
        return self._table(rows.pages, group, int(needed.max()))

    def _prefill_rows(self, rows: Rows, group, source, target, batch: int) -> PrefillRows:
        fresh = not (rows.num_computed[group] > 0).any()
        return PrefillRows(
            request_rows=self._padded(group, group, fill=batch),
            lengths=self._padded(rows.query_lengths, group),
            computed=self._padded(rows.num_computed, group),
            source_slots=None if fresh else self._padded(source, group),
            final_slots=self._padded(target, group),
            pages=self._pages(rows, group),
        )

    def _decode_rows(self, rows: Rows, group, target, batch: int) -> DecodeRows:
        return DecodeRows(
            request_rows=self._padded(group, group, fill=batch),
            computed=self._padded(rows.num_computed, group),
            slots=self._padded(target, group),
            pages=self._pages(rows, group),
        )

    def _spec_rows(self, rows: Rows, group, source, fold, batch: int) -> SpecRows:
        base, targets, align = self.base, None, None
        if rows.row_slots is not None:
            targets = np.zeros((self.rows(len(group)), base.window), np.int32)
            targets[: len(group)] = rows.row_slots[group, : base.window]
        if base.mode == "align":
            # columns up to the one that holds the window's last token, so that the width follows the longest row
            block, start = base.block_size, rows.num_computed[group]
            end = start + rows.query_lengths[group]
            table = self._table(rows.block_table, group, int(end.max() - 1) // block + 1)
            may_cross = bool((end >= (start // block + 1) * block).any())
            align = AlignRows(table, self._padded(rows.num_computed, group), block, may_cross)
        return SpecRows(
            request_rows=self._padded(group, group, fill=batch),
            lengths=self._padded(rows.query_lengths, group),
            computed=self._padded(rows.num_computed, group),
            slots=self._padded(source, group),
            target_slots=targets,
            align=align,
            fold=fold,
            pages=self._pages(rows, group),
            window=base.window,
        )

    def _copies(self, decode, source, target) -> SlotCopies | None:
        """Decode rows that enter a new block: their state moves to its slot before the step."""
        moved = decode[(source[decode] != target[decode]) & (source[decode] > 0)]
        if not len(moved):
            return None
        return SlotCopies(self._padded(source, moved), self._padded(target, moved))


def _check_columns(name, table, shared, active, read, written, last, ids) -> None:
    """Columns ``read .. last`` of each active row are allocated, ``written .. last`` held by it alone."""
    for row in np.flatnonzero(active & (last >= table.shape[1])):
        raise ValueError(f"{name} of request {ids[row]!r} must have column {last[row]}, got {table.shape[1]} columns")
    if not active.any():
        return
    column = read[:, None] + np.arange(int((last - read)[active].max()) + 1)[None]
    used = active[:, None] & (column <= last[:, None])
    column = np.minimum(column, table.shape[1] - 1)
    for row, i in np.argwhere(used & (np.take_along_axis(table, column, axis=1) <= 0)):
        raise ValueError(
            f"{name} of request {ids[row]!r}: column {column[row, i]} is needed in this step and not allocated"
        )
    if shared is not None:
        taken = used & (column >= written[:, None]) & np.take_along_axis(shared, column, axis=1)
        for row, i in np.argwhere(taken):
            raise ValueError(
                f"{name} of request {ids[row]!r}: column {column[row, i]} is written in this step and shared"
            )


class Postprocessed(NamedTuple):
    """Where each speculative row stands after its commit."""

    num_computed: np.ndarray
    column: np.ndarray | None  # mode "align": of the running state
    last_accepted: np.ndarray


def postprocess(base: BuilderBase, num_computed, lengths, num_accepted, last_accepted) -> Postprocessed:
    """Counts after a step's speculative rows committed ``min(max(num_accepted, 0), lengths)`` tokens; all int [R].

    With one checkpoint a row (recover, or mode "align") the checkpoint is the accepted position, and the accepted count
    is 1. Natively it is the number of tokens that stand, unchanged where none does.
    """
    n = np.minimum(np.maximum(num_accepted, 0), lengths)
    computed = num_computed + n
    if base.mode == "align":
        return Postprocessed(computed, np.maximum(computed - 1, 0) // base.block_size, np.ones_like(n))
    if base.recover or base.window is None:
        return Postprocessed(computed, None, np.ones_like(n))
    return Postprocessed(computed, None, np.where(n > 0, n, last_accepted))
