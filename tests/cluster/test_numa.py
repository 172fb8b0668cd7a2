"""Memory placement: what the kernel is told, and that a refusal is a warning."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from errno import EFAULT, EINVAL, ENOSYS, EPERM
from pathlib import Path

import numpy as np
import pytest

from ellm_serve.cluster import numa
from ellm_serve.cluster.segment import Segment
from ellm_serve.model.region import Region

MIB = 1 << 20
# A number that no machine gives to a node.
NO_NODE = 1000


class Refusing:
    """A kernel that refuses every call, as containers do."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.num_calls = 0

    def __call__(self, number: int, *arguments: object) -> int:
        self.num_calls += 1
        raise OSError(self.code, "refused")


@pytest.fixture(autouse=True)
def fresh_warnings() -> Iterator[None]:
    """Each test is the first one to be refused."""
    numa._warn_once.cache_clear()
    yield
    numa._warn_once.cache_clear()


@pytest.fixture
def supported() -> None:
    """Skips where the kernel does not let us, which is what the refusal tests are about."""
    if not in_thread(lambda: numa.prefer_node(0)):
        pytest.skip("memory policies are forbidden here")


def in_thread(function: Callable[[], object]) -> object:
    """Runs in a thread of its own, whose policy ends with it."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def touched(size: int) -> Region:
    """Memory that is there."""
    region = Region(size)
    region.commit(0, size)
    return region


def test_thread_prefers_a_node(supported: None) -> None:
    """Set for the calling thread alone, inherited by its threads, and taken back."""

    def inside() -> tuple[object, ...]:
        first = numa.preferred_node(), numa.prefer_node(0), numa.preferred_node()
        inherited = in_thread(numa.preferred_node)
        return *first, inherited, numa.prefer_node(None), numa.preferred_node()

    assert in_thread(inside) == (None, True, 0, 0, True, None)
    assert numa.preferred_node() is None


def test_pages_are_on_the_node(supported: None) -> None:
    """All on node 0 after binding to it, and none on another."""
    region = touched(4 * MIB)
    assert numa.bind_memory(region.address, 4 * MIB, 0)
    assert numa.pages_on_node(region.address, 4 * MIB, 0) == 1.0
    assert numa.pages_on_node(region.address, 4 * MIB, NO_NODE) == 0.0


def test_segment_is_bound_before_commit(supported: None, shm: Path) -> None:
    """Addresses that are not whole pages are allowed."""
    with Segment.create("ellm-test-w", 4 * MIB, committed=False, directory=shm) as segment:
        assert numa.bind_memory(segment.address + 5, 3 * MIB, 0)
        segment.commit(0, 4 * MIB)
        assert numa.pages_on_node(segment.address + 5, 3 * MIB, 0) == 1.0


def test_untouched_memory_is_nowhere(supported: None) -> None:
    """No share instead of a division by zero."""
    region = Region(4 * MIB)
    assert numa.pages_on_node(region.address, 4 * MIB, 0) is None
    assert numa.pages_on_node(region.address, 0, 0) is None


def test_share_counts_what_is_there(supported: None) -> None:
    """Pages that are not there yet are not on the wrong node."""
    region = Region(8 * MIB)
    region.commit(0, 2 * MIB)
    assert numa.pages_on_node(region.address, 8 * MIB, 0, samples=64) == 1.0


@pytest.mark.parametrize(("length", "samples"), [(1, 256), (4096, 256), (MIB, 3), (MIB, 10_000)])
def test_samples_stay_inside(length: int, samples: int) -> None:
    """Every page at most once, the first one always, none beyond the range."""
    seen: list[int] = []

    def record(number: int, *arguments: object) -> int:
        pages, status = arguments[2], arguments[4]
        seen.extend(pages)  # type: ignore[call-overload]
        for index in range(len(seen)):
            status[index] = index % 2  # type: ignore[index]
        return 0

    share = numa.pages_on_node(1 << 20, length, 0, samples, call=record)
    num_pages = -(-length // 4096)
    assert len(seen) == len(set(seen)) == min(samples, num_pages)
    assert seen[0] == 1 << 20 and seen[-1] < (1 << 20) + length
    assert all(page % 4096 == 0 for page in seen)
    assert share == (len(seen) + 1) // 2 / len(seen)


@pytest.mark.parametrize("code", [EPERM, ENOSYS, EINVAL])
def test_refusal_is_one_warning(code: int, caplog: pytest.LogCaptureFixture) -> None:
    """First touch goes on; a warning for each kind of call, however many calls there are."""
    kernel = Refusing(code)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert numa.prefer_node(0, call=kernel) is False
            assert numa.prefer_node(None, call=kernel) is False
            assert numa.bind_memory(1 << 20, MIB, 0, call=kernel) is False
            assert numa.preferred_node(call=kernel) is None
            assert numa.pages_on_node(1 << 20, MIB, 0, call=kernel) is None
    assert kernel.num_calls == 15
    names = [record.getMessage().split()[0] for record in caplog.records]
    assert sorted(names) == ["get_mempolicy", "mbind", "move_pages", "set_mempolicy"]
    assert all("touched first" in record.getMessage() for record in caplog.records)


def test_mistakes_are_not_refusals(supported: None) -> None:
    """An address that is not mapped is a programmer's error, not a container's rule."""
    with pytest.raises(OSError) as caught:
        numa.bind_memory(4096, 4096, 0)
    assert caught.value.errno == EFAULT
    with pytest.raises(AssertionError):
        numa.prefer_node(-1)


def test_missing_node_is_refused(supported: None, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel itself says no, and the contents stay."""
    region = touched(2 * MIB)
    view = region.array(0, (2 * MIB,), np.uint8)
    view[:] = 4
    assert not numa.bind_memory(region.address, 2 * MIB, NO_NODE)
    assert not in_thread(lambda: numa.prefer_node(NO_NODE))
    assert "cpuset.mems" in caplog.text
    assert view.min() == 4
