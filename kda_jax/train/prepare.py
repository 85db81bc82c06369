"""Make a prepared corpus: read, split, learn the tokenizer on the training files, tokenise, choose prompts."""

import json
from pathlib import Path
from typing import Any

from kda_jax.train import bpe, corpus, quality


def prepare(
    output: str | Path,
    *,
    source: str | Path | None = None,
    vocab_size: int = bpe.VOCAB_SIZE,
    max_length: int = 8192,
    num_prompts: int = 50,
) -> dict[str, Any]:
    """Fill the folder ``output``; ``source`` is a folder of Python files, by default the standard library.

    Returns the manifest. Raises ``ValueError`` when ``source`` leaves a split empty or cannot fill the vocabulary.
    """
    source = corpus.standard_library() if source is None else Path(source)
    files = corpus.read_files(source)
    parts = corpus.split_files(files)
    for name, part in parts.items():
        if not part:
            raise ValueError(f"corpus: no {name} file among the {len(files)} under {str(source)!r}")
    tokenizer = bpe.train_tokenizer((f.text for f in parts["train"]), vocab_size)
    bos, eos = (tokenizer.token_to_id(name) for name in (bpe.BOS, bpe.EOS))
    splits = {name: corpus.tokenize_files(part, tokenizer, bos, eos) for name, part in parts.items()}
    extra = corpus.describe_source(source, files) | {"vocab_size": vocab_size}
    corpus.write_corpus(output, splits, extra)
    bpe.save_tokenizer(tokenizer, output, max_length=max_length)
    for name, part, count in (
        ("prompts.json", "held_out", num_prompts),
        ("validation_prompts.json", "validation", 2 * num_prompts),
    ):
        prompts = quality.make_prompts(parts[part], count)
        (Path(output) / name).write_text(json.dumps(prompts, indent=1) + "\n")
    return json.loads((Path(output) / "corpus.json").read_text())
