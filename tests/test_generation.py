"""``generate`` and ``stream``: batches, buckets, what is compiled, what leaves the device, and what is refused."""

import dataclasses
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax import GenerateOptions, SpeculativeOptions, generation, generation_loop, model
from kda_jax.speculate.ngram import NgramDrafter
from tests.compiling import quick  # noqa: F401
from tests.small_models import Ledger, healthy_params
from tests.tiny import TINY as THREE_LAYERS

TINY = dataclasses.replace(THREE_LAYERS, mixer_kinds=("kda", "mla"), ffn_kinds=("moe", "dense"))
ROWS, PROMPT, NEW = 8, 16, 32
NEVER = 10**6  # a stop token no vocabulary holds
KEY = jax.random.key(0)
PARAMS = healthy_params(TINY)
RNG = np.random.default_rng(5)
PROMPTS = (RNG.integers(0, 3, (ROWS, PROMPT)) + 8).astype(np.int32)  # few tokens, so that lookup finds some
LENGTHS = np.asarray([16, 1, 7, 12, 3, 16, 9, 5], np.int32)
SPECULATIVE = SpeculativeOptions("ngram", 3)


def run(prompts=PROMPTS, lengths=LENGTHS, new_tokens=NEW, config=TINY, params=PARAMS, key=KEY, how=None, **options):
    options = GenerateOptions(new_tokens, **({"stop_tokens": (NEVER, NEVER)} | options))
    found = kda_jax.generate(params, config, prompts, lengths, key, options=options, speculative=how)
    return jax.tree.map(np.asarray, found)


@pytest.fixture(params=[None, SPECULATIVE], ids=["plain", "n-gram"])
def how(request):
    return request.param


@pytest.fixture(scope="module")
def ledger():
    ledger = Ledger()
    yield ledger
    ledger.check()


# --- rows of a batch --------------------------------------------------------------------------------------------------


def test_padding_never_matters(how):
    """Whatever the padding holds, ids that do not exist included, every bit of the result is the same."""
    expected = run(how=how)
    past = np.arange(PROMPT)[None] >= LENGTHS[:, None]
    for fill in (RNG.integers(0, TINY.vocab_size, PROMPTS.shape), -1, 10**9):
        chex.assert_trees_all_equal(run(np.where(past, fill, PROMPTS).astype(np.int32), how=how), expected)


def test_a_row_does_not_depend_on_its_batch(how, ledger):
    """Other rows, their order, and other sizes of batch, prompt and output."""
    expected = run(how=how)
    other = RNG.integers(0, TINY.vocab_size, PROMPTS.shape).astype(np.int32)
    order = RNG.permutation(ROWS)
    alone = np.arange(ROWS) == 3
    wide = np.pad(PROMPTS[2:5], [(0, 0), (0, 9)], constant_values=11)
    cases = {
        "other order": (run(PROMPTS[order], LENGTHS[order], how=how), order),
        "other rows": (run(np.where(alone[:, None], PROMPTS, other), np.where(alone, LENGTHS, 16), how=how), alone),
        "fewer rows, more padding, more tokens": (run(wide, LENGTHS[2:5], NEW + 1, how=how), range(2, 5)),
    }
    for what, (found, rows) in cases.items():
        rows = np.arange(ROWS) if rows is alone else rows
        for place, row in enumerate(rows):
            if what == "other rows" and row != 3:
                continue
            prompt, tokens = PROMPTS[row, : LENGTHS[row]], found.tokens[place, :NEW]
            ledger.compare(PARAMS, TINY, prompt, tokens, expected.tokens[row], f"{what}, row {row}")


def test_one_token_is_prefills(how):
    found = run(how=how, new_tokens=1)
    assert found.tokens.shape == (ROWS, 1)
    assert (found.lengths == 1).all()
    assert not found.stats.steps.any()
    last = kda_jax.logits(PARAMS, TINY, PROMPTS, LENGTHS)[np.arange(ROWS), LENGTHS - 1]
    np.testing.assert_array_equal(found.tokens[:, 0], np.argmax(last, axis=-1))


def test_a_row_whose_logits_are_nan_ends_and_is_reported(how):
    """One token's embedding is NaN. A row that holds it ends at once; one that emits it ends at the next token."""
    expected = run(how=how)
    poison = next(t for t in range(11, TINY.vocab_size) if 1 <= (expected.tokens[:, :-1] == t).any(axis=1).sum() <= 4)
    emits = {b: list(row).index(poison) for b, row in enumerate(expected.tokens) if poison in row}
    prompts = PROMPTS.copy()
    holds = next(b for b in range(ROWS) if b not in emits)
    prompts[holds, 0] = poison
    params = dataclasses.replace(PARAMS, embed=PARAMS.embed.at[poison].set(jnp.nan))
    found = run(prompts, how=how, params=params)
    for b in range(ROWS):
        n = 0 if b == holds else emits.get(b, NEW - 1) + 1
        assert found.lengths[b] == n
        np.testing.assert_array_equal(found.tokens[b], [*expected.tokens[b, :n], *[0] * (NEW - n)])
        assert found.stats.nan[b] == (n < NEW)


# --- sampling and keys ------------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_tokens_and_another_key_others(how):
    first, again = run(how=how, temperature=1.0), run(how=how, temperature=1.0)
    chex.assert_trees_all_equal(first, again)
    other = run(how=how, temperature=1.0, key=jax.random.key(1))
    assert (first.tokens != other.tokens).any(axis=1).all()


def test_rows_choose_their_own_temperature(how):
    greedy, mixed = run(how=how), run(how=how, temperature=np.where(np.arange(ROWS) % 2, 1.0, 0.0))
    same = (greedy.tokens == mixed.tokens).all(axis=1)
    np.testing.assert_array_equal(same, np.arange(ROWS) % 2 == 0)


def test_equal_prompts_of_a_batch_draw_their_own_tokens(how):
    found = run(np.repeat(PROMPTS[:1], ROWS, axis=0), np.full(ROWS, 16, np.int32), how=how, temperature=1.0)
    assert len({tuple(row) for row in found.tokens.tolist()}) == ROWS


def test_a_tiny_temperature_and_top_k_of_one_are_greedy(how):
    greedy = run(how=how)
    chex.assert_trees_all_equal(run(how=how, temperature=1e-6).tokens, greedy.tokens)
    chex.assert_trees_all_equal(run(how=how, temperature=1.0, top_k=1).tokens, greedy.tokens)


# --- stream -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 8, 100])
def test_stream_yields_what_generate_returns(how, steps):
    stops = tuple(int(t) for t in run(how=how).tokens[0, [9, 13]])
    expected = run(how=how, stop_tokens=stops)
    assert (expected.lengths < NEW).any()
    options = GenerateOptions(NEW, stop_tokens=stops)
    chunks = list(
        kda_jax.stream(PARAMS, TINY, PROMPTS, LENGTHS, KEY, options=options, speculative=how, steps_per_chunk=steps)
    )
    for b in range(ROWS):
        tokens = np.concatenate([chunk.tokens[b] for chunk in chunks])
        np.testing.assert_array_equal(tokens, expected.tokens[b, : expected.lengths[b]])
        sizes = [len(chunk.tokens[b]) for chunk in chunks]
        assert sizes[0] == 1
        assert max(sizes[1:]) <= steps * (1 if how is None else how.window)
        ends = np.cumsum(sizes) == expected.lengths[b]
        np.testing.assert_array_equal([chunk.finished[b] for chunk in chunks], ends)
    chex.assert_trees_all_equal(chunks[-1].stats, expected.stats)
    assert len(chunks) == 1 + -(-int(expected.stats.steps.max()) // steps)
    for before, after in itertools.pairwise(chunks):
        assert not before.finished.all()
        assert (after.stats.steps - before.stats.steps <= steps).all()


def test_stream_refuses_at_once():
    with pytest.raises(ValueError, match="an empty prompt"):
        kda_jax.stream(PARAMS, TINY, PROMPTS, LENGTHS * 0, KEY, options=GenerateOptions(4))
    with pytest.raises(ValueError, match="steps_per_chunk must be an integer at least 1, got 0"):
        kda_jax.stream(PARAMS, TINY, PROMPTS, LENGTHS, KEY, options=GenerateOptions(4), steps_per_chunk=0)


# --- the compiled loop ------------------------------------------------------------------------------------------------


def prepared(how, **options):
    """The state after prefill, and a function of (state, steps int32 []) that advances it."""
    options = GenerateOptions(NEW, stop_tokens=(NEVER, NEVER), **options)
    state, partial, _ = generation._prepare(PARAMS, TINY, PROMPTS, LENGTHS, KEY, options, how, None)
    params, sampling, drafter_params, program = partial.args

    def advance(state, steps):
        return generation_loop.advance(params, state, sampling, drafter_params, steps, program=program)

    def lowered(state):
        steps = jnp.int32(1)
        return generation_loop.advance.lower(params, state, sampling, drafter_params, steps, program=program)

    return state, advance, lowered


def test_nothing_leaves_the_device_inside_the_loop(how):
    state, advance, lowered = prepared(how)
    steps = jnp.int32(NEW)
    with jax.transfer_guard("disallow"):
        state = advance(state, steps)
        with pytest.raises(Exception, match=r"[Dd]isallowed host-to-device transfer"):  # so the guard would say so
            advance(state, np.int32(NEW))
    assert np.asarray(state.done).all()
    # and the program holds nothing that could call the host
    text = lowered(prepared(how)[0]).compile().as_text()
    assert "while" in text
    assert not re.search(r"\b(infeed|outfeed|send|recv|host-callback)\(|callback", text)


def test_the_state_is_donated(how):
    state, advance, lowered = prepared(how)
    held = (state.cache, state.tokens)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    assert lowered(state).compile().memory_analysis().alias_size_in_bytes >= size
    after = advance(state, jnp.int32(2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_recovery_keeps_one_state_a_row():
    """Bytes of the whole loop state: with records one state a row, natively one for each token of the window."""
    recover = prepared(SPECULATIVE)[0].cache.state.shape
    native = prepared(dataclasses.replace(SPECULATIVE, recover=False))[0].cache.state.shape
    assert recover == (1, 1 + ROWS, 4, 10, 6)
    assert native == (1, 1 + 4 * ROWS, 4, 10, 6)
    assert prepared(dataclasses.replace(SPECULATIVE, num_draft_tokens=7))[0].cache.state.shape == recover


def sizes():
    return np.asarray([generation_loop.start._cache_size(), generation_loop.advance._cache_size()])


def test_a_bucket_compiles_once(how, monkeypatch):
    """Any batch, prompt and output sizes within a bucket, and any values of the traced options."""
    config = dataclasses.replace(TINY, max_length=511)  # nothing is compiled for it yet
    chex.clear_trace_counter()
    name = "decode" if how is None else "verify"
    monkeypatch.setattr(model, name, chex.assert_max_traces(getattr(model, name), n=1))
    monkeypatch.setattr(model, "prefill", chex.assert_max_traces(model.prefill, n=1))
    before = sizes()
    for batch, prompt, new, temperature, top_p, stop in (
        (8, 16, 32, 0.0, 1.0, NEVER),
        (5, 1, 17, 1.0, 0.5, 3),
        (7, 9, 20, np.linspace(0, 1, 7), 0.9, 4),
        (6, 13, 31, 2, jnp.linspace(0.1, 1, 6), 5),
    ):
        prompts, lengths = PROMPTS[:batch, :prompt], np.minimum(LENGTHS[:batch], prompt)
        options = {"temperature": temperature, "top_p": top_p, "stop_tokens": (stop,), "how": how}
        run(prompts, lengths, new, config, **options)
        options = GenerateOptions(new, temperature, top_p=top_p, stop_tokens=(stop,))
        for _ in kda_jax.stream(PARAMS, config, prompts, lengths, KEY, options=options, speculative=how):
            pass
        np.testing.assert_array_equal(sizes() - before, [1, 1])


def test_buckets_are_powers_of_two(monkeypatch):
    """How many programs a range of sizes needs, without compiling them."""
    seen = set()

    def start(params, tokens, lengths, key, sampling, drafter_params, *, program):
        seen.add((tokens.shape, program))
        raise StopIteration

    monkeypatch.setattr(generation, "start", start)
    for batch in (1, 2, 3, 4, 5, 8):
        for prompt in (1, 15, 16, 17, 32, 33):
            for new in (1, 2, 3, 4, 63):
                with pytest.raises(StopIteration):
                    run(np.zeros((batch, prompt), np.int32), np.ones(batch, np.int32), new)
    assert {shape for shape, _ in seen} == {(b, p) for b in (1, 2, 4, 8) for p in (16, 32, 64)}
    assert {program.new_tokens for _, program in seen} == {1, 2, 4, 64}
    assert len(seen) == 4 * 3 * 4


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = {"prompt_tokens": PROMPTS, "prompt_lengths": LENGTHS, "key": KEY, "options": GenerateOptions(4)}


def put(row, column, value, dtype=np.int32):
    prompts = PROMPTS.astype(dtype)
    prompts[row, column] = value
    return prompts


def length(row, value):
    lengths = LENGTHS.copy()
    lengths[row] = value
    return lengths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_lengths": length(2, 0)}, r"prompt_lengths\[2\] must be in \[1, P=16\], got an empty prompt"),
        ({"prompt_lengths": length(2, 17)}, r"prompt_lengths\[2\] must be in \[1, P=16\], got 17"),
        ({"prompt_lengths": length(2, -1)}, r"prompt_lengths\[2\] must be in \[1, P=16\], got -1"),
        ({"prompt_lengths": LENGTHS[:7]}, r"prompt_lengths must be integers \[B=8\], got int32 \(7,\)"),
        ({"prompt_lengths": LENGTHS[:, None]}, r"prompt_lengths must be integers \[B=8\], got int32 \(8, 1\)"),
        ({"prompt_lengths": LENGTHS.astype(np.float32)}, r"prompt_lengths must be integers \[B=8\], got float32"),
        ({"prompt_lengths": 3}, r"prompt_lengths must be integers \[B=8\]"),
        ({"prompt_tokens": PROMPTS[:, :0]}, r"prompt_tokens must be integers \[B, P\] with B, P >= 1.*\(8, 0\)"),
        ({"prompt_tokens": PROMPTS[:0]}, r"prompt_tokens must be integers \[B, P\] with B, P >= 1.*\(0, 16\)"),
        ({"prompt_tokens": PROMPTS[0]}, r"prompt_tokens must be integers \[B, P\].*\(16,\)"),
        ({"prompt_tokens": PROMPTS[None]}, r"prompt_tokens must be integers \[B, P\].*\(1, 8, 16\)"),
        ({"prompt_tokens": PROMPTS.astype(np.float32)}, r"prompt_tokens must be integers \[B, P\].*float32"),
        ({"prompt_tokens": PROMPTS > 8}, r"prompt_tokens must be integers \[B, P\].*bool"),
        ({"prompt_tokens": put(3, 4, 40)}, r"prompt_tokens\[3, 4\] must be in \[0, vocab_size=40\), got 40"),
        ({"prompt_tokens": put(3, 4, -1)}, r"prompt_tokens\[3, 4\] must be in \[0, vocab_size=40\), got -1"),
        ({"prompt_tokens": put(3, 4, 2**32 + 3, np.int64)}, r"prompt_tokens.* must be in"),
        ({"options": GenerateOptions(497)}, r"prompt_lengths\[0\] \+ max_new_tokens must be at most the model's 512"),
        ({"options": GenerateOptions(4, temperature=[1.0, 0.5])}, r"temperature must be a scalar or have shape \[8\]"),
        ({"options": GenerateOptions(4, top_k=[1])}, r"top_k must be a scalar or have shape \[8\]"),
        ({"options": None}, "options must be GenerateOptions, got NoneType"),
        ({"options": {"max_new_tokens": 4}}, "options must be GenerateOptions, got dict"),
        ({"speculative": "ngram"}, "speculative must be SpeculativeOptions or None, got str"),
        ({"speculative": SpeculativeOptions("custom", 3)}, "drafter must be given for method 'custom'"),
        ({"speculative": SPECULATIVE, "drafter": NgramDrafter(3)}, "drafter must be None for method 'ngram'"),
        ({"drafter": NgramDrafter(3)}, "drafter is given without speculative options"),
        (
            {"speculative": SpeculativeOptions("custom", 3), "drafter": NgramDrafter(2)},
            "drafter.num_draft_tokens must be speculative.num_draft_tokens=3, got 2",
        ),
        ({"speculative": SpeculativeOptions("custom", 3), "drafter": object()}, "drafter"),
        ({"key": jax.random.split(KEY, 2)}, r"key must be one key, got shape \[2\]"),
        ({"key": 7}, "key must be"),
        ({"key": None}, "key must be"),
    ],
)
@pytest.mark.parametrize("call", [kda_jax.generate, kda_jax.stream])
def test_bad_input_is_named(call, change, message):
    with pytest.raises(ValueError, match=message):
        call(PARAMS, TINY, **(GOOD | change))


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (PROMPTS[0], None, r"tokens must be integers \[B, T\], got int32 \(16,\)"),
        (PROMPTS.astype(np.float32), None, r"tokens must be integers \[B, T\], got float32"),
        (PROMPTS[:, :0], None, "tokens must hold at least one column, got T=0"),
        (put(0, 0, 40), None, r"tokens\[0, 0\] must be in \[0, vocab_size=40\), got 40"),
        (put(0, 0, -1), None, r"tokens\[0, 0\] must be in \[0, vocab_size=40\), got -1"),
        (put(0, 0, 2**32 + 3, np.int64), None, r"tokens\[0, 0\] must be in"),
        (PROMPTS, LENGTHS[:3], r"lengths must be integers \[B=8\], got int32 \(3,\)"),
        (PROMPTS, LENGTHS.astype(np.float32), r"lengths must be integers \[B=8\], got float32"),
        (PROMPTS, length(1, 17), "lengths"),
        (PROMPTS, length(1, -1), "lengths"),
    ],
)
def test_bad_input_of_logits_is_named(tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        kda_jax.logits(PARAMS, TINY, tokens, lengths)


def test_logits_past_a_rows_length_are_zero_and_padding_never_matters():
    found = np.asarray(kda_jax.logits(PARAMS, TINY, PROMPTS, LENGTHS))
    assert found.shape == (ROWS, PROMPT, TINY.vocab_size)
    past = np.arange(PROMPT)[None] >= LENGTHS[:, None]
    assert not found[past].any()
    assert found[~past].all()
    other = np.where(past, 7, PROMPTS)
    np.testing.assert_array_equal(kda_jax.logits(PARAMS, TINY, other, LENGTHS), found)


def test_logits_are_differentiable_and_padding_gets_no_gradient():
    def loss(params, tokens):
        return jnp.sum(kda_jax.logits(params, TINY, tokens, LENGTHS) ** 2)

    prompts = np.where(np.arange(PROMPT)[None] < LENGTHS[:, None], PROMPTS, 33)
    gradient = jax.jit(jax.grad(loss))(PARAMS, prompts)
    chex.assert_tree_all_finite(gradient)
    assert not np.asarray(gradient.embed[33]).any()
    untouched = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
        if not np.asarray(leaf).any()
    ]
    assert untouched == [".layers[0].ffn.router_bias"]
