"""Folders of safetensors files, read lazily and written one tensor at a time.

A folder holds either one ``model.safetensors``, or shards and a ``model.safetensors.index.json`` that says which shard
holds which tensor. A file is an 8-byte little-endian header length, a JSON header and the raw little-endian tensors.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# stored name -> numpy dtype; every other stored dtype is refused
NUMPY_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_STORED_DTYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says, before any of it is read."""

    file: Path
    name: str
    dtype: str  # as the header spells it: "BF16", "F32", "I8", ...
    shape: tuple[int, ...]


class TensorFolder:
    """The tensors of a checkpoint folder by name. A context manager; nothing is read until ``read``.

    Raises ``ValueError`` naming the file (and the tensor where there is one) when a file is missing, truncated or
    damaged, or when the index and the shards disagree.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such folder")
        one, index = self.path / ONE_FILE, self.path / INDEX
        if one.exists() and index.exists():
            raise ValueError(f"{self.path}: holds both {ONE_FILE} and {INDEX}; remove the one that is out of date")
        if not one.exists() and not index.exists():
            raise ValueError(f"{self.path}: holds neither {ONE_FILE} nor {INDEX}")
        self.listing = one if one.exists() else index  # the file to blame for a missing tensor
        self._handles: dict[Path, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        if one.exists():
            self._open(one)
            return
        weight_map = _read_index(index)
        for name, file in weight_map.items():
            if not (self.path / file).is_file():
                raise ValueError(f"{self.path / file}: no such file, yet {index} says that it holds {name}")
        for file in sorted(set(weight_map.values())):
            self._open(self.path / file)
        for name, file in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != file:
                raise ValueError(f"{self.path / file}: does not hold {name}, yet {index} says so")
        for name, stored in self.tensors.items():
            if name not in weight_map:
                raise ValueError(f"{stored.file}: holds {name}, which {index} does not list")

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor ``name``, or the part of it that ``index`` selects; only that part is read."""
        stored = self.tensors[name]
        handle = self._handles[stored.file]
        try:
            return handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{stored.file}: {name} can't be read ({error})") from None

    def _open(self, file: Path) -> None:
        try:
            handle = safe_open(str(file), framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a readable safetensors file ({_diagnose(file) or error})") from None
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            if name in self.tensors:
                raise ValueError(f"{file}: holds {name}, which {self.tensors[name].file} holds too")
            view = handle.get_slice(name)
            self.tensors[name] = StoredTensor(file, name, view.get_dtype(), tuple(view.get_shape()))


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not a readable index with a weight_map ({error!r})") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be an object of tensor names and file names, got {weight_map!r}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: weight_map[{name!r}] must be a plain file name, got {file!r}")
    return weight_map


def _diagnose(file: Path) -> str | None:
    """Which tensor a truncated file cuts off, when its header can still be read."""
    try:
        data = file.open("rb")
        with data:
            length = int.from_bytes(data.read(8), "little")
            size = file.stat().st_size
            header = json.loads(data.read(min(length, size)))
            for name, entry in header.items():
                if name != "__metadata__" and 8 + length + entry["data_offsets"][1] > size:
                    return f"truncated: {name} ends at byte {8 + length + entry['data_offsets'][1]} of {size}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        pass
    return None


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_tensor_folder(
    path: Path, specs: Sequence[TensorSpec], tensors: Iterable[np.ndarray], max_shard_bytes: int
) -> None:
    """Write ``tensors`` (one per spec, in order, drawn one at a time) as one file, or as shards with an index.

    A shard holds at least one tensor and otherwise at most ``max_shard_bytes`` bytes of tensors. Weight files of an
    earlier checkpoint in ``path`` are replaced, and only once every new file is complete.
    """
    shards: list[list[TensorSpec]] = [[]]
    room = max_shard_bytes
    for spec in specs:
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(spec)
        room -= spec.nbytes
    count = len(shards)
    names = [ONE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    remaining = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(path / f".{name}.partial", shard, lambda: next(remaining))
    for stale in [*path.glob("model-*-of-*.safetensors"), path / ONE_FILE, path / INDEX]:
        stale.unlink(missing_ok=True)
    for name in names:
        os.replace(path / f".{name}.partial", path / name)
    if count > 1:
        weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_file(file: Path, specs: Sequence[TensorSpec], next_tensor: Callable[[], np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": _STORED_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little"))
        out.write(encoded)
        for spec in specs:
            tensor = next_tensor()
            if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise ValueError(f"{spec.name} must be {spec.dtype} {spec.shape}, got {tensor.dtype} {tensor.shape}")
            # bytes, not the array itself: the buffer protocol knows no bfloat16
            out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
