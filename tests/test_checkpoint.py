"""Reading and writing Hugging Face folders: every spelling, every refusal, and the round trip."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kda_jax import checkpoint
from kda_jax.checkpoint import Model, load, save
from kda_jax.hf_tensors import tensor_plan
from kda_jax.presets import load_config
from tests.tiny import TINY, TINY_HF, random_params


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (where, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, jax.tree_util.keystr(where)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(where))


@pytest.fixture
def folder(tmp_path):
    """A saved folder and its parameters."""
    params = random_params(TINY)
    save((params, TINY), tmp_path)
    return tmp_path


def rewrite(folder, change):
    """Apply ``change`` to the dictionary of stored tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def rename(folder, *pairs):
    def change(tensors):
        for name in list(tensors):
            new = name
            for old, replacement in pairs:
                new = new.replace(old, replacement)
            tensors[new] = tensors.pop(name)

    rewrite(folder, change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_bytes", [checkpoint.MAX_SHARD_BYTES, 4000, 1], ids=["one", "shards", "one-each"])
def test_round_trip_is_exact(tmp_path, dtype, max_shard_bytes):
    config = dataclasses.replace(TINY, dtype=dtype, eos_token_ids=(2, 3))
    params = random_params(config)
    save((params, config), tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_bytes > 1_000_000)
    model = load(tmp_path)
    assert_same(model.params, params)
    assert model.config == config
    assert model.stop_tokens == (2, 3)
    assert model.tokenizer is None
    assert model.path == tmp_path


def test_saving_again_replaces_what_was_there(tmp_path):
    params = random_params(TINY)
    save((params, TINY), tmp_path, max_shard_bytes=4000)
    save(load(tmp_path), tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same(load(tmp_path).params, params)
    save((params, TINY), tmp_path, max_shard_bytes=8000)
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(load(tmp_path).params, params)


@pytest.mark.parametrize("given", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtype_converts_all_but_the_fp32_parameters(folder, given):
    params = random_params(TINY)
    model = load(folder, dtype=given)
    config = dataclasses.replace(TINY, dtype="bfloat16")
    assert model.config == config
    wanted = jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), params, checkpoint.abstract_params(config, "bfloat16"))
    assert_same(model.params, wanted)
    kda, moe = model.params.layers[0].mixer, model.params.layers[1].ffn
    assert kda.A_log.dtype == kda.dt_bias.dtype == moe.router.dtype == moe.router_bias.dtype == jnp.float32
    assert kda.q_proj.dtype == kda.conv.dtype == moe.w1.dtype == jnp.bfloat16


def test_fp32_parameters_are_upcast_from_what_is_stored(folder):
    def change(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    rewrite(folder, change)
    model = load(folder)
    router = random_params(TINY).layers[1].ffn.router
    assert model.params.layers[1].ffn.router.dtype == jnp.float32
    np.testing.assert_array_equal(model.params.layers[1].ffn.router, router.astype(jnp.bfloat16).astype(jnp.float32))


# --- spellings ---------------------------------------------------------------------------------------------------


def stack_experts(tensors):
    for layer in (1, 2):
        p = f"model.layers.{layer}.block_sparse_moe.experts."
        w = {n: np.stack([tensors.pop(f"{p}{e}.{n}.weight") for e in range(4)]) for n in ("w1", "w2", "w3")}
        tensors[p + "gate_up_proj"] = np.concatenate([w["w1"], w["w3"]], axis=1)
        tensors[p + "down_proj"] = w["w2"]


def join_convolutions(tensors):
    for layer in (0, 2):
        p = f"model.layers.{layer}.self_attn."
        tensors[p + "conv1d.weight"] = np.concatenate([tensors.pop(f"{p}{n}_conv1d.weight") for n in "qkv"])


def squeeze(tensors):
    for name in tensors:
        if "conv1d" in name:
            tensors[name] = tensors[name].squeeze(1)
        if name.endswith("A_log"):
            tensors[name] = tensors[name].reshape(-1)


def join_and_squeeze(tensors):
    join_convolutions(tensors)
    squeeze(tensors)


def add_what_is_skipped(tensors):
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    tensors["model.layers.3.eh_proj.weight"] = np.ones((2, 2), np.int8)
    tensors["model.layers.11.self_attn.q_proj.weight"] = np.ones(2, np.float32)


@pytest.mark.parametrize(
    "change",
    [stack_experts, join_convolutions, squeeze, join_and_squeeze, add_what_is_skipped],
    ids=lambda f: f.__name__,
)
def test_spellings_by_content(folder, change):
    rewrite(folder, change)
    assert_same(load(folder).params, random_params(TINY))


@pytest.mark.parametrize(
    "pairs",
    [
        [("layers.0.mlp.", "layers.0.block_sparse_moe.")],
        [("block_sparse_moe", "mlp")],
        [("model.", "language_model.model."), ("lm_head", "language_model.lm_head")],
        [("model.", "")],
        [("model.", "language_model."), ("lm_head", "language_model.lm_head")],
        [(f"self_attn.{n}", f"self_attn.forget_gate.{n}") for n in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")],
    ],
    ids=["dense-as-moe", "moe-as-mlp", "language_model", "no-model", "language_model-no-model", "forget_gate"],
)
def test_spellings_by_name(folder, pairs):
    rename(folder, *pairs)
    assert_same(load(folder).params, random_params(TINY))


def test_twelve_experts_keep_their_order(tmp_path):
    config = dataclasses.replace(TINY, num_experts=12)
    params = random_params(config)
    save((params, config), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        stored["model.layers.1.block_sparse_moe.experts.10.w2.weight"], params.layers[1].ffn.w2[10]
    )
    assert_same(load(tmp_path).params, params)


def test_loading_holds_little_more_than_the_result(tmp_path):
    config = dataclasses.replace(TINY, num_experts=32, moe_intermediate_size=200, hidden_size=128)
    params = random_params(config)
    save((params, config), tmp_path)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
    tracemalloc.start()
    load(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(sizes) + 1.5 * max(sizes) + 1_000_000, (peak, sum(sizes), max(sizes))


# --- refusals ----------------------------------------------------------------------------------------------------


def refuses(folder, *words, **kwargs):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        load(folder, **kwargs)
    for word in words:
        assert word in str(error.value), f"{word!r} not in {error.value}"


Q, W1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.2.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.parametrize("name", [Q, W1, "model.layers.0.self_attn.k_conv1d.weight", "model.norm.weight"])
def test_missing_tensor(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    refuses(folder, "model.safetensors", name, "missing")


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_norm.weight", "extra", "model.layers.0.mlp.gate.weight"])
def test_unexpected_tensor(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(3, np.float32)}))
    refuses(folder, "model.safetensors", name, "unexpected")


def test_two_spellings_at_once(folder):
    def change(tensors):
        tensors["model.layers.0.block_sparse_moe.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]

    rewrite(folder, change)
    refuses(folder, "model.safetensors", "model.layers.0.block_sparse_moe.up_proj.weight", "two spellings")


def test_both_conv_layouts_at_once(folder):
    def change(tensors):
        kept = dict(tensors)
        join_convolutions(tensors)
        tensors.update(kept)

    rewrite(folder, change)
    refuses(folder, "model.layers.0.self_attn.conv1d.weight", "unexpected")


@pytest.mark.parametrize("name", [Q, W1, "model.layers.0.self_attn.A_log", "model.layers.0.self_attn.dt_bias"])
def test_misshaped_tensor(folder, name):
    def change(tensors):
        tensors[name] = np.ascontiguousarray(np.concatenate([tensors[name], tensors[name]], axis=-1))

    rewrite(folder, change)
    refuses(folder, "model.safetensors", name, "shape")


def test_a_transposed_weight_is_misshaped(folder):
    rewrite(folder, lambda tensors: tensors.update({Q: np.ascontiguousarray(tensors[Q].T)}))
    refuses(folder, "model.safetensors", Q, "(24, 12)")


@pytest.mark.parametrize("dtype", [np.int8, np.float64, np.bool_])
@pytest.mark.parametrize("name", [Q, W1])
def test_wrong_dtype(folder, name, dtype):
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].astype(dtype)}))
    refuses(folder, "model.safetensors", name, "BF16, F16, F32")


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999], ids=str)
def test_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    refuses(folder, "model.safetensors", *(["truncated: "] if isinstance(keep, float) else []))


def test_a_truncated_shard_names_the_tensor(tmp_path):
    save((random_params(TINY), TINY), tmp_path, max_shard_bytes=8000)
    file = sorted(tmp_path.glob("model-*"))[1]
    last = list(load_file(file))[-1]
    file.write_bytes(file.read_bytes()[:-4])
    refuses(tmp_path, file.name, "truncated", last.split(".")[-1])


def test_damaged_header(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\0" * 32
    file.write_bytes(data)
    refuses(folder, "model.safetensors", "not a readable safetensors file")


def test_a_missing_shard(tmp_path):
    save((random_params(TINY), TINY), tmp_path, max_shard_bytes=8000)
    file = sorted(tmp_path.glob("model-*"))[1]
    first = min(load_file(file))
    file.unlink()
    refuses(tmp_path, file.name, "no such file", first.split(".")[0])


def edit_index(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update({Q: sorted(set(m.values()))[-1]}), (Q, "does not hold")),
        (lambda m: m.pop(Q), (Q, "does not list")),
        (lambda m: m.update({"ghost": m[Q]}), ("ghost", "does not hold")),
        (lambda m: m.update({Q: "../elsewhere.safetensors"}), (Q, "plain file name")),
    ],
    ids=["wrong-shard", "unlisted", "ghost", "outside"],
)
def test_an_index_that_disagrees(tmp_path, change, words):
    save((random_params(TINY), TINY), tmp_path, max_shard_bytes=8000)
    edit_index(tmp_path, change)
    refuses(tmp_path, *words)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_a_damaged_index(tmp_path, content):
    save((random_params(TINY), TINY), tmp_path, max_shard_bytes=8000)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refuses(tmp_path, "model.safetensors.index.json")


def test_one_file_beside_an_index(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    refuses(folder, "holds both")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refuses(folder, "holds neither")


def test_values_past_float16_are_refused(folder):
    rewrite(folder, lambda tensors: tensors.update({Q: tensors[Q] + 1e5}))
    refuses(folder, Q, "float16", dtype="float16")


@pytest.mark.parametrize("dtype", ["int8", "float64", "half a float", 3])
def test_bad_dtype(folder, dtype):
    refuses(folder, "dtype must be one of", dtype=dtype)


def test_mesh_is_refused(folder):
    refuses(folder, "mesh must be None", mesh=jax.make_mesh((1,), ("model",)))


def test_no_such_folder(tmp_path):
    refuses(tmp_path / "nowhere", "path must be a folder")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refuses(folder, "config.json")


def test_no_model_that_ships(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "ASSETS", tmp_path)
    refuses(None, "the model that ships")


def test_the_model_that_ships_is_found(monkeypatch, folder):
    monkeypatch.setattr(checkpoint, "ASSETS", folder)
    assert_same(load().params, random_params(TINY))


# --- stop tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "stop"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (2,)), (None, (2,))]
)
def test_stop_tokens(folder, generation, stop):
    file = folder / "generation_config.json"
    file.unlink() if generation is None else file.write_text(json.dumps(generation))
    model = load(folder)
    assert model.stop_tokens == stop
    save(model, folder)
    assert load(folder).stop_tokens == stop


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [-1]}'])
def test_bad_generation_config(folder, content):
    (folder / "generation_config.json").write_text(content)
    refuses(folder, "generation_config.json")


# --- what save refuses ---------------------------------------------------------------------------------------------


def test_save_refuses_parameters_that_do_not_fit(tmp_path):
    params = random_params(TINY)
    with pytest.raises(ValueError, match=r"params\.norm must be float32 \(24,\), got float32 \(25,\)"):
        save((dataclasses.replace(params, norm=jnp.ones(25)), TINY), tmp_path)
    with pytest.raises(ValueError, match=r"params\.norm must be float32"):
        save((dataclasses.replace(params, norm=params.norm.astype(jnp.bfloat16)), TINY), tmp_path)
    with pytest.raises(ValueError, match="structure"):
        save((dataclasses.replace(params, layers=params.layers[:-1]), TINY), tmp_path)
    with pytest.raises(ValueError, match="model must be"):
        save(params, tmp_path)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        save((params, TINY), tmp_path, max_shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_the_dtype_saved_is_that_of_the_parameters(tmp_path):
    params = random_params(dataclasses.replace(TINY, dtype="bfloat16"))
    save(Model(TINY, params, None, ()), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(load(tmp_path).params, params)


def test_saved_names_are_the_released_ones(tmp_path):
    save((random_params(TINY_HF), TINY_HF), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_conv1d.weight"].shape == (12, 1, 4)
    assert tensors["model.layers.0.self_attn.A_log"].shape == (1, 1, 2, 1)
    assert tensors["model.layers.0.self_attn.dt_bias"].shape == (12,)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (24, 28)
    assert tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (24, 12)
    assert tensors["model.layers.1.block_sparse_moe.shared_experts.up_proj.weight"].shape == (24, 24)
    assert tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (13, 24)
    per_layer = {"kda": 15, "mla": 5}, {"dense": 3, "moe": 2 + 3 * 4 + 3}
    expected = 3 + sum(
        2 + per_layer[0][m] + per_layer[1][f] for m, f in zip(TINY.mixer_kinds, TINY.ffn_kinds, strict=True)
    )
    assert len(tensors) == expected


def test_kimi_linear_48b_has_its_published_number_of_tensors():
    names = [
        piece.name
        for spellings in jax.tree.leaves(tensor_plan(load_config("kimi_linear_48b")))
        for piece in spellings.options[0]
    ]
    assert len(names) == len(set(names)) == 20_493
