"""Mixed steps: each request gets the tokens it gets alone, whatever else runs beside it and however it is cut up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kda_jax
from kda_jax import model
from tests.compiling import quick  # noqa: F401
from tests.small_models import Ledger, healthy_params
from tests.step_driver import BLOCK, Driver
from tests.tiny import TINY

SMALL = dataclasses.replace(TINY, mixer_kinds=("kda", "mla"), ffn_kinds=("dense",) * 2)
W, NEW = 4, 20
PROMPTS = [
    [3],
    [5, 7, 1, 9],
    [2, 30, 4, 4, 8, 1, 6, 11, 17],
    [int(x) for x in np.random.default_rng(0).integers(0, 40, 21)],
]
KINDS = {
    "recover": {"window": W},
    "native": {"window": W, "recover": False},
    "plain": {},
    "recover, align": {"window": W, "mode": "align"},
    "native, align": {"window": W, "recover": False, "mode": "align"},
    "plain, align": {"mode": "align"},
    "recover, packed": {"window": W, "packed": True},
    "native, packed": {"window": W, "recover": False, "packed": True},
}


@functools.cache
def alone(config=SMALL):
    tokens = np.zeros((len(PROMPTS), 21), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(p) for p in PROMPTS], np.int32)
    options = kda_jax.GenerateOptions(NEW + W)
    found = kda_jax.generate(healthy_params(config), config, tokens, lengths, jax.random.key(0), options=options)
    return np.asarray(found.tokens).tolist()


def draw_work(data, driver, speculative):
    """What each request does in the next step."""
    work = []
    for request, truth in zip(driver.requests, alone(), strict=True):
        if len(request.emitted) >= NEW or data.draw(st.integers(0, 5)) == 0:
            work.append("idle")
        elif request.prefilling:
            work.append(data.draw(st.integers(1, 8)))
        elif speculative and data.draw(st.integers(0, 4)):
            drafts = truth[len(request.emitted) :][: data.draw(st.integers(0, W - 1))]
            wrong = data.draw(st.integers(0, W))
            work.append([(t + 1) % 40 if i == wrong else t for i, t in enumerate(drafts)])
        else:
            work.append(None)
    return work


def packed(built):
    """The step with its windows packed, into half of their room where they fit."""
    spec = built.metadata.spec
    if spec is None:
        return built
    room = spec.lengths.size * spec.window
    size = room // 2 if spec.lengths.sum() <= room // 2 else room
    spec = dataclasses.replace(spec, packed=size)
    return built._replace(metadata=dataclasses.replace(built.metadata, spec=spec))


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k == "native, packed" else k for k in KINDS]
)
def test_any_interleaving_gives_each_request_its_own_tokens(kind):
    ledger = Ledger()

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        how = dict(KINDS[kind])
        tamper = packed if how.pop("packed", False) else lambda built: built
        driver = Driver(SMALL, healthy_params, PROMPTS, **how)
        driver.tamper = tamper
        for _ in range(60):
            if all(len(request.emitted) >= NEW for request in driver.requests):
                break
            order = data.draw(st.permutations(range(len(PROMPTS))))
            driver.step(draw_work(data, driver, "window" in KINDS[kind]), order=order, defer=data.draw(st.booleans()))
        for request, truth in zip(driver.requests, alone(), strict=True):
            n = len(request.emitted)
            ledger.compare(healthy_params(SMALL), SMALL, request.prompt, request.emitted, truth[:n], kind)

    check()
    ledger.check()


def run_to(driver, steps, **options):
    for work in steps:
        driver.step(work, **options)
    return driver


@pytest.mark.parametrize("kind", ["recover", "recover, align"])
def test_a_deferred_commit_is_the_commit(kind):
    """Put off into the next verify, before the next step, and not at all: the same states."""
    truth, states = alone(), []
    drafts = [[*truth[i][1:3], 0] for i in range(2)]
    # a verify of the same rows folds; one of other rows, and a prompt beside them, have the commit written before
    for defer, order in ((False, [0, 1, 2, 3]), (True, [0, 1, 2, 3]), (True, [1, 0, 3, 2])):
        driver = Driver(SMALL, healthy_params, PROMPTS, **KINDS[kind])
        driver.fold_apart = False
        run_to(driver, [[1, 4, "idle", "idle"]])
        driver.step([drafts[0], drafts[1], "idle", "idle"], defer=defer, order=order)
        assert (driver.pending is not None) == (driver.cache.pending is not None)
        # in mode align row 1 may reach a boundary, and the states there are written at once
        assert (driver.pending is not None) == (defer and kind == "recover")
        built = driver.step([None, None, "idle", "idle"], defer=defer)
        if driver.pending is not None:
            assert built.metadata.spec.fold is not None
        built = driver.step([None, "idle", 3, "idle"], defer=defer)
        assert built.must_fold == (defer and kind == "recover")
        driver.cache = driver.fold(driver.cache)
        assert driver.cache.pending is None
        slots = np.asarray([driver.state_of(request) for request in driver.requests[:3]])
        states.append([np.asarray(pool[:, slots]) for pool in (driver.cache.state, driver.cache.conv)])
        assert [len(r.emitted) for r in driver.requests] == [6, 5, 0, 0]
    for other in states[1:]:
        for ours, theirs in zip(jax.tree.leaves(states[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


def test_folding_nothing_is_the_identity():
    cache = Driver(SMALL, healthy_params, PROMPTS, window=W).cache
    assert model.fold(healthy_params(SMALL), SMALL, cache) is cache


def test_a_second_commit_cannot_be_put_off():
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W)
    run_to(driver, [[1, "idle", "idle", "idle"], [[1], "idle", "idle", "idle"]], defer=True)
    pending = driver.cache.pending
    with pytest.raises(ValueError, match="pending commit already"):
        model.defer(driver.cache, pending.records, pending.plan)
    left, free = dataclasses.replace(pending.records, records=None), dataclasses.replace(driver.cache, pending=None)
    with pytest.raises(ValueError, match=r"left\.records must be given"):
        model.defer(free, left, pending.plan)
    crossing = dataclasses.replace(pending.plan, writes_boundaries=True)
    with pytest.raises(ValueError, match=r"plan\.writes_boundaries must be False"):
        model.defer(free, pending.records, crossing)


@pytest.mark.parametrize("kind", ["recover", "native", "recover, align"])
def test_a_discarded_step_changes_nothing(kind):
    """A row that sampled nothing commits nothing, and goes on as if the step had not been."""
    driver = Driver(SMALL, healthy_params, PROMPTS, **KINDS[kind])
    run_to(driver, [[1, 4, "idle", "idle"]])
    if kind == "native":  # its verify overwrites the states it may not commit: only recovery can throw a step away
        driver.step([None, [1], "idle", "idle"])
    else:
        before = np.asarray(driver.cache.state[:, driver.state_of(driver.requests[0])])
        driver.step([[9, 9], [1], "idle", "idle"], discard=(0,))
        after = np.asarray(driver.cache.state[:, driver.state_of(driver.requests[0])])
        np.testing.assert_array_equal(before, after)
        assert len(driver.requests[0].emitted) == 1
    for _ in range(6):
        driver.step([None, None, "idle", "idle"])
    for request, truth in zip(driver.requests[:2], alone(), strict=False):
        assert request.emitted == truth[: len(request.emitted)]


def test_slots_nobody_owns_stay_bit_for_bit():
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W, mode="align", poison=7.5)
    run_to(driver, [[1, 4, 8, 8], [None, [1, 2, 3], 1, 8], [[4], None, [5, 6], 5], [None, [1, 2, 3], None, [4, 4, 4]]])
    owned = {0} | {int(s) for r in driver.requests for s in r.table}
    others = [slot for slot in range(48) if slot not in owned]
    assert len(others) > 20
    for pool in (driver.cache.state, driver.cache.conv):
        np.testing.assert_array_equal(np.asarray(pool)[:, [0, *others]], 7.5)
    pages = {int(p) for r in driver.requests for p in r.pages} - {0}
    for pool in driver.cache.latents:
        np.testing.assert_array_equal(np.delete(np.asarray(pool), sorted(pages), axis=0), 7.5)


def test_a_prompt_in_a_recycled_slot_starts_from_nothing():
    """The slot's last owner left a state; a fresh request, of one token or more, does not see it."""
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W)
    run_to(driver, [[1, 4, "idle", "idle"], [None, None, "idle", "idle"]])
    first, second = driver.requests[:2]
    fresh = [(first, PROMPTS[1]), (second, PROMPTS[0])]
    driver.requests[:2] = [dataclasses.replace(r, emitted=[], computed=0, prompt=list(p)) for r, p in fresh]
    driver.step([4, 1, "idle", "idle"])
    for _ in range(5):
        driver.step([None, None, "idle", "idle"])
    assert driver.requests[0].emitted == alone()[1][:6]
    assert driver.requests[1].emitted == alone()[0][:6]


@pytest.mark.parametrize("accept", [1, 2, 3, 4])
def test_a_block_boundary_at_every_place_of_an_accepted_run(accept):
    """Whatever part of a window stands, the running state is in the block of the last token, and a boundary that was
    passed has the state of its own token."""
    for start in range(BLOCK - W, BLOCK + 1):
        driver = Driver(SMALL, healthy_params, PROMPTS, window=W, mode="align")
        request, truth = driver.requests[1], alone()[1]
        driver.step(["idle", 4, "idle", "idle"])
        while request.computed < start:
            driver.step(["idle", None, "idle", "idle"])
        n = len(request.emitted)
        drafts = [(t + (i + 1 == accept)) % 40 for i, t in enumerate(truth[n : n + W - 1])]
        driver.step(["idle", drafts, "idle", "idle"])
        assert request.computed == start + accept
        slow = Driver(SMALL, healthy_params, PROMPTS, mode="align")
        slow.step(["idle", 4, "idle", "idle"])
        while slow.requests[1].computed < request.computed:
            slow.step(["idle", None, "idle", "idle"])
        assert request.emitted == slow.requests[1].emitted
        columns = {(request.computed - 1) // BLOCK} | set(range(request.computed // BLOCK))
        for column in columns:
            for name in ("state", "conv"):
                ours = getattr(driver.cache, name)[:, request.table[column]]
                theirs = getattr(slow.cache, name)[:, slow.requests[1].table[column]]
                np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4, err_msg=f"{name} {column} from {start}")


def test_groups_need_pages():
    driver = Driver(SMALL, healthy_params, PROMPTS, window=W)
    run_to(driver, [[1, "idle", "idle", "idle"]])
    step = {}

    def spy(cache, tokens, metadata, judge, defer):
        step["it"] = cache, tokens, metadata
        raise InterruptedError

    driver.run = spy
    with pytest.raises(InterruptedError):
        driver.step([[1], 4, "idle", "idle"])
    cache, tokens, metadata = step["it"]
    bare = dataclasses.replace(metadata, spec=dataclasses.replace(metadata.spec, pages=None))
    with pytest.raises(ValueError, match="pages must be given where a step has several groups of rows"):
        model.step(healthy_params(SMALL), SMALL, cache, tokens, bare)
    with pytest.raises(ValueError, match="tokens must have at least window=4 columns, got 3"):
        model.step(healthy_params(SMALL), SMALL, cache, jnp.asarray(tokens)[:, :3], metadata)
