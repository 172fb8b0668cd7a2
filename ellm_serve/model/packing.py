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
from ellm_serve.model.region import Memory
from ellm_serve.model.sharding import Part, Shard
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
    num_bytes: int
    run: Callable[[], None]


def load_weights(
    shard: Shard,
    checkpoint: Checkpoint,
    layout: WeightLayout,
    memory: Memory,
    num_threads: int,
    progress: bool = False,
) -> None:
    """Packs the shard's part of every tensor to its place in memory.

    Raises:
        ModelError: a tensor is missing, left over, or has the wrong shape or dtype.
    """
    checkpoint.reconcile(shard.whole)
    jobs = list(_Packer(shard, checkpoint, layout, memory).jobs())
    checkpoint.finish()
    with (
        tqdm(total=sum(job.num_bytes for job in jobs), unit="B", unit_scale=True, desc="weights",
             disable=not progress) as bar,
        ThreadPoolExecutor(num_threads) as pool,
    ):  # fmt: skip
        for job in pool.map(_finish_job(checkpoint), jobs):
            bar.update(job.num_bytes)


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
        self, shard: Shard, checkpoint: Checkpoint, layout: WeightLayout, memory: Memory
    ) -> None:
        self._shard = shard
        self._config = shard.whole
        self._checkpoint = checkpoint
        self._layout = layout
        self._memory = memory

    def _take(
        self, name: str, shape: Shape, rows: Part | None = None, columns: Part | None = None
    ) -> Array:
        """The shard's rows and columns of a tensor, which counts as used."""
        array = self._checkpoint.expect(name, shape)
        if rows is not None:
            array = array[rows.begin : rows.end]
        return array if columns is None else array[:, columns.begin : columns.end]

    def jobs(self) -> Iterator[_Job]:
        config, layout, rows = self._config, self._layout, self._shard.vocabulary
        shape = (config.vocab_size, config.hidden_size)
        if layout.embedding is None:
            yield self._matrix(layout.lm_head, {EMBEDDING: self._take(EMBEDDING, shape, rows)})
        else:
            yield self._table(layout.embedding, EMBEDDING, self._take(EMBEDDING, shape, rows))
            yield self._matrix(layout.lm_head, {LM_HEAD: self._take(LM_HEAD, shape, rows)})
        yield self._vector(layout.final_norm, FINAL_NORM)
        for index, layer in enumerate(layout.layers):
            yield from self._layer_jobs(layer_prefix(index), layer)

    def _layer_jobs(self, prefix: str, layer: LayerPlaces) -> Iterator[_Job]:
        config, shard = self._config, self._shard
        hidden = config.hidden_size
        attention = f"{prefix}self_attn."
        yield self._vector(layer.input_norm, f"{prefix}input_layernorm.weight")
        yield self._vector(layer.q_norm, f"{attention}q_norm.weight")
        yield self._vector(layer.k_norm, f"{attention}k_norm.weight")
        yield self._vector(layer.post_norm, f"{prefix}post_attention_layernorm.weight")
        queries, keys = self._columns(shard.query_heads), self._columns(shard.kv_heads)
        kv_shape = (config.kv_size, hidden)
        q, k, v = (f"{attention}{part}_proj.weight" for part in "qkv")
        yield self._matrix(
            layer.qkv,
            {
                q: self._take(q, (config.q_size, hidden), queries),
                k: self._take(k, kv_shape, keys),
                v: self._take(v, kv_shape, keys),
            },
        )
        o = f"{attention}o_proj.weight"
        yield self._matrix(layer.o_proj, {o: self._take(o, (hidden, config.q_size), None, queries)})
        if layer.router is None:
            yield self._expert(layer.experts, 0, f"{prefix}mlp.", moe=False)
            return
        gate = f"{prefix}mlp.gate.weight"
        yield self._matrix(layer.router, {gate: self._take(gate, (config.num_experts, hidden))})
        yield from self._expert_jobs(prefix, layer.experts)

    def _columns(self, heads: Part) -> Part:
        d = self._config.head_dim
        return Part(heads.begin * d, heads.end * d)

    def _expert_jobs(self, prefix: str, places: ExpertPlaces) -> Iterator[_Job]:
        held = self._shard.experts
        for expert in range(self._config.num_experts):
            name = f"{prefix}mlp.experts.{expert}."
            if held.begin <= expert < held.end:
                yield self._expert(places, expert - held.begin, name, moe=True)
            else:
                self._skip_expert(name)

    def _skip_expert(self, prefix: str) -> None:
        """Another socket's expert: checked, but not read."""
        hidden, size = self._config.hidden_size, self._config.moe_intermediate_size
        for part, shape in (("gate", (size, hidden)), ("up", (size, hidden)),
                            ("down", (hidden, size))):  # fmt: skip
            self._checkpoint.expect(f"{prefix}{part}_proj.weight", shape)

    def _expert(self, places: ExpertPlaces, index: int, prefix: str, moe: bool) -> _Job:
        config, part = self._config, self._shard.intermediate(moe)
        hidden = config.hidden_size
        size = config.moe_intermediate_size if moe else config.intermediate_size
        names = tuple(f"{prefix}{kind}_proj.weight" for kind in ("gate", "up", "down"))
        gate = self._take(names[0], (size, hidden), part)
        up = self._take(names[1], (size, hidden), part)
        down = self._take(names[2], (hidden, size), None, part)
        base = self._memory.address
        up_at = base + places.up.offset + index * (places.up.size_bytes // places.num_experts)
        down_at = base + places.down.offset + index * (places.down.size_bytes // places.num_experts)

        def run() -> None:
            _pack(gate, up_at, HALF_PANEL, 0)
            _pack(up, up_at, HALF_PANEL, HALF_PANEL)
            _pack(down, down_at)

        return _Job(names, gate.nbytes + up.nbytes + down.nbytes, run)

    def _matrix(self, place: Place, sources: dict[str, Array]) -> _Job:
        arrays = list(sources.values())
        address = self._memory.address + place.offset
        step = panel_bytes(place.inputs)

        def run() -> None:
            if any(len(array) % PANEL for array in arrays[:-1]):
                # A panel that spans two tensors: join them first (only tiny models have these).
                _pack(np.concatenate([to_bf16(array) for array in arrays]), address)
                return
            at = address
            for array in arrays:
                _pack(array, at)
                at += len(array) // PANEL * step

        return _Job(tuple(sources), sum(array.nbytes for array in arrays), run)

    def _table(self, place: Place, name: str, source: Array) -> _Job:
        target = self._memory.array(place.offset, source.shape, np.uint16)

        def run() -> None:
            for row in range(0, len(source), _CONVERT_ROWS):
                target[row : row + _CONVERT_ROWS] = to_bf16(source[row : row + _CONVERT_ROWS])

        return _Job((name,), source.nbytes, run)

    def _vector(self, place: Place, name: str) -> _Job:
        source = self._take(name, (place.outputs,))
        target = self._memory.array(place.offset, (place.outputs,), np.float32)

        def run() -> None:
            target[:] = to_f32(source)

        return _Job((name,), source.nbytes, run)


def _pack(source: Array, address: int, width: int = PANEL, column: int = 0) -> None:
    """Packs a matrix [outputs, inputs] into `width` columns of every panel at `address`."""
    outputs, inputs = source.shape
    if source.dtype == np.uint16 and source.strides[1] == 2:
        pack_panels(source.ctypes.data, source.strides[0], outputs, inputs, address, width, column)
        return
    for row in range(0, outputs, _CONVERT_ROWS):
        rows = to_bf16(source[row : row + _CONVERT_ROWS])
        at = address + row // width * panel_bytes(inputs)
        pack_panels(rows.ctypes.data, inputs * 2, len(rows), inputs, at, width, column)
