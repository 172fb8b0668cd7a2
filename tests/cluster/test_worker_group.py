"""Socket workers: the same bits as threads, whoever dies and whenever, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ellm_serve import LLM
from ellm_serve.cluster.claims import is_claimed, list_groups, remove_unclaimed
from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.local_ray import RaySession
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.errors import ModelError, StartupError, WorkerDied
from ellm_serve.model.sharding import ExpertSplit
from tests.running import Model, assert_same, decode, prefill

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
MakeGroup = Callable[..., WorkerGroup]
MakeExecutor = Callable[..., SoloExecutor]


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    """Fails if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.01)


def wait_until_rebuilt(group: WorkerGroup) -> None:
    """Called right after a worker was killed."""
    count = group.num_rebuilds
    wait_until(lambda: group.num_rebuilds > count, 60)


def state(path: Path) -> str:
    """The letter the kernel shows for a process or thread, below /proc."""
    return (path / "stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that waits for its parent to notice counts."""
    try:
        return state(Path(f"/proc/{pid}")) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop(pid: int) -> None:
    """Stops a process, and returns when all of its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    wait_until(lambda: all(state(task) == "T" for task in tasks), 10)


@contextmanager
def killed_in_the_middle(group: WorkerGroup, rank: int) -> Iterator[None]:
    """A worker is stopped, so that no step can end, and killed a moment later.

    Checks that the death was noticed within a second, give or take a loaded machine.
    """
    pid, rebuilds = group.pids[rank], group.num_rebuilds
    stop(pid)
    killed_at = [0.0]

    def kill() -> None:
        killed_at[0] = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(0.3, kill)
    timer.start()
    yield
    timer.join()
    assert 0 < killed_at[0] <= group.lost_at < killed_at[0] + 5
    assert group.num_rebuilds == rebuilds + 1


@pytest.mark.parametrize("split", list(ExpertSplit))
@pytest.mark.parametrize("name", ["tiny_dense", "tiny_moe"])
def test_same_bits_as_threads(
    name: str,
    split: ExpertSplit,
    request: pytest.FixtureRequest,
    make_group: MakeGroup,
    make_executor: MakeExecutor,
) -> None:
    """Two processes with a shard each compute what two sockets of one process compute."""
    model: Model = request.getfixturevalue(name)
    group = make_group(model, expert_split=split)
    threads = make_executor(model, 1, sockets=2, expert_split=split)
    ids = model.ids(300)
    for budget_s in (0.0, 1e-9):
        whole = prefill(threads, ids, block=200)
        assert_same(prefill(group, ids, block=200, budget_s=budget_s), whole)
    assert_same(decode(group, ids[:40], start=300), decode(threads, ids[:40], start=300))
    group.copy_prefix(0, 2, 340)
    threads.copy_prefix(0, 2, 340)
    assert_same(decode(group, ids[:3], slot=2, start=340), decode(threads, ids[:3], start=340))
    assert group.limits == threads.limits
    assert group.num_rebuilds == 0


def test_reports(tiny_dense: Model, make_group: MakeGroup) -> None:
    """What a start tells about each socket, for metrics and for people."""
    group = make_group(tiny_dense)
    assert [report.rank for report in group.reports] == [0, 1]
    assert [report.cores for report in group.reports] == list(group.options.sockets)
    for report in group.reports:
        assert report.packed and report.shard_bytes > 0
        assert report.local_share is None or 0 <= report.local_share <= 1
        assert report.bytes_per_s > 1e8
        assert report.huge_bytes >= 0
    assert 0 < group.decode_ceiling <= group.reports[0].decode_ceiling


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_idle(rank: int, tiny_moe: Model, make_group: MakeGroup) -> None:
    """The group is whole again before anybody asks, and keys and values are still there."""
    group = make_group(tiny_moe)
    ids = tiny_moe.ids(60)
    whole = prefill(group, ids)
    before = decode(group, ids[:5], start=60)
    pid = group.pids[rank]
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: group.num_rebuilds == 1, 60)
    assert group.lost_at < killed_at + 5
    assert_same(decode(group, ids[:5], start=60), before)
    assert_same(prefill(group, ids, slot=1), whole)
    assert group.num_rebuilds == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_decoding(rank: int, tiny_moe: Model, make_group: MakeGroup) -> None:
    """The step runs again; a prefill block that had yielded meanwhile is not lost either."""
    group = make_group(tiny_moe)
    ids, other = tiny_moe.ids(60), tiny_moe.ids(200, seed=1)
    whole = prefill(group, other, slot=1)
    prefill(group, ids)
    before = decode(group, ids[:5], start=60)
    group.start_prefill([Span(1, 0, other, LogitRows.ALL)])
    assert group.run_prefill(1e-9) is None
    with killed_in_the_middle(group, rank):
        after = decode(group, ids[:5], start=60)
    assert_same(after, before)
    logits = None
    while logits is None:
        logits = group.run_prefill(1e-9)
    assert_same(logits, whole)


@pytest.mark.parametrize("budget_s", [0.0, 1e-9])
def test_killed_while_prefilling(budget_s: float, tiny_moe: Model, make_group: MakeGroup) -> None:
    """The block starts again from its first op, and decoding goes on between its parts."""
    group = make_group(tiny_moe)
    ids, other = tiny_moe.ids(200), tiny_moe.ids(9, seed=1)
    whole = prefill(group, ids)
    prefill(group, other, slot=1)
    before = decode(group, other[:1], slot=1, start=9)
    group.start_prefill([Span(0, 0, ids, LogitRows.ALL)])
    with killed_in_the_middle(group, 0):
        logits = group.run_prefill(budget_s)
    while logits is None:
        assert_same(decode(group, other[:1], slot=1, start=9), before)
        logits = group.run_prefill(budget_s)
    assert_same(logits, whole)


def test_a_worker_that_hangs_is_replaced(tiny_dense: Model, make_group: MakeGroup) -> None:
    """No process has ended, but no thread shows a sign of life either."""
    group = make_group(tiny_dense, hang_s=1.0)
    ids = tiny_dense.ids(20)
    whole, pids = prefill(group, ids), group.pids
    stop(pids[1])
    assert_same(prefill(group, ids), whole)
    assert group.num_rebuilds == 1
    assert all(gone(pid) for pid in pids)


def test_killed_while_being_replaced(tiny_dense: Model, make_group: MakeGroup) -> None:
    """A rebuild that fails is tried again."""
    group = make_group(tiny_dense)
    ids = tiny_dense.ids(20)
    whole = prefill(group, ids)
    os.kill(group.pids[0], signal.SIGKILL)
    wait_until(lambda: group.num_rebuilds == 1, 60)
    for _ in range(3):
        os.kill(group.pids[0], signal.SIGKILL)
        os.kill(group.pids[1], signal.SIGKILL)
        assert_same(prefill(group, ids), whole)


@pytest.mark.slow
def test_workers_that_keep_dying_are_given_up(
    tiny_dense: Model, make_group: MakeGroup, shm: Path
) -> None:
    """What cannot be rebuilt is not tried for ever, and whoever waits is told."""
    group = make_group(tiny_dense)
    group.commit(0, 1)
    next(shm.glob("*-weights-1")).unlink()
    os.kill(group.pids[0], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerDied, match="keep dying: .*weights-1 cannot be attached"):
            group.decode([Span(0, 0, (1,), LogitRows.LAST)])


def test_nothing_is_left(tiny_dense: Model, make_group: MakeGroup, shm: Path) -> None:
    """Neither processes, files, threads nor descriptors, however often workers were replaced."""
    import ray

    make_group(tiny_dense).close()  # Ray's own threads and descriptors of a first time
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    group = make_group(tiny_dense)
    assert len(list_groups(directory=shm)) == 1
    pids = list(group.pids)
    for _ in range(2):
        os.kill(group.pids[-1], signal.SIGKILL)
        wait_until_rebuilt(group)
        pids += group.pids
    group.close()
    group.close()
    assert list(shm.iterdir()) == []
    assert all(gone(pid) for pid in pids)
    wait_until(lambda: not any("ellm" in thread.name for thread in threading.enumerate()), 5)
    assert {thread.name for thread in set(threading.enumerate()) - threads} <= set()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    wait_until(lambda: ray.available_resources().get("cpu_socket") == 2.0, 30)


def test_only_this_machine_can_reach_ray(local_ray: RaySession) -> None:
    """Who reaches Ray's ports runs code; by default Ray binds them to every interface."""
    listening = {
        connection.laddr.ip
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_cluster_without_sockets(
    tiny_dense: Model, make_group: MakeGroup, monkeypatch: Any
) -> None:
    """The one who has no bundle to get is told how to start Ray."""
    monkeypatch.setattr("ellm_serve.cluster.crew._PLACEMENT_TIMEOUT_S", 1.0)
    make_group(tiny_dense)
    with pytest.raises(StartupError, match="no 2 free cpu_socket"):
        make_group(tiny_dense)


def test_broken_checkpoint(tmp_path: Path, make_model: Any, make_group: MakeGroup) -> None:
    """A worker's refusal arrives as the one line it is."""
    model = make_model(moe=False, vocab=300)
    (tmp_path / "config.json").write_bytes((model.directory / "config.json").read_bytes())
    broken = Model(tmp_path, model.config, model.layout, model.weights)
    with pytest.raises(ModelError, match="safetensors"):
        make_group(broken)


def test_warm_start(tiny_moe: Model, make_group: MakeGroup, shm: Path) -> None:
    """Kept weights are attached to, by the same model and layout only."""
    ids = tiny_moe.ids(30)
    first = make_group(tiny_moe, keep_weights=True)
    whole = prefill(first, ids)
    first.close()
    assert [group.persistent for group in list_groups(directory=shm)] == [True]
    second = make_group(tiny_moe, keep_weights=True)
    assert [report.packed for report in second.reports] == [False, False]
    assert_same(prefill(second, ids), whole)
    second.close()
    os.utime(next(tiny_moe.directory.glob("*.safetensors")))
    third = make_group(tiny_moe, keep_weights=True)
    assert [report.packed for report in third.reports] == [True, True]
    third.close()
    remove_unclaimed(keep_persistent=False, directory=shm)
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize(
    ("joins", "keep"), [(True, True), (False, False)], ids=["joined cluster", "own cluster"]
)
def test_engine_process_killed(
    joins: bool,
    keep: bool,
    tiny_dense: Model,
    make_group: MakeGroup,
    local_ray: RaySession,
    shm: Path,
) -> None:
    """Workers leave by themselves; what is left is owned by nobody, and goes or serves again."""
    import ray

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment.pop("RAY_ADDRESS", None)
    if joins:
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.cluster.engine_process"]
    command += [str(tiny_dense.directory), str(shm), "keep" if keep else "drop"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as engine:
        assert engine.stdout is not None
        try:
            group_id, *pids = engine.stdout.readline().split()
            assert is_claimed(group_id, directory=shm) and len(pids) == 2
        finally:
            engine.kill()
    wait_until(lambda: all(gone(int(pid)) for pid in pids), 10)
    assert not is_claimed(group_id, directory=shm)
    assert list_groups(directory=shm) != []
    wait_until(lambda: ray.available_resources().get("cpu_socket") == 2.0, 30)
    group = make_group(tiny_dense, keep_weights=keep)
    assert [report.packed for report in group.reports] == [not keep] * 2
    assert len(list_groups(directory=shm)) == 1


def test_generations_survive(local_ray: RaySession) -> None:
    """Running requests go on, and their text is that of an undisturbed run in one process."""
    prompts = ["def fibonacci(n):", "class Stack:\n", "import os\n\n"]
    with LLM("builtin", sequence_length=1024, sockets=2) as llm:
        params = llm.sampling(max_tokens=120, temperature=0)
        expected = [one.token_ids for one in llm.generate(prompts, params)]
    with LLM("builtin", sequence_length=1024, sockets=2, workers="ray") as llm:
        group = llm.engine._executor
        assert isinstance(group, WorkerGroup)
        streams = [llm.stream(prompt, params) for prompt in prompts]
        pieces = [list(next(stream).token_ids) for stream in streams]
        os.kill(group.pids[1], signal.SIGKILL)
        for index, stream in enumerate(streams):
            for delta in stream:
                pieces[index] += delta.token_ids
        wait_until(lambda: group.num_rebuilds == 1, 60)
    assert [tuple(piece) for piece in pieces] == expected


@pytest.mark.slow
def test_soak(tiny_moe: Model, make_group: MakeGroup, make_executor: MakeExecutor) -> None:
    """300 random steps while workers are killed at random: no step is lost, no bit changes."""
    group, threads = make_group(tiny_moe), make_executor(tiny_moe, 1, sockets=2)
    draw = random.Random(7)
    over = threading.Event()
    kills = 0

    def kill_at_random() -> None:
        nonlocal kills
        chance = random.Random(8)
        while not over.wait(chance.uniform(0.2, 2.0)):
            pids = group.pids
            if pids and not gone(victim := chance.choice(pids)):
                os.kill(victim, signal.SIGKILL)
                kills += 1

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        steps = 0
        while steps < 300 or kills < 20:
            slot, length = draw.randrange(3), draw.randrange(1, 200)
            ids = tiny_moe.ids(length, seed=steps)
            results = []
            for executor in (group, threads):
                first = prefill(executor, ids, slot=slot, block=100, budget_s=1e-9)
                rest = decode(executor, ids[:4], slot=slot, start=length)
                results.append(np.concatenate([first, rest]))
            assert_same(*results)
            steps += 1
            time.sleep(draw.uniform(0, 0.1))
    finally:
        over.set()
        killer.join()
    assert group.num_rebuilds >= 20
