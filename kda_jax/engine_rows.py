"""What the scheduler chose, as the arrays of one step. Host only."""

from collections.abc import Sequence

import numpy as np

from kda_jax.cache_options import CacheOptions
from kda_jax.engine_memory import Memory
from kda_jax.engine_program import RowSampling
from kda_jax.engine_schedule import Work
from kda_jax.metadata_builder import Rows


def batch_rows(
    work: Sequence[Work], memory: Memory, options: CacheOptions, *, speculative: bool, native: bool
) -> tuple[Rows, list[list[int]]]:
    """The rows that the metadata builder takes, and each row's tokens."""
    requests = [request for request, _, _ in work]
    tokens = [
        request.tokens[request.computed : request.computed + query] if drafts is None else request.tokens[-1:] + drafts
        for request, query, drafts in work
    ]
    align = options.mode == "align"
    flags = [memory.shared(request.held, request.computed, query) for request, query, _ in work]
    no_draft = 0 if speculative else -1
    rows = Rows(
        query_lengths=np.asarray([query for _, query, _ in work]),
        num_computed=np.asarray([request.computed for request in requests]),
        is_prefilling=np.asarray([drafts is None for _, _, drafts in work]),
        num_draft=np.asarray([-1 if d is None else len(d) or no_draft for _, _, d in work]),
        slots=None if align or native else np.asarray([r.held.slots[0] for r in requests]),
        row_slots=np.asarray([r.held.slots for r in requests]) if native else None,
        last_accepted=np.asarray([r.last_accepted for r in requests]),
        block_table=np.stack([r.held.table for r in requests]) if align else None,
        shared=np.stack([columns for columns, _ in flags]) if align else None,
        pages=np.stack([r.held.pages for r in requests]),
        shared_pages=np.stack([pages for _, pages in flags]),
        request_ids=tuple(r.id for r in requests),
    )
    return rows, tokens


def row_sampling(
    work: Sequence[Work], num_draft, batch: int, *, vocab_size: int, num_seats: int | None, budget=None, confidence=None
) -> RowSampling:
    """How each of ``batch`` rows samples, null rows behind the real ones. ``num_seats`` is None without seats;
    ``budget`` and ``confidence`` [m] of each request are None without adaptive verification."""
    requests = [request for request, _, _ in work]

    def padded(values, dtype, fill=0):
        out = np.full((batch, *np.shape(values)[1:]), fill, dtype)
        out[: len(requests)] = values
        return out

    def optional(name, neutral, dtype):
        values = [getattr(r.options, name) for r in requests]
        if all(value is None for value in values):
            return None
        values += [None] * (batch - len(values))
        return np.asarray([neutral if value is None else value for value in values], dtype)

    seats = [request.seat if drafts is not None else num_seats for request, _, drafts in work]
    return RowSampling(
        key_data=padded([r.key_data for r in requests], np.uint32),
        emitted=padded([r.emitted for r in requests], np.int32),
        temperature=padded([r.options.temperature for r in requests], np.float32),
        top_k=optional("top_k", vocab_size, np.int32),
        top_p=optional("top_p", 1.0, np.float32),
        num_draft=padded(np.maximum(num_draft, 0), np.int32),
        first=padded([drafts is None for _, _, drafts in work], bool),
        seat=None if num_seats is None else padded(seats, np.int32, num_seats),
        budget=None if budget is None else np.int32(budget),
        confidence=None if confidence is None else padded(confidence, np.float32),
    )


def null_sampling(
    num_draft, batch: int, key_shape: tuple[int, ...], num_seats: int | None, drafts: int | None
) -> RowSampling:
    """``row_sampling`` of a step that has only null rows; ``drafts`` a window is None without adaptive verification."""
    flat = np.zeros(batch, np.int32)
    return RowSampling(
        np.zeros((batch, *key_shape), np.uint32),
        flat,
        flat.astype(np.float32),
        None,
        None,
        num_draft,
        flat.astype(bool),
        None if num_seats is None else flat + np.int32(num_seats),
        None if drafts is None else np.int32(batch * drafts),
        None if drafts is None else np.ones((batch, drafts), np.float32),
    )
