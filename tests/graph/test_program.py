"""A whole model lowered: arenas without overlaps, few barriers, addresses inside their memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ellm_kernels import opcodes as oc
from ellm_kernels.control import control_bytes
from ellm_serve.graph.group_layout import GroupLayout, StepSizes
from ellm_serve.graph.kv_tensor import KVShape
from ellm_serve.graph.ops import Load, Op
from ellm_serve.graph.program import Ceiling, Table, cost, lower, roofline_s
from ellm_serve.graph.qwen3 import Activations, Bases, build_qwen3
from ellm_serve.graph.rotary import rotary_bytes, write_rotary_tables
from ellm_serve.graph.tensor import Arena, Buffer, Mode, Per, Tensor
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.sharding import ExpertSplit, Shard
from ellm_serve.model.weights import WeightLayout
from tests.tiny_models import write_model

WEIGHTS, KV, ROTARY, ARENA, SHARED = 1 << 40, 1 << 42, 1 << 44, 1 << 46, 1 << 48
LENGTH, SLOTS, THREADS = 1024, 4, 3
SIZES = {
    Mode.FEW: StepSizes(Mode.FEW, SLOTS, SLOTS),
    Mode.MANY: StepSizes(Mode.MANY, 128, 4),
}


@pytest.fixture(params=[False, True], ids=["dense", "experts"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    directory = write_model(
        tmp_path, moe=request.param, tie=request.param, layers=3, mlp_only_layers=(1,)
    )
    return ModelConfig.from_dir(directory)


@pytest.fixture(
    params=[
        (0, 1, ExpertSplit.SLICE), (0, 2, ExpertSplit.SLICE), (1, 2, ExpertSplit.WHOLE),
        (3, 4, ExpertSplit.SLICE), (2, 4, ExpertSplit.WHOLE),
    ],
    ids=lambda value: "{}/{} {}".format(*value),
)  # fmt: skip
def shard(request: pytest.FixtureRequest, config: ModelConfig) -> Shard:
    """Every size of the configuration that is cut can be cut in four."""
    return Shard(config, *request.param)


def build(shard: Shard) -> tuple[list[Op], Activations, WeightLayout, KVShape]:
    layout, local = WeightLayout.from_shard(shard), shard.local
    kv = KVShape(SLOTS, LENGTH, local.num_layers, local.num_kv_heads, local.head_dim)
    bases = Bases(WEIGHTS, KV, ROTARY, ROTARY + rotary_bytes(local, LENGTH) // 2)
    ops, activations = build_qwen3(shard, layout, kv, bases)
    return ops, activations, layout, kv


def group_layout(shard: Shard) -> GroupLayout:
    return GroupLayout(shard, THREADS, SIZES[Mode.FEW], SIZES[Mode.MANY])


def lowered(shard: Shard, mode: Mode, part_flops: float = 1e15) -> tuple[Table, Arena]:
    ops, activations, _, _ = build(shard)
    exchanges = group_layout(shard).exchanges(mode, shard.rank, SHARED)
    arena = activations.arena(mode, SIZES[mode].rows, 4, THREADS, LENGTH, ARENA, exchanges)
    return lower(ops, arena, part_flops), arena


def own_buffers(arena: Arena) -> list[Buffer]:
    """Those that no other socket sees, in the order of their addresses."""
    buffers = sorted(arena.buffers().values(), key=lambda buffer: buffer.address)
    return [buffer for buffer in buffers if buffer.address < SHARED]


def test_arena_buffers_do_not_overlap(shard: Shard) -> None:
    """Every tensor of the mode has room for all its rows and all threads' copies."""
    for mode in Mode:
        _, arena = lowered(shard, mode)
        buffers = own_buffers(arena)
        assert len(buffers) == len(arena.buffers()) - 3
        assert buffers[0].address == ARENA
        for one, following in pairwise(buffers):
            assert one.address + one.size_bytes <= following.address
        assert buffers[-1].address + buffers[-1].size_bytes <= ARENA + arena.size_bytes
        assert all(buffer.address % 64 == 0 for buffer in buffers)


def test_shared_memory_is_nobodys_twice(shard: Shard) -> None:
    """Control block, mailboxes, every socket's shares and the logits: in order, without overlap."""
    layout = group_layout(shard)
    pieces = [(0, control_bytes(shard.count))]
    for mode in Mode:
        box, sizes = layout.mailbox(mode), SIZES[mode]
        fields = list(box.fields().values())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(fields))
        assert sum(fields[-1]) <= box.size_bytes
        pieces += [(layout.mailbox_offset(mode, rank), box.size_bytes)
                   for rank in range(shard.count)]  # fmt: skip
        shares = [layout.exchanges(mode, rank, 0) for rank in range(shard.count)]
        size = 4 * sizes.rows * shard.whole.hidden_size
        for rank, share in enumerate(shares):
            sums = (share.attention, share.mlp)
            assert {one.count for one in (*sums, share.logits)} == {shard.count}
            pieces += [(one.base + rank * one.stride, size) for one in sums]
        pieces.append((layout.logits_offset(mode), sizes.logit_rows * layout.logits_row_bytes))
        # Sockets write side by side into rows that hold all columns.
        assert {share.logits.base for share in shares} == {layout.logits_offset(mode)}
        assert shard.count * shares[0].logits.stride == layout.logits_row_bytes
    pieces.sort()
    for (one, size), (following, _) in pairwise(pieces):
        assert one + size <= following
    assert sum(pieces[-1]) <= layout.size_bytes
    assert all(offset % 64 == 0 for offset, _ in pieces)


def test_all_sockets_agree_on_the_shared_memory(config: ModelConfig) -> None:
    """Every process computes the offsets for itself."""
    for count in (2, 4):
        layouts = [group_layout(Shard(config, rank, count)) for rank in range(count)]
        assert len({layout.size_bytes for layout in layouts}) == 1
        for mode in Mode:
            for rank in range(count):
                assert len({layout.mailbox_offset(mode, rank) for layout in layouts}) == 1
                assert len({layout.exchanges(mode, rank, 0) for layout in layouts}) == 1


@pytest.mark.parametrize("mode", Mode)
def test_sockets_meet_at_the_same_barriers(config: ModelConfig, mode: Mode) -> None:
    """A barrier of all sockets that one of them passes by would hang the others."""
    for split in ExpertSplit:
        for count in (2, 4):
            shards = [Shard(config, rank, count, split) for rank in range(count)]
            tables = [lowered(shard, mode, 1e5)[0].words for shard in shards]
            for table in tables[1:]:
                assert np.array_equal(table[:, :3], tables[0][:, :3])
            waits = tables[0][:, 1] & oc.ALL_TEAMS != 0
            # Embedding, two sums per layer, logits.
            assert waits.sum() == 2 * config.num_layers + 2
            assert waits[-1]


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


def test_a_plan_equals_the_placed_program(shard: Shard) -> None:
    """Sizes do not depend on addresses, so memory can be planned before there is any."""
    ops, activations, _, _ = build(shard)
    for mode in Mode:
        sizes = {
            base: activations.arena(mode, 4, 4, THREADS, LENGTH, base).size_bytes
            for base in (0, ARENA)
        }
        assert len(set(sizes.values())) == 1
    assert len({op.name for op in ops}) == len(ops)


def test_barriers_of_a_decode_step(shard: Shard) -> None:
    """At most six per layer (qkv, attention, o_proj, router, up, down), plus embed and lm_head."""
    table, _ = lowered(shard, Mode.FEW)
    routed = sum(shard.whole.moe_layers)
    assert table.num_barriers == 5 * shard.whole.num_layers + routed + 2


@pytest.mark.parametrize("mode", Mode)
def test_the_last_row_synchronises(shard: Shard, mode: Mode) -> None:
    """A step is over when everybody has arrived; the interpreter relies on that."""
    table, _ = lowered(shard, mode)
    assert table.words[-1, 1] & oc.SYNC
    if mode is Mode.MANY:
        assert (table.words[:, 1] & oc.SYNC).all()
        assert not (table.words[:, 1] & oc.PRIVATE).any()


@pytest.mark.parametrize("mode", Mode)
def test_addresses_lie_in_their_memory(shard: Shard, mode: Mode) -> None:
    """Weights, KV tensor, rotary tables and arena: no argument points anywhere else."""
    table, arena = lowered(shard, mode)
    _, _, layout, kv = build(shard)
    spans = [
        (WEIGHTS, layout.size_bytes),
        (KV, kv.size_bytes),
        (ROTARY, rotary_bytes(shard.whole, LENGTH)),
        (ARENA, arena.size_bytes),
        (SHARED, group_layout(shard).size_bytes),
    ]
    arguments = table.words[:, oc.FIRST_ARG :].reshape(-1)
    addresses = arguments[arguments >= WEIGHTS]
    assert len(addresses) > 3 * table.num_rows
    for address in addresses:
        assert any(start <= address < start + size for start, size in spans), hex(address)
    # No size or count is as large as an address.
    assert arguments[arguments < WEIGHTS].max() < 1 << 34


def test_every_weight_is_used(shard: Shard) -> None:
    """Each place of the layout is some op's argument: a weight left out gives wrong answers."""
    table, _ = lowered(shard, Mode.MANY)
    _, _, layout, _ = build(shard)
    used = set(table.words[:, oc.FIRST_ARG :].reshape(-1).tolist())
    places = [layout.final_norm, layout.lm_head]
    places += [layout.embedding] if layout.embedding else []
    for layer in layout.layers:
        places += [layer.input_norm, layer.qkv, layer.q_norm, layer.k_norm, layer.o_proj]
        places += [layer.post_norm, layer.experts.up, layer.experts.down]
        places += [layer.router] if layer.router else []
    assert {WEIGHTS + place.offset for place in places} <= used


def test_rows_remember_their_op(shard: Shard) -> None:
    """Times are measured per row and shown per op."""
    ops, _, _, _ = build(shard)
    table, _ = lowered(shard, Mode.MANY)
    assert table.num_rows == len(table.words) == len(table.op_of_row)
    assert sorted(set(table.op_of_row)) == list(range(len(ops)))
    assert list(table.op_of_row) == sorted(table.op_of_row)


def test_cost_and_roofline(shard: Shard) -> None:
    """The step's bound is that of its sums, which lies below the sum of the ops' bounds."""
    ops, _, _, _ = build(shard)
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


@pytest.mark.parametrize("split", ExpertSplit)
@pytest.mark.parametrize("count", [2, 4])
def test_sockets_share_the_work(config: ModelConfig, count: int, split: ExpertSplit) -> None:
    """What is cut adds up to one socket's work, by which ceilings are predicted."""
    load = Load(3, 100, 2)
    whole = {op.name: op.flops(load) for op in build(Shard(config))[0]}
    cut = [build(Shard(config, rank, count, split))[0] for rank in range(count)]
    parts = {op.name: 0.0 for op in cut[0]}
    for ops in cut:
        for op in ops:
            parts[op.name] += op.flops(load)
    assert parts.keys() == whole.keys()
    shared = ("attention", "o_proj", "experts", "mlp", "lm_head")
    for name, flops in whole.items():
        if name.endswith(shared):
            assert parts[name] == pytest.approx(flops), name
        else:
            assert flops <= parts[name] <= count * flops, name


def test_rotary_tables(shard: Shard) -> None:
    """cos, then sin, of position × frequency."""
    region, cos, sin = write_rotary_tables(shard.whole, 5000)
    half = shard.whole.head_dim // 2
    assert sin - cos == 5000 * half * 4
    tables = region.array(0, (2, 5000, half), np.float32)
    angles = np.outer(np.arange(5000), 10_000.0 ** (-np.arange(half) / half))
    np.testing.assert_allclose(tables[0], np.cos(angles), atol=4e-4)
    np.testing.assert_allclose(tables[1], np.sin(angles), atol=4e-4)
