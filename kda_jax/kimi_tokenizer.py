"""Kimi's tokenizer: a ``tiktoken.model`` of mergeable ranks, special tokens above them, and a chat template."""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BOS, EOS = "[BOS]", "[EOS]"

# Special ids follow the mergeable ranks; these are their names, counted from the first one. A folder's
# tokenizer_config.json names them too, and wins. The rest are <|reserved_token_{id}|>.
NUM_SPECIAL = 258
SPECIAL_NAMES = {
    0: BOS,
    1: EOS,
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    17: "<|im_middle|>",
    254: "[UNK]",
    255: "[PAD]",
}

CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- set marker = message.role if message.role in ('user', 'assistant') else 'system' -%}
<|im_{{ marker }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type != 'text' -%}{{ raise_exception('only text content is supported, got ' ~ part.type) }}{%- endif -%}
{{ part.text }}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""

# tiktoken's regex engine knows class intersection (&&), which Python's does not
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"  # letters that may open a cased word, Han excluded
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        _BEFORE_WORD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _BEFORE_WORD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

MAX_CHARS = 400_000  # of text encoded at once
MAX_RUN = 25_000  # of characters that are all spaces, or all none


class KimiBackend:
    """``tiktoken.model`` read by the ``tiktoken`` package.

    ``names`` are special tokens by id, from the folder. Raises ``ValueError`` naming ``file`` when it can't be read,
    and naming the ``kimi`` extra when ``tiktoken`` is not installed.
    """

    def __init__(self, content: bytes, names: Mapping[int, str], file: Path):
        try:
            import tiktoken
        except ImportError:
            raise ValueError(
                f"{file}: reading it needs the tiktoken package, which the kimi extra installs: "
                "pip install 'kda-jax[kimi]'"
            ) from None
        ranks = _read_ranks(content, file)
        first = len(ranks)
        specials = {}
        for offset in range(NUM_SPECIAL):
            i = first + offset
            specials[names.get(i) or SPECIAL_NAMES.get(offset) or f"<|reserved_token_{i}|>"] = i
        self._specials = specials
        self._special_ids = frozenset(specials.values())
        self._encoding: Any = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)
        self.vocab_size = first + NUM_SPECIAL

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        del add_special_tokens  # Kimi puts nothing around a text
        ids: list[int] = []
        for part in cut(text):
            ids += self._encoding.encode(part, allowed_special="all")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self._special_ids if skip_special_tokens else frozenset()
        kept = [i for i in ids if i < self.vocab_size and i not in skipped]
        return self._encoding.decode_bytes(kept).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        if token in self._specials:
            return self._specials[token]
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None


def cut(text: str, max_chars: int = MAX_CHARS, max_run: int = MAX_RUN) -> Iterator[str]:
    """Cut ``text`` where Kimi's tokenizer does before it splits words: every ``max_chars`` characters, and inside
    those after each ``max_run`` characters of a run that is all whitespace or has none."""
    for start in range(0, len(text), max_chars):
        block = text[start : start + max_chars]
        begin = 0
        for run in re.finditer(r"\s+|\S+", block):
            for end in range(run.start() + max_run, run.end(), max_run):
                yield block[begin:end]
                begin = end
        yield block[begin:]


def _read_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{file}: line {number} is not a base64 token and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise ValueError(f"{file}: must rank its tokens 0, 1, 2, ... and hold every single byte")
    return ranks
