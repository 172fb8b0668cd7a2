"""A checkpoint: tensors by their Hugging Face name, mapped and not copied.

Every tensor must be accounted for: a loader takes each with `expect` or puts it aside with
`discard`, and `finish` refuses what is left over. `reconcile` does the same from names and shapes
alone, before any memory is taken for weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ellm_serve.errors import ModelError
from ellm_serve.model.config import SUPPORTED_WEIGHTS, ModelConfig
from ellm_serve.model.safetensors_file import NUMPY_DTYPES, SafetensorsFile, TensorInfo
from ellm_serve.model.shards import locate_tensors
from ellm_serve.model.tensors import LM_HEAD, Shape, model_tensors

logger = logging.getLogger(__name__)

# Tensors that published checkpoints carry and inference does not need: rotation tables that are
# computed from the configuration, and multi-token-prediction heads.
NOT_NEEDED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(model\.)?mtp\..*")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

MAX_GROUPS, MAX_NAMES = 6, 4


class Checkpoint:
    """Lazy view of a model directory's safetensors files.

    Arrays are read-only views of mapped files and stay valid as long as they are referenced.
    """

    def __init__(self, path: Path, located: Mapping[str, SafetensorsFile]) -> None:
        self.path = path
        self._located = dict(located)
        self._settled: set[str] = set()

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Maps the files and checks every header; reads no tensor."""
        return cls(path, locate_tensors(path))

    def __contains__(self, name: str) -> bool:
        return name in self._located

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._located)

    def info(self, name: str) -> TensorInfo:
        if name not in self._located:
            raise ModelError(f"{self.path} has no tensor {name!r}; incomplete or another model?")
        return self._located[name].tensors[name]

    def array(self, name: str) -> NDArray[np.generic]:
        """The tensor as stored: bf16 bits in uint16, float16 or float32."""
        info = self.info(name)
        _check_dtype(info)
        return self._located[name].array(info)

    def expect(self, name: str, shape: Shape) -> NDArray[np.generic]:
        """The tensor, which must have this shape; it counts as used from here on."""
        assert name not in self._settled, f"{name} is used twice"
        self._check(name, shape)
        self._settled.add(name)
        return self._located[name].array(self.info(name))

    def discard(self, name: str, reason: str) -> None:
        """Leaves a tensor of the checkpoint unused on purpose."""
        info = self.info(name)
        if name not in self._settled:
            logger.warning("%s: tensor %s is ignored: %s", info.file, name, reason)
        self._settled.add(name)

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of this process once its bytes have been used."""
        self._located[name].release(self.info(name))

    def reconcile(self, config: ModelConfig) -> None:
        """Checks names, shapes and dtypes against the configuration without reading a tensor.

        `config.json` decides about tied embeddings: an lm_head beside them is discarded, and a
        model that is not tied must have one.
        """
        if config.tie_word_embeddings and LM_HEAD in self:
            self.discard(LM_HEAD, "config.json says tie_word_embeddings, so the embedding is used")
        expected = model_tensors(config)
        missing = expected.keys() - self._located.keys()
        if missing == {LM_HEAD}:
            raise ModelError(
                f"{self.path} has no {LM_HEAD} although config.json does not tie it to the"
                f" embedding; if the model is tied, set tie_word_embeddings to true in config.json"
            )
        if missing:
            raise ModelError(
                f"{self.path} lacks {len(missing)} tensors: {_grouped(missing)};"
                " incomplete checkpoint or wrong config.json?"
            )
        self._refuse_unused(self._located.keys() - expected.keys())
        for name, shape in expected.items():
            self._check(name, shape)

    def finish(self) -> None:
        """Refuses a checkpoint with tensors nobody asked for: ignoring one gives wrong answers."""
        self._refuse_unused(self._located.keys())

    def _refuse_unused(self, names: Iterable[str]) -> None:
        unused = set(names) - self._settled
        for name in sorted(filter(NOT_NEEDED.fullmatch, unused)):
            self.discard(name, "not needed for inference")
        unused -= self._settled
        if unused:
            raise ModelError(
                f"{self.path} has {len(unused)} tensors that this model does not use:"
                f" {_grouped(unused)}; they cannot be ignored safely"
            )

    def _check(self, name: str, shape: Shape) -> None:
        info = self.info(name)
        _check_dtype(info)
        if info.shape != shape:
            raise ModelError(
                f"{info.file}: tensor {name!r} should have shape {list(shape)} by config.json, it"
                f" has {list(info.shape)} ({info.dtype})"
            )


def _check_dtype(info: TensorInfo) -> None:
    if info.dtype not in NUMPY_DTYPES:
        raise ModelError(
            f"{info.file}: tensor {info.name!r} has dtype {info.dtype}; supported are"
            f" {SUPPORTED_WEIGHTS}"
        )


def _grouped(names: Iterable[str]) -> str:
    """Names by layer, shortened: `layer 3: a, b (+2 more); layer 4: a`."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name in sorted(names):
        match = _LAYER.fullmatch(name)
        key = (int(match[1]), f"layer {match[1]}: ") if match else (-1, "")
        groups.setdefault(key, []).append(match[2] if match else name)
    shown = [
        label + _shortened(members, MAX_NAMES) for (_, label), members in sorted(groups.items())
    ]
    hidden = len(shown) - MAX_GROUPS
    return "; ".join(shown[:MAX_GROUPS]) + (f"; and {hidden} more layers" if hidden > 0 else "")


def _shortened(names: list[str], limit: int) -> str:
    hidden = len(names) - limit
    return ", ".join(names[:limit]) + (f" (+{hidden} more)" if hidden > 0 else "")
