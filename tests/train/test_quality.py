import pytest

from kda_jax.train.corpus import SourceFile
from kda_jax.train.quality import make_prompts, python_tokenises, repeated_share, score


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("x = 1\ny = 'cut he", True, True),  # what follows the last line break does not count
        ("", True, True),
        ("x = 'open\ny = 2\n", False, False),
        ("x = 5 ? 1\n", False, False),
        ("if x:\n        y\n    z\n", False, False),  # dedent to no level
        ("f(1,\n  2,\n", False, True),
        ('"""open\nstring\n', False, True),
        ("def f(:):\n    pass\n", True, True),  # tokenises, although it does not parse
    ],
)
def test_python_tokenises(text, strict, lenient):
    assert python_tokenises(text) == (strict, lenient)


def test_repeated_share():
    assert repeated_share(list(range(50))) == 0.0
    assert repeated_share([1] * 17) == 0.9  # ten 8-grams, one of them new
    assert repeated_share([1, 2, 3]) == 0.0
    assert repeated_share([1, 2, 3, 1, 2, 3], n=3) == 0.25


def test_prompts_end_between_tokens():
    text = (
        '"""Doc."""\n\nX = 1\n\n\ndef short():\n    pass\n\n\ndef long(a,\n         b):\n'
        '    """Say\n\n    more.\n    """\n'
        "    return (a +\n            b)\n\n\nclass C:\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n    e = 5\n"
    )
    prompts = make_prompts([SourceFile("b.py", text), SourceFile("a.py", text)], 3)
    assert [p["path"] for p in prompts] == ["a.py", "b.py", "a.py"]
    assert {p["name"] for p in prompts} <= {"long", "C"}
    for prompt in prompts:
        assert not prompt["text"].endswith("\n")
        assert python_tokenises(prompt["text"] + "\n") == (True, True)
    assert make_prompts([SourceFile("a.py", text)], 3) == make_prompts([SourceFile("a.py", text)], 3)


def test_score_counts():
    figures = score(["x = 1", "y = 2"], ["\nz = 3\n", "\nz = 'open\nw\n"], [[1, 2, 3], [5] * 9])
    assert figures == {
        "samples": 2,
        "tokenise_strict": 1,
        "tokenise_lenient": 1,
        "repeated_8gram_share": 0.25,
        "mean_tokens": 6.0,
    }
