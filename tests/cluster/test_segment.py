"""Named shared memory commits before it is used, and leaves no file behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import numpy as np
import pytest

from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.segment import Segment, segment_name
from ellm_serve.errors import ConfigError, StartupError
from ellm_serve.model import region
from ellm_serve.model.region import HUGE_PAGE

NAME = "ellm-test-kv"
MIB = 1 << 20


def refuse(descriptor: int, offset: int, length: int) -> None:
    """A file system that is full."""
    raise OSError(ENOSPC, os.strerror(ENOSPC))


class Recorder:
    """A full file system that counts what is asked of it."""

    num_calls = 0

    def __call__(self, descriptor: int, offset: int, length: int) -> None:
        self.num_calls += 1
        refuse(descriptor, offset, length)


class RoomFor:
    """A file system that gets full on the way."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls

    def __call__(self, descriptor: int, offset: int, length: int) -> None:
        self.num_calls -= 1
        if self.num_calls < 0:
            refuse(descriptor, offset, length)
        os.posix_fallocate(descriptor, offset, length)


def read_and_write(directory: Path, offset: int) -> None:
    """In another process: adds one to what is there."""
    with Segment.attach(NAME, directory=directory) as segment:
        segment.array(offset, (4,), np.int64)[:] += 1


def test_sparse_costs_nothing(shm: Path) -> None:
    """Larger than the machine, and only what is committed counts; discarding gives it back."""
    with Segment.create(NAME, 1 << 40, committed=False, directory=shm) as segment:
        assert segment.size_bytes == 1 << 40
        assert segment.committed_bytes == 0
        segment.commit(1 << 39, 4 * MIB)
        assert segment.committed_bytes == 4 * MIB
        values = segment.array(1 << 39, (4 * MIB,), np.uint8)
        assert not values.any()
        values[:] = 7
        segment.commit(1 << 39, 6 * MIB)
        assert segment.committed_bytes == 6 * MIB
        assert values.min() == 7, "what was committed before keeps its contents"
        segment.discard(1 << 39, 4 * MIB)
        assert segment.committed_bytes == 2 * MIB
        assert not values.any()


def test_committed_at_once(shm: Path) -> None:
    """All memory is there before the first use."""
    with Segment.create(NAME, 5 * MIB, committed=True, directory=shm) as segment:
        assert segment.size_bytes == segment.committed_bytes == 6 * MIB
        assert segment.path.stat().st_mode & 0o777 == 0o600


def test_is_memory_for_the_program(shm: Path) -> None:
    """Everything that takes a `Region` takes a segment: alignment, address and views agree."""
    with Segment.create(NAME, HUGE_PAGE, committed=True, directory=shm) as segment:
        memory: region.Memory = segment
        assert memory.address % HUGE_PAGE == 0
        view = memory.array(4096, (2, 3), np.float32)
        assert view.ctypes.data == memory.address + 4096
        assert view.shape == (2, 3)


def test_range_that_is_not_whole_pages(shm: Path) -> None:
    """Every page that a range touches is committed."""
    with Segment.create(NAME, 8 * MIB, committed=False, directory=shm) as segment:
        segment.commit(5000, 5 * MIB)
        first, last = 5000 // 4096, (5000 + 5 * MIB - 1) // 4096
        assert segment.committed_bytes >= (last - first + 1) * 4096
        segment.array(5000, (5 * MIB,), np.uint8)[:] = 1


def test_huge_pages(shm: Path) -> None:
    """Committed memory is in huge pages where this kernel can make them, here and elsewhere."""
    with Segment.create(NAME, 4 * MIB, committed=True, directory=shm) as segment:
        segment.array(0, (4 * MIB,), np.uint8)[:] = 1
        release = tuple(map(int, os.uname().release.split(".")[:2]))
        if release < (6, 1) or shm.parts[:3] != ("/", "dev", "shm"):
            assert segment.huge_bytes <= 4 * MIB
            pytest.skip("no MADV_COLLAPSE of shared memory")
        assert segment.huge_bytes == 4 * MIB
        with Segment.attach(NAME, directory=shm) as other:
            assert other.huge_bytes == 0
            assert other.array(0, (4 * MIB,), np.uint8).all()
            assert other.huge_bytes == 4 * MIB


@pytest.mark.parametrize("length", [0, 1])
def test_edge_lengths(shm: Path, length: int) -> None:
    """Nothing, and less than a page."""
    with Segment.create(NAME, HUGE_PAGE, committed=False, directory=shm) as segment:
        segment.commit(100, length)
        assert segment.committed_bytes == (4096 if length else 0)
        segment.discard(100, length)


@pytest.mark.parametrize("excess", ["file system", "memory"])
def test_more_than_there_is(shm: Path, excess: str) -> None:
    """An error before anything is taken, and what was committed stays.

    Trying would fill the file system, and the OOM killer would choose what to end.
    """
    taking = Recorder()
    with (
        Segment.create(NAME, 1 << 45, committed=False, directory=shm) as segment,
        Segment.attach(NAME, directory=shm, fallocate=taking) as greedy,
    ):
        segment.commit(0, HUGE_PAGE)
        segment.array(0, (4,), np.int64)[:] = 9
        length = 1 << 45 if excess == "file system" else Memory.read().available_bytes + (1 << 30)
        with pytest.raises(MemoryError, match="No space left|Cannot allocate"):
            greedy.commit(0, length)
        assert taking.num_calls == 0
        assert segment.committed_bytes == HUGE_PAGE
        assert segment.array(0, (4,), np.int64).tolist() == [9] * 4


@pytest.mark.parametrize("num_calls", [0, 1, 2, 3])
def test_full_on_the_way(shm: Path, num_calls: int) -> None:
    """Space that others take meanwhile: a refusal keeps only what was committed before."""
    with (
        Segment.create(NAME, 8 * MIB, committed=False, directory=shm) as segment,
        Segment.attach(NAME, directory=shm, fallocate=RoomFor(num_calls)) as unlucky,
    ):
        segment.commit(2 * MIB, 2 * MIB)
        segment.array(2 * MIB, (2 * MIB,), np.uint8)[:] = 5
        with pytest.raises(MemoryError, match="No space left"):
            unlucky.commit(0, 6 * MIB)
        assert segment.committed_bytes == 2 * MIB
        assert segment.array(2 * MIB, (2 * MIB,), np.uint8).min() == 5
        assert segment.committed_bytes == 2 * MIB


def test_failing_creation_leaves_no_file(shm: Path) -> None:
    """Refused commit, and a limit on file sizes."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        Segment.create(NAME, MIB, committed=True, directory=shm, fallocate=refuse)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            Segment.create(NAME, 4 * MIB, committed=False, directory=shm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises((OSError, OverflowError)):
        Segment.create(NAME, 1 << 62, committed=False, directory=shm)
    assert list(shm.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_name_is_taken(shm: Path) -> None:
    """Never somebody else's file; and it stays theirs."""
    with Segment.create(NAME, MIB, committed=True, directory=shm):
        with pytest.raises(FileExistsError):
            Segment.create(NAME, MIB, committed=True, directory=shm)
        assert (shm / NAME).exists()


def test_other_process_sees_the_data(shm: Path) -> None:
    """And this one sees what the other writes."""
    with Segment.create(NAME, HUGE_PAGE, committed=True, directory=shm) as segment:
        values = segment.array(8192, (4,), np.int64)
        values[:] = [1, 2, 3, 4]
        child = multiprocessing.get_context("spawn").Process(
            target=read_and_write, args=(shm, 8192)
        )
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert values.tolist() == [2, 3, 4, 5]
    assert (shm / NAME).exists(), "closing does not remove the name"
    segment.unlink()
    segment.unlink()
    assert list(shm.iterdir()) == []


def test_views_outlive_the_segment(shm: Path) -> None:
    """A view that reads unmapped memory would end the process."""
    segment = Segment.create(NAME, HUGE_PAGE, committed=True, directory=shm)
    view = segment.array(0, (HUGE_PAGE,), np.uint8)
    view[:] = 3
    address = segment.address
    segment.close()
    segment.unlink()
    del segment
    gc.collect()
    assert view.min() == 3
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert NAME not in Path("/proc/self/maps").read_text()


def test_closed_segment_gives_no_views(shm: Path) -> None:
    """A programmer's error, found at once; closing twice is none."""
    segment = Segment.create(NAME, MIB, committed=True, directory=shm)
    segment.close()
    segment.close()
    with pytest.raises(AssertionError, match="closed"):
        segment.array(0, (1,), np.uint8)


def test_no_view_beyond_the_end(shm: Path) -> None:
    """The addresses after a segment are reserved for its alignment and hold nothing."""
    with Segment.create(NAME, HUGE_PAGE, committed=True, directory=shm) as segment:
        with pytest.raises(AssertionError):
            segment.array(HUGE_PAGE - 4, (2,), np.float32)
        with pytest.raises(AssertionError):
            segment.commit(HUGE_PAGE, 1)


def test_death_leaves_the_file_for_the_next(shm: Path) -> None:
    """Weights survive their process, and nothing at exit removes them."""
    script = (
        "import os, sys; from pathlib import Path; import numpy as np;"
        "from ellm_serve.cluster.segment import Segment;"
        f"s = Segment.create({NAME!r}, 1, committed=True, directory=Path(sys.argv[1]));"
        "s.array(0, (1,), np.int64)[:] = 42; os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(shm)], env=environment(), timeout=60)
    assert done.returncode == -9
    with Segment.attach(NAME, directory=shm) as segment:
        assert segment.array(0, (1,), np.int64)[0] == 42


def environment() -> dict[str, str]:
    """This process's, with its import path."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_attaches_to_segments_only(shm: Path) -> None:
    """Not to nothing, a link, a torso or a directory."""
    with pytest.raises(FileNotFoundError):
        Segment.attach(NAME, directory=shm)
    (shm / NAME).touch()
    with pytest.raises(StartupError, match="not a segment"):
        Segment.attach(NAME, directory=shm)
    (shm / NAME).write_bytes(b"x" * 4096)
    with pytest.raises(StartupError, match="not a segment"):
        Segment.attach(NAME, directory=shm)
    (shm / "ellm-test-link").symlink_to(shm / NAME)
    with pytest.raises(OSError, match="symbolic"):
        Segment.attach("ellm-test-link", directory=shm)


@pytest.mark.parametrize(
    "name",
    ["kv", "ellm-kv", "ellm--kv", "ellm-a-", "ellm-a-..", "ellm-a-../b", "ellm-a-b/c", "ellm-a/b-c"]
    + ["ellm-a-b\0", "ellm-ä-b", "ellm-a-b\n", "ellm-a-" + "b" * 129, "ellm-" + "a" * 65 + "-b"],
)
def test_names(shm: Path, name: str) -> None:
    """Only names that belong to a group, that stay in the directory and that a kernel takes."""
    with pytest.raises(ConfigError, match="not a segment name"):
        Segment.create(name, 1, committed=False, directory=shm)
    with pytest.raises(ConfigError, match="not a segment name"):
        Segment.attach(name, directory=shm)


def test_longest_name_works(shm: Path) -> None:
    """The limits leave room in a file name."""
    name = segment_name("a" * 64, "b" * 128)
    with Segment.create(name, 1, committed=False, directory=shm) as segment:
        assert segment.name == name
    with pytest.raises(ConfigError, match="not a segment name"):
        segment_name("a-b", "c/d")
