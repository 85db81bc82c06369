"""The steps an engine compiles ahead of time, made of null rows: the shapes of real ones, and nothing to do."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from kda_jax.metadata_builder import Built, MetadataBuilder, Rows
from kda_jax.ops._couplings import next_power_of_two


def compositions(builder: MetadataBuilder, max_rows: int, max_tokens: int) -> Iterator[tuple[Built, np.ndarray, bool]]:
    """(step of null rows, its drafts per row, whether its commit is put off) for each bucket of rows and tokens."""
    rows = 1
    while rows <= next_power_of_two(max_rows):
        yield from _of_rows(builder, rows, max_tokens)
        rows *= 2


def windows(builder: MetadataBuilder, rows: int, packed: int | None) -> Built:
    """A step of ``rows`` windows that hold ``packed`` tokens in all (None: all they can), read from nowhere and leave
    nothing: what such a step costs beside states and context. ``packed`` is a multiple of ``rows``."""
    window = builder.base.window
    built = _null(builder, rows, window, False, window - 1, 1)
    spec = built.metadata.spec
    lengths = np.full_like(spec.lengths, window if packed is None else packed // rows)
    request_rows = np.arange(len(lengths), dtype=np.int32)
    spec = dataclasses.replace(spec, lengths=lengths, request_rows=request_rows, packed=packed)
    return built._replace(metadata=dataclasses.replace(built.metadata, spec=spec))


def _of_rows(builder: MetadataBuilder, rows: int, max_tokens: int):
    base = builder.base
    if rows * (base.window or 1) <= next_power_of_two(max_tokens):
        drafts = [-1] if base.window is None else [0] if base.recover else [0, base.window - 1]
        for draft in drafts:
            built = _null(builder, rows, 1 + max(draft, 0), False, draft, 1)
            spec = built.metadata.spec is not None
            for defer in {False, spec and base.recover}:
                yield built, np.full(built.batch, max(draft, 0), np.int32), defer
    tokens = 1
    while rows * tokens <= next_power_of_two(max_tokens) and tokens <= (base.block_size or tokens):
        for computed in (0, base.block_size or 1):
            built = _null(builder, rows, tokens, True, -1, computed)
            yield built, np.zeros(built.batch, np.int32), False
        tokens *= 2


def _null(builder: MetadataBuilder, count: int, query: int, prefilling: bool, draft: int, computed: int) -> Built:
    base, one = builder.base, np.ones((count, 1), np.int32)
    columns = (computed + query) // (base.block_size or computed + query) + 1
    pages = (computed + query) // (base.page_size or 1) + 1
    built = builder.build(
        Rows(
            np.full(count, query),
            np.full(count, computed),
            np.full(count, prefilling),
            np.full(count, draft),
            slots=one[:, 0],
            row_slots=np.repeat(one, base.window or 1, axis=1),
            last_accepted=one[:, 0],
            block_table=np.repeat(one, columns, axis=1) if base.mode == "align" else None,
            pages=np.repeat(one, pages, axis=1) if base.page_size is not None else None,
        )
    )
    return built._replace(metadata=built.metadata.nulled(built.batch))
