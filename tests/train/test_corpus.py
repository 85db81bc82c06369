import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kda_jax.train import bpe, corpus
from kda_jax.train.prepare import prepare
from tests.train.helpers import write_sources

TEXT = "def f(x):\n    if x > 10:\n        return x * 2\n    return self.value\n\n\nclass A:\n    name = 'é'\n" * 20


@pytest.fixture(scope="module")
def tokenizer():
    return bpe.train_tokenizer([TEXT], vocab_size=300)


def test_split_depends_only_on_the_path():
    # fixed here so that a change of the rule, which would leak held-out files into training, is seen
    assert corpus.split_of("turtle.py") == "held_out"
    assert corpus.split_of("os.py") == "train"
    names = [f"pkg/module_{i}.py" for i in range(20_000)]
    shares = {name: np.mean([corpus.split_of(n) == name for n in names]) for name in corpus.SPLITS}
    assert 0.025 < shares["held_out"] < 0.035
    assert 0.015 < shares["validation"] < 0.025


def test_splits_are_disjoint_and_complete(tmp_path):
    files = corpus.read_files(write_sources(tmp_path))
    splits = corpus.split_files(files)
    paths = [f.path for part in splits.values() for f in part]
    assert sorted(paths) == sorted(f.path for f in files)
    assert len(paths) == len(set(paths)) == 80
    again = corpus.split_files(reversed(files))
    assert {n: {f.path for f in p} for n, p in splits.items()} == {n: {f.path for f in p} for n, p in again.items()}


def test_useless_files_are_left_out(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "copy.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    (tmp_path / "broken_bytes.py").write_bytes(b"x = '\xff\xfe'\n")
    (tmp_path / "python2.py").write_text("print 'hello'\n")
    (tmp_path / "table.py").write_text("table = [\n" + "    0x1234, 0x5678, 0x9abc,\n" * 100 + "]\n")
    (tmp_path / "empty.py").write_text("\n")
    installed = tmp_path / "site-packages" / "other.py"
    installed.parent.mkdir()
    installed.write_text("y = 2\n")
    assert [f.path for f in corpus.read_files(tmp_path)] == ["copy.py", "latin.py"]


@pytest.mark.parametrize("folder", ["missing", "."])
def test_nothing_to_read_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="corpus"):
        corpus.read_files(tmp_path / folder)


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(st.text(), st.text(alphabet="ab_ 1\n\t.():'\"é\r"), st.binary().map(lambda b: b.decode("latin-1")))
)
def test_tokenizer_round_trips(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_pieces(tokenizer):
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("  if x1 == 4096:\n\n        go()\n")]
    shown = [p.replace("Ġ", " ").replace("Ċ", "\n") for p in pieces]
    assert shown == [" ", " if", " x", "1", " ==", " 409", "6", ":", "\n\n        ", "go", "()", "\n"]


def test_tokenizer_size_and_specials(tokenizer, tmp_path):
    assert tokenizer.get_vocab_size() == 300
    assert [tokenizer.token_to_id(t) for t in bpe.SPECIAL_TOKENS] == [0, 1, 2]
    bpe.save_tokenizer(tokenizer, tmp_path, max_length=64)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids == tokenizer.encode(TEXT).ids
    with pytest.raises(ValueError, match="vocab_size"):
        bpe.train_tokenizer([TEXT], vocab_size=258)
    with pytest.raises(ValueError, match="vocab_size=2048"):
        bpe.train_tokenizer(["x = 1\n"], vocab_size=2048)


@pytest.mark.parity
def test_transformers_loads_the_tokenizer(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    bpe.save_tokenizer(tokenizer, tmp_path, max_length=64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT).ids
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == bpe.SPECIAL_TOKENS


def test_prepared_corpus_reads_back(tmp_path):
    manifest = prepare(tmp_path / "out", source=write_sources(tmp_path / "src"), vocab_size=300)
    splits, read = corpus.read_corpus(tmp_path / "out")
    assert read == manifest
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for name, split in splits.items():
        assert split.tokens.dtype == np.uint16
        assert len(split.offsets) == len(split.paths) + 1
        total = 0
        for path, low, high in zip(split.paths, split.offsets, split.offsets[1:], strict=False):
            assert corpus.split_of(path) == name
            document = split.tokens[low:high]
            assert (document[0], document[-1]) == (0, 1)
            text = tokenizer.decode(document[1:-1].tolist())
            assert text == (tmp_path / "src" / path).read_text()
            total += len(text.encode())
        assert total == split.num_bytes == manifest[name]["bytes"]
    with pytest.raises(ValueError, match="prepared corpus"):
        corpus.read_corpus(tmp_path / "src")
