"""Text and ids: tokenizer.json, Kimi's tiktoken.model, chat templates, and decoding as ids arrive."""

import base64
import json
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kda_jax.checkpoint import load, save
from kda_jax.kimi_tokenizer import SPECIAL_NAMES, cut
from kda_jax.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import TINY, random_params

TEXTS = [
    "",
    "def quicksort(items):\n    return items\n",
    "Ünïcode: 日本語 and 한국어 🙂🚀, naïve café",
    "  leading\tand   many   spaces \r\n\n\nand lines  ",
    "don't WON'T CamelCase snake_case 1234567 3.14",
    "汉字and英文mixed字",
    "null \0 and \ufffd and \x1f",
]


def byte_level(post: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if post:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


MERGES = [b" a", b"an", b" an", b"nd", b" and", "字".encode()[:2], "字".encode()]


def write_kimi(folder):
    """A synthetic tiktoken.model: all bytes, then ``MERGES`` in order."""
    tokens = [bytes([b]) for b in range(256)] + MERGES
    lines = [base64.b64encode(token).decode() + f" {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return len(tokens)


@pytest.fixture
def json_tokenizer():
    return Tokenizer.from_tokenizers(byte_level(), bos_token="<s>", eos_token="</s>")


@pytest.fixture
def kimi_tokenizer(tmp_path):
    pytest.importorskip("tiktoken")
    write_kimi(tmp_path)
    return load_tokenizer(tmp_path)


@pytest.fixture(params=["json", "kimi"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.mark.parametrize("text", TEXTS)
def test_decode_undoes_encode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_adds_up_and_is_never_half_a_character(tokenizer, text, size):
    ids, stream, pieces = tokenizer.encode(text), tokenizer.stream(), []
    for i in range(0, len(ids), size):
        pieces.append(stream.feed(ids[i : i + size]))
    pieces.append(stream.flush())
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.data())
def test_streaming_any_ids(data):
    tokenizer = Tokenizer.from_tokenizers(byte_level())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    stream = tokenizer.stream()
    assert "".join(stream.feed([i]) for i in ids) + stream.flush() == tokenizer.decode(ids)


def test_a_character_is_held_until_it_is_complete(tokenizer):
    ids = tokenizer.encode("ж𝄞", add_special_tokens=False)
    assert len(ids) == 6
    stream = tokenizer.stream()
    assert [stream.feed([i]) for i in ids] == ["", "ж", "", "", "", "𝄞"]
    assert stream.flush() == ""
    stream.feed(ids[:1])
    assert stream.flush() == "\ufffd"


def test_special_tokens(tokenizer):
    eos = {"</s>": 2, "[EOS]": 256 + 7 + 1}[tokenizer.eos_token]
    assert tokenizer.eos_token_id == eos
    assert tokenizer.bos_token_id == eos - 1
    ids = tokenizer.encode(f"a{tokenizer.eos_token}b")
    assert ids.count(eos) == 1
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"a{tokenizer.eos_token}b"
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_bad_arguments(tokenizer):
    with pytest.raises(ValueError, match="text must be a string, got bytes"):
        tokenizer.encode(b"bytes")
    with pytest.raises(ValueError, match="ids must not be negative, got -1"):
        tokenizer.decode([3, -1])


def test_what_goes_around_a_text():
    tokenizer = Tokenizer.from_tokenizers(byte_level(post=True), bos_token="<s>")
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [1, *plain]
    assert tokenizer.eos_token_id is None


def test_saved_and_loaded_with_a_model(tmp_path, tokenizer):
    save((random_params(TINY), TINY), tmp_path / "model", tokenizer=tokenizer)
    again = load(tmp_path / "model").tokenizer
    assert again.eos_token_id == tokenizer.eos_token_id
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    save(load(tmp_path / "model"), tmp_path / "more")
    assert load(tmp_path / "more").tokenizer.files == again.files


def test_no_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tiktoken.model", "not base64 at all"),
        ("tiktoken.model", "YQ== x"),
        ("tiktoken.model", "YQ== 0"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(tmp_path)


# --- Kimi ----------------------------------------------------------------------------------------------------------


def test_kimi_special_ids_follow_the_ranks(kimi_tokenizer):
    first = 256 + 7
    assert kimi_tokenizer.vocab_size == first + 258
    for offset, name in SPECIAL_NAMES.items():
        assert kimi_tokenizer.encode(name) == [first + offset]
    assert kimi_tokenizer.encode(f"<|reserved_token_{first + 5}|>") == [first + 5]


def test_kimi_names_of_the_folder_win(tmp_path):
    pytest.importorskip("tiktoken")
    first = write_kimi(tmp_path)
    names = {str(first + 5): {"content": "<|five|>"}, str(first + 1): {"content": "<|end|>"}}
    settings = {"added_tokens_decoder": names, "eos_token": {"content": "<|end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|five|>") == [first + 5]
    assert tokenizer.eos_token_id == first + 1
    assert tokenizer.bos_token_id == first


def test_kimi_merges_by_rank_inside_words_only(kimi_tokenizer):
    assert kimi_tokenizer.encode(" and") == [256 + 4]
    assert kimi_tokenizer.encode("and") == [256 + 1, ord("d")]
    assert kimi_tokenizer.encode(" a n d") == [256 + 0, *b" n", *b" d"]
    # a run of Han characters is a word of its own, so nothing merges across its ends
    assert kimi_tokenizer.encode("字字and") == [256 + 6, 256 + 6, 256 + 1, ord("d")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello World", ["Hello", " World"]),
        ("don't WON'T", ["don't", " WON'T"]),
        ("12345", ["123", "45"]),
        ("汉字abc汉", ["汉字", "abc", "汉"]),
        ("a汉b", ["a", "汉", "b"]),
        ("x=y;\n\n z", ["x", "=y", ";\n\n", " z"]),
        ("a   b", ["a", "  ", " b"]),
        ("CamelCase", ["Camel", "Case"]),
        ("HTTPServer", ["HTTPServer"]),
    ],
)
def test_kimi_pattern(text, words):
    tiktoken = pytest.importorskip("tiktoken")
    from kda_jax.kimi_tokenizer import PATTERN

    # every pair of bytes of the words merges, none across words: so the tokens show the words
    ranks = {bytes([b]): b for b in range(256)}
    for word in dict.fromkeys(words):
        data = word.encode()
        for end in range(2, len(data) + 1):
            ranks.setdefault(data[:end], len(ranks))
    encoding = tiktoken.Encoding("words", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert [encoding.decode([i]) for i in encoding.encode(text)] == words


def test_kimi_cuts_long_texts():
    assert list(cut("abcdefg", max_chars=3)) == ["abc", "def", "g"]
    assert list(cut("aaaaa  bb", max_run=2)) == ["aa", "aa", "a  bb"]
    assert list(cut("a" + " " * 5 + "b", max_run=2)) == ["a  ", "  ", " b"]
    assert list(cut("abcd", max_run=2)) == ["ab", "cd"]
    assert list(cut("")) == []


@given(text=st.text(alphabet="ab \n", max_size=60), max_chars=st.integers(1, 20), max_run=st.integers(1, 6))
def test_kimi_cuts_lose_nothing_and_keep_runs_short(text, max_chars, max_run):
    parts = list(cut(text, max_chars, max_run))
    assert "".join(parts) == text
    for part in parts:
        assert 0 < len(part) <= max_chars
        run = longest = 0
        for i, character in enumerate(part):
            run = run + 1 if i and character.isspace() == part[i - 1].isspace() else 1
            longest = max(longest, run)
        assert longest <= max_run


def test_kimi_without_tiktoken_names_the_extra(tmp_path, monkeypatch):
    write_kimi(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r"tiktoken\.model.*kda-jax\[kimi\]"):
        load_tokenizer(tmp_path)


# --- chat ----------------------------------------------------------------------------------------------------------


def test_kimi_chat(kimi_tokenizer):
    first = 256 + 7
    end, user, assistant, system, middle = (first + i for i in (2, 3, 4, 10, 17))
    assistant_name = kimi_tokenizer.encode("assistant")
    ids = kimi_tokenizer.apply_chat(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "U"}], "name": "Ann"},
            {"role": "assistant", "content": "A\n"},
            {"role": "tool", "content": "T"},
        ]
    )
    assert ids == [
        *(system, *b"system", middle, *b"S", end),
        *(user, *b"Ann", middle, *b"U", end),
        *(assistant, *assistant_name, middle, *b"A\n", end),
        *(system, *b"tool", middle, *b"T", end),
        *(assistant, *assistant_name, middle),
    ]
    assert kimi_tokenizer.apply_chat("U", add_generation_prompt=False) == [user, *b"user", middle, *b"U", end]


def test_kimi_chat_declares_tools_first(kimi_tokenizer):
    tools = [{"type": "function", "function": {"name": "ü"}}]
    ids = kimi_tokenizer.apply_chat("U", tools=tools)
    text = kimi_tokenizer.decode(ids, skip_special_tokens=False)
    declared = '[{"type":"function","function":{"name":"ü"}}]'
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{declared}<|im_end|><|im_user|>user<|im_middle|>U")


def test_kimi_chat_refuses_images(kimi_tokenizer):
    with pytest.raises(ValueError, match="only text content is supported, got image"):
        kimi_tokenizer.apply_chat([{"role": "user", "content": [{"type": "image"}]}])


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ tools }}"


@pytest.mark.parametrize("where", ["string", "list", "file"])
def test_chat_templates_of_the_folder(tmp_path, json_tokenizer, where):
    settings = {"bos_token": "<s>"}
    if where == "string":
        settings["chat_template"] = TEMPLATE
    elif where == "list":
        settings["chat_template"] = [{"name": "x", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    else:
        settings["chat_template"] = "no"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer.json").write_bytes(json_tokenizer.files["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = load_tokenizer(tmp_path).apply_chat("hi")
    assert ids[0] == 1
    assert json_tokenizer.decode(ids) == "user:hi;None"


def test_no_template(json_tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        json_tokenizer.apply_chat("hi")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('bad roles') }}", "{% if %}", "{{ messages.__class__.__mro__ }}"]
)
def test_a_template_that_refuses_breaks_or_escapes(template):
    tokenizer = Tokenizer.from_tokenizers(byte_level(), chat_template=template)
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat("hi")
