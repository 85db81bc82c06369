"""The engine's drafter with a state on the device: who has which seat, and the program that seats a request."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.engine_requests import Request
from kda_jax.ops._couplings import next_power_of_two
from kda_jax.speculate.seats import DraftRows, Seated, Seats

SMALLEST_TEXT = 16  # tokens; texts are padded to powers of two from here on


class Drafting(NamedTuple):
    """How a step drafts; static under ``jax.jit``."""

    seated: Seated
    in_place: bool


@functools.partial(jax.jit, static_argnames="seated", donate_argnames="seats")
def begin(params: Any, seats: Seats, rows: DraftRows, tokens, lengths, *, seated: Seated) -> Seats:
    return seated.begin(params, seats, rows, tokens, lengths)


class EngineDrafter:
    """Seats for ``max_requests`` requests of up to ``max_length`` tokens. ``ValueError`` as ``Seated.of``."""

    def __init__(self, drafter: Any, params: Any, *, max_requests: int, max_length: int):
        self.params = params
        self.seated = Seated.of(drafter, params, max_requests, max_length)
        self.seats: Seats | None = self.seated.empty(params)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.seats))

    def drafting(self, rows: int, all_rows: bool) -> Drafting:
        """How a step of ``rows`` drafting rows (padded) does it; ``all_rows``: no seat is taken by anybody else."""
        return Drafting(self.seated, all_rows and rows >= self.seated.num_seats)

    def begin(self, request: Request) -> None:
        """Bring ``request.seat`` to its text."""
        options, size = request.options, self._text(len(request.tokens))
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(request.tokens)] = request.tokens
        rows = DraftRows(
            np.asarray([request.seat], np.int32),
            request.key_data[None],
            np.asarray([options.temperature], np.float32),
            None if options.top_k is None else np.asarray([options.top_k], np.int32),
            None if options.top_p is None else np.asarray([options.top_p], np.float32),
        )
        lengths = np.asarray([len(request.tokens)], np.int32)
        self.seats = begin(self.params, self.seats, rows, tokens, lengths, seated=self.seated)

    def warm_up(self, key_shape: tuple[int, ...]) -> int:
        """Compile ``begin`` for every bucket of text lengths, on no seat; returns how many there are."""
        count, size = 0, 0
        while size < self.seated.length:
            size = self._text(size + 1)
            rows = DraftRows(
                np.asarray([self.seated.num_seats], np.int32),
                np.zeros((1, *key_shape), np.uint32),
                np.zeros(1, np.float32),
                None,
                None,
            )
            seats = jax.tree.map(jnp.copy, self.seats)
            begin(self.params, seats, rows, np.zeros((1, size), np.int32), np.ones(1, np.int32), seated=self.seated)
            count += 1
        return count

    def _text(self, length: int) -> int:
        return min(max(next_power_of_two(length), SMALLEST_TEXT), self.seated.length)
