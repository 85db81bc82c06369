"""Continuous batching: many requests over one step function, each with the tokens it would get alone.

A step takes the decoding requests, then prompt chunks, up to a token budget; requests wait for slots and are sent back
to waiting (their text kept, their state dropped) when older ones need the memory. What a step sampled is read back
once; the next step is built from it.
"""

import dataclasses
import itertools
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kda_jax.cache import Cache, PendingCommit, make_pools
from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.cache_options import CacheOptions, check_serving
from kda_jax.checks import check_integer
from kda_jax.engine_adaptive import Adaptive
from kda_jax.engine_drafter import Drafting, EngineDrafter
from kda_jax.engine_memory import Memory
from kda_jax.engine_program import RowSampling, fold, run_step
from kda_jax.engine_progress import progress as progress_bar
from kda_jax.engine_requests import EngineStats, Output, Request, checked_prompt
from kda_jax.engine_rows import batch_rows, null_sampling, row_sampling
from kda_jax.engine_schedule import Scheduler
from kda_jax.engine_warm_up import compositions, windows
from kda_jax.metadata_builder import SMALLEST, BuilderBase, MetadataBuilder, Rows, Smallest, postprocess
from kda_jax.options import GenerateOptions, SpeculativeOptions
from kda_jax.speculate.lookup import Lookup
from kda_jax.speculate.resolve import resolve_drafter
from kda_jax.speculate.sampling import row_keys

DEFAULT_LENGTH = 4096


class Engine:
    """Serves requests; not thread-safe.

    Args:
      model: from ``kda_jax.load``.
      cache: ``CacheOptions``.
      speculative: ``SpeculativeOptions`` without branches, or None.
      drafter: as ``generate`` takes it: None for method "ngram", else what the method asks for.
      max_requests: most requests that hold memory at once.
      max_tokens_per_step: most tokens, of prompts, windows and decodes, in one step; at least a window.
      max_length: most tokens of a request, output included; None for 4096 or the model's most.
      smallest: ``Smallest`` buckets of rows, tokens and columns; larger ones compile fewer programs.
      implementation: of the operations.

    Raises:
      ValueError: naming what does not fit, before anything is allocated.
    """

    def __init__(
        self,
        model: Any,
        *,
        cache: CacheOptions,
        speculative: SpeculativeOptions | None = None,
        drafter: Any = None,
        max_requests: int,
        max_tokens_per_step: int,
        max_length: int | None = None,
        smallest: Smallest = SMALLEST,
        implementation: str | None = None,
    ):
        config = model.config
        check_serving(config, cache, speculative, implementation=implementation)
        drafter, drafter_params = resolve_drafter(config, speculative, drafter, implementation)
        if speculative is not None and speculative.branches is not None:
            raise ValueError(f"branches must be None in the engine, got {speculative.branches}")
        window = speculative.window if speculative is not None else 1
        check_integer("max_requests", max_requests, 1)
        check_integer("max_tokens_per_step", max_tokens_per_step, window)
        max_length = min(config.max_length, DEFAULT_LENGTH) if max_length is None else max_length
        check_integer("max_length", max_length, 2, config.max_length)
        self.model, self.config, self.speculative, self.options = model, config, speculative, cache
        self.max_requests, self.max_tokens_per_step, self.max_length = max_requests, max_tokens_per_step, max_length
        self._implementation = implementation
        self._key_shape = jax.random.key_data(jax.random.key(0)).shape
        self._native = speculative is not None and not speculative.recover
        self._memory = Memory(
            cache,
            native_window=window if self._native else None,
            max_requests=max_requests,
            max_length=max_length,
            lookahead=window - 1,
        )
        dtype = model.params.embed.dtype
        layout = CacheLayout.from_sizes(
            CacheSizes.from_config(config),
            window=window if speculative is not None else None,
            dtype=dtype,
            state_dtype=cache.state_dtype,
        )
        self._builder = MetadataBuilder(
            BuilderBase(
                config,
                tuple(f"layers.{i}.{kind}" for i, kind in enumerate(config.mixer_kinds)),
                layout,
                window if speculative is not None else None,
                speculative is None or speculative.recover,
                cache.mode,
                cache.block_size,
                cache.tokens_per_page,
                smallest,
            )
        )
        self._cache: Cache = make_pools(
            config,
            slots=self._memory.slots.num_slots,
            pages=self._memory.pages.num_slots,
            page_size=cache.tokens_per_page,
            dtype=dtype,
            state_dtype=jnp.dtype(cache.state_dtype),
        )
        self._stats = EngineStats(
            state_bytes=self._cache.state.nbytes + self._cache.conv.nbytes,
            latent_bytes=sum(x.nbytes for x in self._cache.latents),
        )
        self._scheduler = Scheduler(
            self._memory,
            self._stats,
            max_requests=max_requests,
            max_tokens=max_tokens_per_step,
            num_draft=window - 1,
        )
        self._drafter: EngineDrafter | None = None  # n-grams are looked up on the host, in what each request keeps
        if speculative is not None and speculative.method != "ngram":
            self._drafter = EngineDrafter(drafter, drafter_params, max_requests=max_requests, max_length=max_length)
            self._stats.drafter_bytes = self._drafter.nbytes
        adaptive = speculative is not None and speculative.adaptive
        self._adaptive = Adaptive(window, self._time_windows) if adaptive else None
        self._numbers = itertools.count()
        self._pending: tuple | None = None
        self._cancelled: list[Output] = []
        self._failure: BaseException | None = None

    # requests

    def submit(
        self,
        prompt_tokens: Sequence[int],
        *,
        options: GenerateOptions,
        key: Any = None,
        request_id: Hashable = None,
    ) -> Hashable:
        """Queue a prompt; returns the request's id (a number if none is given).

        The request gets the tokens of ``generate`` on its prompt alone with the same ``options`` and ``key`` (default
        ``jax.random.key(0)``).

        Raises:
          ValueError: an empty prompt, a token or stop token out of range, more tokens than ``max_length``, an id in
            use, options with rows. Other requests go on.
        """
        tokens = checked_prompt(
            prompt_tokens,
            options,
            vocab=self.config.vocab_size,
            max_length=self.max_length,
            implementation=self._implementation,
        )
        number = next(self._numbers)
        request_id = number if request_id is None else request_id
        if request_id in self._scheduler.requests:
            raise ValueError(f"request_id must not be in use, got {request_id!r}")
        key = jax.random.key(0) if key is None else key
        if not isinstance(key, jax.Array | np.ndarray):
            raise ValueError(f"key must be a JAX key such as jax.random.key(0), got {key!r}")
        key_data = np.asarray(jax.random.key_data(row_keys(jnp.asarray(key), 1)))[0]
        if key_data.shape != self._key_shape:
            raise ValueError(f"key must be of jax's default kind, with data {self._key_shape}, got {key_data.shape}")
        lookup = None
        if self.speculative is not None and self._drafter is None:
            lookup = Lookup(self.speculative.ngram_max, self.speculative.ngram_min)
            lookup.extend(tokens)
        self._scheduler.requests[request_id] = Request(
            request_id,
            number,
            tokens,
            len(tokens),
            options,
            key_data,
            lookup,
        )
        self._stats.prompt_tokens += len(tokens)
        return request_id

    def cancel(self, request_id: Hashable) -> None:
        """End a request; the next ``step`` reports it. ``ValueError`` for an id that is not in use."""
        if request_id not in self._scheduler.requests:
            raise ValueError(f"request_id must be in use, got {request_id!r}")
        self._scheduler.leave(self._scheduler.requests.pop(request_id))
        self._cancelled.append(Output(request_id, [], True, "cancelled"))

    @property
    def stats(self) -> EngineStats:
        """Counts so far."""
        evictions = self._memory.slots.stats.evictions + self._memory.pages.stats.evictions
        return dataclasses.replace(self._stats, evictions=evictions)

    @property
    def unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._scheduler.requests)

    def run(self, *, progress: bool = False) -> dict[Hashable, list[int]]:
        """Step until nothing is left; the new tokens of each request that ended meanwhile. ``progress`` shows a bar."""
        found: dict[Hashable, list[int]] = {}
        with progress_bar(self, progress) as update:
            while self._scheduler.requests or self._cancelled:
                for output in self.step():
                    found.setdefault(output.request_id, []).extend(output.tokens)
                update()
        return found

    # steps

    def step(self) -> list[Output]:
        """One step; what it brought. An empty list when there is nothing to do.

        Raises:
          RuntimeError: an earlier step failed; its error is the cause. The engine's state can't be trusted any more.
        """
        if self._failure is not None:
            raise RuntimeError("the engine stopped: an earlier step failed") from self._failure
        try:
            return self._step()
        except BaseException as error:
            self._failure = error
            raise

    def _step(self) -> list[Output]:
        outputs, self._cancelled = self._cancelled, []
        work = self._scheduler.schedule()
        if not work:
            if self._scheduler.requests:
                raise RuntimeError("no request can be scheduled although some are left")
            self._settle()
            return outputs
        self._stats.steps += 1
        if self._adaptive is not None:  # may run steps of its own, before this one is built
            self._adaptive.costs(self._builder.rows(sum(drafts is not None for _, _, drafts in work)))
        rows, tokens = batch_rows(
            work, self._memory, self.options, speculative=self.speculative is not None, native=self._native
        )
        built = self._builder.build(rows, pending=self._pending)
        padded = np.zeros((built.batch, built.tokens), np.int32)
        for row, new in enumerate(tokens):
            padded[row, : len(new)] = new
        spec = built.metadata.spec
        defer = built.may_defer
        drafting = None if self._drafter is None else self._seat(work, spec)
        seats = None if drafting is None else drafting.seated.num_seats
        metadata, budget, expected = built.metadata, None, None
        if self._adaptive is not None:
            budget, metadata = self._adaptive.plan(work, built)
            expected = [self._adaptive.confidence(request) for request, _, _ in work]
        sampling = row_sampling(
            work,
            rows.num_draft,
            built.batch,
            vocab_size=self.config.vocab_size,
            num_seats=seats,
            budget=budget and budget.drafts,
            confidence=expected,
        )
        began = time.perf_counter()
        read = self._run(padded, metadata, sampling, drafting, defer)
        self._pending = None
        if defer:
            real = [work[row].request.id for row in spec.request_rows if row < built.batch]
            self._pending = tuple(real) + (None,) * (len(spec.request_rows) - len(real))
        self._scheduler.look_ahead()  # while the device works
        read = np.asarray(read)
        if budget is not None:
            self._adaptive.learn(work, built, budget, read, 1e3 * (time.perf_counter() - began))
        return outputs + self._finish(work, rows, read, spec)

    def _seat(self, work, spec) -> Drafting:
        """Bring every decoding request to the drafter, and say how the step drafts."""
        drafts = [request for request, _, drafts in work if drafts is not None]
        for request in drafts:
            if request.seat is None:
                request.seat = self._scheduler.free_seats.pop()
                self._drafter.begin(request)
        taken = self.max_requests - len(self._scheduler.free_seats)
        return self._drafter.drafting(0 if spec is None else len(spec.request_rows), taken == len(drafts))

    def _run(self, tokens, metadata, sampling: RowSampling, drafting: Drafting | None, defer: bool) -> jax.Array:
        drafter = (None, None) if drafting is None else (self._drafter.params, self._drafter.seats)
        self._cache, seats, read = run_step(
            self.model.params,
            *self._split(),
            tokens,
            metadata,
            sampling,
            *drafter,
            config=self.config,
            speculative=self.speculative,
            drafting=drafting,
            defer=defer,
            implementation=self._implementation,
        )
        if drafting is not None:
            self._drafter.seats = seats
        return read

    def _finish(self, work, rows: Rows, read: np.ndarray, spec) -> list[Output]:
        outputs, size = [], len(work)
        counts, lengths = read[:size, -2], rows.query_lengths
        after = postprocess(self._builder.base, rows.num_computed, lengths, counts, rows.last_accepted)
        verified = np.zeros(read.shape[0] + 1, bool)
        if spec is not None:
            verified[spec.request_rows] = True  # null rows: one past the batch
        computed = np.where(verified[:size], after.num_computed, rows.num_computed + lengths)
        accepted = np.where(verified[:size], after.last_accepted, rows.last_accepted)
        for row, (request, query, drafts) in enumerate(work):
            before, count = request.computed, int(counts[row])
            self._stats.computed += query if drafts is None else 1 + int(read[row, -3])
            samples = drafts is not None or (before + query == request.prompt and not request.emitted)
            request.computed, request.last_accepted = int(computed[row]), int(accepted[row])
            new, reason = self._ends(request, read[row, :count].tolist() if samples else [])
            if samples and reason is None and read[row, -1]:
                reason = "nan"
            request.tokens += new
            if request.lookup is not None:
                request.lookup.extend(new)
            if drafts is not None and self.speculative is not None:
                self._stats.verified += 1
                self._stats.drafted += int(read[row, -3])
                self._stats.accepted += max(len(new) - 1, 0)
            self._stats.generated += len(new)
            # past a stop token the cache holds tokens that are not in the text: those blocks are nobody's prefix
            self._memory.advance(request.held, request.tokens, before, min(request.computed, len(request.tokens)))
            if reason is not None:
                self._scheduler.leave(self._scheduler.requests.pop(request.id))
                self._stats.finished += 1
            if new or reason is not None:
                outputs.append(Output(request.id, new, reason is not None, reason))
        return outputs

    @staticmethod
    def _ends(request: Request, new: list[int]) -> tuple[list[int], str | None]:
        """``new`` up to a stop token or the limit, and which of them it was."""
        for i, token in enumerate(new):
            if token in request.options.stop_tokens:
                return new[: i + 1], "stop"
            if request.emitted + i + 1 >= request.options.max_new_tokens:
                return new[: i + 1], "length"
        return new, None

    def _split(self) -> tuple[Cache, PendingCommit | None]:
        return dataclasses.replace(self._cache, pending=None), self._cache.pending

    def _settle(self) -> None:
        """Write a commit that is still pending when there is nothing left to do."""
        if self._cache.pending is not None:
            self._cache = fold(
                self.model.params, *self._split(), config=self.config, implementation=self._implementation
            )
        self._pending = None

    def warm_up(self, *, max_rows: int | None = None) -> int:
        """Compile ahead of time: for each number of rows up to ``max_requests`` (or ``max_rows``), decodes or verifies,
        and prompts, fresh and continued, of each bucket of lengths. Runs on null rows, so nothing changes.

        Returns how many programs were run.
        """
        count, seats = 0, None
        if self._drafter is not None:
            seats = jax.tree.map(jnp.copy, self._drafter.seats)
            count += self._drafter.warm_up(self._key_shape)
        for built, num_draft, defer in compositions(
            self._builder, max_rows or self.max_requests, self.max_tokens_per_step
        ):
            tokens = np.zeros((built.batch, built.tokens), np.int32)
            for drafting in self._draftings(built.metadata.spec):
                num_seats = None if drafting is None else drafting.seated.num_seats
                sampling = null_sampling(num_draft, built.batch, self._key_shape, num_seats, self._drafts)
                self._settle()
                self._run(tokens, built.metadata, sampling, drafting, defer)
                count += 1
        self._settle()
        if self._drafter is not None:
            self._drafter.seats = seats
        return count

    @property
    def _drafts(self) -> int | None:
        return None if self._adaptive is None else self.speculative.num_draft_tokens

    def _time_windows(self, rows: int, packed: int | None) -> float:
        """Milliseconds of a step of null windows: the median of five, after one that compiles."""
        built = windows(self._builder, rows, packed)
        tokens = np.random.default_rng(0).integers(0, self.config.vocab_size, (built.batch, built.tokens), np.int32)
        seated = None if self._drafter is None else self._drafter.seated
        num_draft = np.full(built.batch, built.metadata.spec.lengths[0] - 1, np.int32)
        num_seats = None if seated is None else seated.num_seats
        sampling = null_sampling(num_draft, built.batch, self._key_shape, num_seats, self._drafts)
        drafting = None if seated is None else Drafting(seated, False)
        times = []
        for _ in range(6):
            self._settle()
            began = time.perf_counter()
            np.asarray(self._run(tokens, built.metadata, sampling, drafting, False))
            times.append(1e3 * (time.perf_counter() - began))
        return float(np.median(times[1:]))

    def _draftings(self, spec) -> set[Drafting | None]:
        """All the ways a step may draft."""
        if self._drafter is None:
            return {None}
        rows = 0 if spec is None else len(spec.request_rows)
        return {self._drafter.drafting(rows, all_rows) for all_rows in (False, True)}
