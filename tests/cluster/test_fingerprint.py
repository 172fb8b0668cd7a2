"""Weights in shared memory are used again only if nothing they depend on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ellm_serve.cluster.fingerprint import layout_version, weights_fingerprint
from ellm_serve.errors import ModelError
from ellm_serve.model.config import ModelConfig
from tests.tiny_models import write_model

FACTS = {"num_ranks": 2, "experts": "slice"}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A tiny checkpoint."""
    write_model(tmp_path, moe=True)
    return tmp_path


def fingerprint(model_dir: Path) -> str:
    return weights_fingerprint(model_dir, ModelConfig.from_dir(model_dir), "layout", FACTS)


def touch(path: Path) -> None:
    """The same bytes at another time."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def change_header(path: Path) -> None:
    """One byte of the header; size and time stay."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(20)
        byte = file.read(1)
        file.seek(20)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def rename(path: Path) -> None:
    path.rename(path.with_name("other.safetensors"))


def test_same_start_same_fingerprint(model_dir: Path) -> None:
    """Files that are no weights do not matter."""
    before = fingerprint(model_dir)
    (model_dir / "README.md").write_text("x")
    touch(model_dir / "config.json")
    assert fingerprint(model_dir) == before
    assert len(before) == 64


@pytest.mark.parametrize("change", [touch, change_header, rename])
def test_changed_file(model_dir: Path, change: Callable[[Path], None]) -> None:
    """Time, header or name."""
    before = fingerprint(model_dir)
    change(sorted(model_dir.glob("*.safetensors"))[0])
    assert fingerprint(model_dir) != before


def test_changed_facts(model_dir: Path) -> None:
    """Dimensions, layout and the cut into shards."""
    config = ModelConfig.from_dir(model_dir)
    prints = {
        weights_fingerprint(model_dir, config, "layout", FACTS),
        weights_fingerprint(model_dir, config, "other", FACTS),
        weights_fingerprint(model_dir, config, "layout", FACTS | {"num_ranks": 4}),
        weights_fingerprint(model_dir, config, "layout", FACTS | {"experts": "whole"}),
        weights_fingerprint(model_dir, replace(config, rms_norm_eps=0.5), "layout", FACTS),
    }
    assert len(prints) == 5


def test_file_that_cannot_be_read(model_dir: Path) -> None:
    """One line that names it."""
    config = ModelConfig.from_dir(model_dir)
    (model_dir / "gone.safetensors").symlink_to(model_dir / "nowhere")
    with pytest.raises(ModelError, match="gone.safetensors cannot be read"):
        weights_fingerprint(model_dir, config, "layout", FACTS)


def test_header_that_lies(model_dir: Path) -> None:
    """A length beyond the file costs no memory and is no error here: the loader reports it."""
    (model_dir / "x.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    config = ModelConfig.from_dir(model_dir)
    assert len(weights_fingerprint(model_dir, config, "layout", FACTS)) == 64


def test_layout_version() -> None:
    """One word, the same all the time."""
    assert layout_version() == layout_version()
    assert " " not in layout_version()
