"""How good samples of Python are: do they tokenise, do they repeat themselves. Nothing here knows about the model.

``python_tokenises`` looks at the text up to its last line break, because a sample ends wherever its token budget does.
Strictly, text cut inside an open bracket or a triple-quoted string does not tokenise; leniently, that one reason is
excused, since the cut made it and not the model.
"""

import ast
import hashlib
import io
import tokenize
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from kda_jax.train.corpus import SourceFile

_CUT_OPEN = ("EOF in multi-line", "unterminated triple-quoted")
MIN_PROMPT_LINES = 4
MAX_PROMPT_LINES = 12


def python_tokenises(text: str) -> tuple[bool, bool]:
    """``(strict, lenient)``: whether ``text`` up to its last line break passes the ``tokenize`` module.

    A character that the module can only report as an error token (a lone quote, ``$``, ``?``) is a failure too, so that
    Python versions that raise there and versions that do not agree.
    """
    text = text[: text.rfind("\n") + 1]
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.ERRORTOKEN and token.string.strip():
                return False, False
    except tokenize.TokenError as error:
        return False, any(reason in str(error) for reason in _CUT_OPEN)
    except SyntaxError:  # IndentationError among them
        return False, False
    return True, True


def repeated_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of the ``n``-grams of ``tokens`` that occurred before: ``1 - unique / total``; 0 if there are none."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def make_prompts(files: Sequence[SourceFile], count: int) -> list[dict[str, str]]:
    """Up to ``count`` prompts, each the start of a top-level function or class of a file, at most a few from each file.

    A prompt is the first 4 to 12 lines of the definition, up to the first of those line ends at which the text so far
    tokenises (so it never ends inside a string or a bracket), without the line break itself. Files take turns; a hash
    of the definition's place orders the definitions of one file.
    """
    queues = []
    for file in sorted(files, key=lambda f: f.path):
        lines = file.text.splitlines(keepends=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(file.text).body
        found = []
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            definition = lines[node.lineno - 1 : node.end_lineno]
            for end in range(MIN_PROMPT_LINES, min(MAX_PROMPT_LINES, len(definition) - 1) + 1):
                if python_tokenises("".join(definition[:end]))[0] and definition[end - 1].strip():
                    text = "".join(definition[:end]).rstrip()
                    found.append({"path": file.path, "name": node.name, "text": text})
                    break
        queues.append(sorted(found, key=lambda p: hashlib.sha256(f"{p['path']}:{p['name']}".encode()).digest()))
    rounds = max(map(len, queues), default=0)
    return [queue[i] for i in range(rounds) for queue in queues if i < len(queue)][:count]


def score(prompts: Sequence[str], continuations: Sequence[str], tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Counts and shares over samples: ``continuations[i]`` is the text of ``tokens[i]`` and follows ``prompts[i]``."""
    results = [python_tokenises(p + c) for p, c in zip(prompts, continuations, strict=True)]
    return {
        "samples": len(results),
        "tokenise_strict": sum(strict for strict, _ in results),
        "tokenise_lenient": sum(lenient for _, lenient in results),
        "repeated_8gram_share": float(np.mean([repeated_share(t) for t in tokens])) if tokens else 0.0,
        "mean_tokens": float(np.mean([len(t) for t in tokens])) if tokens else 0.0,
    }
