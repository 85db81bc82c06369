"""Host time of building one step's metadata: mixed batches, each mode, no device involved."""

import argparse
import statistics
import time
from typing import Any

import numpy as np
from rich.table import Table

from kda_jax.bench import machine
from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.checks import check_integer
from kda_jax.metadata_builder import BuilderBase, MetadataBuilder, Rows
from kda_jax.presets import load_config

WINDOW, BLOCK, PAGE = 8, 2048, 64
MODES = {
    "plain": {},
    "recover": {"window": WINDOW},
    "native": {"window": WINDOW, "recover": False},
    "recover, align": {"window": WINDOW, "mode": "align", "block_size": BLOCK},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024], help="requests in the batch")
    parser.add_argument("--context", type=int, default=8192, help="most tokens of a request (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="timed builds (default %(default)s)")


def mixed_rows(count: int, base: BuilderBase, context: int) -> Rows:
    """A batch of which one request in eight computes a prompt; the others decode, with 0 to 7 drafts."""
    r = np.random.default_rng(count)
    prefilling = np.arange(count) % 8 == 7
    draft = np.where(prefilling, -1, r.integers(0, WINDOW, count)) if base.window else np.full(count, -1)
    query = np.where(prefilling, 256, np.maximum(draft, 0) + 1)
    computed = np.where(prefilling, BLOCK, r.integers(BLOCK, context - WINDOW, count))
    slots = np.arange(1, count + 1)
    columns = -(-context // BLOCK)
    return Rows(
        query,
        computed,
        prefilling,
        draft,
        slots=slots,
        row_slots=slots[:, None] * WINDOW + np.arange(WINDOW)[None],
        last_accepted=r.integers(1, WINDOW + 1, count),
        block_table=1 + np.arange(count * columns).reshape(count, columns),
        pages=1 + np.arange(count * -(-context // PAGE)).reshape(count, -1),
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """``microseconds``: per mode and number of rows, the median of ``--repeats`` builds."""
    check_integer("--repeats", args.repeats, 1)
    check_integer("--context", args.context, 2 * BLOCK)
    config = load_config("kimi_linear_48b")
    names = tuple(f"layers.{i}" for i in range(config.num_layers))
    layout = CacheLayout.from_sizes(CacheSizes.from_config(config), window=WINDOW, dtype=config.dtype)
    found: dict[str, dict[int, float]] = {}
    for mode, options in MODES.items():
        base = BuilderBase(config, names, layout, page_size=PAGE, **options)
        builder = MetadataBuilder(base)
        for count in args.rows:
            check_integer("--rows", count, 1)
            rows, times = mixed_rows(count, base, args.context), []
            builder.build(rows)
            for _ in range(args.repeats):
                start = time.perf_counter()
                builder.build(rows)
                times.append(time.perf_counter() - start)
            found.setdefault(mode, {})[count] = 1e6 * statistics.median(times)
    return {"machine": machine.describe(), "window": WINDOW, "context": args.context, "microseconds": found}


def tables(report: dict[str, Any]) -> Table:
    sizes = list(next(iter(report["microseconds"].values())))
    where = machine.sentence(report["machine"])
    title = f"microseconds to build a step's metadata at {report['context']:,} tokens ({where})"
    table = Table("mode", *(f"{n} rows" for n in sizes), title=title)
    for mode, times in report["microseconds"].items():
        table.add_row(mode, *(f"{times[n]:.0f}" for n in sizes))
    for column in table.columns[1:]:
        column.justify = "right"
    return table
