"""Every problem has a finding with a remedy, and a good machine has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ellm_serve.cluster.diagnosis import Facts, Level, diagnose
from ellm_serve.cluster.memory import Memory
from ellm_serve.cluster.topology import Core, HugePages, Machine, Node

GOOD_MACHINE = Machine(
    cpu_model="CPU",
    cores=(Core((0,), 0, 0), Core((1,), 0, 0)),
    nodes=(Node(0, (0, 1), 1 << 36),),
    caches=(),
    huge_pages=HugePages("madvise", "never"),
    allowed_cpus=frozenset({0, 1}),
    quota=None,
)
GOOD = Facts(
    machine=GOOD_MACHINE,
    memory=Memory(1 << 36, 1 << 35),
    architecture="x86_64",
    kernel_version=(6, 1),
    shm_bytes=1 << 35,
    flags={"avx512f": True, "avx512_bf16": True},
    variant="avx512_bf16",
    forced_variant=None,
    cache_directory="cache",
    cache_is_temporary=False,
    num_cached=3,
)
TWO_NODES = (Core((0,), 0, 0), Core((1,), 1, 1))
SLOW = {"avx512f": False, "avx512_bf16": False}
HALF_SLOW = {"avx512f": True, "avx512_bf16": False}


def test_good_machine_has_no_findings() -> None:
    """No noise where nothing is wrong."""
    assert diagnose(GOOD) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"memory": Memory(1 << 36, 1 << 20)}, "only 1 MiB"),
        ({"shm_bytes": 64 << 20}, "/dev/shm holds only 64 MiB"),
        ({"flags": SLOW, "variant": "avx2"}, "lacks avx512f, so the slower avx2"),
        ({"flags": HALF_SLOW, "variant": "avx512"}, "lacks avx512_bf16"),
        ({"forced_variant": "avx2"}, "forced by ELLM_ISA=avx2"),
        ({"cache_is_temporary": True}, "cannot be written"),
        ({"num_cached": 0}, "cache is empty"),
    ],
)
def test_notes(change: dict[str, Any], text: str) -> None:
    """Things that cost speed are one note each."""
    (finding,) = diagnose(replace(GOOD, **change))
    assert finding.level is Level.NOTE
    assert text in finding.text
    assert finding.remedy


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quota": 1.5}, "a CPU limit of 1.5 leaves 1 of 2 cores"),
        ({"allowed_cpus": frozenset({0})}, "leaves 1 of 2 cores"),
        ({"cores": TWO_NODES}, "NUMA nodes 0, 1"),
        ({"huge_pages": HugePages("never", "never")}, "huge pages are off"),
    ],
)
def test_notes_on_the_machine(change: dict[str, Any], text: str) -> None:
    """Limits and settings of the machine are one note each."""
    (finding,) = diagnose(replace(GOOD, machine=replace(GOOD_MACHINE, **change)))
    assert finding.level is Level.NOTE
    assert text in finding.text


def test_quota_below_one_core() -> None:
    """Half a core throttles the only thread; the number of cores alone would not show it."""
    found = diagnose(replace(GOOD, machine=replace(GOOD_MACHINE, quota=0.5)))
    assert any("less than one core" in finding.text for finding in found)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "aarch64"},
        {"kernel_version": (5, 10)},
        {"machine": replace(GOOD_MACHINE, allowed_cpus=frozenset())},
    ],
)
def test_problems_come_first(change: dict[str, Any]) -> None:
    """What makes serving impossible leads the list."""
    found = diagnose(replace(GOOD, num_cached=0, **change))
    assert found[0].level is Level.PROBLEM
    assert found[-1].level is Level.NOTE


def test_shared_huge_pages_need_a_setting_on_old_kernels_only() -> None:
    """From Linux 6.1 on `never` does not matter."""
    old = replace(GOOD, kernel_version=(5, 15))
    assert ["shared memory" in finding.text for finding in diagnose(old)] == [True]
