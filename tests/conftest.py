"""Fixtures for every test that computes: compiled kernels, tiny checkpoints, executors.

Kernels are compiled or loaded once per session, under the cache's lock and only if a test asks.
Checkpoints and their packed weights are shared by all tests; executors live for one test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ellm_kernels import jit
from ellm_serve.engine.solo import SoloExecutor
from tests.running import Model
from tests.tiny_models import write_model

# A property is about results: how long an example takes depends on what else the machine does.
settings.register_profile("ellm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ellm")

MakeModel = Callable[..., Model]
MakeExecutor = Callable[..., SoloExecutor]


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Every entry, those of test modules included, so that no test compiles for itself."""
    jit.compile_all()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: None) -> MakeModel:
    """Arguments of `write_model` → the loaded model; equal arguments give the same one."""
    models: dict[str, Model] = {}

    def make(**arguments: Any) -> Model:
        key = repr(sorted(arguments.items()))
        if key not in models:
            directory: Path = tmp_path_factory.mktemp("model")
            models[key] = Model.load(write_model(directory, **arguments))
        return models[key]

    return make


@pytest.fixture(scope="session")
def tiny_dense(make_model: MakeModel) -> Model:
    """Two dense layers."""
    return make_model(moe=False)


@pytest.fixture(scope="session")
def tiny_moe(make_model: MakeModel) -> Model:
    """Two layers of eight experts, embeddings tied."""
    return make_model(moe=True, tie=True)


@pytest.fixture
def compute_threads() -> Callable[[], list[str]]:
    """Names of the pinned threads started since the test began; other engines may be alive."""
    before = set(threading.enumerate())
    return lambda: sorted(
        thread.name
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("ellm-compute")
    )


@pytest.fixture
def make_executor(compiled_kernels: None) -> Iterator[MakeExecutor]:
    """`make_executor(model, threads=2, sockets=1, **options)`; closed when the test ends."""
    made: list[SoloExecutor] = []

    def make(model: Model, threads: int = 2, sockets: int = 1, **options: Any) -> SoloExecutor:
        made.append(model.executor(threads, sockets, **options))
        return made[-1]

    yield make
    for executor in made:
        executor.close()
