"""Bits per byte on text that training did not see, and the quality of sampled Python."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from kda_jax.config import ModelConfig
from kda_jax.generation import generate
from kda_jax.layers.params import ModelParams
from kda_jax.options import GenerateOptions
from kda_jax.train import quality
from kda_jax.train.corpus import Split
from kda_jax.train.step import cross_entropy


@partial(jax.jit, static_argnames=("config", "forward"))
def _total_nats(params, tokens, valid, *, config, forward):
    nll, _ = cross_entropy(forward(params, config, tokens[:, :-1], None), tokens[:, 1:])
    return jnp.where(valid, nll, 0.0).sum()


def windows_of(split: Split, seq_len: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a stream so that every token but the very first is predicted once.

    Returns windows int32 [batches, B, seq_len + 1], which overlap by one token, and whether each target counts, bool
    [batches, B, seq_len]. Each window starts without context, so a token sees ``seq_len / 2`` tokens on average.
    """
    count = len(split.tokens) - 1
    rows = max(1, math.ceil(count / seq_len))
    batches = math.ceil(rows / batch_size)
    padded = np.zeros(batches * batch_size * seq_len + 1, np.int32)
    padded[: count + 1] = split.tokens
    index = np.arange(batches * batch_size)[:, None] * seq_len + np.arange(seq_len + 1)
    valid = index[:, 1:] <= count
    shape = (batches, batch_size)
    return padded[index].reshape(*shape, seq_len + 1), valid.reshape(*shape, seq_len)


def held_out_loss(
    params: ModelParams,
    config: ModelConfig,
    split: Split,
    *,
    forward: Callable[..., Any],
    seq_len: int = 512,
    batch_size: int = 64,
) -> dict[str, float]:
    """``bits_per_byte`` of the split's text and ``nats_per_token``; the end of every file is predicted and counted."""
    windows, valid = windows_of(split, seq_len, batch_size)
    batches = [
        _total_nats(params, tokens, mask, config=config, forward=forward)
        for tokens, mask in zip(windows, valid, strict=True)
    ]
    total = float(np.sum(jax.device_get(batches), dtype=np.float64))
    return {"bits_per_byte": total / math.log(2) / split.num_bytes, "nats_per_token": total / (len(split.tokens) - 1)}


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """The ``tokenizer.json`` of a prepared corpus."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def sample_quality(
    params: ModelParams,
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: list[dict[str, str]],
    *,
    temperature: float = 0.7,
    max_new_tokens: int = 200,
    seed: int = 0,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Sample one continuation of each prompt (``text``) and score them as ``quality.score`` does.

    A continuation ends at its end token if it makes one. Returns the figures, and the prompts with ``continuation`` and
    whether the two together tokenise, strictly.
    """
    encoded = [tokenizer.encode(p["text"], add_special_tokens=False).ids for p in prompts]
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    tokens = np.zeros((len(encoded), int(lengths.max())), np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    options = GenerateOptions(max_new_tokens=max_new_tokens, temperature=temperature, stop_tokens=config.eos_token_ids)
    result = generate(params, config, tokens, lengths, jax.random.key(seed), options=options)
    stop = set(config.eos_token_ids)
    rows = [
        [int(t) for t in row[:n] if int(t) not in stop]
        for row, n in zip(np.asarray(result.tokens), np.asarray(result.lengths), strict=True)
    ]
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in rows]
    figures = quality.score([p["text"] for p in prompts], texts, rows)
    figures |= {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    samples = [
        p | {"continuation": text, "tokenises": quality.python_tokenises(p["text"] + text)[0]}
        for p, text in zip(prompts, texts, strict=True)
    ]
    return figures, samples
