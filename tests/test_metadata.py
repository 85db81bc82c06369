"""Steps built from host arrays: expected arrays written out, and the rules against a row-by-row reference."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_jax.cache_layout import CacheLayout, CacheSizes
from kda_jax.metadata import Fold, StepMetadata
from kda_jax.metadata_builder import BuilderBase, MetadataBuilder, Rows, postprocess
from tests.tiny import TINY

CONFIG = dataclasses.replace(TINY, mixer_kinds=("kda",) * 3)  # no latents: groups need no pages
NAMES = ("first", "second", "third")
W = 4


def make(**options):
    layout = CacheLayout.from_sizes(CacheSizes.from_config(CONFIG), window=W, dtype="float32")
    return MetadataBuilder(BuilderBase(options.pop("config", CONFIG), NAMES, layout, **options))


RECOVER, NATIVE, PLAIN = make(window=W), make(window=W, recover=False), make()
ALIGN = make(window=W, mode="align", block_size=8)


def rows(query, computed, prefilling, draft, **more):
    n = len(query)
    if not more.keys() & {"block_table", "row_slots"}:
        more.setdefault("slots", np.arange(1, n + 1) * 10)
    return Rows(np.asarray(query), np.asarray(computed), np.asarray(prefilling, bool), np.asarray(draft), **more)


def native(query, computed, prefilling, draft, accepted):
    slots = np.arange(len(query))[:, None] * 10 + np.arange(1, W + 1)[None]
    return rows(query, computed, prefilling, draft, row_slots=slots, last_accepted=np.asarray(accepted))


def same(found, **expected):
    for name, value in expected.items():
        got = getattr(found, name)
        if value is None or isinstance(value, int):
            assert got == value, name
        else:
            np.testing.assert_array_equal(got, value, err_msg=name)


def test_the_base_keeps_everything_it_is_given():
    base = RECOVER.base
    assert (base.config, base.layer_names, base.window, base.recover, base.mode) == (CONFIG, NAMES, W, True, "none")
    assert base.layout.state("correction").shape[1] == W
    with pytest.raises(ValueError, match="base must be a BuilderBase, got NoneType"):
        MetadataBuilder(None)
    with pytest.raises(TypeError, match="layout"):
        BuilderBase(TINY, NAMES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_names": ("a",)}, "layer_names must be a tuple of 3 names"),
        ({"layout": None}, "layout must be given, got None"),
        ({"config": "tiny"}, "config must be a ModelConfig, got str"),
        ({"window": 1}, "window must be an integer at least 2, got 1"),
        ({"mode": "all"}, "mode must be one of"),
        ({"block_size": 8}, "block_size belongs to mode 'align', got 8"),
        ({"mode": "align", "block_size": 3}, "block_size must be an integer at least 4, got 3"),
        ({"page_size": 0}, "page_size must be"),
    ],
)
def test_a_base_with_something_missing_or_wrong_is_refused(change, message):
    arguments = {"config": TINY, "layer_names": NAMES, "layout": RECOVER.base.layout, "window": W} | change
    with pytest.raises(ValueError, match=message):
        BuilderBase(**arguments)


def test_a_prefill_only_step_in_recover_mode_has_no_speculative_rows():
    built = RECOVER.build(rows([5, 3, 0], [0, 0, 0], [1, 1, 0], [-1, -1, -1]))
    step = built.metadata
    assert (step.spec, step.decode, step.copies) == (None, None, None)
    assert (built.batch, built.tokens, step.window) == (4, 8, 1)
    same(step.prefill, request_rows=[0, 1], lengths=[5, 3], computed=[0, 0], source_slots=None, final_slots=[10, 20])


@pytest.mark.parametrize("draft", [[0, 0], [-1, -1], [0, -1]])
def test_decodes_without_drafts_stay_speculative_in_recover_mode(draft):
    step = RECOVER.build(rows([1, 1], [7, 9], [0, 0], draft)).metadata
    assert (step.prefill, step.decode) == (None, None)
    same(step.spec, request_rows=[0, 1], lengths=[1, 1], computed=[7, 9], slots=[10, 20], target_slots=None, window=W)


@pytest.mark.parametrize("draft", [[0, 0], [-1, -1], [0, -1]])
def test_a_native_step_without_a_draft_is_an_ordinary_one(draft):
    step = NATIVE.build(native([1, 1], [7, 9], [0, 0], draft, [3, 1])).metadata
    assert (step.prefill, step.spec) == (None, None)
    same(step.decode, request_rows=[0, 1], computed=[7, 9], slots=[3, 11])


def test_draftless_native_decodes_beside_a_prompt_go_through_prefill():
    step = NATIVE.build(native([1, 2], [7, 0], [0, 1], [0, -1], [3, 0])).metadata
    assert (step.decode, step.spec) == (None, None)
    same(step.prefill, request_rows=[0, 1], lengths=[1, 2], source_slots=[3, 0], final_slots=[3, 11])


def test_a_draftless_decode_beside_drafted_rows():
    args = [1, 4, 3], [7, 9, 5], [0, 0, 0], [0, 3, 2]
    same(RECOVER.build(rows(*args)).metadata.spec, request_rows=[0, 1, 2, 4], lengths=[1, 4, 3, 0])
    step = NATIVE.build(native(*args, [1, 2, 4])).metadata
    same(step.spec, request_rows=[0, 1, 2, 4], lengths=[1, 4, 3, 0], slots=[1, 12, 24, 0])
    np.testing.assert_array_equal(step.spec.target_slots[3], [0] * W)
    # not scheduled for drafting at all: a plain decode natively, speculative with recovery
    step = NATIVE.build(native(args[0], args[1], args[2], [-1, 3, 2], [1, 2, 4])).metadata
    same(step.spec, request_rows=[1, 2], lengths=[4, 3])
    same(step.decode, request_rows=[0], slots=[1])
    same(RECOVER.build(rows(args[0], args[1], args[2], [-1, 3, 2])).metadata.spec, request_rows=[0, 1, 2, 4])


@pytest.mark.parametrize("builder", [RECOVER, NATIVE], ids=["recover", "native"])
def test_a_prompt_chunk_of_one_token_is_prefill(builder):
    args = [1, 3, 1], [0, 9, 6], [1, 0, 1], [-1, 2, -1]
    given = rows(*args) if builder is RECOVER else native(*args, [1, 2, 3])
    step = builder.build(given).metadata
    assert step.decode is None
    fresh = {"source_slots": [0, 30 if builder is RECOVER else 23], "lengths": [1, 1], "computed": [0, 6]}
    same(step.prefill, request_rows=[0, 2], final_slots=[10, 30] if builder is RECOVER else [1, 23], **fresh)
    same(step.spec, request_rows=[1], lengths=[3])


@pytest.mark.parametrize("builder", [RECOVER, NATIVE], ids=["recover", "native"])
def test_a_prompt_of_the_windows_length_is_prefill(builder):
    args = [W, W], [0, 9], [1, 0], [-1, W - 1]
    step = builder.build(rows(*args) if builder is RECOVER else native(*args, [1, 1])).metadata
    same(step.prefill, request_rows=[0], lengths=[W])
    same(step.spec, request_rows=[1], lengths=[W])


def test_rows_of_no_token_are_in_no_group():
    built = RECOVER.build(
        rows([0, 2, 0, 0], [0, 5, 8, 0], [0, 0, 0, 1], [-1, 1, -1, -1], slots=np.asarray([0, 3, 5, 0]))
    )
    assert built.metadata.prefill is None
    same(built.metadata.spec, request_rows=[1], lengths=[2], slots=[3])
    empty = RECOVER.build(rows([0], [0], [0], [-1])).metadata
    assert empty == StepMetadata()


def test_groups_keep_batch_order_and_lead_back_to_it():
    step = RECOVER.build(rows([2, 6, 4, 1, 3], [5, 0, 9, 4, 2], [0, 1, 0, 0, 1], [1, -1, 3, -1, -1])).metadata
    same(step.spec, request_rows=[0, 2, 3, 8], lengths=[2, 4, 1, 0], computed=[5, 9, 4, 0], slots=[10, 30, 40, 0])
    same(step.prefill, request_rows=[1, 4], lengths=[6, 3], source_slots=[0, 50], final_slots=[20, 50])
    assert (step.count("spec", 8), step.count("prefill", 8), step.count("decode", 8)) == (3, 2, 0)


def test_native_rows_read_where_the_last_acceptance_left_the_state():
    for accepted, slot in ((0, 1), (1, 1), (3, 3), (4, 4)):
        step = NATIVE.build(native([3], [9], [0], [2], [accepted])).metadata
        same(step.spec, slots=[slot], target_slots=[[1, 2, 3, 4]])
        same(NATIVE.build(native([1], [9], [0], [0], [accepted])).metadata.decode, slots=[slot])
        same(NATIVE.build(native([2], [9], [1], [-1], [accepted])).metadata.prefill, source_slots=[slot])
        same(NATIVE.build(native([2], [9], [1], [-1], [accepted])).metadata.prefill, final_slots=[slot])


def test_plain_decoding_has_no_speculative_rows():
    same(PLAIN.build(rows([1, 1], [3, 4], [0, 0], [-1, -1])).metadata.decode, request_rows=[0, 1], slots=[10, 20])
    step = PLAIN.build(rows([1, 2], [3, 4], [0, 1], [-1, -1])).metadata
    assert step.decode is None  # a true decode goes along through prefill
    same(step.prefill, request_rows=[0, 1], source_slots=[10, 20])


@pytest.mark.parametrize(
    ("builder", "given", "message"),
    [
        (RECOVER, rows([2], [0], [1], [1]), "request 0 is prefilling and can't verify num_draft=1 drafts"),
        (RECOVER, rows([2], [5], [0], [2]), "request 0 has num_draft=2 and must have query length 3, got 2"),
        (RECOVER, rows([5], [5], [0], [4]), "request 0 has 5 tokens to verify; the window is 4"),
        (RECOVER, rows([5], [5], [0], [-1]), "request 0 has 5 tokens to verify; the window is 4"),
        (PLAIN, rows([1], [5], [0], [0]), "num_draft of request 0 must be -1 without speculation, got 0"),
        (RECOVER, rows([1], [0], [0], [-1]), "request 0 has nothing computed"),
        (RECOVER, rows([1], [5], [0], [-1], slots=np.asarray([0])), "slots of request 0 must be allocated, got 0"),
        (RECOVER, rows([1], [-5], [0], [-1]), "num_computed of request 0 must be at least 0, got -5"),
        (RECOVER, rows([1, 1], [5], [0, 0], [-1, -1]), "num_computed must be integers of rank 1 with 2 rows"),
        (RECOVER, rows([1.0], [5], [0], [-1]), "query_lengths must be integers"),
        (NATIVE, rows([1], [5], [0], [-1]), "row_slots must be integers of rank 2 with 1 rows, got None"),
        (RECOVER, rows([1], [5], [0], [-1], request_ids=("a", "b")), "request_ids must name 1 rows, each once, got 2"),
        (RECOVER, rows([1, 1], [5, 5], [0, 0], [-1, -1], request_ids=("a", "a")), "each once, got 2, 1 of them"),
        (NATIVE, native([1], [5], [0], [1 - 1], [5]), "last_accepted of request 0 must be at most window=4, got 5"),
        (
            NATIVE,
            native([1], [5], [0], [0], [1])._replace(row_slots=np.asarray([[1, 2, -3, 4]])),
            "row_slots of request 0",
        ),
        (
            make(window=W, recover=False, mode="align", block_size=8),
            native([1], [5], [0], [0], [1])._replace(row_slots=np.zeros((1, W), int), block_table=np.asarray([[5]])),
            "row_slots of request 0 must be allocated",
        ),
        (RECOVER, rows([1], [5], [[0]], [-1]), r"is_prefilling must be bool \[1\]"),
    ],
)
def test_refused_rows(builder, given, message):
    with pytest.raises(ValueError, match=message):
        builder.build(given)


def table(*columns):
    return np.asarray([columns])


def test_columns_of_an_aligned_verify():
    # blocks of 8: token 15 is the last of column 1, a window of 4 from 14 reaches column 2
    built = ALIGN.build(rows([4], [14], [0], [3], block_table=table(5, 6, 7, 0)))
    same(built.metadata.spec, slots=[6], computed=[14])
    same(built.metadata.spec.align, block_table=[[5, 6, 7, 0]], num_computed=[14], block_size=8)
    assert built.metadata.spec.align.may_cross
    assert not built.may_defer
    stays = ALIGN.build(rows([2], [12], [0], [1], block_table=table(5, 6)))
    assert not stays.metadata.spec.align.may_cross
    assert stays.may_defer
    assert not ALIGN.build(rows([4], [12], [0], [3], block_table=table(5, 6))).may_defer  # ends on the boundary
    assert RECOVER.build(rows([2], [12], [0], [1])).may_defer
    assert not NATIVE.build(native([2], [12], [0], [1], [1])).may_defer
    assert not RECOVER.build(rows([2], [12], [1], [-1])).may_defer


def test_latents_without_pages_need_the_whole_batch_in_order():
    builder = make(config=TINY, window=W)
    same(builder.build(rows([2, 3], [5, 6], [0, 0], [1, 2])).metadata.spec, pages=None, lengths=[2, 3])
    for query, prefilling in (([0, 2], [0, 0]), ([2, 2], [1, 0])):
        draft = [-1 if p or not q else q - 1 for q, p in zip(query, prefilling, strict=True)]
        with pytest.raises(ValueError, match=r"pages must be given where a group is not the whole batch, got rows \["):
            builder.build(rows(query, [5, 6], prefilling, draft))


def test_a_complete_block_is_read_where_it_is_shared_and_never_written():
    shared = table(False, True, False)
    built = ALIGN.build(rows([4], [16], [0], [3], block_table=table(5, 6, 7), shared=shared))
    same(built.metadata.spec, slots=[6])
    with pytest.raises(ValueError, match="block_table of request 0: column 1 is written in this step and shared"):
        ALIGN.build(rows([4], [15], [0], [3], block_table=table(5, 6, 7), shared=shared))


@pytest.mark.parametrize(
    ("query", "computed", "columns", "message"),
    [
        (4, 14, (5, 6, 0), "block_table of request 'a': column 2 is needed in this step and not allocated"),
        (4, 14, (5, 0, 7), "block_table of request 'a': column 1 is needed"),
        (4, 14, (5, 6), "block_table of request 'a' must have column 2, got 2 columns"),
    ],
)
def test_columns_that_are_not_there(query, computed, columns, message):
    given = rows([query], [computed], [0], [query - 1], block_table=table(*columns), request_ids=("a",))
    with pytest.raises(ValueError, match=message):
        ALIGN.build(given)


def test_columns_are_of_state_blocks_where_pages_are_smaller():
    builder = make(window=W, mode="align", block_size=8, page_size=2)
    given = {"block_table": table(5, 6), "pages": np.arange(1, 9)[None]}
    step = builder.build(rows([5], [8], [1], [-1], **given)).metadata
    same(step.prefill, source_slots=[5], final_slots=[6])  # of pages, column 3 would be the source and there is none
    same(builder.build(rows([3], [9], [0], [2], **given)).metadata.spec, slots=[6])


def test_aligned_prompts_stop_at_boundaries():
    step = ALIGN.build(rows([8, 5], [8, 0], [1, 1], [-1, -1], block_table=np.asarray([[5, 6], [7, 0]]))).metadata
    same(step.prefill, source_slots=[5, 0], final_slots=[6, 7])
    with pytest.raises(ValueError, match="tokens 6 to 8 over the block boundary at 8; a chunk ends at the next"):
        ALIGN.build(rows([3], [6], [1], [-1], block_table=table(5, 6)))


def test_an_aligned_decode_that_enters_a_block_moves_its_state_there():
    builder = make(mode="align", block_size=8)
    given = rows([1, 1, 1], [8, 9, 7], [0, 0, 0], [-1] * 3, block_table=np.asarray([[1, 2], [3, 4], [5, 0]]))
    step = builder.build(given).metadata
    same(step.decode, slots=[2, 4, 5, 0])
    same(step.copies, source=[1], target=[2])


def test_pages_cover_the_window_and_are_cut_to_what_is_needed():
    builder = make(window=W, page_size=4)
    pages = np.asarray([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]])
    step = builder.build(rows([4, 2], [7, 2], [0, 0], [3, 1], pages=pages)).metadata
    np.testing.assert_array_equal(step.spec.pages, [[1, 2, 3, 0], [4, 0, 0, 0]])
    with pytest.raises(ValueError, match="pages of request 0: column 3 is needed in this step and not allocated"):
        builder.build(rows([4], [9], [0], [3], pages=pages[:1]))
    with pytest.raises(ValueError, match="pages of request 0: column 1 is written in this step and shared"):
        builder.build(rows([4], [7], [0], [3], pages=pages[:1], shared_pages=np.asarray([[1, 1, 0, 0, 0]], bool)))
    builder.build(rows([4], [8], [0], [3], pages=pages[:1], shared_pages=np.asarray([[1, 1, 0, 0, 0]], bool)))


def build_after(pending, ids, query=None, prefilling=None):
    n = len(ids)
    query = [2] * n if query is None else query
    prefilling = [0] * n if prefilling is None else prefilling
    draft = [-1 if p else q - 1 for q, p in zip(query, prefilling, strict=True)]
    return RECOVER.build(rows(query, [5] * n, prefilling, draft, request_ids=ids), pending=pending)


def test_a_pending_commit_is_folded_by_a_verify_of_all_its_rows():
    assert build_after(("a", "b"), ("a", "b")).metadata.spec.fold == Fold(None)
    assert build_after(("a", None), ("a",)).must_fold is False
    same(build_after(("a", "b"), ("b", "a")).metadata.spec.fold, rows=[1, 0])
    same(build_after(("a", "b"), ("b", "c", "a")).metadata.spec.fold, rows=[1, 2, 0, 2])
    same(build_after(("a", "b", "c", None), ("c", "a", "b")).metadata.spec.fold, rows=[2, 0, 1, 4])
    assert build_after(("a", "b", "c", None), ("a", "b", "c")).metadata.spec.fold == Fold(None)
    for built in (
        build_after(("a", "b"), ("a",)),  # b is not in the step
        build_after(("z",), ("a",)),  # z is gone
        build_after(("a", "b"), ("a", "b"), query=[2, 3], prefilling=[0, 1]),  # b would be read by prefill
    ):
        assert built.must_fold
        assert built.metadata.spec.fold is None
    assert build_after(None, ("a",)).metadata.spec.fold is None
    assert not build_after(None, ("a",)).must_fold
    assert build_after((None, None), ("a",)).metadata.spec.fold is None


def test_counts_after_a_commit():
    args = np.asarray([14, 14, 14, 14]), np.asarray([4, 4, 4, 0]), np.asarray([1, 2, 9, 3]), np.asarray([2, 2, 2, 2])
    found = postprocess(ALIGN.base, *args)
    same(found, num_computed=[15, 16, 18, 14], column=[1, 1, 2, 1], last_accepted=[1, 1, 1, 1])
    same(postprocess(RECOVER.base, *args), num_computed=[15, 16, 18, 14], last_accepted=[1, 1, 1, 1], column=None)
    same(postprocess(NATIVE.base, *args), num_computed=[15, 16, 18, 14], last_accepted=[1, 2, 4, 2])
    same(postprocess(NATIVE.base, *(x[:1] for x in args[:2]), np.asarray([-1]), args[3][:1]), last_accepted=[2])


@st.composite
def batches(draw):
    out = []
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["idle", "prompt", "decode", "drafted"]))
        query = {"idle": 0, "prompt": draw(st.integers(1, 6)), "decode": 1, "drafted": draw(st.integers(1, W))}[kind]
        computed = draw(st.integers(0 if kind in ("idle", "prompt") else 1, 20))
        out.append((query, computed, kind == "prompt", query - 1 if kind == "drafted" else -1))
    return [list(column) for column in zip(*out, strict=True)]


def reference(query, prefilling, draft, mode):
    """The rules, one row at a time."""
    spec, rest = [], []
    any_draft = any(d > 0 for d in draft)
    for row, (q, p, d) in enumerate(zip(query, prefilling, draft, strict=True)):
        if q == 0:
            continue
        if mode == "recover":
            speculative = not p
        elif mode == "native":
            speculative = any_draft and d >= 0
        else:
            speculative = False
        (spec if speculative else rest).append(row)
    plain = all(not prefilling[row] and query[row] == 1 for row in rest)
    return spec, rest if plain else [], [] if plain else rest


@settings(max_examples=300, deadline=None)
@given(batches(), st.sampled_from(["recover", "native", "plain"]))
def test_groups_are_those_of_a_reference_by_rows(batch, mode):
    query, computed, prefilling, draft = batch
    if mode == "plain":
        draft = [-1] * len(draft)
        query = [1 if q and not p else q for q, p in zip(query, prefilling, strict=True)]
    builder = {"recover": RECOVER, "native": NATIVE, "plain": PLAIN}[mode]
    accepted = [1 + row % W for row in range(len(query))]
    args = query, computed, prefilling, draft
    built = builder.build(native(*args, accepted) if mode == "native" else rows(*args))
    for name, group in zip(("spec", "decode", "prefill"), reference(query, prefilling, draft, mode), strict=True):
        found = getattr(built.metadata, name)
        if not group:
            assert found is None
            continue
        size = 1 << (len(group) - 1).bit_length()
        assert found.request_rows.tolist() == group + [built.batch] * (size - len(group))
        slots = found.final_slots if name == "prefill" else found.slots
        own = [row * 10 + accepted[row] if mode == "native" else (row + 1) * 10 for row in group]
        assert slots.tolist() == own + [0] * (size - len(group))
        leaves = jax.tree.leaves(found)
        chex.assert_type(leaves, jnp.int32)
        assert {len(leaf) for leaf in leaves} == {size}
        fields = {"prefill": ("lengths", "computed", "final_slots"), "decode": ("computed", "slots")}
        for field in fields.get(name, ("lengths", "computed", "slots")):
            chex.assert_shape(getattr(found, field), (size,))
        if name == "spec" and mode == "native":
            chex.assert_shape(found.target_slots, (size, W))
    assert built.tokens >= max([1, *query]) or built.metadata.spec is not None
    assert built.batch >= len(query)
