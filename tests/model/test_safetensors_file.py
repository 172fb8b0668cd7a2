"""The safetensors reader against damaged and hostile files: always one line, never noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import ModelError
from ellm_serve.model.safetensors_file import SafetensorsFile
from tests.tiny_models import write_safetensors

GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def write_raw(
    path: Path, header: object, data: bytes = bytes(24), length: int | None = None
) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    count = len(text) if length is None else length
    path.write_bytes(count.to_bytes(8, "little") + text + data)
    return path


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"empty": np.zeros((0, 3), np.float32), "one": np.array(7, np.float32)})
    file = SafetensorsFile(path)
    assert file.array(file.tensors["empty"]).shape == (0, 3)
    assert file.array(file.tensors["one"]) == 7
    file.release(file.tensors["empty"])


def test_unpadded_header_gives_aligned_elements(tmp_path: Path) -> None:
    """Compiled kernels assume aligned arrays; files of old writers start data anywhere."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    text = json.dumps({"a": GOOD}).encode()
    text += b" " * (3 - len(text) % 4)
    file = SafetensorsFile(write_raw(tmp_path / "a.safetensors", text, values.tobytes()))
    assert file.tensors["a"].offset % 4
    array = file.array(file.tensors["a"])
    assert array.flags.aligned
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, values)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "names 'a' twice"),
        (b"[" * 50_000, "not JSON"),
        ({"a": 3}, "'a' is not an object"),
        ({"a": GOOD | {"dtype": "F4"}}, "unknown dtype 'F4'"),
        ({"a": GOOD | {"dtype": ["F32"]}}, "unknown dtype"),
        ({"a": GOOD | {"shape": [2, -3]}}, "shape must be a list of integers >= 0"),
        ({"a": GOOD | {"shape": [True, 6]}}, "shape must be"),
        ({"a": GOOD | {"shape": None}}, "shape must be"),
        ({"a": GOOD | {"shape": [2, 4]}}, "needs 32 bytes"),
        ({"a": GOOD | {"data_offsets": [0]}}, "data_offsets are"),
        ({"a": GOOD | {"data_offsets": [24, 0]}}, "data_offsets are"),
        ({"a": GOOD | {"data_offsets": [4, 28]}}, "follows a gap"),
        ({"a": GOOD, "b": GOOD}, "overlaps"),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [24, 48]}}, "should have .* incomplete download"),
        ({}, "should have"),
    ],
)  # fmt: skip
def test_bad_headers(tmp_path: Path, header: object, message: str) -> None:
    path = write_raw(tmp_path / "a.safetensors", header)
    with pytest.raises(ModelError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [1 << 63, 10_000, 0])
def test_bad_header_length(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError):
        SafetensorsFile(write_raw(tmp_path / "a.safetensors", {"a": GOOD}, length=length))


@pytest.mark.parametrize("content", [b"", b"1234567", b"version https://git-lfs.github.com/spec"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="git lfs pull" if len(content) > 8 else "incomplete"):
        SafetensorsFile(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """A download may stop at any byte."""
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"a": np.ones(4, np.float32), "b": np.ones(3, np.uint16)})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            SafetensorsFile(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-4, 30) | st.sampled_from(["F32", "BF16", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "dtype", "shape", "data_offsets"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(header=st.dictionaries(st.text(max_size=3), JSON | st.just(GOOD), max_size=3))
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any]
) -> None:
    """No JSON may surface as a KeyError or TypeError, or read outside the file."""
    path = write_raw(tmp_path_factory.mktemp("header") / "a.safetensors", header)
    try:
        file = SafetensorsFile(path)
    except ModelError:
        return
    assert sum(tensor.num_bytes for tensor in file.tensors.values()) == 24
    for tensor in file.tensors.values():
        if tensor.dtype in ("F32", "BF16"):
            assert file.array(tensor).nbytes == tensor.num_bytes
