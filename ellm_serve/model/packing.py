"""From a mapped checkpoint to packed panels: every byte is read once and held once.

Tensors are packed straight from the file's pages, which leave this process as soon as they were
used. fp16 and fp32 values are rounded to bf16 a few hundred rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ellm_kernels.pack import pack_panels
from ellm_kernels.tiles import HALF_PANEL, PANEL, panel_bytes
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import Region
from ellm_serve.model.tensors import EMBEDDING, FINAL_NORM, LM_HEAD, Shape, layer_prefix
from ellm_serve.model.weights import ExpertPlaces, LayerPlaces, Place, WeightLayout

Array = NDArray[np.generic]

# Rows converted at once: 256 × 8,192 inputs are 8 MB of float32.
_CONVERT_ROWS = 256


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """bf16 bits of float16 or float32 values, nearest even; bf16 bits stay as they are."""
    if values.dtype == np.uint16:
        return np.ascontiguousarray(values)
    bits = values.astype(np.float32).view(np.uint32)
    nan = np.isnan(values)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(nan, 0x7FC0, rounded).astype(np.uint16)


def to_f32(values: Array) -> NDArray[np.float32]:
    """float32 values of bf16 bits, float16 or float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


@dataclass(frozen=True)
class _Job:
    """Tensors that become one packed piece, and the work to do it."""

    names: tuple[str, ...]
    run: Callable[[], None]


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    layout: WeightLayout,
    region: Region,
    num_threads: int,
    progress: bool = False,
) -> None:
    """Packs every tensor of the checkpoint to its place in the region.

    Raises:
        ModelError: a tensor is missing, left over, or has the wrong shape or dtype.
    """
    checkpoint.reconcile(config)
    jobs = list(_Packer(config, checkpoint, layout, region).jobs())
    checkpoint.finish()
    with (
        tqdm(total=layout.size_bytes, unit="B", unit_scale=True, desc="weights",
             disable=not progress) as bar,
        ThreadPoolExecutor(num_threads) as pool,
    ):  # fmt: skip
        for job in pool.map(_finish_job(checkpoint), jobs):
            bar.update(sum(checkpoint.array(name).nbytes for name in job.names))


def _finish_job(checkpoint: Checkpoint) -> Callable[[_Job], _Job]:
    def run(job: _Job) -> _Job:
        job.run()
        for name in job.names:
            checkpoint.release(name)
        return job

    return run


class _Packer:
    """Turns places into jobs; all checks of the checkpoint happen while the jobs are made."""

    def __init__(
        self, config: ModelConfig, checkpoint: Checkpoint, layout: WeightLayout, region: Region
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._layout = layout
        self._region = region

    def jobs(self) -> Iterator[_Job]:
        config, layout = self._config, self._layout
        shape = (config.vocab_size, config.hidden_size)
        if layout.embedding is None:
            yield self._matrix(layout.lm_head, (EMBEDDING,), (shape,))
        else:
            yield self._table(layout.embedding, EMBEDDING, shape)
            yield self._matrix(layout.lm_head, (LM_HEAD,), (shape,))
        yield self._vector(layout.final_norm, FINAL_NORM)
        for index, layer in enumerate(layout.layers):
            yield from self._layer_jobs(layer_prefix(index), layer)

    def _layer_jobs(self, prefix: str, layer: LayerPlaces) -> Iterator[_Job]:
        config = self._config
        hidden = config.hidden_size
        attention = f"{prefix}self_attn."
        yield self._vector(layer.input_norm, f"{prefix}input_layernorm.weight")
        yield self._vector(layer.q_norm, f"{attention}q_norm.weight")
        yield self._vector(layer.k_norm, f"{attention}k_norm.weight")
        yield self._vector(layer.post_norm, f"{prefix}post_attention_layernorm.weight")
        yield self._matrix(
            layer.qkv,
            tuple(f"{attention}{part}_proj.weight" for part in "qkv"),
            ((config.q_size, hidden), (config.kv_size, hidden), (config.kv_size, hidden)),
        )
        o_name = f"{attention}o_proj.weight"
        yield self._matrix(layer.o_proj, (o_name,), ((hidden, config.q_size),))
        if layer.router is None:
            yield self._expert(layer.experts, 0, f"{prefix}mlp.")
            return
        yield self._matrix(
            layer.router, (f"{prefix}mlp.gate.weight",), ((config.num_experts, hidden),)
        )
        for expert in range(config.num_experts):
            yield self._expert(layer.experts, expert, f"{prefix}mlp.experts.{expert}.")

    def _expert(self, experts: ExpertPlaces, index: int, prefix: str) -> _Job:
        hidden = self._config.hidden_size
        names = tuple(f"{prefix}{part}_proj.weight" for part in ("gate", "up", "down"))
        size = experts.intermediate
        gate = self._checkpoint.expect(names[0], (size, hidden))
        up = self._checkpoint.expect(names[1], (size, hidden))
        down = self._checkpoint.expect(names[2], (hidden, size))
        base = self._region.address
        up_at = base + experts.up.offset + index * (experts.up.size_bytes // experts.num_experts)
        down_at = (
            base + experts.down.offset + index * (experts.down.size_bytes // experts.num_experts)
        )

        def run() -> None:
            _pack(gate, up_at, HALF_PANEL, 0)
            _pack(up, up_at, HALF_PANEL, HALF_PANEL)
            _pack(down, down_at)

        return _Job(names, run)

    def _matrix(self, place: Place, names: tuple[str, ...], shapes: tuple[Shape, ...]) -> _Job:
        sources = [
            self._checkpoint.expect(name, shape) for name, shape in zip(names, shapes, strict=True)
        ]
        address = self._region.address + place.offset
        step = panel_bytes(place.inputs)

        def run() -> None:
            if any(len(source) % PANEL for source in sources[:-1]):
                # A panel that spans two tensors: join them first (only tiny models have these).
                _pack(np.concatenate([to_bf16(source) for source in sources]), address)
                return
            at = address
            for source in sources:
                _pack(source, at)
                at += len(source) // PANEL * step

        return _Job(names, run)

    def _table(self, place: Place, name: str, shape: Shape) -> _Job:
        source = self._checkpoint.expect(name, shape)
        target = self._region.array(place.offset, shape, np.uint16)

        def run() -> None:
            for row in range(0, len(source), _CONVERT_ROWS):
                target[row : row + _CONVERT_ROWS] = to_bf16(source[row : row + _CONVERT_ROWS])

        return _Job((name,), run)

    def _vector(self, place: Place, name: str) -> _Job:
        source = self._checkpoint.expect(name, (place.outputs,))
        target = self._region.array(place.offset, (place.outputs,), np.float32)

        def run() -> None:
            target[:] = to_f32(source)

        return _Job((name,), run)


def _pack(source: Array, address: int, width: int = PANEL, column: int = 0) -> None:
    """Packs a matrix [outputs, inputs] into `width` columns of every panel at `address`."""
    outputs, inputs = source.shape
    if source.dtype == np.uint16 and source.flags.c_contiguous:
        pack_panels(source.ctypes.data, inputs * 2, outputs, inputs, address, width, column)
        return
    for row in range(0, outputs, _CONVERT_ROWS):
        rows = to_bf16(source[row : row + _CONVERT_ROWS])
        at = address + row // width * panel_bytes(inputs)
        pack_panels(rows.ctypes.data, inputs * 2, len(rows), inputs, at, width, column)
