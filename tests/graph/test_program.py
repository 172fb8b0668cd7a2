"""A whole model lowered: arenas without overlaps, few barriers, addresses inside their memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ellm_kernels import opcodes as oc
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.ops import Load, Op
from ellm_serve.graph.program import Ceiling, Table, cost, lower, roofline_s
from ellm_serve.graph.qwen3 import Activations, Bases, build_qwen3
from ellm_serve.graph.rotary import rotary_bytes, write_rotary_tables
from ellm_serve.graph.tensor import Arena, Mode, Per, Tensor
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.weights import WeightLayout
from tests.tiny_models import write_model

WEIGHTS, KV, ROTARY, ARENA = 1 << 40, 1 << 42, 1 << 44, 1 << 46
LENGTH, SLOTS, THREADS = 1024, 4, 3


@pytest.fixture(params=[False, True], ids=["dense", "experts"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    directory = write_model(
        tmp_path, moe=request.param, tie=request.param, layers=3, mlp_only_layers=(1,)
    )
    return ModelConfig.from_dir(directory)


def build(config: ModelConfig) -> tuple[list[Op], Activations, WeightLayout, KVShape]:
    layout = WeightLayout.from_config(config)
    kv = KVShape(SLOTS, LENGTH, config.num_layers, config.num_kv_heads, config.head_dim)
    bases = Bases(WEIGHTS, KV, ROTARY, ROTARY + rotary_bytes(config, LENGTH) // 2)
    ops, activations = build_qwen3(config, layout, kv, bases)
    return ops, activations, layout, kv


def lowered(config: ModelConfig, mode: Mode, part_flops: float = 1e15) -> tuple[Table, Arena]:
    ops, activations, _, _ = build(config)
    rows = SLOTS if mode is Mode.FEW else 128
    arena = activations.arena(mode, rows, 4, THREADS, LENGTH, ARENA)
    return lower(ops, arena, part_flops), arena


def test_arena_buffers_do_not_overlap(config: ModelConfig) -> None:
    """Every tensor of the mode has room for all its rows and all threads' copies."""
    for mode in Mode:
        _, arena = lowered(config, mode)
        buffers = sorted(arena.buffers().values(), key=lambda buffer: buffer.address)
        assert buffers[0].address == ARENA
        for one, following in pairwise(buffers):
            assert one.address + one.size_bytes <= following.address
        assert buffers[-1].address + buffers[-1].size_bytes <= ARENA + arena.size_bytes
        assert all(buffer.address % 64 == 0 for buffer in buffers)


def test_local_tensors_exist_per_thread_in_decode_only() -> None:
    """Decode trades memory for barriers; a prefill block is shared."""
    tensor = Tensor("x", 100, local=True)
    scratch, only = Tensor("s", 10, Per.THREAD), Tensor("p", 10, only=Mode.FEW)
    for mode, copies in ((Mode.FEW, THREADS), (Mode.MANY, 1)):
        arena = Arena(mode, 4, 2, THREADS)
        for one in (tensor, scratch, only):
            arena.add(one)
        assert arena[tensor].size_bytes == 448 * copies  # 400 in whole lines
        assert arena[tensor].private == (448 if copies > 1 else 0)
        assert arena[scratch].size_bytes == 64 * THREADS
        assert ("p" in arena.buffers()) is (mode is Mode.FEW)


def test_a_plan_equals_the_placed_program(config: ModelConfig) -> None:
    """Sizes do not depend on addresses, so memory can be planned before there is any."""
    ops, activations, _, _ = build(config)
    for mode in Mode:
        sizes = {
            base: activations.arena(mode, 4, 4, THREADS, LENGTH, base).size_bytes
            for base in (0, ARENA)
        }
        assert len(set(sizes.values())) == 1
    assert len({op.name for op in ops}) == len(ops)


def test_barriers_of_a_decode_step(config: ModelConfig) -> None:
    """At most six per layer (qkv, attention, o_proj, router, up, down), and one for lm_head."""
    table, _ = lowered(config, Mode.FEW)
    routed = sum(config.moe_layers)
    assert table.num_barriers == 5 * config.num_layers + routed + 1


@pytest.mark.parametrize("mode", Mode)
def test_the_last_row_synchronises(config: ModelConfig, mode: Mode) -> None:
    """A step is over when everybody has arrived; the interpreter relies on that."""
    table, _ = lowered(config, mode)
    assert table.words[-1, 1] & oc.SYNC
    if mode is Mode.MANY:
        assert (table.words[:, 1] & oc.SYNC).all()
        assert not (table.words[:, 1] & oc.PRIVATE).any()


@pytest.mark.parametrize("mode", Mode)
def test_addresses_lie_in_their_memory(config: ModelConfig, mode: Mode) -> None:
    """Weights, KV tensor, rotary tables and arena: no argument points anywhere else."""
    table, arena = lowered(config, mode)
    _, _, layout, kv = build(config)
    spans = [
        (WEIGHTS, layout.size_bytes),
        (KV, kv.size_bytes),
        (ROTARY, rotary_bytes(config, LENGTH)),
        (ARENA, arena.size_bytes),
    ]
    arguments = table.words[:, oc.FIRST_ARG :].reshape(-1)
    addresses = arguments[arguments >= WEIGHTS]
    assert len(addresses) > 3 * table.num_rows
    for address in addresses:
        assert any(start <= address < start + size for start, size in spans), hex(address)
    # No size or count is as large as an address.
    assert arguments[arguments < WEIGHTS].max() < 1 << 34


def test_every_weight_is_used(config: ModelConfig) -> None:
    """Each place of the layout is some op's argument: a weight left out gives wrong answers."""
    table, _ = lowered(config, Mode.MANY)
    _, _, layout, _ = build(config)
    used = set(table.words[:, oc.FIRST_ARG :].reshape(-1).tolist())
    places = [layout.final_norm, layout.lm_head]
    places += [layout.embedding] if layout.embedding else []
    for layer in layout.layers:
        places += [layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.o_proj]
        places += [layer.post_norm, layer.experts.up, layer.experts.down]
        places += [layer.router] if layer.router else []
    assert {WEIGHTS + place.offset for place in places} <= used


def test_rows_remember_their_op(config: ModelConfig) -> None:
    """Times are measured per row and shown per op."""
    ops, _, _, _ = build(config)
    table, _ = lowered(config, Mode.MANY)
    assert table.num_rows == len(table.words) == len(table.op_of_row)
    assert sorted(set(table.op_of_row)) == list(range(len(ops)))
    assert list(table.op_of_row) == sorted(table.op_of_row)


def test_cost_and_roofline(config: ModelConfig) -> None:
    """The step's bound is that of its sums, which lies below the sum of the ops' bounds."""
    ops, _, _, _ = build(config)
    load, ceiling = Load(1, 100, 1), Ceiling(bytes_per_s=1e9, flops_per_s=1e10)
    costs = cost(ops, load, ceiling, measured_s=[2.0] * len(ops))
    assert [one.name for one in costs] == [op.name for op in ops]
    assert all(one.measured_s == 2.0 and one.dims for one in costs)
    for one in costs:
        assert one.predicted_s == max(one.flops / 1e10, one.bytes / 1e9)
    bound = roofline_s(ops, load, ceiling)
    assert 0 < bound <= sum(one.predicted_s for one in costs)
    assert cost(ops, load, ceiling)[0].measured_s is None
    many = Load(2048, 1024, 1)
    assert roofline_s(ops, many, ceiling) > 20 * bound


def test_rotary_tables(config: ModelConfig) -> None:
    """cos, then sin, of position × frequency."""
    region, cos, sin = write_rotary_tables(config, 5000)
    half = config.head_dim // 2
    assert sin - cos == 5000 * half * 4
    tables = region.array(0, (2, 5000, half), np.float32)
    angles = np.outer(np.arange(5000), 10_000.0 ** (-np.arange(half) / half))
    np.testing.assert_allclose(tables[0], np.cos(angles), atol=4e-4)
    np.testing.assert_allclose(tables[1], np.sin(angles), atol=4e-4)
