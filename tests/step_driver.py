"""Requests run through ``model.step`` by hand: any interleaving of prompt chunks, decodes and verifies, each request's
slots and pages where the pools happen to have them, everything nobody owns filled with NaN."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kda_jax import model
from kda_jax.cache import make_pools
from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.metadata_builder import BuilderBase, MetadataBuilder, Rows, Smallest, postprocess
from kda_jax.pool import SlotPool, columns_needed

BLOCK, PAGE, MOST = 8, 4, 64
COLUMNS, PAGES = MOST // BLOCK, MOST // PAGE
MOST_PROGRAMS = 24
SMALLEST = Smallest(rows=4, tokens=8, columns=16)


@dataclasses.dataclass
class Request:
    prompt: list[int]
    emitted: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    last_accepted: int = 1
    column: int = 0
    slots: list[int] = dataclasses.field(default_factory=list)  # mode "none": one, or one per position
    table: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(COLUMNS, np.int32))
    pages: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(PAGES, np.int32))

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.emitted

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.prompt)


@functools.cache
def programs(config, params_of, kind):
    """The step with its commit at once or put off, and the fold. Each composition of groups is compiled once, so a long
    run of any steps takes a bounded number of programs."""
    params = params_of(config)

    def run(cache, tokens, metadata, judge, defer: bool):
        logits, cache, left = model.step(params, config, cache, tokens, metadata)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        broken = jnp.any(jnp.isnan(logits[:, 0]), axis=-1)
        if metadata.spec is None:
            return cache, best, jnp.zeros(tokens.shape[0], jnp.int32), broken
        spec = metadata.spec
        drafts = jnp.take(tokens[:, : spec.window], spec.request_rows, axis=0, mode="clip")
        found = jnp.take(best, spec.request_rows, axis=0, mode="clip")
        right = (drafts[:, 1:] == found[:, :-1]) & (jnp.arange(1, spec.window)[None] < spec.lengths[:, None])
        accepted = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1)
        sampled = jnp.take(judge, spec.request_rows, mode="clip")
        accepted = jnp.where(sampled, accepted, 0)
        plan = model.plan_rows(spec, accepted)
        cache = model.defer(cache, left, plan) if defer else model.commit(params, config, cache, left, plan)
        stands = jnp.zeros(tokens.shape[0], jnp.int32).at[spec.request_rows].set(accepted, mode="drop")
        return cache, best, stands, broken

    fold = jax.jit(lambda cache: model.fold(params, config, cache))
    return jax.jit(chex.assert_max_traces(run, MOST_PROGRAMS), static_argnums=4), fold


class NotANumber(Exception):
    """Logits of a real row: something that nobody owns was read."""


class Driver:
    """``recover`` None: plain decoding. ``poison``: what the pools hold where nothing was written."""

    def __init__(self, config, params_of, prompts, *, window=None, recover=True, mode="none", poison=np.nan):
        layout = CacheLayout.from_sizes(CacheSizes.from_config(config), window=window, dtype="float32")
        names = tuple(f"layer {i}" for i in range(len(config.mixer_kinds)))
        self.base = BuilderBase(
            config,
            names,
            layout,
            window,
            recover,
            mode,
            BLOCK if mode == "align" else None,
            PAGE,
            smallest=SMALLEST,
        )
        self.builder = MetadataBuilder(self.base)
        self.native = window is not None and not recover
        self.run, self.fold = programs(config, params_of, (window, recover, mode))
        chex.clear_trace_counter()  # the bound is on the programs that one run of a driver can need
        self.fold_apart = True
        self.tamper = lambda built: built
        self.requests = [Request(list(prompt)) for prompt in prompts]
        self.slot_pool, self.page_pool = SlotPool(48), SlotPool(1 + PAGES * len(prompts))
        cache = make_pools(config, slots=48, pages=self.page_pool.num_slots, page_size=PAGE, dtype=jnp.float32)
        self.cache = jax.tree.map(lambda x: jnp.full_like(x, poison), cache)
        self.pending = None
        rng = np.random.default_rng(len(prompts))
        for pool in (self.slot_pool, self.page_pool):  # slots are handed out in no order
            some = pool.allocate(pool.available)
            pool.free(rng.permutation(some).tolist())

    def _reserve(self, request: Request, query: int) -> None:
        for table, size, pool in ((request.pages, PAGE, self.page_pool), (request.table, BLOCK, self.slot_pool)):
            if table is request.table and self.base.mode == "none":
                continue
            for column in range(columns_needed(request.computed, query, size)):
                if table[column] == 0 and column >= max(request.computed - 1, 0) // size:
                    table[column] = pool.allocate(1)[0]
        wanted = self.base.window if self.native else 1 if self.base.mode == "none" else 0
        while len(request.slots) < wanted:
            request.slots += self.slot_pool.allocate(1)

    def step(self, work, *, order=None, defer=False, discard=()):
        """One step. ``work``: per request a chunk length (while prefilling), or drafts (a list; None: not scheduled),
        or "idle". ``discard``: requests whose step is thrown away unsampled."""
        order = list(range(len(self.requests))) if order is None else order
        queries, drafts, prefilling = [], [], []
        window = np.zeros((len(order), 64), np.int32)
        for row, index in enumerate(order):
            request, what = self.requests[index], work[index]
            if isinstance(what, str):
                queries.append(0), drafts.append(-1), prefilling.append(False)
                continue
            prefilling.append(request.prefilling)
            if request.prefilling:
                new = request.prompt[request.computed : request.computed + what]
                if self.base.mode == "align":
                    new = new[: BLOCK - request.computed % BLOCK]
                drafts.append(-1)
            else:
                new = request.tokens[-1:] + list(what or [])
                drafts.append(-1 if what is None else len(what))
            queries.append(len(new))
            window[row, : len(new)] = new
            self._reserve(request, len(new))
        chosen = [self.requests[i] for i in order]
        table = np.stack([r.table for r in chosen])
        rows = Rows(
            np.asarray(queries),
            np.asarray([r.computed for r in chosen]),
            np.asarray(prefilling),
            np.asarray(drafts),
            slots=np.asarray([r.slots[0] if r.slots else 0 for r in chosen]),
            row_slots=np.asarray([r.slots or [0] * self.base.window for r in chosen]) if self.native else None,
            last_accepted=np.asarray([r.last_accepted for r in chosen]),
            block_table=table if self.base.mode == "align" else None,
            pages=np.stack([r.pages for r in chosen]),
            request_ids=tuple(order),
        )
        built = self.builder.build(rows, pending=self.pending)
        true_spec = built.metadata.spec
        built = self.tamper(built)
        if built.must_fold and self.fold_apart:  # else the step does it
            self.cache = self.fold(self.cache)
        judge = np.zeros(built.batch, bool)
        judge[: len(order)] = [index not in discard for index in order]
        tokens = np.zeros((built.batch, built.tokens), np.int32)
        tokens[: len(order)] = window[:, : built.tokens]
        spec = built.metadata.spec
        defer = defer and built.may_defer
        metadata = jax.tree.map(jnp.asarray, built.metadata)
        self.cache, best, stands, broken = self.run(self.cache, tokens, metadata, judge, defer)
        if np.asarray(broken)[: len(order)][[q > 0 for q in queries]].any():
            raise NotANumber
        self.pending = None
        if defer:
            real = [order[row] for row in spec.request_rows if row < built.batch]
            self.pending = tuple(real) + (None,) * (len(spec.request_rows) - len(real))
        spec_rows = set() if true_spec is None else set(true_spec.request_rows.tolist())
        for row, (index, query) in enumerate(zip(order, queries, strict=True)):
            request = self.requests[index]
            if query and row in spec_rows:
                self._advance(request, query, int(stands[row]), np.asarray(best)[row])
            elif query and index not in discard:
                self._emit(request, query, [int(best[row, 0])])
        return built

    def _advance(self, request, query, stands, best):
        counts = [np.asarray([x]) for x in (request.computed, query, stands, request.last_accepted)]
        after = postprocess(self.base, *counts)
        request.computed, request.last_accepted = int(after.num_computed[0]), int(after.last_accepted[0])
        request.emitted += best[:stands].tolist()

    def _emit(self, request, query, tokens):
        request.computed += query
        if not request.prefilling:
            request.emitted += tokens

    def state_of(self, request) -> int:
        """The slot that holds the request's running state."""
        if self.base.mode == "align":
            return int(request.table[(request.computed - 1) // BLOCK])
        return request.slots[max(request.last_accepted, 1) - 1 if self.native else 0]
