"""The draft model: its cache holds what was accepted and nothing else, its drafts are what it would say, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax import model
from kda_jax.cache import make_cache
from kda_jax.speculate.draft_model import DraftModel, ModelDrafter
from kda_jax.speculate.drafter import DraftContext
from kda_jax.speculate.sampling import row_keys
from tests.compiling import quick  # noqa: F401
from tests.small_models import Ledger, healthy_params
from tests.speculate.toy import Shape, shaped
from tests.test_speculative_generation import NEVER, NEW, PROMPT, ROWS, Case, check_emitted
from tests.tiny import TINY
from tests.tolerances import assert_close, tolerance

# smaller than TINY, of the same vocabulary
SMALL = dataclasses.replace(
    TINY,
    hidden_size=16,
    mixer_kinds=("kda", "mla"),
    ffn_kinds=("dense", "dense"),
    kda_num_heads=1,
    kda_num_value_heads=2,
    kda_key_dim=4,
    kda_value_dim=6,
)
PARAMS = healthy_params(SMALL, 5)
DRAFTS, SIZE, LIMIT = 3, 40, tolerance("float32").state


@functools.cache
def programs():
    drafter = ModelDrafter(DRAFTS, SMALL)
    prefill = jax.jit(
        lambda tokens, lengths, slots: model.prefill(
            PARAMS,
            SMALL,
            tokens,
            lengths,
            make_cache(SMALL, batch=4, tokens=SIZE, dtype=jnp.float32, states_per_row=2),
            slots,
        )
    )
    return jax.jit(drafter.start), jax.jit(drafter), prefill


def context(tokens, lengths, temperature=0.0):
    temperatures, top_k = np.full(len(lengths), temperature, np.float32), np.full(len(lengths), 5, np.int32)
    return DraftContext(*map(jnp.asarray, (tokens, lengths, temperatures, top_k)), prompt_size=12)


def logits_behind(tokens, length, drafts):
    """Of the small model, fp32 [DRAFTS, vocab]: what each of the drafts was chosen by."""
    text = np.zeros((1, SIZE + DRAFTS), np.int32)
    text[0, :length] = tokens[:length]
    text[0, length : length + DRAFTS] = drafts
    logits = kda_jax.logits(PARAMS, SMALL, text, np.array([length + DRAFTS], np.int32))
    return np.asarray(logits)[0, length - 1 : length + DRAFTS - 1]


def check_state(state, tokens, lengths, prefill):
    """The committed slots hold what a prefill of everything but nothing else gives."""
    np.testing.assert_array_equal(state.computed, lengths)
    slots = 1 + 2 * np.arange(4)
    _, want = prefill(tokens, np.asarray(lengths), slots)
    for name in ("state", "conv"):
        got, expected = (np.asarray(getattr(c, name))[:, slots] for c in (state.cache, want))
        assert_close(got, expected, LIMIT, name)
        assert not np.asarray(getattr(state.cache, name))[:, 0].any()
    for got, expected in zip(state.cache.latents, want.latents, strict=True):
        for b, n in enumerate(lengths):
            assert_close(got[b, :n], expected[b, :n], LIMIT, f"latents, row {b}")


def test_the_state_is_that_of_the_accepted_tokens():
    """Rows gain from no token (a row that has ended) to a whole window; drafts are the model's greedy continuation."""
    start, call, prefill = programs()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SMALL.vocab_size, (4, SIZE)).astype(np.int32)
    lengths = np.array([2, 8, 12, 13], np.int32)
    state = start(PARAMS, context(tokens, lengths))
    check_state(state, tokens, lengths - 1, prefill)
    keys = row_keys(jax.random.key(0), 4)
    for gained in ([0, 0, 0, 0], [1, 2, 3, 4], [4, 0, 4, 1], [0, 3, 1, 4]):
        lengths = lengths + np.array(gained, np.int32)
        draft = call(PARAMS, state, context(tokens, lengths), keys)
        state = draft.state
        check_state(state, tokens, lengths, prefill)
        assert draft.parents is None
        for b in range(4):
            # a row that gained nothing has nothing to draft from, and its drafts are not looked at
            if gained[b] > 0:
                best = logits_behind(tokens[b], lengths[b], draft.tokens[b]).argmax(-1)
                np.testing.assert_array_equal(draft.tokens[b], best)


def test_drafts_are_drawn_from_what_is_returned():
    start, call, _ = programs()
    tokens = np.random.default_rng(1).integers(0, SMALL.vocab_size, (4, SIZE)).astype(np.int32)
    lengths = np.array([2, 8, 12, 13], np.int32)
    state = start(PARAMS, context(tokens, lengths))
    draft = call(PARAMS, state, context(tokens, lengths, 0.7), row_keys(jax.random.key(0), 4))
    for b in range(4):
        logits = logits_behind(tokens[b], lengths[b], draft.tokens[b])
        for i in range(DRAFTS):
            want = shaped(logits[i], Shape(0.7, 5, 1.0))
            np.testing.assert_allclose(draft.probs[b, i], want, atol=1e-5)
            assert want[draft.tokens[b, i]] > 0
    other = call(PARAMS, state, context(tokens, lengths, 0.7), row_keys(jax.random.key(1), 4))
    assert (other.tokens != draft.tokens).any()


@pytest.fixture(scope="module")
def ledger():
    ledger = Ledger()
    yield ledger
    ledger.check()


@pytest.mark.parametrize("recover", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["itself", "smaller", pytest.param("not numbers", marks=pytest.mark.slow)])
def test_a_draft_model_leaves_the_tokens_alone(kind, recover, ledger):
    rng = np.random.default_rng(7)
    prompts = rng.integers(0, TINY.vocab_size, (ROWS, PROMPT)).astype(np.int32)
    case = Case(prompts, rng.integers(1, PROMPT + 1, ROWS).astype(np.int32), NEW - 3, (), 0)
    stop_tokens = (int(case.generate((NEVER, NEVER)).tokens[0, 6]), NEVER)
    plain = case.generate(stop_tokens)
    params = healthy_params(TINY)
    drafter = {
        "itself": DraftModel(TINY, params),
        "smaller": DraftModel(SMALL, PARAMS),
        "not numbers": DraftModel(SMALL, dataclasses.replace(PARAMS, norm=PARAMS.norm * np.nan)),
    }[kind]
    how = kda_jax.SpeculativeOptions("draft", DRAFTS, recover=recover)
    found = case.generate(stop_tokens, speculative=how, drafter=drafter)
    check_emitted(found, case, stop_tokens)
    for b, n in enumerate(plain.lengths):
        tokens = found.tokens[b, : found.lengths[b]]
        ledger.compare(params, TINY, prompts[b, : case.lengths[b]], tokens, plain.tokens[b, :n], f"{kind}, row {b}")
    if kind == "itself":
        # every step but the last emits a whole window
        np.testing.assert_array_equal(found.stats.steps, -(-(found.lengths - 1) // (DRAFTS + 1)))
    elif kind == "not numbers":
        assert not found.stats.drafted.any()
    else:
        assert found.stats.drafted.all(axis=1).sum() >= ROWS - 1


def test_prompts_run_once(monkeypatch):
    """The compiled loop holds no prefill, of the model or of the drafter."""
    calls, original = [], model.prefill

    def counting(params, config, *rest, **how):
        calls.append(config)
        return original(params, config, *rest, **how)

    monkeypatch.setattr(model, "prefill", counting)
    how = {"options": kda_jax.GenerateOptions(5), "speculative": kda_jax.SpeculativeOptions("draft", 2)}

    def run(tokens, lengths):
        drafter = DraftModel(SMALL, PARAMS)
        return kda_jax.generate(healthy_params(TINY), TINY, tokens, lengths, jax.random.key(0), drafter=drafter, **how)

    jax.eval_shape(run, np.ones((1, 4), np.int32), np.array([4], np.int32))
    assert calls == [TINY, SMALL]


def test_load_drafter(tmp_path):
    kda_jax.save((PARAMS, SMALL), tmp_path / "small")
    found = kda_jax.load_drafter(tmp_path / "small")
    assert found.config == SMALL
    assert found.path == tmp_path / "small"
    jax.tree.map(np.testing.assert_array_equal, found.params, PARAMS)
    assert kda_jax.load_drafter(tmp_path / "small", dtype="bfloat16").params.embed.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="path must be a folder with a smaller KDA model: no drafter ships"):
        kda_jax.load_drafter()
    with pytest.raises(ValueError, match="path must be a folder"):
        kda_jax.load_drafter(tmp_path / "nothing")


def test_drafters_that_do_not_fit_are_refused():
    arguments = healthy_params(TINY), TINY, np.ones((1, 4), np.int32), np.array([4], np.int32), jax.random.key(0)

    def refuse(message, drafter):
        with pytest.raises(ValueError, match=message):
            kda_jax.generate(
                *arguments,
                options=kda_jax.GenerateOptions(4),
                speculative=kda_jax.SpeculativeOptions("draft", 2),
                drafter=drafter,
            )

    refuse("drafter must be given for method 'draft'", None)
    refuse("drafter must be a DraftModel for method 'draft'", ModelDrafter(2, SMALL))
    larger = dataclasses.replace(SMALL, vocab_size=41)
    refuse("drafter must have the model's vocabulary of 40 tokens, got one of 41", DraftModel(larger, PARAMS))
