"""Atomic operations between real threads."""

from __future__ import annotations

import threading

import numpy as np

from ellm_kernels.atomics import atomic_add, atomic_load, atomic_store, cpu_pause
from ellm_kernels.jit import kernel
from tests.kernels.support import address


@kernel
def add_many(word: int, count: int) -> None:
    """Adds 1 `count` times."""
    for _ in range(count):
        atomic_add(word, 1)


@kernel
def set_and_add(word: int, value: int, amount: int) -> int:
    """Stores, adds; returns value before and after."""
    atomic_store(word, value)
    cpu_pause()
    before = atomic_add(word, amount)
    return before * 1000 + atomic_load(word)


def test_no_addition_is_lost() -> None:
    """Two threads add to one word at the same time."""
    word = np.zeros(1, np.int64)
    add_many(address(word), 0)
    threads = [threading.Thread(target=add_many, args=(address(word), 50_000)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word[0] == 100_000


def test_add_returns_the_value_before() -> None:
    """The last finisher is found by what its addition returns."""
    word = np.array([77], np.int64)
    assert set_and_add(address(word), 5, -3) == 5 * 1000 + 2
    assert word[0] == 2
