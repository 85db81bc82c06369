"""The command line, on a tiny checkpoint: text, JSON, speculation, chat, and one line for every mistake."""

import dataclasses
import functools
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import kda_jax
from kda_jax.cli import main
from kda_jax.tokenizer import Tokenizer
from tests.compiling import quick  # noqa: F401
from tests.small_models import healthy_params
from tests.tiny import TINY

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
PROMPT = "one two one two one"
NEW = 24
REPORT = {
    "prompt_tokens",
    "new_tokens",
    "steps",
    "acceptance_length",
    "drafted",
    "accepted",
    "state_bytes_with_recovery",
    "state_bytes_without_recovery",
    "window",
    "recover",
    "backend",
    "nan",
    "tokens_per_second",
}


def characters(chat_template=None) -> Tokenizer:
    """A token for each byte, and an end token, 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer.from_tokenizers(backend, eos_token="</s>", chat_template=chat_template)


CONFIG = dataclasses.replace(TINY, vocab_size=257, mixer_kinds=("kda", "mla"), ffn_kinds=("dense", "moe"))


def continuation(tokens, new=NEW, **options):
    """What ``generate`` gives after ``tokens``."""
    prompt = np.asarray([tokens], np.int32)
    options = kda_jax.GenerateOptions(new, **options)
    found = kda_jax.generate(healthy_params(CONFIG), CONFIG, prompt, [len(tokens)], jax.random.key(0), options=options)
    return found.tokens[0, : int(found.lengths[0])].tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints by name. The model's end token is one that it really emits after ``PROMPT``."""
    root = tmp_path_factory.mktemp("models")
    ids = characters().encode(PROMPT)
    free = continuation(ids)
    end = next(t for i, t in enumerate(free) if i >= 5 and t not in free[:i])
    config = dataclasses.replace(CONFIG, eos_token_ids=(end,))
    for name, tokenizer in (("plain", characters()), ("chat", characters(TEMPLATE)), ("wordless", None)):
        kda_jax.save((healthy_params(CONFIG), config), root / name, tokenizer=tokenizer)
    return root


@pytest.fixture
def call(capsys, folders):
    """Run the command line: (exit code, stdout, stderr)."""

    def run(*argv, model="plain"):
        where = [] if model is None else ["--model", str(folders / model)]
        try:
            code = main([str(word) for word in ("generate", *argv, *where)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def result(call):
    """The object that ``--json`` prints; nothing else may be printed."""

    def run(*argv, prompt=PROMPT, **kwargs):
        code, out, err = call(*([prompt] if prompt else []), "--json", "--max-new-tokens", NEW, *argv, **kwargs)
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        return json.loads(out)

    return run


# --- generate ---------------------------------------------------------------------------------------------------------


def test_json(result):
    ids = characters().encode(PROMPT)
    found = result()
    assert set(found) == REPORT | {"prompt", "text", "tokens"}
    free = continuation(ids)
    assert found["tokens"] == free[: len(found["tokens"])]
    assert 6 <= len(found["tokens"]) < NEW  # it stops at the model's end token, which is emitted
    assert found["new_tokens"] == len(found["tokens"])
    assert found["steps"] == found["new_tokens"] - 1
    assert found["prompt"] == PROMPT
    assert found["text"] == characters().decode(found["tokens"])
    assert found["prompt_tokens"] == len(ids) == len(PROMPT)
    assert found["acceptance_length"] is None
    assert found["recover"] is None
    assert found["drafted"] == found["accepted"] == []
    assert found["nan"] is False


def test_the_end_token_can_be_ignored(result):
    assert result("--ignore-stop")["tokens"] == continuation(characters().encode(PROMPT))


def test_text_streams_after_the_prompt_and_a_report_follows(call, result):
    code, out, err = call(PROMPT, "--max-new-tokens", NEW)
    assert (code, err) == (0, "")
    text = PROMPT + result()["text"]
    assert out.startswith(text + "\n\n")
    report = out[len(text) :]
    assert re.search(r"\d+ tokens, \d+ tokens/s after the first on \w+", report)
    assert "state per request: " in report
    assert "acceptance length" not in report


def test_quiet_prints_the_text_alone(call, result):
    code, out, err = call(PROMPT, "--max-new-tokens", NEW, "--quiet")
    assert (code, out, err) == (0, PROMPT + result()["text"] + "\n", "")


def test_the_prompt_may_come_from_a_file(result, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    found = result("--prompt-file", file, prompt=None)
    assert found | {"tokens_per_second": 0} == result() | {"tokens_per_second": 0}


@pytest.mark.parametrize("flags", [[], ["--no-recover"]])
def test_speculation_changes_no_token_and_reports_what_stood(flags, result, call):
    plain = result("--ignore-stop")
    found = result("--ignore-stop", "--speculative", "ngram", "--num-draft-tokens", 3, *flags)
    assert found["tokens"] == plain["tokens"]
    assert found["window"] == 4
    assert found["recover"] is not bool(flags)
    assert found["acceptance_length"] == (NEW - 1) / found["steps"]
    assert len(found["drafted"]) == len(found["accepted"]) == 3
    assert sum(found["accepted"]) == NEW - 1 - found["steps"]
    assert found["state_bytes_without_recovery"] > found["state_bytes_with_recovery"]
    code, out, err = call(
        PROMPT, "--max-new-tokens", NEW, "--ignore-stop", "--speculative", "ngram", "--num-draft-tokens", 3, *flags
    )
    assert (code, err) == (0, "")
    assert f"acceptance length {found['acceptance_length']:.2f} over {found['steps']} steps" in out
    rates = " ".join(f"{a}/{d}" for a, d in zip(found["accepted"], found["drafted"], strict=True))
    assert f"accepted/drafted by position: {rates}\n" in out
    assert f"with recovery ({'not used here' if flags else 'used here'})" in out


def test_sampling_follows_the_seed(result):
    sampled = ["--ignore-stop", "--temperature", 1.5, "--seed"]
    first, again, other = result(*sampled, 7), result(*sampled, 7), result(*sampled, 8)
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["tokens"] != result("--ignore-stop")["tokens"]


def test_chat_lays_the_prompt_out(result, call):
    found = result("--chat", "--ignore-stop", model="chat")
    assert found["tokens"] == continuation(characters().encode(f"[user]{PROMPT}[assistant]"))
    code, out, err = call(PROMPT, "--chat", "--quiet", "--ignore-stop", "--max-new-tokens", NEW, model="chat")
    assert (code, out, err) == (0, found["text"] + "\n", "")  # the answer alone


def test_weights_may_be_read_in_another_dtype(result):
    assert result("--dtype", "bfloat16")["new_tokens"] >= 1


@pytest.mark.parametrize(
    ("argv", "model", "message"),
    [
        ([PROMPT], "missing", "path must be a folder with a config.json and weights, got"),
        ([""], "plain", "PROMPT must not be empty"),
        ([], "plain", "give PROMPT or --prompt-file, one of the two"),
        ([PROMPT, "--prompt-file", "x.txt"], "plain", "give PROMPT or --prompt-file, one of the two"),
        (["--prompt-file", "x.txt"], "plain", "--prompt-file x.txt: can't be read"),
        ([PROMPT, "--max-new-tokens", "0"], "plain", "max_new_tokens must be an integer at least 1, got 0"),
        ([PROMPT, "--max-new-tokens", "many"], "plain", "argument --max-new-tokens: invalid int value: 'many'"),
        ([PROMPT, "--max-new-tokens", "500"], "plain", "max_new_tokens must be at most the model's 512 tokens"),
        ([PROMPT, "--temperature", "-1"], "plain", "temperature must be finite and at least 0, got -1.0"),
        ([PROMPT, "--temperature", "nan"], "plain", "temperature must be finite and at least 0, got nan"),
        ([PROMPT, "--top-k", "0"], "plain", "top_k must be"),
        ([PROMPT, "--top-p", "1.5"], "plain", "top_p must be"),
        ([PROMPT, "--seed", "x"], "plain", "argument --seed: invalid int value: 'x'"),
        ([PROMPT, "--dtype", "int8"], "plain", "dtype must be one of"),
        ([PROMPT, "--preset", "nonsense"], "plain", "preset must be one of"),
        ([PROMPT, "--speculative", "guess"], "plain", "method must be one of"),
        ([PROMPT, "--speculative", "dspark"], "plain", "'dspark' is not implemented"),
        ([PROMPT, "--speculative", "custom"], "plain", "drafter must be given"),
        ([PROMPT, "--speculative", "draft"], "plain", "--speculative draft needs --drafter DIR"),
        ([PROMPT, "--speculative", "ngram", "--drafter", "x"], "plain", "--drafter needs --speculative draft"),
        ([PROMPT, "--speculative", "ngram", "--branches", "2,x"], "plain", "--branches must be numbers with commas"),
        ([PROMPT, "--branches", "2,1"], "plain", "--branches needs --speculative METHOD"),
        ([PROMPT, "--speculative", "ngram", "--num-draft-tokens", "0"], "plain", "num_draft_tokens must be"),
        ([PROMPT, "--num-draft-tokens", "3"], "plain", "--num-draft-tokens needs --speculative METHOD"),
        ([PROMPT, "--no-recover"], "plain", "--no-recover needs --speculative METHOD"),
        ([PROMPT, "--rejection", "block"], "plain", "--rejection needs --speculative METHOD"),
        ([PROMPT, "--rejection", "maybe"], "plain", "argument --rejection: invalid choice: 'maybe'"),
        ([PROMPT], "wordless", "no tokenizer in this folder"),
        ([PROMPT, "--chat"], "plain", "no chat template"),
        ([PROMPT, "--nonsense"], "plain", "unrecognized arguments: --nonsense"),
    ],
)
def test_a_mistake_is_one_line(argv, model, message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*argv, model=model)
    assert code == 2
    assert out == ""
    assert err.startswith("kda-jax")
    assert ": error: " in err
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


def test_a_damaged_checkpoint_is_one_line(call, folders):
    (folders / "damaged").mkdir()
    for file in (folders / "plain").iterdir():
        content = file.read_bytes()
        (folders / "damaged" / file.name).write_bytes(content[:-100] if file.suffix == ".safetensors" else content)
    code, out, err = call(PROMPT, model="damaged")
    assert (code, out) == (2, "")
    assert "model.safetensors" in err
    assert err.count("\n") == 1


def test_nan_is_said_and_is_a_failure(call, folders):
    params = healthy_params(CONFIG)
    params = dataclasses.replace(params, norm=params.norm * np.nan)
    kda_jax.save((params, CONFIG), folders / "nan", tokenizer=characters())
    code, _, err = call(PROMPT, "--max-new-tokens", NEW, model="nan")
    assert code == 2
    assert err == "kda-jax generate: error: the model's logits held NaN; the text ends there\n"


def test_it_is_a_module_and_a_mistake_has_no_traceback():
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=120)
    found = run([sys.executable, "-m", "kda_jax", "generate", PROMPT, "--model", "no/such/folder"])
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("kda-jax generate: error: path must be a folder")
    assert found.stderr.count("\n") == 1


# --- inspect, and the rest --------------------------------------------------------------------------------------------


def main_exits(*argv):
    try:
        return main(list(map(str, argv)))
    except SystemExit as exit:
        return exit.code


def test_inspect_by_name(capsys):
    assert main(["inspect", "kimi_linear_48b"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("49.12 B", "3.48 B", "verifying a window of 8", "native", "recover"):
        assert part in out


def test_inspect_a_folder_for_another_window(capsys, folders):
    """Numbers of a config alone; the folder holds no weights."""
    (folders / "bare").mkdir()
    (folders / "bare" / "config.json").write_bytes((folders / "plain" / "config.json").read_bytes())
    found = {}
    for window in (1, 5):
        assert main(["inspect", str(folders / "bare"), "--json", "--window", str(window)]) == 0
        found[window] = json.loads(capsys.readouterr().out)
    state = 4 * 4 * 6 * 10
    assert found[1]["recurrent_bytes"] == found[5]["recurrent_bytes"] == state
    assert found[5]["window"]["native_states"] == 5 * state
    assert found[5]["window"]["recover_states"] == state
    assert found[5]["window"]["recover"] < found[5]["window"]["native"]
    leaves = [leaf.size for leaf in jax.tree.leaves(healthy_params(CONFIG))]
    assert found[1]["total_parameters"] == sum(leaves)
    assert found[1]["weight_bytes"] == 4 * sum(leaves)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "no_such_model"], "configuration must be a folder with a config.json or one of"),
        (["inspect", "kimi_linear_48b", "--window", "0"], "window must be an integer at least 1, got 0"),
        (["inspect", "kimi_linear_48b", "--window", "x"], "argument --window: invalid int value"),
        (["guess"], "invalid choice: 'guess'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_other_mistakes_are_one_line(argv, message, capsys):
    assert main_exits(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_version_and_help(capsys):
    assert main_exits("--version") == 0
    assert capsys.readouterr().out == f"kda-jax {kda_jax.__version__}\n"
    assert main_exits("generate", "--help") == 0
    out = capsys.readouterr().out
    for flag in ("--prompt-file", "--model", "--chat", "--speculative", "--no-recover", "--seed", "--json"):
        assert flag in out
