"""Source text to token arrays: the Python standard library (which every machine that runs this has) or any folder.

The split is by file and depends on nothing but the file's relative path, so a file is in the same split on every
machine. A prepared corpus is a folder of arrays, a tokenizer and a manifest; training reads only that folder.
"""

import ast
import dataclasses
import hashlib
import json
import platform
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "validation", "held_out")
HELD_OUT_PER_MILLE = 30
VALIDATION_PER_MILLE = 20
_NOT_SOURCE = ("site-packages", "dist-packages", "__pycache__", "node_modules")
_TABLES = (
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/data/",
    "test/cjkencodings/",
    "_sysconfigdata",
    "html/entities.py",
)
_DATA = re.compile(r"0[xX][0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[0-7]{3}|[0-9]+(?:\.[0-9]+)?")
_DATA_LINE_SHARE = 0.5  # a line is data when more than this share of it is numbers
_DATA_FILE_SHARE = 0.25  # a file is a table when more than this share of its lines is data


@dataclasses.dataclass(frozen=True)
class SourceFile:
    path: str  # relative to the corpus folder, with forward slashes
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclasses.dataclass(frozen=True)
class Split:
    """One split as a token stream: every file is ``bos, its tokens, eos``, in order of path."""

    tokens: np.ndarray  # uint16 [N]
    offsets: np.ndarray  # int64 [files + 1]: file i is tokens[offsets[i]:offsets[i + 1]]
    paths: tuple[str, ...]
    num_bytes: int  # UTF-8 bytes of the text, special tokens not counted


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def split_of(path: str) -> str:
    """The split of the file of this relative path; a hash of the path decides.

    ``validation`` is what a training run may look at to choose its weights; ``held_out`` is only for the figures that
    are reported.
    """
    place = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 1000
    if place < HELD_OUT_PER_MILLE:
        return "held_out"
    return "validation" if place < HELD_OUT_PER_MILLE + VALIDATION_PER_MILLE else "train"


def is_data_table(text: str) -> bool:
    """Whether a file is mostly numbers: generated tables teach a language model nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    data = sum(sum(map(len, _DATA.findall(line))) > _DATA_LINE_SHARE * len(line) for line in lines)
    return data > _DATA_FILE_SHARE * max(1, len(lines))


def read_files(folder: str | Path) -> list[SourceFile]:
    """Every Python file under ``folder`` worth learning from, sorted by path.

    Left out: installed packages, files that do not decode or parse, copies of an earlier file, and data tables.
    Raises ``ValueError`` when nothing is left.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"corpus must be a folder, got {str(folder)!r}")
    files, seen = [], set()
    for path in sorted(_python_files(folder)):
        relative = path.relative_to(folder).as_posix()
        if any(mark in relative for mark in _TABLES):
            continue
        try:
            with tokenize.open(path) as stream:  # honours the coding line
                text = stream.read()
            with warnings.catch_warnings():  # the compiler's remarks about somebody else's source
                warnings.simplefilter("ignore")
                ast.parse(text)
            digest = hashlib.sha256(text.encode()).digest()
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if not text.strip() or digest in seen or is_data_table(text):
            continue
        seen.add(digest)
        files.append(SourceFile(relative, text))
    if not files:
        raise ValueError(f"corpus: no usable Python file under {str(folder)!r}")
    return files


def split_files(files: Iterable[SourceFile]) -> dict[str, list[SourceFile]]:
    """The files of each split, in the order given."""
    splits: dict[str, list[SourceFile]] = {name: [] for name in SPLITS}
    for file in files:
        splits[split_of(file.path)].append(file)
    return splits


def tokenize_files(files: list[SourceFile], tokenizer: Any, bos: int, eos: int) -> Split:
    """One token stream from ``files``. ``tokenizer`` is a ``tokenizers.Tokenizer`` of at most 65536 entries."""
    encodings = tokenizer.encode_batch([f.text for f in files], add_special_tokens=False)
    parts = [np.array([bos, *encoding.ids, eos], np.uint16) for encoding in encodings]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    return Split(tokens, offsets, tuple(f.path for f in files), sum(f.num_bytes for f in files))


def describe_source(folder: Path, files: list[SourceFile]) -> dict[str, Any]:
    """Where the text came from, and a digest of exactly what was used."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.path.encode() + b"\0" + file.text.encode() + b"\0")
    is_library = folder.resolve() == standard_library().resolve()
    return {
        "source": f"Python {platform.python_version()} standard library" if is_library else folder.name,
        "licence": "PSF-2.0" if is_library else "unknown",
        "sha256": digest.hexdigest(),
    }


def write_corpus(output: str | Path, splits: dict[str, Split], extra: dict[str, Any]) -> None:
    """Write the arrays and ``corpus.json`` (sizes and paths of each split, and ``extra``) into ``output``."""
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    manifest = dict(extra)
    for name, split in splits.items():
        np.save(output / f"{name}.npy", split.tokens)
        np.save(output / f"{name}_offsets.npy", split.offsets)
        sizes = {"files": len(split.paths), "tokens": len(split.tokens), "bytes": split.num_bytes}
        manifest[name] = sizes | {"paths": list(split.paths)}
    (output / "corpus.json").write_text(json.dumps(manifest, indent=1) + "\n")


def read_corpus(folder: str | Path) -> tuple[dict[str, Split], dict[str, Any]]:
    """``(splits, manifest)`` from a folder that ``write_corpus`` filled. Raises ``ValueError`` for any other folder."""
    folder = Path(folder)
    try:
        manifest = json.loads((folder / "corpus.json").read_text())
        splits = {
            name: Split(
                np.load(folder / f"{name}.npy"),
                np.load(folder / f"{name}_offsets.npy"),
                tuple(manifest[name]["paths"]),
                manifest[name]["bytes"],
            )
            for name in SPLITS
        }
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"data: {str(folder)!r} is not a prepared corpus ({error}); make one with `prepare`") from None
    return splits, manifest


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*.py"):
        if not any(part in _NOT_SOURCE for part in path.relative_to(folder).parts) and path.is_file():
            yield path
