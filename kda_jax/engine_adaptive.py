"""The engine's side of adaptive verification: what a step costs, and what is expected of each request's drafts."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from kda_jax.engine_requests import Request
from kda_jax.engine_schedule import Work
from kda_jax.metadata import StepMetadata
from kda_jax.metadata_builder import Built
from kda_jax.speculate.adaptive import best_budget, expected, faded, monotone, sizes

REMEMBERED = 9  # steps whose time says what a step costs besides its windows


class Budget(NamedTuple):
    """What a step verifies."""

    drafts: int  # most of them in all
    tokens: int  # of the windows, drafts or not
    packed: int | None  # as ``SpecRows.packed``


class Adaptive:
    """Decides each step's budget.

    A step's time is that of its windows, measured on null rows for each number of rows and tokens, and a part that does
    not depend on the drafts: states, context, prompts beside them. That part is learnt from the steps that run.

    Args:
      window: tokens of a window.
      measure: (rows, packed) -> milliseconds of a step of that many null windows.
    """

    def __init__(self, window: int, measure: Callable[[int, int | None], float]):
        self.window, self._measure = window, measure
        self._windows: dict[int, list[tuple[int, float]]] = {}
        self._rest: dict[tuple, collections.deque] = {}
        self._judged = self._stood = 0

    def costs(self, rows: int) -> list[tuple[int, float]]:
        """(tokens, milliseconds) of steps of ``rows`` null windows, measured when first asked for."""
        if rows not in self._windows:
            full = rows * self.window
            found = [(size, self._measure(rows, self._packed(size, full))) for size in sizes(rows, self.window)]
            self._windows[rows] = monotone(found)
        return self._windows[rows]

    @staticmethod
    def _packed(size: int, full: int) -> int | None:
        return None if size == full else size

    def plan(self, work: Sequence[Work], built: Built) -> tuple[Budget | None, StepMetadata]:
        """The step's budget, None without windows, and its metadata with the windows packed to it."""
        spec = built.metadata.spec
        if spec is None:
            return None, built.metadata
        budget = self.choose(work, len(spec.request_rows), _kind(built))
        spec = dataclasses.replace(spec, packed=budget.packed)
        return budget, dataclasses.replace(built.metadata, spec=spec)

    def choose(self, work: Sequence[Work], rows: int, kind: Hashable) -> Budget:
        """The budget of a step whose windows are padded to ``rows``; ``kind`` says what else is in it."""
        survival, decoding = [], 0
        for request, _, drafts in work:
            if drafts is not None:
                decoding += 1
                survival.append(np.cumprod(self.confidence(request)[: len(drafts)]))
        rest = max(float(np.median(self._rest[rows, kind])), 0.0) if (rows, kind) in self._rest else 0.0
        tokens, ms = zip(*self.costs(rows), strict=True)
        drafts, best = best_budget(np.concatenate(survival), decoding, tokens, np.asarray(ms) + rest)
        return Budget(int(drafts), tokens[best], self._packed(tokens[best], rows * self.window))

    def confidence(self, request: Request) -> np.ndarray:
        """What is expected of each draft of the next window, given that those before it stand; [m]."""
        if request.confidence is not None:
            return request.confidence
        each = expected(request.judged, request.stood, self._judged, self._stood)
        return np.full(self.window - 1, each, np.float32)

    def learn(self, work: Sequence[Work], built: Built, budget: Budget, read: np.ndarray, ms: float) -> None:
        """What a step of ``ms`` milliseconds says of the next ones; ``read`` is what ``run_step`` returned."""
        self.observe(budget, len(built.metadata.spec.request_rows), _kind(built), ms)
        for row, (request, _, drafts) in enumerate(work):
            if drafts is None:
                continue
            said = np.ascontiguousarray(read[row, self.window : -3]).view(np.float32)
            request.confidence = None if said[0] < 0 else said
            self.judge(request, int(read[row, -3]), max(int(read[row, -2]) - 1, 0))

    def judge(self, request: Request, judged: int, stood: int) -> None:
        """Of ``judged`` drafts the first ``stood`` stood."""
        request.judged, request.stood = faded(request.judged, request.stood, judged, stood)
        self._judged += min(judged, stood + 1)
        self._stood += stood

    def observe(self, budget: Budget, rows: int, kind: Hashable, ms: float) -> None:
        """A step with ``budget`` took ``ms``."""
        windows = dict(self.costs(rows))[budget.tokens]
        self._rest.setdefault((rows, kind), collections.deque(maxlen=REMEMBERED)).append(ms - windows)


def _kind(built: Built) -> Hashable:
    prefill = built.metadata.prefill
    return built.batch, built.tokens if prefill is not None else 0, 0 if prefill is None else len(prefill.request_rows)
