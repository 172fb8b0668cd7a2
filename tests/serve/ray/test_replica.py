"""The replica without Serve around it: how it loads, how it fails, and when it gives up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from ellm_serve.config import ServeConfig
from ellm_serve.errors import EllmError, ModelError
from tests.serve.client import wait_until

pytestmark = [
    pytest.mark.ray,
    # Of Ray, which is imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CONFIG = ServeConfig.from_options(
    model="builtin", sequence_length=256, batch_size=1, workers="threads"
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The replica's module; its processes have no Ray node and do not end."""
    from ellm_serve.serve import replica

    ours = logging.getLogger("ellm_serve")
    before = ours.handlers, ours.propagate, ours.level
    monkeypatch.setattr(replica, "stay_on_loopback", lambda: None)
    yield replica
    ours.handlers, ours.propagate, ours.level = before


def test_from_loading_to_the_end(module: Any, compiled_kernels: None) -> None:
    """The constructor does not wait; once ready it serves, and after `stop` it does not."""
    replica = module.Replica(CONFIG)
    assert not replica.status().ready
    wait_until(lambda: replica.status().ready, "ready", 60)
    status = replica.status()
    assert (status.phase, status.failed, status.num_open) == ("ready", None, 0)
    assert "1 slots x 256 tokens" in status.summary
    replica.check_health()
    assert replica._engine.stats().steps.num_decode_tokens > 0
    assert replica.drain() == 0
    asyncio.run(replica.stop())
    replica.check_health()


def test_a_start_that_fails(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is there to be read, and Serve is told that this replica will never answer."""

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(module, "plan_start", refuse)
    replica = module.Replica(CONFIG)
    wait_until(lambda: replica.status().failed, "failed")
    assert replica.status().failed == "no such model"
    assert not replica.status().ready
    with pytest.raises(EllmError, match="no such model"):
        replica.check_health()


def test_a_bug_while_starting(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not leave a replica that loads for ever."""
    monkeypatch.setattr(module, "plan_start", lambda _: 1 // 0)
    replica = module.Replica(CONFIG)
    wait_until(lambda: replica.status().failed, "failed")
    assert "see the replica's log" in replica.status().failed


def test_an_engine_that_hangs(
    module: Any, monkeypatch: pytest.MonkeyPatch, compiled_kernels: None
) -> None:
    """Readers get a moment to see why; then the process ends, because a thread of it may not."""
    codes: list[int] = []
    monkeypatch.setattr(module.os, "_exit", codes.append)
    monkeypatch.setattr(module, "_LAST_WORDS_S", 0.0)
    monkeypatch.setattr(module, "_WATCH_PERIOD_S", 0.01)
    replica = module.Replica(CONFIG)
    wait_until(lambda: replica.status().ready, "ready", 60)
    monkeypatch.setattr(replica._engine, "health", lambda: "no step for 200 s")
    wait_until(lambda: codes, "the end")
    assert codes[0] == 1
    assert replica.status().failed == "no step for 200 s"
    with pytest.raises(EllmError, match="no step for 200 s"):
        replica.check_health()
    asyncio.run(replica.stop())
