"""``kda-jax bench``: what it counts, what it compares and what it refuses. Never how fast anything is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kda_jax
from kda_jax.bench import generation, operations, speculative
from kda_jax.bench.operations import NAMES, Shape
from kda_jax.cli import main
from kda_jax.generation import GenerateResult, GenerateStats
from kda_jax.options import GenerateOptions
from kda_jax.tokenizer import Tokenizer
from tests.test_tokenizer import byte_level
from tests.tiny import TINY_HF, random_params

SMALL = Shape(B=2, H=2, HV=4, K=6, V=10, W=3, T=20)


@pytest.fixture(autouse=True)
def short_loops(monkeypatch):
    monkeypatch.setattr(operations, "LOOP_SECONDS", 1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer; its n-gram drafts are sometimes right."""
    path = tmp_path_factory.mktemp("model")
    config = dataclasses.replace(TINY_HF, vocab_size=300, mixer_kinds=("kda", "mla"), ffn_kinds=("dense", "moe"))
    kda_jax.save((random_params(config), config), path, tokenizer=Tokenizer.from_tokenizers(byte_level()))
    return path


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"text": "def f(x):\n    return x"}, {"text": "abab" * 5}, {"text": "x"}]))
    return file


def bench(capsys, *arguments) -> dict:
    assert main(["bench", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def generate_arguments(folder, prompts):
    sizes = ("--max-new-tokens", 12, "--num-draft-tokens", 2, "--timed", 2, "--repeats", 1)
    return ("generate", "--model", folder, "--prompts", prompts, *sizes)


def speculative_arguments(folder, prompts, *more):
    return "speculative", "--model", folder, "--prompts", prompts, "--max-new-tokens", 12, "--repeats", 1, *more


def test_metadata_is_built_in_each_mode(capsys):
    report = bench(capsys, "metadata", "--rows", 3, 9, "--repeats", 2)
    assert set(report["microseconds"]) == {"plain", "recover", "native", "recover, align"}
    assert all(set(times) == {"3", "9"} and min(times.values()) > 0 for times in report["microseconds"].values())
    assert main(["bench", "metadata", "--rows", "2", "--repeats", "1"]) == 0
    assert "recover, align" in capsys.readouterr().out


@pytest.mark.slow
def test_speculative_compares_methods(capsys, folder, prompts):
    """Counts are generate's; a drafter that is the model itself is always right; tables say it all again."""
    more = ("--num-draft-tokens", 2, "--branches", "2,1", "--drafter", folder, "--batch", 2)
    report = bench(capsys, *speculative_arguments(folder, prompts, *more))
    assert (report["prompts"], report["batch"], report["dtype"]) == (3, 2, "float32")
    names = ["plain", "ngram, recovered", "ngram, native", "ngram tree 2+1", "draft, recovered", "draft, native"]
    assert list(report["methods"]) == names
    for name, run in report["methods"].items():
        # three prompts, the last of them twice to fill its batch
        assert run["rows"] == run["same_as_plain"] == len(run["acceptance_length_by_prompt"]) == 4
        assert len(run["drafted"]) == {"plain": 0, "ngram tree 2+1": 3}.get(name, 2)
        assert run["tokens_per_second"] > 0
        assert (run["draft_ms"] is None) == (name == "plain")
        if name != "plain":
            assert run["draft_ms"] + run["verify_ms"] == pytest.approx(run["step_ms"])
    assert report["methods"]["plain"]["acceptance_length"] == 1
    assert report["methods"]["plain"]["times_plain"] == 1
    itself = report["methods"]["draft, recovered"]
    assert itself["accepted"] == itself["drafted"]
    assert itself["acceptance_length"] == 11 / 4
    text = "".join(map(str, speculative.tables(report).renderables))
    assert "slower than plain" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--num-draft-tokens", 0), "--num-draft-tokens must be an integer at least 1, got 0"),
        (("--branches", "2,x"), "--branches must be numbers with commas between them, got '2,x'"),
        (("--branches", "2,0"), "branches must be an integer at least 1, got 0"),
        (("--batch", 0), "--batch must be an integer at least 1, got 0"),
        (("--drafter", "nowhere"), "path must be a folder"),
    ],
)
def test_speculative_refuses(capsys, folder, prompts, more, message):
    assert main(["bench", *map(str, speculative_arguments(folder, prompts, *more))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_generate_counts_what_generate_reports(capsys, folder, prompts):
    report = bench(capsys, *generate_arguments(folder, prompts))
    assert (report["prompts"], report["timed_prompts"], report["dtype"]) == (3, 2, "float32")
    assert list(report["decoders"]) == ["plain", "ngram, recovered", "ngram, native"]
    for run in report["decoders"].values():
        assert run["agrees"] == 2
        assert run["slowest"] <= run["tokens_per_second"] <= run["fastest"]
    model = kda_jax.load(folder)
    steps, accepted = 0, np.zeros(2, int)
    for prompt in json.loads(prompts.read_text()):
        ids = model.tokenizer.encode(prompt["text"])
        tokens = np.zeros((1, report["prompt_tokens"]["most"]), np.int32)
        tokens[0, : len(ids)] = ids
        result = kda_jax.generate(
            model.params,
            model.config,
            tokens,
            np.asarray([len(ids)]),
            jax.random.key(0),
            options=GenerateOptions(max_new_tokens=12),
            speculative=kda_jax.SpeculativeOptions("ngram", 2),
        )
        steps += int(result.stats.steps[0])
        accepted += np.asarray(result.stats.accepted[0])
    acceptance = report["acceptance"]
    assert acceptance["steps"] == steps
    assert acceptance["accepted"] == accepted.tolist()
    assert acceptance["length"] == pytest.approx(3 * 11 / steps)
    # with every token drafted or not, steps and accepted drafts make up the tokens after the first
    assert steps + accepted.sum() == 3 * 11
    assert report["state_bytes"]["native"] > report["state_bytes"]["recovered"] > 0


def test_generate_prints_tables(capsys, folder, prompts, monkeypatch):
    def fake(params, config, tokens, lengths, key, *, options, speculative):
        stats = GenerateStats(np.asarray([5]), np.asarray([[4, 2]]), np.asarray([[4, 2]]), np.asarray([False]))
        return GenerateResult(np.arange(12)[None], np.asarray([12]), stats)

    monkeypatch.setattr(generation, "generate", fake)
    assert main(["bench", *map(str, generate_arguments(folder, prompts))]) == 0
    out = capsys.readouterr().out
    # three prompts of 12 tokens in 5 steps each: 3 * 11 / 15 tokens a step
    for text in ("tokens/s", "ngram, native", "length 2.20 tokens", "with recovery", f"jax {jax.__version__}"):
        assert text in " ".join(out.split()), text


@pytest.mark.parity
@pytest.mark.filterwarnings("default")
def test_transformers_decodes_the_same_tokens(capsys, folder, prompts):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    report = bench(capsys, *generate_arguments(folder, prompts), "--against-transformers")
    theirs = [name for name in report["decoders"] if name.startswith("transformers")]
    assert theirs
    assert all(report["decoders"][name]["agrees"] == 2 for name in theirs), report["decoders"]
    assert set(report["times_transformers"]) == set(report["decoders"])
    assert max(report["times_transformers"][name] for name in theirs) == 1


def test_a_decoder_that_differs_is_found_out():
    def decoder(*changes):
        def decode(prompt):
            tokens = np.arange(8) + prompt[0]
            for where in changes:
                tokens[where] += prompt[0] == 5
            return tokens

        return decode

    found = generation.time_decoders(
        {"a": decoder(), "b": decoder(3, 6), "short": lambda prompt: np.arange(7) + prompt[0]},
        [np.asarray([5]), np.asarray([9])],
        repeats=2,
    )
    assert found["a"]["agrees"] == 2
    assert (found["b"]["agrees"], found["b"]["first_differences"]) == (1, [3])
    assert (found["short"]["agrees"], found["short"]["first_differences"]) == (0, [7, 7])


def test_the_prompts_that_ship():
    texts = generation.read_prompts(generation.PROMPTS)
    assert len(texts) == len(set(texts)) == 50
    assert all(text.startswith(("def ", "class ", "async def ")) for text in texts)


def array_bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_arrays(name):
    """What one call reads and writes, counted from the arrays themselves."""
    shape = SMALL
    maker = operations.Maker(shape, "bfloat16", 0)
    case = operations._CASES[name](maker, None)
    inputs = array_bytes(case.inputs) // operations.INPUT_SETS
    state = shape.B * shape.HV * shape.V * shape.K * 4
    conv = shape.B * 3 * maker.channels * 2
    weight = maker.channels * 4 * 2
    output = array_bytes(case.carry[0]) if isinstance(case.carry, tuple) else 0
    expected = {
        "decode": inputs + output + 2 * state,
        "verify": inputs + output + state + (array_bytes(case.carry[1]) if name == "verify" else 0),
        "verify_native": inputs + output + state * (1 + shape.W),
        "commit": inputs + 2 * state,
        "chunked": inputs + output + 2 * state,
        "conv_prefill": inputs + output + 2 * conv + weight,
        "conv_step": inputs + output + conv + weight,
        "conv_commit": 2 * conv,  # the last tokens of the window replace the history
    }
    assert case.moved == expected[name]


@pytest.mark.parametrize("name", ["decode", "verify_native", "commit"])
def test_the_loop_walks_over_the_whole_pool(name):
    """Every slot but the null slot is written by enough steps, none twice before that."""
    case = operations._CASES[name](operations.Maker(SMALL, "float32", 16 * 2 * 4 * 60 * 4), None)
    carry = jax.tree.map(jnp.copy, case.carry)
    before = np.asarray(jax.tree.leaves(carry)[-1])
    width = SMALL.W if name == "verify_native" else 1
    steps = (before.shape[0] - 1) // (SMALL.B * width)
    after = operations._loop(case.inputs, carry, jnp.int32(steps), call=case.call, slots=case.slots)
    changed = (np.asarray(jax.tree.leaves(after)[-1]) != before).any(axis=(1, 2, 3))
    assert steps > 2
    assert changed.tolist() == [False] + [True] * (before.shape[0] - 1)


def test_ops_report(capsys):
    shape = ",".join(f"{name}={size}" for name, size in dataclasses.asdict(SMALL).items())
    report = bench(capsys, "ops", "--shape", shape, "--repeats", 1, "--pool-mib", 1)
    assert [row["op"] for row in report["rows"]] == list(NAMES)
    bandwidth = report["copy_bytes_per_second"]
    for row in report["rows"]:
        assert row["seconds"] > 0
        assert row["floor_seconds"] == pytest.approx(row["bytes"] / bandwidth)
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert {name: row[name] for name in dataclasses.asdict(SMALL)} == dataclasses.asdict(SMALL)


def test_ops_prints_tables(capsys):
    assert main(["bench", "ops", "--shape", "H=1,K=4,V=2,W=2,T=16", "--pool-mib", "1", "--ops", "decode"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "copy bandwidth" in out
    assert "B=1 H=1 HV=1 K=4 V=2 W=2 T=16" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ops", "--shape", "H=2,Q=3"), "--shape must be NAME=NUMBER with names of B, H, HV, K, V, W, T, got 'Q=3'"),
        (("ops", "--shape", "H=-2"), "--shape must be NAME=NUMBER"),
        (("ops", "--shape", "K=0"), "--shape K must be"),
        (("ops", "--shape", "H=2,HV=3"), "--shape HV must be a multiple of H=2, got 3"),
        (("ops", "--repeats", "0"), "--repeats must be"),
        (("ops", "--ops", "nothing"), "invalid choice: 'nothing'"),
        (("generate", "--timed", "0"), "--timed must be"),
        (("generate", "--max-new-tokens", "0"), "max-new-tokens must be"),
        (("generate", "--num-draft-tokens", "0"), "num_draft_tokens must be"),
        (("generate", "--prompts", "nowhere.json"), "--prompts nowhere.json: must be a JSON list"),
        (("generate", "--model", "nowhere"), "path must be a folder"),
        ((), "WHAT"),
    ],
)
def test_refusals_are_one_line(capsys, arguments, message):
    try:
        code = main(["bench", *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("content", ["{", "[]", "{}", '[{"text": ""}]', '[{"txt": "a"}]', "[1]"])
def test_a_bad_file_of_prompts_is_named(tmp_path, content):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"p\.json"):
        generation.read_prompts(file)
