"""A small byte-level BPE tokenizer for Python source, in the ``tokenizer.json`` form that others load too."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)  # ids 0, 1, 2
VOCAB_SIZE = 2048

# Pieces that merges never cross. A line break takes the blank lines and the indentation after it, so that a level of
# indentation is one token and the word that follows has the same form at every depth.
_PIECES = "|".join(
    (
        r"[^\S\n]*(?:\n[^\S\n]*)+",  # line breaks with their indentation
        r" ?[\p{L}_][\p{L}\p{M}_]*",  # identifiers and words, digits apart
        r" ?\p{N}{1,3}",  # numbers, up to three digits at a time
        r" ?[^\s\p{L}\p{N}_]+",  # runs of punctuation
        r"[^\S\n]+(?!\S)",  # a run of spaces leaves its last one to the word that follows
        r"[^\S\n]+",
    )
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn a byte-level BPE of exactly ``vocab_size`` entries, the special tokens included.

    Every text round-trips, because the 256 bytes are in the vocabulary. Raises ``ValueError`` when the texts hold too
    few different pieces to fill the vocabulary.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"vocab_size must be at least {least} (the bytes and the special tokens), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"texts fill {tokenizer.get_vocab_size()} entries, vocab_size={vocab_size} was asked for")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path, *, max_length: int) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` that transformers wants beside it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
