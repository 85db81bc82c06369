"""transformers' Kimi-Linear, live: freshly made random models, both ways through the checkpoint."""

import dataclasses

import jax
import numpy as np
import pytest

import kda_jax
from kda_jax.checkpoint import load, save
from kda_jax.tokenizer import Tokenizer
from tests.golden_data import pad_right, relative_rms
from tests.reference_model import make_model, stepwise_logits
from tests.tiny import TINY_HF, random_params

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("default"),  # of torch and transformers
]


@pytest.fixture(autouse=True)
def torch():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return torch


VARIANTS = {
    "as-golden": {},
    "two-shared-grouped": {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "not-renormalised": {"norm_topk_prob": False, "routed_scaling_factor": 0.7, "rms_norm_eps": 1e-3},
    "no-moe": {"mlp_layer_types": ["dense"] * 4, "linear_conv_kernel_dim": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_greedy_tokens(tmp_path, changes):
    seed = list(VARIANTS.values()).index(changes)
    reference = make_model(seed, **changes)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.dtype == "float32"
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 250, n).astype(np.int32) for n in (2, 37, 70)]
    tokens, lengths = pad_right(prompts, fill=9)
    logits = kda_jax.logits(model.params, model.config, tokens, lengths)
    expected = [stepwise_logits(reference, prompt, 15) for prompt in prompts]
    for row, (wanted, _), n in zip(logits, expected, lengths, strict=True):
        assert relative_rms(row[:n], wanted[:n]) <= 1e-4, n
    options = kda_jax.GenerateOptions(max_new_tokens=16)
    result = kda_jax.generate(model.params, model.config, tokens, lengths, jax.random.key(0), options=options)
    for found, (wanted, sequence), n in zip(np.asarray(result.tokens), expected, lengths, strict=True):
        top = np.sort(wanted[n - 1 :], axis=-1)
        gaps = top[:, -1] - top[:, -2]
        decided = int(np.argmax(gaps < 1e-4)) if (gaps < 1e-4).any() else 16
        assert decided >= 8, "a near tie leaves too little to compare: change the seed"
        np.testing.assert_array_equal(found[:decided], sequence[n : n + decided])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one", "shards"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_save_writes(torch, tmp_path, dtype, max_shard_bytes):
    from transformers import KimiLinearForCausalLM

    config = dataclasses.replace(TINY_HF, dtype=dtype)
    params = random_params(config)
    save((params, config), tmp_path, max_shard_bytes=max_shard_bytes)
    loaded, info = KimiLinearForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (kind, info[kind])
    assert loaded.dtype == getattr(torch, dtype)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 2
    assert loaded.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    back = load(again)
    assert back.config == config
    found = jax.tree_util.tree_leaves_with_path(back.params)
    for (where, x), y in zip(found, jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(where)
        if dtype == "bfloat16" and name.endswith("A_log"):  # transformers holds it in the model's dtype
            y = y.astype("bfloat16").astype("float32")
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=name)


def test_logits_of_what_save_writes(torch, tmp_path):
    from transformers import KimiLinearForCausalLM

    params = jax.tree.map(lambda x: x * 0.4, random_params(TINY_HF))
    save((params, TINY_HF), tmp_path)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 20)).astype(np.int32)
    with torch.no_grad():
        wanted = KimiLinearForCausalLM.from_pretrained(tmp_path)(torch.tensor(tokens)).logits.numpy()
    logits = kda_jax.logits(params, TINY_HF, tokens, np.full(2, 20, np.int32))
    assert relative_rms(logits, wanted) <= 1e-4


def test_transformers_reads_the_tokenizer_that_save_writes(tmp_path):
    from transformers import AutoTokenizer

    from tests.test_tokenizer import TEXTS, byte_level

    tokenizer = Tokenizer.from_tokenizers(
        byte_level(), bos_token="<s>", eos_token="</s>", chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    save((random_params(TINY_HF), TINY_HF), tmp_path, tokenizer=tokenizer)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load(tmp_path).tokenizer
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert chat == ours.apply_chat("hi")
