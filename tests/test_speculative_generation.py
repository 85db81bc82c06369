"""Greedy speculation gives the tokens of plain decoding, whatever the drafts, and counts what it did.

Eight rows a batch, each with its own kind of drafter (``tests.drafters.Script``), so that one program a window serves
every kind; prompts, lengths, scripts, stop tokens and the number of new tokens vary without compiling anything.
"""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kda_jax
from tests.compiling import quick  # noqa: F401
from tests.drafters import KINDS, Script, expected_counts, script
from tests.small_models import BOUNDED, Ledger, healthy_params
from tests.tiny import TINY

ROWS, PROMPT, NEW = 8, 16, 32
NEVER = 10**6  # a stop token no vocabulary holds
KEY = jax.random.key(0)
few = settings(max_examples=4, deadline=None)


@pytest.fixture(scope="module")
def ledger():
    ledger = Ledger()
    yield ledger
    ledger.check()


@dataclasses.dataclass
class Case:
    """A ragged batch, when its rows end, and the kind of drafter of each row."""

    prompts: np.ndarray
    lengths: np.ndarray
    new_tokens: int
    kinds: tuple[str, ...]
    seed: int
    config: kda_jax.ModelConfig = TINY

    def generate(self, stop_tokens, **how):
        options = kda_jax.GenerateOptions(self.new_tokens, stop_tokens=stop_tokens)
        params = healthy_params(self.config)
        result = kda_jax.generate(params, self.config, self.prompts, self.lengths, KEY, options=options, **how)
        return jax.tree.map(np.asarray, result)

    def stop_tokens(self):
        """None, or two that two rows emit at drawn places: both end inside a run where the drafter is right."""
        rng = np.random.default_rng(self.seed)
        free = self.generate((NEVER, NEVER)).tokens
        if rng.random() < 0.3:
            return NEVER, NEVER
        return int(free[0, rng.integers(0, self.new_tokens)]), int(free[-1, rng.integers(0, self.new_tokens)])

    def scripts(self, plain):
        """Parameters of ``Script`` [8, S], and the drafts for each place of the output [B, new_tokens]."""
        rng = np.random.default_rng(self.seed)
        rows = np.full((ROWS, PROMPT + NEW), -1, np.int32)
        places = []
        for b, kind in enumerate(self.kinds):
            n = self.lengths[b]
            drafts = script(kind, plain.tokens[b], self.config.vocab_size, rng)
            if plain.lengths[b] < self.new_tokens:
                # past a stop token anything may be drafted, and may even stand: it never comes out
                past = rng.integers(0, self.config.vocab_size, self.new_tokens - plain.lengths[b])
                drafts[plain.lengths[b] :] = -1 if kind == "silent" else past
            rows[b, n : n + self.new_tokens] = drafts
            places.append(drafts)
        return rows, np.stack(places)


@st.composite
def cases(draw, config=TINY):
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    batch = draw(st.integers(5, ROWS))
    prompts = rng.integers(0, config.vocab_size, (batch, PROMPT)).astype(np.int32)
    lengths = np.asarray(draw(st.lists(st.integers(1, PROMPT), min_size=batch, max_size=batch)), np.int32)
    kinds = (*KINDS, *(draw(st.sampled_from(KINDS)) for _ in range(batch - len(KINDS))))
    return Case(prompts, lengths, draw(st.integers(NEW // 2 + 1, NEW)), kinds, seed, config)


def check(case: Case, num_draft_tokens: int, recovers, ledger: Ledger):
    stop_tokens = case.stop_tokens()
    plain = case.generate(stop_tokens)
    check_emitted(plain, case, stop_tokens)
    np.testing.assert_array_equal(plain.stats.steps, plain.lengths - 1)
    assert plain.stats.drafted.shape == plain.stats.accepted.shape == (len(case.prompts), 0)
    params, places = case.scripts(plain)
    drafter = (Script(num_draft_tokens), params)
    for recover in recovers:
        how = kda_jax.SpeculativeOptions("custom", num_draft_tokens, recover=recover)
        found = case.generate(stop_tokens, speculative=how, drafter=drafter)
        check_emitted(found, case, stop_tokens)
        assert not found.stats.nan.any()
        for b, kind in enumerate(case.kinds):
            prompt, n = case.prompts[b, : case.lengths[b]], plain.lengths[b]
            what = f"{kind} drafts, window {num_draft_tokens + 1}, recover={recover}, row {b}"
            emitted = found.tokens[b, : found.lengths[b]]
            excused = ledger.excused
            ledger.compare(healthy_params(case.config), case.config, prompt, emitted, plain.tokens[b, :n], what)
            if ledger.excused == excused:
                check_counts(found.stats, b, plain.tokens[b, :n], places[b], kind, num_draft_tokens, case, what)


def check_emitted(result, case: Case, stop_tokens):
    """Lengths count the stop token; tokens are zero after the end; nothing goes on past an end."""
    assert result.tokens.shape == (len(case.prompts), case.new_tokens)
    assert result.tokens.dtype == result.lengths.dtype == np.int32
    for tokens, n in zip(result.tokens, result.lengths, strict=True):
        assert 1 <= n <= case.new_tokens
        assert not tokens[n:].any()
        assert not np.isin(tokens[: n - 1], stop_tokens).any()
        assert n == case.new_tokens or tokens[n - 1] in stop_tokens


def check_counts(stats, b, output, drafts, kind, num_draft_tokens, case: Case, what):
    steps, drafted, accepted = expected_counts(output, drafts, num_draft_tokens, case.new_tokens)
    assert stats.steps[b] == steps, what
    np.testing.assert_array_equal(stats.drafted[b], drafted, err_msg=what)
    np.testing.assert_array_equal(stats.accepted[b], accepted, err_msg=what)
    emitted, window = len(output), num_draft_tokens + 1
    if kind == "right":
        # every step but the last emits a whole window
        assert steps == -(-(emitted - 1) // window), what
        assert accepted.sum() == emitted - 1 - steps or emitted < case.new_tokens, what
        if (emitted - 1) % window == 0 and steps:
            assert (emitted - 1) / steps == window
    elif kind in ("wrong", "silent"):
        assert steps == emitted - 1, what
        assert not accepted.any(), what
        assert (drafted.sum() == 0) == (kind == "silent" or steps == 0 or case.new_tokens == 2), what


@pytest.mark.parametrize("num_draft_tokens", range(1, 8))
def test_any_drafts_leave_the_tokens_alone(num_draft_tokens, ledger, request):
    """With recovery every window; with a state for each draft three of them, all with --slow."""
    native = num_draft_tokens in (1, 3, 7) or request.config.getoption("--slow")

    @few
    @given(cases())
    def run(case):
        check(case, num_draft_tokens, (True, False) if native else (True,), ledger)

    run()


@pytest.mark.parametrize("config", [TINY, BOUNDED], ids=["softplus gate", "bounded gate"])
def test_lookup_leaves_the_tokens_alone(config, ledger):
    """The n-gram drafter, on prompts that repeat themselves; some drafts stand and some don't."""
    drafted = accepted = 0

    @few
    @given(cases(config))
    def run(case):
        nonlocal drafted, accepted
        case = dataclasses.replace(case, prompts=case.prompts % 3 + 8)
        stop_tokens = case.stop_tokens()
        plain = case.generate(stop_tokens)
        for recover in (True, False) if config is TINY else (True,):
            how = kda_jax.SpeculativeOptions("ngram", 3, recover=recover)
            found = case.generate(stop_tokens, speculative=how)
            check_emitted(found, case, stop_tokens)
            for b, n in enumerate(plain.lengths):
                prompt, what = case.prompts[b, : case.lengths[b]], f"n-gram drafts, recover={recover}, row {b}"
                tokens = found.tokens[b, : found.lengths[b]]
                ledger.compare(healthy_params(config), config, prompt, tokens, plain.tokens[b, :n], what)
            # a step emits the drafts that stand and one token more, except that a stop token may be a draft itself
            extra = 1 + found.stats.steps + found.stats.accepted.sum(axis=1) - found.lengths
            assert np.isin(extra, (0, 1)).all()
            assert not extra[found.lengths == case.new_tokens].any()
            assert (found.stats.accepted <= found.stats.drafted).all()
            assert (np.diff(found.stats.accepted, axis=1) <= 0).all()
            drafted, accepted = drafted + found.stats.drafted.sum(), accepted + found.stats.accepted.sum()

    run()
    assert 0 < accepted < drafted


def one_row(stop_tokens=(NEVER, NEVER), new_tokens=NEW, kind="right", length=9):
    """A batch of five rows (the programs compiled above) whose first one is looked at, and its plain output."""
    prompts = np.random.default_rng(1).integers(0, TINY.vocab_size, (5, PROMPT)).astype(np.int32)
    case = Case(prompts, np.full(5, length, np.int32), new_tokens, (kind,) * 5, 0)
    plain = case.generate((NEVER, NEVER))
    how = kda_jax.SpeculativeOptions("custom", 3)
    found = case.generate(stop_tokens, speculative=how, drafter=(Script(3), case.scripts(plain)[0]))
    return plain.tokens[0], found


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_a_stop_token_anywhere_in_an_accepted_run_ends_the_row(place):
    """Prefill's token is place 0; the first run is places 1 to 4, three drafts and the token after them."""
    output, _ = one_row()
    assert output[place] not in output[:place], "choose another prompt"
    _, found = one_row(stop_tokens=(int(output[place]), NEVER))
    assert found.lengths[0] == place + 1
    np.testing.assert_array_equal(found.tokens[0], [*output[: place + 1], *[0] * (NEW - place - 1)])
    steps = -(-place // 4)
    assert found.stats.steps[0] == steps
    # a draft that stood but lies behind the stop token never came out, so it is not counted
    assert found.stats.accepted[0].sum() == place - place // 4
    np.testing.assert_array_equal(found.stats.drafted[0], [steps] * 3)


@pytest.mark.parametrize("new_tokens", range(17, 25))
def test_the_limit_anywhere_in_a_run_ends_the_row(new_tokens):
    output, found = one_row(new_tokens=new_tokens)
    assert found.tokens.shape == (5, new_tokens)
    assert found.lengths[0] == new_tokens
    np.testing.assert_array_equal(found.tokens[0], output[:new_tokens])
    whole, rest = divmod(new_tokens - 1, 4)
    assert found.stats.steps[0] == whole + (rest > 0)
    # the last window drafts no more than can still come out
    np.testing.assert_array_equal(found.stats.drafted[0], [whole + (rest > 1), whole + (rest > 2), whole])
    np.testing.assert_array_equal(found.stats.accepted[0], found.stats.drafted[0])


def test_the_acceptance_length_of_right_drafts_is_the_window():
    _, found = one_row(new_tokens=29)
    np.testing.assert_array_equal(found.acceptance_length, [4] * 5)
    np.testing.assert_array_equal(found.stats.acceptance, np.ones((5, 3)))
    assert found.overall_acceptance_length == 4
    _, found = one_row(new_tokens=29, kind="wrong")
    np.testing.assert_array_equal(found.acceptance_length, [1] * 5)
    np.testing.assert_array_equal(found.stats.overall_acceptance, [0, 0, 0])
    np.testing.assert_array_equal(found.stats.drafted[0], [27, 26, 25])
    np.testing.assert_array_equal(found.stats.accepted[0], [0, 0, 0])


def test_shares_of_nothing_are_not_numbers():
    _, found = one_row(new_tokens=1)
    assert np.isnan(found.acceptance_length).all()
    assert np.isnan(found.stats.acceptance).all()
    assert np.isnan(found.overall_acceptance_length)


def test_a_drafter_that_lost_track_would_be_noticed():
    """``Script`` goes silent when its context changes under it, so the runs above show that it does not."""
    from kda_jax.speculate.drafter import DraftContext

    drafter, params = Script(2), np.arange(20, dtype=np.int32)[None]
    tokens = np.asarray([[5, 6, 7, 8, 9, 1, 1, 1]], np.int32)

    def context(tokens, length):
        return DraftContext(jax.numpy.asarray(tokens), jax.numpy.asarray([length]), jax.numpy.zeros(1))

    state = drafter.start(params, context(tokens, 3))
    first = drafter(params, state, context(tokens, 4), None)
    assert first.tokens.tolist() == [[4, 5]]
    assert drafter(params, first.state, context(tokens, 5), None).tokens.tolist() == [[5, 6]]
    assert drafter(params, state, context(tokens, 7), None).tokens.tolist() == [[-1, -1]]
    changed = np.where(np.arange(8) == 1, 3, tokens)
    assert drafter(params, first.state, context(changed, 5), None).tokens.tolist() == [[-1, -1]]


def test_a_rejected_draft_that_gives_nan_changes_nothing():
    """Plain decoding never meets such a token, so neither its logits nor its traces in the cache may be seen."""
    output, _ = one_row()
    prompts = np.random.default_rng(1).integers(0, TINY.vocab_size, (5, PROMPT)).astype(np.int32)
    poison = next(t for t in range(TINY.vocab_size) if t not in output and t not in prompts[0])
    params = healthy_params(TINY)
    params = dataclasses.replace(params, embed=params.embed.at[poison].set(np.nan))
    found = kda_jax.generate(
        params,
        TINY,
        prompts,
        np.full(5, 9, np.int32),
        KEY,
        options=kda_jax.GenerateOptions(NEW, stop_tokens=(NEVER, NEVER)),
        speculative=kda_jax.SpeculativeOptions("custom", 3),
        drafter=(Script(3), np.full((ROWS, PROMPT + NEW), poison, np.int32)),
    )
    np.testing.assert_array_equal(found.tokens[0], output)
    assert not found.stats.nan[0]
