"""Kernels beside XLA: what each operation on a slot pool takes, from raw inputs to outputs, on every route there is.

Everything runs inside one compiled loop with the pool as its carry, its length known to the compiler: a loop that asks
the host whether to go on adds microseconds to every step. Pools are several times a cache and steps walk over
their slots, so states are cold; windows are full and acceptance runs through 1..W, differently for each row and step;
preparation of operands counts. A time is the median of several loops. The bytes are those that must move at the mean
acceptance: each state, record and activation read once, written once; the floor is those bytes at the copy bandwidth
measured here.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Group
from rich.table import Table

from kda_jax import ops
from kda_jax.accounting import format_bytes
from kda_jax.bench import machine
from kda_jax.bench.operations import CONV_WIDTH, INPUT_SETS, Maker, Shape
from kda_jax.checks import check_choice, check_integer
from pallas_kernels import routes

# (requests, heads, window) at K = V = 128
DEFAULT_SHAPES = tuple(
    Shape(B=B, H=H, W=W)
    for B, H, W in ((1, 32, 8), (8, 32, 8), (64, 32, 4), (64, 32, 8), (1, 96, 8), (16, 96, 8), (128, 12, 8))
)


class Case(NamedTuple):
    """A row: ``call(inputs, carry, slots, accepted) -> carry``."""

    call: Callable[..., Any]
    inputs: Any  # every leaf with a leading axis of INPUT_SETS
    carry: Any
    moved: float  # bytes one call must move
    kernels: tuple[str, ...]  # of the routes that run it; none: XLA only


class _Parts:
    """Inputs and calls of one shape; ``how`` is what the operations get as ``implementation``."""

    def __init__(self, maker: Maker, how: str):
        self.m, self.how = maker, how
        s = maker.shape
        self.full = jnp.full((s.B,), s.W, jnp.int32)
        self.committed = (s.W + 1) / 2  # mean acceptance

    def tokens(self):
        return self.m.tokens(self.m.shape.B, self.m.shape.W)

    def pending(self):
        m, s = self.m, self.m.shape
        correction = 0.1 * m.normal(s.B, s.HV, s.W, s.V, dtype=jnp.float32)
        return ops.Records(correction, m.normal(s.B, s.H, s.W, s.K), m.normal(s.B, s.HV, s.W, s.K))

    def empty(self):
        """Somewhere to put a verify's outputs and records."""
        m, s = self.m, self.m.shape
        records = ops.Records(
            jnp.zeros((s.B, s.HV, s.W, s.V), jnp.float32),
            jnp.zeros((s.B, s.H, s.W, s.K), m.dtype),
            jnp.zeros((s.B, s.HV, s.W, s.K), m.dtype),
        )
        return jnp.zeros((s.B, s.W, s.HV, s.V), m.dtype), records

    def verify(self, x, pool, slots):
        return ops.kda_verify(*x, self.m.gate, pool, slots, self.full, implementation=self.how)

    def commit(self, pool, records, slots, accepted):
        plan = ops.plan_commit(accepted, self.full, slots)
        return ops.kda_commit(pool, records, self.m.gate, plan, implementation=self.how)


def _decode(p: _Parts) -> Case:
    m, s, z = p.m, p.m.shape, p.m.sizes

    def call(x, carry, slots, accepted):
        return ops.kda_decode(*x, m.gate, carry[1], slots, implementation=p.how)

    carry = jnp.zeros((s.B, s.HV, s.V), m.dtype), m.pool()
    return Case(call, m.tokens(s.B), carry, 2 * z.state + z.tokens + z.output, ("decode",))


def _verify(p: _Parts) -> Case:
    z, W = p.m.sizes, p.m.shape.W

    def call(x, carry, slots, accepted):
        return *p.verify(x, carry[2], slots), carry[2]

    carry = *p.empty(), p.m.pool()
    return Case(call, p.tokens(), carry, z.state + W * (z.tokens + z.output + z.record), ("verify",))


def _commit(p: _Parts) -> Case:
    z = p.m.sizes

    def call(records, pool, slots, accepted):
        return p.commit(pool, records, slots, accepted)

    return Case(call, p.pending(), p.m.pool(), 2 * z.state + p.committed * z.record, ("commit",))


def _separate(p: _Parts) -> Case:
    """A whole step: verify, then commit of what was accepted, which reads the state again."""
    z, W = p.m.sizes, p.m.shape.W

    def call(x, carry, slots, accepted):
        o, records = p.verify(x, carry[2], slots)
        return o, records, p.commit(carry[2], records, slots, accepted)

    moved = 3 * z.state + W * (z.tokens + z.output + z.record) + p.committed * z.record
    return Case(call, p.tokens(), (*p.empty(), p.m.pool()), moved, ("verify", "commit"))


def _folded(p: _Parts) -> Case:
    """A whole step whose commit is left to the next one."""
    z, W = p.m.sizes, p.m.shape.W

    def call(inputs, carry, slots, accepted):
        x, pending = inputs
        plan = ops.plan_commit(accepted, p.full, slots)
        return ops.kda_verify_after_commit(*x, p.m.gate, carry[2], slots, p.full, pending, plan, implementation=p.how)

    moved = 2 * z.state + W * (z.tokens + z.output + z.record) + p.committed * z.record
    return Case(call, (p.tokens(), p.pending()), (*p.empty(), p.m.pool()), moved, ("verify_after_commit",))


def _native(p: _Parts) -> Case:
    """What recovery replaces: a state for each position of the window."""
    m, s, z = p.m, p.m.shape, p.m.sizes
    m.groups = max(m.groups // s.W, 2) * s.W

    def call(x, carry, slots, accepted):
        first = 1 + ((slots - 1) * s.W) % (m.groups * s.B)
        targets = first[:, None] + jnp.arange(s.W, dtype=jnp.int32)[None]
        source = first + accepted - 1
        return ops.kda_verify_native(*x, m.gate, carry[1], source, targets, p.full, implementation=p.how)

    carry = jnp.zeros((s.B, s.W, s.HV, s.V), m.dtype), m.pool()
    return Case(call, p.tokens(), carry, (1 + s.W) * z.state + s.W * (z.tokens + z.output), ())


def _histories(m: Maker) -> jax.Array:
    return jnp.zeros((1 + m.groups * m.shape.B, CONV_WIDTH - 1, m.channels), m.dtype)


def _conv_inputs(p: _Parts):
    m, s = p.m, p.m.shape
    x, y = m.normal(s.B, s.W, m.channels), jnp.zeros((s.B, s.W, m.channels), m.dtype)
    history = s.B * (CONV_WIDTH - 1) * m.channels * m.item
    return x, y, history, m.normal(m.channels, CONV_WIDTH)[0]


def _conv_step(p: _Parts) -> Case:
    x, y, history, weight = _conv_inputs(p)

    def call(x, carry, slots, accepted):
        return ops.conv_step(x, weight, carry[1], slots, p.full, implementation=p.how), carry[1]

    return Case(call, x, (y, _histories(p.m)), 2 * y.nbytes + history + weight.nbytes, ("conv_step",))


def _conv_commit(p: _Parts) -> Case:
    x, _, history, _ = _conv_inputs(p)

    def call(x, pool, slots, accepted):
        return ops.conv_commit(pool, x, ops.plan_commit(accepted, p.full, slots), implementation=p.how)

    return Case(call, x, _histories(p.m), 2 * history, ("conv_commit",))


def _conv_folded(p: _Parts) -> Case:
    x, y, history, weight = _conv_inputs(p)

    def call(inputs, carry, slots, accepted):
        x, pending = inputs
        plan = ops.plan_commit(accepted, p.full, slots)
        return ops.conv_step_after_commit(x, weight, carry[1], slots, p.full, pending, plan, implementation=p.how)

    moved = 2 * y.nbytes + 3 * history + weight.nbytes
    return Case(call, (x, x[::-1]), (y, _histories(p.m)), moved, ("conv_step_after_commit",))


CASES = {
    "decode": _decode,
    "verify": _verify,
    "commit": _commit,
    "verify, commit": _separate,
    "verify after commit": _folded,
    "verify native": _native,
    "conv step": _conv_step,
    "conv commit": _conv_commit,
    "conv step after commit": _conv_folded,
}
IMPLEMENTATIONS = ("xla", *routes.ROUTES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", nargs="+", choices=CASES, default=list(CASES), metavar="OP", help="default: all")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="B=64,H=32,W=8",
        help="requests, heads (HV: value heads), window, K and V; may be given again. Default: the ones to compare by",
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS),
        metavar="I",
        help=f"of {', '.join(IMPLEMENTATIONS)}; those that don't run here are left out (default: all)",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations")
    parser.add_argument("--repeats", type=int, default=7, help="timed loops of each row (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="calls in a loop (default %(default)s)")
    parser.add_argument("--pool-mib", type=int, default=256, help="size of the pool, at least (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="F", help="write the JSON object to this file too")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run ``kda-jax bench kernels``; the report that ``--json`` prints. Seconds and bytes."""
    check_integer("--repeats", args.repeats, 1)
    check_integer("--pool-mib", args.pool_mib, 1)
    check_integer("--steps", args.steps, 1)
    check_choice("--dtype", args.dtype, ("float32", "bfloat16"))
    shapes = [Shape.parse(text) for text in args.shape] if args.shape else DEFAULT_SHAPES
    bandwidth = _copy_bandwidth(args)
    rows = []
    for shape in shapes:
        for name in args.ops:
            for implementation in args.implementations:
                how = "xla" if implementation == "xla" else "pallas"
                case = CASES[name](_Parts(Maker(shape, args.dtype, args.pool_mib << 20), how))
                if how == "pallas" and not _runs(case, implementation, shape, args.dtype):
                    continue
                seconds = _time(case, shape, implementation, args)
                floor = case.moved / bandwidth
                where = {name: value for name, value in dataclasses.asdict(shape).items() if name != "T"}
                rows.append(
                    {"op": name, "implementation": implementation, **where, "seconds": seconds}
                    | {"bytes": case.moved, "floor_seconds": floor, "ratio": seconds / floor}
                )
    report = {
        "machine": machine.describe(),
        "dtype": args.dtype,
        "state_dtype": "float32",
        "copy_bytes_per_second": bandwidth,
        "pool_mib": args.pool_mib,
        "steps": args.steps,
        "rows": rows,
    }
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _copy_bandwidth(args: argparse.Namespace) -> float:
    """Bytes read and written per second when an fp32 array of the pool's size is updated in place, in the same loop."""
    array = jnp.zeros(args.pool_mib << 18, jnp.float32)
    inputs = jnp.ones((INPUT_SETS,), jnp.float32)
    case = Case(lambda x, carry, slots, accepted: carry + x, inputs, array, 2 * array.nbytes, ())
    return case.moved / _time(case, Shape(), "xla", args)


def _runs(case: Case, route: str, s: Shape, dtype: str) -> bool:
    """Whether the route runs all kernels of the row compiled, here."""
    sizes = {"K": s.K, "V": s.V, "W": s.W, "dtype": dtype, "state_dtype": "float32"}
    convolution = {"K": 2 * s.H * s.K + s.HV * s.V, "V": CONV_WIDTH, "W": s.W, "dtype": dtype, "state_dtype": dtype}
    with routes.only(route):
        return bool(case.kernels) and all(
            routes.compiled(op, asked=True, **(convolution if op.startswith("conv") else sizes)) for op in case.kernels
        )


def _time(case: Case, s: Shape, implementation: str, args: argparse.Namespace) -> float:
    """Seconds a call: the median of the loops."""
    inputs = [jax.tree.map(lambda x, i=i: x[i], case.inputs) for i in range(INPUT_SETS)]
    groups = (jax.tree.leaves(case.carry)[-1].shape[0] - 1) // s.B
    row = jnp.arange(s.B, dtype=jnp.int32)
    pairs = -(-args.steps // INPUT_SETS)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(inputs, carry):
        def pair(i, carry):
            for which, x in enumerate(inputs):
                x, step = jax.lax.optimization_barrier((x, i * INPUT_SETS + which))  # nothing leaves the loop
                slots = 1 + (step % groups) * s.B + row
                carry = case.call(x, carry, slots.astype(jnp.int32), 1 + (5 * step + 3 * row) % s.W)
            return carry

        return jax.lax.fori_loop(0, pairs, pair, carry)

    with contextlib.nullcontext() if implementation == "xla" else routes.only(implementation):
        compiled = loop.lower(inputs, case.carry).compile()
    carry, found = compiled(inputs, jax.tree.map(jnp.copy, case.carry)), []
    for _ in range(args.repeats):
        jax.block_until_ready(carry)
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(inputs, carry))
        found.append((time.perf_counter() - start) / (pairs * INPUT_SETS))
    return statistics.median(found)


def tables(report: dict[str, Any]) -> Group:
    """``measure``'s report for a terminal."""
    group: list[Any] = [
        machine.sentence(report["machine"]),
        f"copy bandwidth {report['copy_bytes_per_second'] / 1e9:,.1f} GB/s; activations {report['dtype']}, "
        f"states {report['state_dtype']}",
    ]
    names = ("B", "H", "HV", "K", "V", "W")
    for where in dict.fromkeys(tuple(row[name] for name in names) for row in report["rows"]):
        title = " ".join(f"{name}={size}" for name, size in zip(names, where, strict=True))
        table = Table("operation", "implementation", "time", "bytes", "floor", "time / floor", title=title)
        for column in table.columns[2:]:
            column.justify = "right"
        for row in report["rows"]:
            if tuple(row[name] for name in names) == where:
                times = [f"{row[name] * 1e6:,.1f} us" for name in ("seconds", "floor_seconds")]
                size = format_bytes(round(row["bytes"]))
                table.add_row(row["op"], row["implementation"], times[0], size, times[1], f"{row['ratio']:.2f}")
        group.append(table)
    return Group(*group)
