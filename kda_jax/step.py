"""One step of a mixed batch through every layer: prompts, single tokens and windows together.

Each layer runs the mixer's form for each group of rows and one feed-forward block for all of their tokens. Each kind of
layer is traced once for each composition of groups, whatever the depth.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kda_jax import ops
from kda_jax.cache import Cache, PendingCommit, StepRecords, copy_prefix
from kda_jax.config import ModelConfig
from kda_jax.layers import kda, mla
from kda_jax.layers.block import embed, feed_forward, head
from kda_jax.layers.linear import rms_norm
from kda_jax.layers.packing import Packing, pack
from kda_jax.layers.params import LayerParams, ModelParams
from kda_jax.metadata import SpecRows, StepMetadata
from kda_jax.ops._slots import read_slots, write_slots
from kda_jax.ops.plan import write_committed


class Groups(NamedTuple):
    """Activations of each group of rows [rows, tokens, D], or None; of speculative rows packed where they say so."""

    spec: jax.Array | None
    decode: jax.Array | None
    prefill: jax.Array | None


def step(
    params: ModelParams, config: ModelConfig, cache: Cache, tokens, metadata: StepMetadata, *, implementation=None
):
    """Run one step of a batch.

    A pending commit in ``cache`` is written first, or folded into this step's verify where ``metadata.spec.fold`` says
    so; either way the cache that comes back has none. States of prefill, decode and native rows are in the cache that
    comes back; speculative rows of the recover mode leave theirs as they were, for ``commit`` or ``defer``.

    Args:
      tokens: int [B, T] in batch order, right-padded: each row's tokens of this step.
      metadata: ``StepMetadata``, its arrays on the device or traced.

    Returns:
      Logits fp32 [B, W, vocab] in batch order, where W is ``metadata.window``: of a speculative row at each of its
      tokens, of another row in column 0, at its last token; zeros elsewhere. The next cache. The ``StepRecords`` of
      the speculative rows, or None without any.

    Raises:
      ValueError: tokens narrower than the window, several groups without pages, or a tree of drafts with native
        slots, naming the argument.
    """
    groups = [name for name in ("spec", "decode", "prefill") if getattr(metadata, name) is not None]
    if len(groups) > 1 and cache.latents and any(getattr(metadata, name).pages is None for name in groups):
        raise ValueError(f"metadata: pages must be given where a step has several groups of rows, got {groups}")
    if metadata.spec is not None and tokens.shape[1] < metadata.spec.window:
        raise ValueError(f"tokens must have at least window={metadata.spec.window} columns, got {tokens.shape[1]}")
    if metadata.spec is not None and metadata.spec.parents is not None and metadata.spec.target_slots is not None:
        raise ValueError("metadata.spec.parents: a tree of drafts needs the recover mode, got target_slots too")
    fold_rows = metadata.spec is not None and metadata.spec.fold is not None
    pending = None
    if fold_rows and cache.pending is not None and metadata.copies is None:  # a copy may be of a state still pending
        pending = _pending_of(metadata.spec, cache.pending)
    else:
        cache = fold(params, config, cache, implementation=implementation)
    if metadata.copies is not None:
        cache = copy_prefix(cache, metadata.copies.source, metadata.copies.target)

    if not groups:
        return jnp.zeros((tokens.shape[0], 1, config.vocab_size), jnp.float32), cache, None
    packing = _packing(metadata.spec)
    xs = _group_inputs(params, tokens, metadata, packing)
    layers, slots = cache.state.shape[:2]
    memory = (cache.state.reshape(layers * slots, *cache.state.shape[2:]),)
    memory += (cache.conv.reshape(layers * slots, *cache.conv.shape[2:]),)
    latents, spec_work, decode_inputs = [], [], []
    index = {"kda": 0, "mla": 0}
    for layer, kind in zip(params.layers, config.mixer_kinds, strict=True):
        run = functools.partial(_layer, layer, xs, packing=packing, config=config, implementation=implementation)
        i = index[kind]
        index[kind] += 1
        if kind == "mla":
            xs, latent, _ = run(cache.latents[i], metadata, kind=kind)
            latents.append(latent)
        else:
            folding = None if pending is None else (jax.tree.map(lambda a, i=i: a[i], pending.records), pending.plan)
            xs, memory, (work, inputs) = run((*memory, jnp.int32(i * slots), folding), metadata, kind=kind)
            spec_work.append(work)
            decode_inputs.append(inputs)
    state, conv = (pool.reshape(old.shape) for pool, old in zip(memory, (cache.state, cache.conv), strict=True))
    cache = Cache(state, conv, tuple(latents), None)
    if metadata.decode is not None:
        ones = (metadata.decode.slots > 0).astype(jnp.int32)
        plan = ops.plan_commit(ones, ones, metadata.decode.slots)
        left = StepRecords(None, _stack(decode_inputs, cache.conv[:, :0]))
        cache = commit(params, config, cache, left, plan, implementation=implementation)
    return (
        _logits(params, config, xs, metadata, packing, tokens.shape[0]),
        cache,
        _records(spec_work, cache, metadata.spec),
    )


def _packing(spec: SpecRows | None) -> Packing | None:
    if spec is None or spec.packed is None:
        return None
    return Packing.of(spec.lengths, spec.window, spec.packed)


def _group_inputs(params, tokens, metadata: StepMetadata, packing: Packing | None) -> Groups:
    def gather(rows, width, packing=None):
        if rows is None:
            return None
        return embed(params, pack(packing, jnp.take(tokens[:, :width], rows.request_rows, axis=0, mode="clip")))

    return Groups(
        spec=gather(metadata.spec, metadata.window, packing),
        decode=gather(metadata.decode, 1),
        prefill=gather(metadata.prefill, tokens.shape[1]),
    )


def _stack(parts, empty):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts) if parts else empty


def _records(work, cache: Cache, spec: SpecRows | None) -> StepRecords | None:
    if spec is None:
        return None
    records, inputs = _stack(work, (None, cache.conv[:, :0]))
    moved = spec.target_slots if spec.target_slots is not None and spec.align is not None else None
    return StepRecords(records, inputs, moved)


def _pending_of(spec: SpecRows, pending: PendingCommit) -> PendingCommit:
    """The pending commit in the order of the rows that continue it; a row that continues none commits nothing."""
    rows = spec.fold.rows
    if rows is None:
        return pending

    def gather(x, axis):
        return jnp.take(x, rows, axis=axis, mode="clip")

    found = rows < pending.plan.commit_length.shape[0]
    plan = jax.tree.map(lambda x: jnp.where(found, gather(x, 0), 0), pending.plan)
    return PendingCommit(jax.tree.map(lambda x: gather(x, 1), pending.records), plan)


def _logits(params, config, xs: Groups, metadata: StepMetadata, packing: Packing | None, batch: int):
    """Logits in batch order: hidden states go to their rows first, so that there is one head, or packed ones through
    the head first, so that it has no padding."""
    if packing is not None:
        out = jnp.zeros((batch, metadata.window, config.vocab_size), jnp.float32)
        logits = head(params, xs.spec, config)
        row = jnp.take(metadata.spec.request_rows, packing.index // metadata.window, mode="fill", fill_value=batch)
        out = out.at[row, packing.index % metadata.window].set(logits[0], mode="drop")
        rest = dataclasses.replace(metadata, spec=None)
        if rest.decode is None and rest.prefill is None:
            return out
        return out.at[:, :1].add(_logits(params, config, xs._replace(spec=None), rest, None, batch))
    hidden = jnp.zeros((batch, metadata.window, config.hidden_size), params.embed.dtype)
    for name in ("spec", "decode", "prefill"):
        rows, x = getattr(metadata, name), getattr(xs, name)
        if rows is None:
            continue
        if name == "prefill":
            x = jnp.take_along_axis(x, jnp.maximum(rows.lengths - 1, 0)[:, None, None], axis=1)
        hidden = hidden.at[rows.request_rows, : x.shape[1]].set(x, mode="drop")
    return head(params, hidden, config)


@functools.partial(jax.jit, static_argnames=("config", "kind", "implementation"))
def _layer(
    layer: LayerParams, xs: Groups, memory, metadata, *, packing, config: ModelConfig, kind: str, implementation
):
    """One layer: (activations, next memory, workspace)."""
    mixer = _mla_groups if kind == "mla" else _kda_groups
    normed = jax.tree.map(lambda x: rms_norm(x, layer.input_norm, config.rms_norm_eps), xs)
    mixed, memory, work = mixer(layer.mixer, normed, memory, metadata, packing, config, implementation)
    xs = jax.tree.map(jnp.add, xs, mixed)
    present = [x for x in xs if x is not None]
    if len(present) == 1:
        return jax.tree.map(lambda x: feed_forward(layer, x, config)[0], xs), memory, work
    flat = jnp.concatenate([x.reshape(1, -1, x.shape[-1]) for x in present], axis=1)
    flat, parts, first = feed_forward(layer, flat, config)[0], [], 0
    for x in xs:
        size = 0 if x is None else x.shape[0] * x.shape[1]
        parts.append(None if x is None else flat[0, first : first + size].reshape(x.shape))
        first += size
    return Groups(*parts), memory, work


def _mla_groups(params, ys: Groups, cache, metadata: StepMetadata, packing, config, implementation):
    out = dict.fromkeys(Groups._fields)
    for name in ("spec", "decode"):
        rows, y = getattr(metadata, name), getattr(ys, name)
        if rows is not None:
            lengths = rows.lengths if name == "spec" else (rows.slots > 0).astype(jnp.int32)
            how = {"parents": rows.parents, "packing": packing} if name == "spec" else {}
            out[name], cache = mla.decode(params, y, cache, rows.computed, config, rows.pages, lengths, **how)
    rows = metadata.prefill
    if rows is not None and rows.source_slots is None:
        out["prefill"], new = mla.prefill(params, ys.prefill, config)
        cache = mla.write_latents(cache, new, jnp.zeros_like(rows.lengths), rows.pages, rows.lengths)
    elif rows is not None:
        out["prefill"], cache = mla.extend(params, ys.prefill, cache, rows.computed, rows.lengths, config, rows.pages)
    return Groups(**out), cache, None


def _kda_groups(params, ys: Groups, memory, metadata: StepMetadata, packing, config, implementation):
    state, conv, base, pending = memory
    out, spec_work, decode_inputs = dict.fromkeys(Groups._fields), None, None

    def at(slots):
        return jnp.where(slots > 0, slots + base, 0)

    rows = metadata.spec
    if rows is not None and rows.target_slots is not None:
        slots = at(rows.slots), at(rows.target_slots)
        out["spec"], state, inputs = kda.verify_native(
            params, ys.spec, state, conv, *slots, rows.lengths, config, packing=packing, implementation=implementation
        )
        spec_work = None, inputs
    elif rows is not None and pending is not None:
        records, plan = pending
        plan = dataclasses.replace(plan, source_slot=at(plan.source_slot), final_slot=at(plan.final_slot))
        out["spec"], *spec_work, state, conv = kda.verify_after_commit(
            params,
            ys.spec,
            state,
            conv,
            at(rows.slots),
            rows.lengths,
            records.records,
            records.conv_inputs,
            plan,
            config,
            parents=rows.parents,
            packing=packing,
            implementation=implementation,
        )
        spec_work = tuple(spec_work)
    elif rows is not None:
        how = {"parents": rows.parents, "packing": packing, "implementation": implementation}
        out["spec"], *spec_work = kda.verify(params, ys.spec, state, conv, at(rows.slots), rows.lengths, config, **how)
        spec_work = tuple(spec_work)
    if metadata.decode is not None:
        out["decode"], state, decode_inputs = kda.decode(
            params, ys.decode, state, conv, at(metadata.decode.slots), config, implementation=implementation
        )
    rows = metadata.prefill
    if rows is not None:
        start = {}
        if rows.source_slots is not None:
            source = at(jnp.where(rows.computed > 0, rows.source_slots, 0))  # null: a fresh row starts from zero
            start = {"state": read_slots(state[None], source)[0], "history": read_slots(conv[None], source)[0]}
        out["prefill"], states, histories = kda.prefill(
            params, ys.prefill, rows.lengths, config, **start, implementation=implementation
        )
        final = at(jnp.where(rows.lengths > 0, rows.final_slots, 0))
        state = write_slots(state[None], final, states[None])[0]
        conv = write_slots(conv[None], final, histories[None])[0]
    return Groups(**out), (state, conv), (spec_work, decode_inputs)


def plan_rows(spec: SpecRows, num_accepted) -> ops.CommitPlan:
    """The commit plan of a step's speculative rows. ``num_accepted`` int [R], in the order of the group.

    Recover mode: ``ops.plan_commit``. Native mode: each row's state is already in the slot of its last committed token,
    which is the final slot unless mode "align" wants it elsewhere.
    """
    plan = ops.plan_commit(num_accepted, spec.lengths, spec.slots, align=spec.align)
    if spec.target_slots is None or spec.align is not None:
        return plan
    last = jnp.maximum(plan.commit_length - 1, 0)
    final = jnp.take_along_axis(spec.target_slots, last[:, None], axis=1)[:, 0]
    return dataclasses.replace(plan, final_slot=jnp.where(plan.commit_length > 0, final, 0))


def keep_path(cache: Cache, left: StepRecords, spec: SpecRows, path, num_accepted) -> tuple[Cache, StepRecords]:
    """A verified tree's step as if it had been a chain along the rows that stand: what ``commit`` and ``defer`` take.

    ``path`` int [R, W]: the rows of each window that stand, in order, row 0 first; ``num_accepted`` int [R] of them
    count. Latents of the path move to consecutive positions, so none of a rejected draft stays in the context.
    """
    count = jnp.minimum(num_accepted, spec.lengths)
    latents = tuple(mla.keep_path(each, spec.computed, path, count, spec.pages) for each in cache.latents)
    records = None if left.records is None else ops.gather_path(left.records, path)
    left = dataclasses.replace(left, records=records, conv_inputs=ops.gather_path(left.conv_inputs, path))
    return dataclasses.replace(cache, latents=latents), left


def commit(params: ModelParams, config: ModelConfig, cache: Cache, left: StepRecords, plan, *, implementation=None):
    """The next cache: a step's accepted tokens folded into states and histories by ``plan`` (``ops.CommitPlan``)."""
    state = cache.state
    if left.records is not None:
        mixers = [layer.mixer for layer, kind in zip(params.layers, config.mixer_kinds, strict=True) if kind == "kda"]
        gate = _stack([kda.gate_params(mixer, config) for mixer in mixers], None)
        state = ops.kda_commit(state, left.records, gate, plan, implementation=implementation)
    elif left.position_slots is not None:
        state = _move_states(state, left.position_slots, plan)
    conv = ops.conv_commit(cache.conv, left.conv_inputs, plan, implementation=implementation)
    return dataclasses.replace(cache, state=state, conv=conv)


def _move_states(pool, position_slots, plan):
    """Native states after the accepted and the boundary token, copied to where ``plan`` wants them."""

    def state_after(source, length):
        slots = jnp.take_along_axis(position_slots, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
        return read_slots(pool, slots)

    return write_committed(pool, plan, state_after)


def defer(cache: Cache, left: StepRecords, plan) -> Cache:
    """``commit`` put off: the cache with the commit pending. Only records can wait; a pending commit must be written
    before another is put off.
    """
    if cache.pending is not None:
        raise ValueError("cache has a pending commit already; a step or fold() writes it")
    if left.records is None:
        raise ValueError("left.records must be given: states written natively are committed at once")
    if plan.writes_boundaries:
        raise ValueError("plan.writes_boundaries must be False: states at block boundaries are written at once")
    return dataclasses.replace(cache, pending=PendingCommit(left, plan))


def fold(params: ModelParams, config: ModelConfig, cache: Cache, *, implementation=None) -> Cache:
    """The cache with its pending commit written; as it is where there is none."""
    if cache.pending is None:
        return cache
    pending, cache = cache.pending, dataclasses.replace(cache, pending=None)
    return commit(params, config, cache, pending.records, pending.plan, implementation=implementation)
