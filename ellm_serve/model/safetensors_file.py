"""One safetensors file, mapped read-only.

The file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without
gaps. All of it is checked when the file is opened, so that a truncated download or a stray file is
reported then and not as noise in the weights. Reading a tensor copies nothing.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ellm_serve.errors import ModelError
from ellm_serve.model.fields import is_int

# Bytes per element of every dtype the format defines with whole bytes.
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

# bf16 has no numpy type: its bits are kept in uint16.
NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `offset` counts from the start of its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    num_bytes: int


class SafetensorsFile:
    """The mapped bytes of one file and the tensors in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self.tensors: dict[str, TensorInfo] = _read_header(path, self._map)

    def array(self, info: TensorInfo) -> NDArray[np.generic]:
        """Read-only view of the mapped bytes; bf16 comes as uint16."""
        dtype = NUMPY_DTYPES[info.dtype]
        count = info.num_bytes // dtype.itemsize
        if not count:
            return np.empty(info.shape, dtype)
        flat: NDArray[np.generic] = np.frombuffer(self._map, dtype, count, info.offset)
        if info.offset % dtype.itemsize:
            # Old writers did not pad the header. Kernels need aligned elements, so copy.
            flat = flat.copy()
            flat.flags.writeable = False
        return flat.reshape(info.shape)

    def release(self, info: TensorInfo) -> None:
        """Unmaps the tensor's pages from this process; a later read maps them again."""
        if not info.num_bytes:
            return
        # Whole pages only. A neighbour that shares a page merely pays one more page fault.
        start = info.offset - info.offset % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, info.offset + info.num_bytes - start)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 8:
                raise ModelError(f"{path} has {path.stat().st_size} bytes; incomplete download?")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _read_header(path: Path, data: mmap.mmap) -> dict[str, TensorInfo]:
    if data[:8] == b"version ":
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`")
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise ModelError(
            f"{path} is not a safetensors file or is truncated: its first bytes announce a header"
            f" of {length} bytes, the file has {len(data)}"
        )
    entries = _parse_header(path, data[8 : 8 + length])
    entries.pop("__metadata__", None)
    start = 8 + length
    tensors = [_tensor(path, name, entry, start) for name, entry in entries.items()]
    _check_layout(path, tensors, start, len(data))
    return {tensor.name: tensor for tensor in tensors}


def _parse_header(path: Path, text: bytes) -> dict[str, object]:
    def reject_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ModelError(f"{path}: its header names {twice!r} twice")
        return entries

    try:
        entries = json.loads(text, object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ModelError(f"{path}: its header is not a JSON object")
    return entries


def _tensor(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    if not isinstance(entry, Mapping):
        raise ModelError(f"{path}: the header entry of {name!r} is not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{path}: tensor {name!r} has unknown dtype {dtype!r}")
    shape = _naturals(path, name, "shape", entry.get("shape"))
    offsets = _naturals(path, name, "data_offsets", entry.get("data_offsets"))
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes:
        raise ModelError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {num_bytes}"
            f" bytes, its data_offsets are {list(offsets)}"
        )
    return TensorInfo(name, dtype, shape, path, start + offsets[0], num_bytes)


def _naturals(path: Path, name: str, key: str, value: object) -> tuple[int, ...]:
    items: list[object] = value if isinstance(value, list) else [None]
    naturals = tuple(item for item in items if is_int(item) and item >= 0)
    if len(naturals) != len(items):
        raise ModelError(f"{path}: tensor {name!r}: {key} must be a list of integers >= 0")
    return naturals


def _check_layout(path: Path, tensors: list[TensorInfo], start: int, file_bytes: int) -> None:
    """The tensors must tile the data section exactly."""
    end = start
    for tensor in sorted(tensors, key=lambda each: (each.offset, each.num_bytes)):
        if tensor.offset != end:
            kind = "overlaps another tensor" if tensor.offset < end else "follows a gap"
            raise ModelError(f"{path}: tensor {tensor.name!r} {kind} in the data section")
        end += tensor.num_bytes
    if end != file_bytes:
        hint = "; incomplete download?" if end > file_bytes else ""
        raise ModelError(f"{path} should have {end} bytes by its header but has {file_bytes}{hint}")
