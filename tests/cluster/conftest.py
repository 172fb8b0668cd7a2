"""A directory for shared memory that is gone after the test, and a Ray cluster for all tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.group_memory import GroupMemory
from ellm_serve.cluster.local_ray import ADDRESS_VARIABLE, RaySession, start_local_ray
from ellm_serve.cluster.sockets import choose_sockets
from ellm_serve.cluster.topology import Machine
from ellm_serve.engine.group import GroupOptions
from tests.running import SMALL, Model


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """Below /dev/shm where that can be written, so that it is the real thing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[RaySession]:
    """A cluster on the loopback address, with room for one group of two sockets."""
    with pytest.MonkeyPatch.context() as patch:
        # A developer's own cluster is none of the tests' business.
        patch.delenv(ADDRESS_VARIABLE, raising=False)
        with start_local_ray(2) as session:
            yield session


@pytest.fixture
def make_group(local_ray: RaySession, shm: Path, compiled_kernels: None) -> Iterator[Any]:
    """`make_group(model, hang_s=5.0, keep_weights=False, **options)`: two sockets, a thread each.

    All are closed when the test ends.
    """
    made: list[WorkerGroup] = []

    def make(
        model: Model, *, hang_s: float = 5.0, keep_weights: bool = False, **options: Any
    ) -> WorkerGroup:
        places = choose_sockets(Machine.discover(), 2, 2)
        chosen = GroupOptions(tuple(place.cores for place in places), **SMALL | options)
        memory = GroupMemory.open(
            model.directory,
            model.config,
            chosen,
            places,
            keep_weights=keep_weights,
            directory=shm,
        )
        try:
            group = WorkerGroup(
                model.directory,
                model.config,
                chosen,
                places,
                memory,
                start_local_ray(2),
                hang_s,
            )
        except BaseException:
            memory.close()
            raise
        made.append(group)
        return group

    yield make
    for group in made:
        group.close()
