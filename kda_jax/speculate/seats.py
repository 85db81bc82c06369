"""Any drafter for requests that come and go: what it keeps of each is in a seat, and a call takes the rows it is for.

A drafter speaks of a batch (``drafter.py``); here its state is made once for all seats, and the part of each row found
by how the shapes of ``start`` grow with the batch.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kda_jax.speculate.drafter import Draft, DraftContext

Array = jax.Array


class Place(NamedTuple):
    """Where an array of a drafter's state has row i: ``per_row`` entries of ``axis``, from ``first + i * per_row``."""

    axis: int
    first: int
    per_row: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seats:
    """What is kept between steps, on the device."""

    tokens: Array  # int32 [S, L]: each request's text
    lengths: Array  # int32 [S]
    state: Any  # the drafter's, for S rows


class DraftRows(NamedTuple):
    """The rows of a call."""

    seat: Array  # int32 [R]: S for a row without a seat
    key_data: Array  # uint32 [R, ...]
    temperature: Array  # fp32 [R]
    top_k: Array | None  # int32 [R]
    top_p: Array | None  # fp32 [R]


@dataclasses.dataclass(frozen=True)
class Seated:
    """A drafter on ``num_seats`` seats for texts of up to ``length`` tokens; hashable, static under ``jax.jit``."""

    drafter: Any
    num_seats: int
    length: int
    places: tuple[Place, ...]  # one for each array of the state, in the order of its leaves

    @classmethod
    def of(cls, drafter: Any, params: Any, num_seats: int, length: int) -> "Seated":
        """``ValueError`` where the arrays of the drafter's state don't keep their rows apart."""
        one, two, three = (jax.tree.leaves(_shapes(drafter, params, n, length)) for n in (1, 2, 3))
        places = []
        for shapes in zip(one, two, three, strict=True):
            grown = [i for i, sizes in enumerate(zip(*(x.shape for x in shapes), strict=True)) if len(set(sizes)) > 1]
            sizes = [x.shape[grown[0]] for x in shapes] if len(grown) == 1 else [0, 0, 0]
            per_row = sizes[1] - sizes[0]
            if per_row < 1 or sizes[2] - sizes[1] != per_row or sizes[0] < per_row:
                raise ValueError(
                    "drafter must keep a state whose arrays each have one axis that grows with the rows, got shapes "
                    f"{', '.join(str(list(x.shape)) for x in shapes)} for 1, 2 and 3 rows"
                )
            places.append(Place(grown[0], sizes[0] - per_row, per_row))
        return cls(drafter, num_seats, length, tuple(places))

    def empty(self, params: Any) -> Seats:
        """Seats nobody has taken."""
        state = _shapes(self.drafter, params, self.num_seats, self.length)
        return Seats(
            jnp.zeros((self.num_seats, self.length), jnp.int32),
            jnp.zeros((self.num_seats,), jnp.int32),
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state),
        )

    def begin(self, params: Any, seats: Seats, rows: DraftRows, tokens: Array, lengths: Array) -> Seats:
        """Seat requests whose texts are ``tokens`` int32 [R, T], ``lengths`` [R]; their newest token is not in the
        target's cache yet."""
        size = tokens.shape[1]
        whole = jnp.pad(tokens, [(0, 0), (0, self.length - size)])
        context = DraftContext(whole, lengths, rows.temperature, rows.top_k, rows.top_p, size)
        state = self.drafter.start(params, context)
        return Seats(
            seats.tokens.at[rows.seat].set(whole, mode="drop"),
            seats.lengths.at[rows.seat].set(lengths, mode="drop"),
            self._put(seats.state, state, rows.seat),
        )

    def draft(self, params: Any, seats: Seats, rows: DraftRows, *, in_place: bool) -> tuple[Draft, Seats]:
        """The ``Draft`` of the rows, its state left out, and the seats.

        Only the rows' seats change. ``in_place`` calls the drafter on all seats, which copies nothing: for when every
        seat that matters has a row.
        """
        rows, back = (self._on_all_seats(rows), rows.seat) if in_place else (rows, None)
        text = [jnp.take(x, rows.seat, axis=0, mode="clip") for x in (seats.tokens, seats.lengths)]
        context = DraftContext(*text, rows.temperature, rows.top_k, rows.top_p)
        state = seats.state if in_place else self._take(seats.state, rows.seat)
        keys = jax.vmap(jax.random.wrap_key_data)(rows.key_data)
        made = self.drafter(params, state, context, keys)
        if made.parents is not None:
            raise ValueError("drafter must draft chains in the engine, got drafts with parents")
        for old, new in zip(jax.tree.leaves(seats.state), jax.tree.leaves(made.state), strict=True):
            if old.dtype != new.dtype:
                raise ValueError(f"drafter must keep the dtypes of its state, got {new.dtype} for {old.dtype}")
        state = made.state if in_place else self._put(seats.state, made.state, rows.seat)
        made = made._replace(state=None)
        if in_place:
            made = jax.tree.map(lambda x: jnp.take(x, back, axis=0, mode="clip"), made)
        return made, dataclasses.replace(seats, state=state)

    def absorb(self, seats: Seats, seat: Array, tokens: Array, count: Array) -> Seats:
        """Append ``count`` [B] of ``tokens`` [B, W] to the texts of ``seat`` [B]."""
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        start = jnp.take(seats.lengths, seat, mode="clip")[:, None]
        place = jnp.where(column < count[:, None], start + column, self.length)
        return dataclasses.replace(
            seats,
            tokens=seats.tokens.at[seat[:, None], place].set(tokens, mode="drop"),
            lengths=seats.lengths.at[seat].add(count, mode="drop"),
        )

    def _on_all_seats(self, rows: DraftRows) -> DraftRows:
        def spread(x):
            if x is None:
                return None
            return jnp.zeros((self.num_seats, *x.shape[1:]), x.dtype).at[rows.seat].set(x, mode="drop")

        return DraftRows(jnp.arange(self.num_seats, dtype=jnp.int32), *(spread(x) for x in rows[1:]))

    def _take(self, state: Any, seat: Array) -> Any:
        leaves, tree = jax.tree.flatten(state)
        taken = [
            jnp.take(x, _entries(place, seat), axis=place.axis, mode="clip")
            for x, place in zip(leaves, self.places, strict=True)
        ]
        return jax.tree.unflatten(tree, taken)

    def _put(self, state: Any, new: Any, seat: Array) -> Any:
        leaves, tree = jax.tree.flatten(state)
        put = []
        for x, y, place in zip(leaves, tree.flatten_up_to(new), self.places, strict=True):
            put.append(x.at[(slice(None),) * place.axis + (_entries(place, seat),)].set(y, mode="drop"))
        return jax.tree.unflatten(tree, put)


def _entries(place: Place, seat: Array) -> Array:
    own = place.first + seat[:, None] * place.per_row + jnp.arange(place.per_row, dtype=jnp.int32)[None]
    return jnp.concatenate([jnp.arange(place.first, dtype=jnp.int32), own.reshape(-1)])


def _shapes(drafter: Any, params: Any, rows: int, length: int) -> Any:
    def vector(dtype):
        return jax.ShapeDtypeStruct((rows,), dtype)

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    context = DraftContext(tokens, vector(jnp.int32), vector(jnp.float32), prompt_size=1)
    return jax.eval_shape(drafter.start, params, context)
