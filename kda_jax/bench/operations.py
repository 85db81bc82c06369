"""Single operations: time inside one compiled loop, the bytes they must move, and how far that is from the floor.

The loop walks over a pool of states larger than a cache and over two sets of inputs, so that no call repeats the one
before it and nothing can be hoisted out of it. A time is the loop's wall clock, less that of an empty loop, over its
calls; a median of several loops. The bytes are each input read once and each output written once; the floor is those
bytes at the copy bandwidth measured here. A shape whose arrays stay in a cache may beat it.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Group
from rich.table import Table

from kda_jax import ops
from kda_jax.accounting import format_bytes
from kda_jax.bench import machine
from kda_jax.checks import check_integer

CONV_WIDTH = 4
INPUT_SETS = 2
LOOP_SECONDS = 0.2
MAX_STEPS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """B requests, H query and key heads, HV value heads (None: H), K and V dims, W window, T tokens of a prompt."""

    B: int = 1
    H: int = 32
    HV: int | None = None
    K: int = 128
    V: int = 128
    W: int = 8
    T: int = 512

    def __post_init__(self):
        if self.HV is None:
            object.__setattr__(self, "HV", self.H)
        for field in dataclasses.fields(self):
            check_integer(f"--shape {field.name}", getattr(self, field.name), 1)
        if self.HV % self.H:
            raise ValueError(f"--shape HV must be a multiple of H={self.H}, got {self.HV}")

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """``B=8,H=32,V=64``; what is left out has its default. Raises ``ValueError`` naming the part."""
        known, values = [field.name for field in dataclasses.fields(cls)], {}
        for part in text.split(","):
            name, _, number = part.strip().partition("=")
            if name not in known or not number.isdecimal():
                raise ValueError(f"--shape must be NAME=NUMBER with names of {', '.join(known)}, got {part!r}")
            values[name] = int(number)
        return cls(**values)

    def __str__(self):
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))


# the model that ships, and a layer of Kimi-Linear-48B
DEFAULT_SHAPES = (Shape(H=8, K=32, V=32), Shape(), Shape(B=8))


class Case(NamedTuple):
    """An operation ready for the loop: ``call(inputs, carry, slots) -> carry``."""

    call: Callable[[Any, Any, jax.Array], Any]
    inputs: Any  # every leaf with a leading axis of INPUT_SETS
    carry: Any
    moved: int  # bytes one call must move
    slots: Callable[[Any], jax.Array]  # step -> the slots of that step's requests


class _Sizes(NamedTuple):
    """Bytes of what a case reads and writes."""

    state: int  # one recurrent state of every request
    tokens: int  # q, k, v, raw gate and raw beta of one token of every request
    output: int  # o of one token of every request
    record: int  # correction, key and raw gate of one token of every request


def _sizes(s: Shape, item: int) -> _Sizes:
    keys, values, gates = s.B * s.H * s.K, s.B * s.HV * s.V, s.B * s.HV * s.K
    return _Sizes(
        state=values * s.K * 4,
        tokens=(2 * keys + values + gates + s.B * s.HV) * item,
        output=values * item,
        record=values * 4 + (keys + gates) * item,
    )


class Maker:
    """Random inputs and pools of one shape."""

    def __init__(self, shape: Shape, dtype: str, pool_bytes: int):
        self.shape, self.dtype, self.item = shape, jnp.dtype(dtype), jnp.dtype(dtype).itemsize
        self.sizes = _sizes(shape, self.item)
        self.random = np.random.default_rng(0)
        self.groups = max(2, pool_bytes // self.sizes.state)  # how many times B requests' states fill the pool
        self.gate = ops.GateParams(jnp.zeros(shape.HV), jnp.full((shape.HV, shape.K), -3.0))

    def slots(self, step):
        first = 1 + (step % self.groups) * self.shape.B
        return (first + jnp.arange(self.shape.B)).astype(jnp.int32)

    def normal(self, *shape: int, dtype: Any = None) -> jax.Array:
        values = self.random.standard_normal((INPUT_SETS, *shape), np.float32)
        return jnp.asarray(values.astype(dtype or self.dtype))

    def tokens(self, *lead: int) -> tuple[jax.Array, ...]:
        """q, k, v, raw gate, raw beta of ``lead`` tokens."""
        s = self.shape
        last = ((s.H, s.K), (s.H, s.K), (s.HV, s.V), (s.HV, s.K), (s.HV,))
        return tuple(self.normal(*lead, *dims) for dims in last)

    def pool(self) -> jax.Array:
        s = self.shape
        return jnp.full((1 + self.groups * s.B, s.HV, s.V, s.K), 0.01, jnp.float32)

    @property
    def channels(self) -> int:
        return 2 * self.shape.H * self.shape.K + self.shape.HV * self.shape.V


def _decode(m: Maker, implementation) -> Case:
    def call(x, carry, slots):
        return ops.kda_decode(*x, m.gate, carry[1], slots, implementation=implementation)

    s, z = m.shape, m.sizes
    carry = jnp.zeros((s.B, s.HV, s.V), m.dtype), m.pool()
    return Case(call, m.tokens(s.B), carry, 2 * z.state + z.tokens + z.output, m.slots)


def _verify(m: Maker, implementation) -> Case:
    s, z = m.shape, m.sizes
    full = jnp.full((s.B,), s.W, jnp.int32)

    def call(x, carry, slots):
        return *ops.kda_verify(*x, m.gate, carry[2], slots, full, implementation=implementation), carry[2]

    records = ops.Records(
        jnp.zeros((s.B, s.HV, s.W, s.V), jnp.float32),
        jnp.zeros((s.B, s.H, s.W, s.K), m.dtype),
        jnp.zeros((s.B, s.HV, s.W, s.K), m.dtype),
    )
    carry = jnp.zeros((s.B, s.W, s.HV, s.V), m.dtype), records, m.pool()
    return Case(call, m.tokens(s.B, s.W), carry, z.state + s.W * (z.tokens + z.output + z.record), m.slots)


def _verify_native(m: Maker, implementation) -> Case:
    s, z = m.shape, m.sizes
    full = jnp.full((s.B,), s.W, jnp.int32)
    m.groups = max(m.groups // s.W, 2) * s.W  # every request has a slot for each token of the window

    def call(x, carry, slots):
        first = 1 + ((slots - 1) * s.W) % (m.groups * s.B)
        targets = first[:, None] + jnp.arange(s.W, dtype=jnp.int32)[None]
        return ops.kda_verify_native(*x, m.gate, carry[1], first, targets, full, implementation=implementation)

    carry = jnp.zeros((s.B, s.W, s.HV, s.V), m.dtype), m.pool()
    return Case(call, m.tokens(s.B, s.W), carry, (1 + s.W) * z.state + s.W * (z.tokens + z.output), m.slots)


def _commit(m: Maker, implementation) -> Case:
    s, z = m.shape, m.sizes
    full = jnp.full((s.B,), s.W, jnp.int32)

    def call(records, pool, slots):
        plan = ops.plan_commit(full, full, slots)
        return ops.kda_commit(pool, records, m.gate, plan, implementation=implementation)

    records = ops.Records(
        m.normal(s.B, s.HV, s.W, s.V, dtype=jnp.float32), m.normal(s.B, s.H, s.W, s.K), m.normal(s.B, s.HV, s.W, s.K)
    )
    return Case(call, records, m.pool(), 2 * z.state + s.W * z.record, m.slots)


def _chunked(m: Maker, implementation) -> Case:
    s, z = m.shape, m.sizes
    q, k, v, raw_gate, raw_beta = m.tokens(s.B, s.T)

    @jax.jit
    def prepare(q, k, raw_gate, raw_beta):
        log_decay = ops.kda_gate(raw_gate, m.gate.A_log, m.gate.dt_bias)
        beta = jax.nn.sigmoid(raw_beta.astype(jnp.float32))
        return ops.l2_normalize(q).astype(m.dtype), ops.l2_normalize(k).astype(m.dtype), log_decay, beta

    q, k, log_decay, beta = prepare(q, k, raw_gate, raw_beta)
    inputs = q, k, v, log_decay, beta

    def call(x, carry, slots):
        return ops.kda_chunked(*x, initial_state=carry[1], implementation=implementation)

    carry = jnp.zeros((s.B, s.T, s.HV, s.V), m.dtype), jnp.zeros((s.B, s.HV, s.V, s.K), jnp.float32)
    read = sum(x.nbytes for x in inputs) // INPUT_SETS
    return Case(call, inputs, carry, 2 * z.state + read + s.T * z.output, m.slots)


def _conv_prefill(m: Maker, implementation) -> Case:
    s, weight = m.shape, m.normal(m.channels, CONV_WIDTH)[0]

    def call(x, carry, slots):
        return ops.conv_prefill(x, weight, history=carry[1], implementation=implementation)

    carry = jnp.zeros((s.B, s.T, m.channels), m.dtype), jnp.zeros((s.B, CONV_WIDTH - 1, m.channels), m.dtype)
    moved = carry[0].nbytes * 2 + carry[1].nbytes * 2 + weight.nbytes
    return Case(call, m.normal(s.B, s.T, m.channels), carry, moved, m.slots)


def _conv_pool(m: Maker) -> jax.Array:
    return jnp.zeros((1 + m.groups * m.shape.B, CONV_WIDTH - 1, m.channels), m.dtype)


def _conv_step(m: Maker, implementation) -> Case:
    s, weight = m.shape, m.normal(m.channels, CONV_WIDTH)[0]
    full = jnp.full((s.B,), s.W, jnp.int32)

    def call(x, carry, slots):
        return ops.conv_step(x, weight, carry[1], slots, full, implementation=implementation), carry[1]

    carry = jnp.zeros((s.B, s.W, m.channels), m.dtype), _conv_pool(m)
    moved = 2 * carry[0].nbytes + carry[1][0].nbytes * s.B + weight.nbytes
    return Case(call, m.normal(s.B, s.W, m.channels), carry, moved, m.slots)


def _conv_commit(m: Maker, implementation) -> Case:
    """All tokens of the window accepted: the last of them replace the history."""
    s = m.shape
    full = jnp.full((s.B,), s.W, jnp.int32)

    def call(x, pool, slots):
        return ops.conv_commit(pool, x, ops.plan_commit(full, full, slots), implementation=implementation)

    pool = _conv_pool(m)
    return Case(call, m.normal(s.B, s.W, m.channels), pool, 2 * pool[0].nbytes * s.B, m.slots)


_CASES = {
    "decode": _decode,
    "verify": _verify,
    "verify_native": _verify_native,
    "commit": _commit,
    "chunked": _chunked,
    "conv_prefill": _conv_prefill,
    "conv_step": _conv_step,
    "conv_commit": _conv_commit,
}
NAMES = tuple(_CASES)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run ``kda-jax bench ops``; the report that ``--json`` prints. Seconds and bytes."""
    check_integer("--repeats", args.repeats, 1)
    check_integer("--pool-mib", args.pool_mib, 1)
    shapes = [Shape.parse(text) for text in args.shape] if args.shape else DEFAULT_SHAPES
    bandwidth = copy_bandwidth(args.pool_mib << 20, args.repeats)
    rows = []
    for shape in shapes:
        for name in args.ops:
            case = _CASES[name](Maker(shape, args.dtype, args.pool_mib << 20), args.implementation)
            seconds = time_case(case, args.repeats)
            floor = case.moved / bandwidth
            rows.append(
                {"op": name, **dataclasses.asdict(shape), "seconds": seconds, "bytes": case.moved}
                | {"floor_seconds": floor, "ratio": seconds / floor}
            )
    return {
        "machine": machine.describe(),
        "dtype": args.dtype,
        "implementation": args.implementation,
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
    }


@functools.partial(jax.jit, static_argnames=("call", "slots"), donate_argnames="carry")
def _loop(inputs, carry, steps, *, call, slots):
    def step(i, carry):
        chosen = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i % INPUT_SETS, keepdims=False), inputs)
        return call(chosen, carry, slots(i))

    return jax.lax.fori_loop(0, steps, step, carry)


def time_case(case: Case, repeats: int) -> float:
    """Seconds a call: the median of ``repeats`` loops of at least ``LOOP_SECONDS``, less an empty loop's time."""

    def run(carry, steps):
        start = time.perf_counter()
        carry = _loop(case.inputs, carry, jnp.int32(steps), call=case.call, slots=case.slots)
        jax.block_until_ready(carry)
        return carry, time.perf_counter() - start

    carry, _ = run(jax.tree.map(jnp.copy, case.carry), 1)  # compiles
    empty = []
    for _ in range(3):
        carry, seconds = run(carry, 0)
        empty.append(seconds)
    steps, found = 1, []
    while len(found) < repeats:
        carry, seconds = run(carry, steps)
        seconds -= statistics.median(empty)
        if seconds < LOOP_SECONDS and steps < MAX_STEPS:
            steps, found = min(MAX_STEPS, 2 * steps), []
        else:
            found.append(seconds / steps)
    return statistics.median(found)


def copy_bandwidth(nbytes: int, repeats: int) -> float:
    """Bytes read and written per second when an fp32 array of ``nbytes`` is updated in place."""
    array = jnp.zeros((max(1, nbytes // 4),), jnp.float32)

    def call(x, carry, slots):
        return carry + x

    case = Case(call, jnp.ones((INPUT_SETS,), jnp.float32), array, 2 * array.nbytes, lambda step: step)
    return case.moved / time_case(case, repeats)


def tables(report: dict[str, Any]) -> Group:
    """``measure``'s report for a terminal."""
    group: list[Any] = [
        machine.sentence(report["machine"]),
        f"copy bandwidth {report['copy_bytes_per_second'] / 1e9:,.1f} GB/s; activations {report['dtype']}; "
        f"implementation {report['implementation'] or 'the best that runs here'}",
    ]
    shapes = dict.fromkeys(Shape(**{f.name: row[f.name] for f in dataclasses.fields(Shape)}) for row in report["rows"])
    for shape in shapes:
        table = Table("operation", "time", "bytes", "floor", "time / floor", title=str(shape))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in report["rows"]:
            if all(row[name] == value for name, value in dataclasses.asdict(shape).items()):
                times = [f"{row[name] * 1e6:,.1f} us" for name in ("seconds", "floor_seconds")]
                table.add_row(row["op"], times[0], format_bytes(row["bytes"]), times[1], f"{row['ratio']:.1f}")
        group.append(table)
    return Group(*group)
