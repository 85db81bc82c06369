"""The engine: every request gets the tokens of ``generate`` on its own, and nothing is lost or left behind."""

import collections
import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kda_jax
from kda_jax import CacheOptions, Engine, GenerateOptions, SpeculativeOptions
from kda_jax import engine as engine_module
from kda_jax.metadata_builder import Smallest
from tests.compiling import quick  # noqa: F401
from tests.small_models import Ledger, healthy_params
from tests.tiny import TINY

CONFIG = dataclasses.replace(TINY, mixer_kinds=("kda", "mla"), ffn_kinds=("dense",) * 2, vocab_size=12)
MODEL = collections.namedtuple("MODEL", "config params")(CONFIG, healthy_params(CONFIG))
DRAFTS = SpeculativeOptions("ngram", 3)
NATIVE = SpeculativeOptions("ngram", 3, recover=False)
MODES = {
    "plain": (None, CacheOptions(page_size=4)),
    "recover": (DRAFTS, CacheOptions(page_size=4)),
    "native": (NATIVE, CacheOptions(page_size=4)),
    "plain, prefixes": (None, CacheOptions("align", 8, 4, prefix_caching=True)),
    "recover, prefixes": (DRAFTS, CacheOptions("align", 8, 4, prefix_caching=True)),
    "native, prefixes": (NATIVE, CacheOptions("align", 8, 4, prefix_caching=True)),
}
SHARED = np.random.default_rng(1).integers(0, 12, 24).tolist()


@functools.cache
def alone(prompt, speculative=None, new=16, temperature=0.0, seed=0, top_k=None, top_p=None):
    """``generate`` on one prompt."""
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(prompt)] = prompt
    options = GenerateOptions(new, temperature=temperature, top_k=top_k, top_p=top_p)
    args = tokens, np.asarray([len(prompt)], np.int32), jax.random.key(seed)
    found = kda_jax.generate(MODEL.params, CONFIG, *args, options=options, speculative=speculative)
    return np.asarray(found.tokens)[0].tolist()


def make(mode, *, max_requests=4, max_tokens_per_step=24, **sizes):
    speculative, cache = MODES[mode]
    cache = dataclasses.replace(cache, **sizes)
    return Engine(
        MODEL,
        cache=cache,
        speculative=speculative,
        max_requests=max_requests,
        max_tokens_per_step=max_tokens_per_step,
        max_length=48,
        smallest=Smallest(rows=4, tokens=8, columns=16),
    )


def check_empty(engine):
    """Nothing held, nothing pending, the books add up."""
    engine._settle()
    assert engine.unfinished == 0
    assert engine._cache.pending is None
    for pool in (engine._memory.slots, engine._memory.pages):
        pool.check()
        assert pool.held == 0


def prompt_of(data):
    shared = data.draw(st.sampled_from([0, 7, 8, 9, 16, 24]))
    tail = data.draw(st.lists(st.integers(0, 11), min_size=0 if shared else 1, max_size=7))
    return tuple(SHARED[:shared] + tail)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_any_run_gives_each_request_its_own_tokens(mode):
    """Arrivals, lengths, budgets, tiny pools, cancellations and shared prefixes are drawn."""
    ledger, seen = Ledger(), collections.Counter()

    @settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        align, own = "prefixes" in mode, 4 if "native" in mode else 0
        least = own + (4 if align else not own)
        budget = data.draw(st.sampled_from([4, 9, 24]))
        engine = make(mode, max_tokens_per_step=budget, num_slots=28, num_pages=31)
        # tiny pools of one array size, so that all runs share their programs: the rest is held by nobody who'd use it
        rest = []
        for pool, most in ((engine._memory.slots, 27 - least), (engine._memory.pages, 17)):
            rest.append((pool, pool.allocate(data.draw(st.integers(0, most)))))
        waiting = [(prompt_of(data), data.draw(st.integers(1, 16))) for _ in range(data.draw(st.integers(1, 7)))]
        wanted, found, dropped = {}, collections.defaultdict(list), set()
        for _ in range(600):
            if waiting and data.draw(st.booleans()):
                prompt, new = waiting.pop()
                wanted[engine.submit(prompt, options=GenerateOptions(new))] = prompt, new
            elif not waiting and not engine.unfinished and not engine._cancelled:
                break
            if wanted and data.draw(st.integers(0, 30)) == 0:
                name = data.draw(st.sampled_from(sorted(wanted)))
                if name in engine._scheduler.requests:
                    engine.cancel(name)
                    dropped.add(name)
            for output in engine.step():
                found[output.request_id] += output.tokens
                if output.finished:
                    seen[output.reason] += 1
                    assert (output.reason == "cancelled") == (output.request_id in dropped)
            for pool in (engine._memory.slots, engine._memory.pages):
                pool.check()
        assert not engine.unfinished
        for name, (prompt, new) in wanted.items():
            truth = alone(prompt)[:new]
            got = found[name]
            truth = truth[: len(got)] if name in dropped else truth
            ledger.compare(MODEL.params, CONFIG, prompt, got, truth, f"{mode}, request {name}")
        for pool, held in rest:
            pool.free(held)
        seen["preempted"] += engine.stats.preemptions
        seen["hit"] += engine.stats.hit_tokens
        check_empty(engine)

    check()
    ledger.check()
    assert seen["length"] > 0


def some(modes, fast):
    """``modes`` as parameters, all but ``fast`` of them slow."""
    return [mode if mode in fast else pytest.param(mode, marks=pytest.mark.slow) for mode in modes]


@pytest.mark.parametrize("mode", some(MODES, ("recover, prefixes",)))
def test_a_full_house_of_requests(mode):
    """More requests than fit, pools for little more than two of them: preemption, resumption, hits."""
    align = "prefixes" in mode
    engine = make(mode, num_pages=20, num_slots=13 if align else 9 if mode == "native" else 4)
    prompts = [(*SHARED[:n], n % 12) for n in (3, 16, 7, 24, 17, 8, 1, 23, 9)]
    ids = [engine.submit(prompt, options=GenerateOptions(16)) for prompt in prompts]
    assert engine.unfinished == len(prompts)
    found = engine.run()
    assert [found[name] for name in ids] == [alone(prompt) for prompt in prompts]
    stats = engine.stats
    assert stats.finished == len(prompts)
    assert stats.generated == 16 * len(prompts)
    assert (stats.preemptions > 0) == ("native" not in mode)  # there, slots keep a third request waiting instead
    assert (stats.hit_tokens > 0) == align
    if "recover" in mode or "native" in mode:
        assert stats.acceptance_length > 1
        assert stats.drafted >= stats.accepted > 0
    check_empty(engine)


@pytest.mark.parametrize("mode", some(["plain", "recover", "native", "recover, prefixes"], ("recover",)))
def test_sampled_tokens_are_those_of_generate_with_the_same_key(mode):
    engine = make(mode, num_pages=20)
    kinds = [{}, {"top_k": 4}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}]
    wanted = {}
    for seed, kind in enumerate(kinds):
        how = {"temperature": 1.2} | kind
        prompt = tuple(SHARED[: 9 + seed])
        name = engine.submit(prompt, options=GenerateOptions(16, **how), key=jax.random.key(seed))
        wanted[name] = alone(prompt, MODES[mode][0], seed=seed, **how)
    assert engine.run() == wanted


@pytest.mark.parametrize(("length", "hit"), [(15, 8), (16, 8), (17, 16)])
def test_hit_lengths_around_a_block_end(length, hit):
    prompt = tuple(SHARED[:length])
    for drop, expected in ((False, hit), (True, max(hit - 8, 0))):
        engine = make("recover, prefixes", drop_last_block=drop)
        for _ in range(2):
            name = engine.submit(prompt, options=GenerateOptions(16))
            assert engine.run()[name] == alone(prompt)
        assert engine.stats.hit_tokens == expected
        assert engine.stats.hit_rate == expected / (2 * length)


def test_what_decoding_wrote_is_found_by_a_later_prompt():
    """Boundary states of commits are as good as those of prompts."""
    engine = make("recover, prefixes")
    first = tuple(SHARED[:5])
    engine.submit(first, options=GenerateOptions(16))
    (text,) = engine.run().values()
    longer = (*first, *text)
    name = engine.submit(longer, options=GenerateOptions(16))
    assert engine.run()[name] == alone(longer)
    assert engine.stats.hit_tokens == 16


def test_stop_tokens_end_a_request_inside_an_accepted_run():
    prompt = tuple(SHARED[:9])
    truth = alone(prompt)
    for stop in set(truth):
        engine = make("recover")
        name = engine.submit(prompt, options=GenerateOptions(16, stop_tokens=(stop,)))
        outputs = []
        while engine.unfinished:
            outputs += engine.step()
        end = truth.index(stop) + 1
        assert [token for output in outputs for token in output.tokens] == truth[:end]
        assert (outputs[-1].request_id, outputs[-1].finished, outputs[-1].reason) == (name, True, "stop")
        check_empty(engine)


BAD = {
    "empty prompt": ({"prompt_tokens": []}, "prompt_tokens must be a non-empty sequence"),
    "token out of range": ({"prompt_tokens": [12]}, r"prompt_tokens must be in \[0, vocab_size=12\), got 12"),
    "negative token": ({"prompt_tokens": [3, -1]}, "got -1"),
    "not tokens": ({"prompt_tokens": ["a"]}, "prompt_tokens must be"),
    "too long": ({"prompt_tokens": [1] * 33}, r"at most max_length=48 tokens together, got 33 \+ 16"),
    "id in use": ({"request_id": "first"}, "request_id must not be in use, got 'first'"),
    "stop token": ({"options": GenerateOptions(4, stop_tokens=(12,))}, r"stop_tokens must be in \[0, vocab_size=12\)"),
    "rows": ({"options": GenerateOptions(4, temperature=np.ones(2))}, "temperature must be a scalar"),
    "options": ({"options": None}, "options must be GenerateOptions, got NoneType"),
    "key": ({"key": 3}, "key must be a JAX key"),
    "kind of key": ({"key": jax.random.key(0, impl="rbg")}, "key must be of jax's default kind"),
    "implementation": ({"options": GenerateOptions(4, implementation="xla")}, "options.implementation must be None or"),
}


def test_bad_requests_leave_the_others_running():
    engine = make("recover")
    prompt = tuple(SHARED[:9])
    engine.submit(prompt, options=GenerateOptions(16), request_id="first")
    engine.step()
    for case, (change, message) in BAD.items():
        arguments = {"prompt_tokens": [1, 2], "options": GenerateOptions(16)} | change
        tokens = arguments.pop("prompt_tokens")
        with pytest.raises(ValueError, match=message):
            engine.submit(tokens, **arguments)
        assert engine.unfinished == 1, case
    with pytest.raises(ValueError, match="max_new_tokens must be an integer at least 1, got 0"):
        GenerateOptions(0)
    with pytest.raises(ValueError, match="request_id must be in use, got 'second'"):
        engine.cancel("second")
    rest = engine.run()["first"]
    assert rest == alone(prompt)[-len(rest) :]
    check_empty(engine)


def test_an_error_inside_a_step_stops_the_engine(monkeypatch):
    engine = make("recover")
    engine.submit([1, 2, 3], options=GenerateOptions(16))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "run_step", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    with pytest.raises(RuntimeError, match="an earlier step failed") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_logits_that_are_not_numbers_end_their_request_only():
    broken = dataclasses.replace(MODEL.params, embed=MODEL.params.embed.at[11].set(np.nan))
    engine = Engine(
        MODEL._replace(params=broken),
        cache=CacheOptions(page_size=4),
        max_requests=3,
        max_tokens_per_step=16,
        max_length=48,
    )
    engine.submit([3, 11], options=GenerateOptions(4), request_id="bad")
    engine.submit([3, 4], options=GenerateOptions(4), request_id="good")
    reasons, tokens = {}, collections.defaultdict(list)
    while engine.unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
            reasons[output.request_id] = output.reason
    assert reasons["bad"] == "nan"
    assert tokens["bad"] == []
    if 11 not in alone((3, 4))[:4]:
        assert tokens["good"] == alone((3, 4))[:4]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "recover", "native", "recover, prefixes", "plain, prefixes"])
def test_warm_up_leaves_no_trace(mode):
    engine = make(mode, max_requests=2, max_tokens_per_step=8)
    engine._cache = jax.tree.map(lambda x: x + 1.5, engine._cache)
    before = jax.tree.map(np.asarray, engine._cache)
    stats = engine.stats
    assert engine.warm_up() >= 6
    for ours, theirs in zip(jax.tree.leaves(engine._cache), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert engine.stats == stats
    prompt = tuple(SHARED[:9])
    name = engine.submit(prompt, options=GenerateOptions(16))
    assert engine.run(progress=True)[name] == alone(prompt)
    check_empty(engine)


REFUSED = {
    "drafter": ({"drafter": object()}, "drafter must be None for method 'ngram'"),
    "method": ({"speculative": SpeculativeOptions("custom", 3)}, "drafter must be given for method 'custom'"),
    "tree": ({"speculative": SpeculativeOptions("ngram", 3, branches=(2, 1))}, "branches must be None in the engine"),
    "budget": ({"max_tokens_per_step": 3}, "max_tokens_per_step must be an integer at least 4, got 3"),
    "requests": ({"max_requests": 0}, "max_requests must be"),
    "length": ({"max_length": 513}, r"max_length must be an integer in \[2, 512\]"),
    "block": ({"cache": CacheOptions("align", 2)}, "block_size must be at least the window of 4 tokens"),
    "slots": ({"cache": CacheOptions("align", 4, num_slots=4)}, "num_slots must be at least 5, enough for one request"),
    "pages": ({"cache": CacheOptions(page_size=4, num_pages=5)}, "num_pages must be at least 14, enough for one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_engines(case):
    change, message = REFUSED[case]
    arguments = {"cache": CacheOptions(), "speculative": DRAFTS, "max_requests": 2, "max_tokens_per_step": 8}
    with pytest.raises(ValueError, match=message):
        Engine(MODEL, **(arguments | {"max_length": 48} | change))
