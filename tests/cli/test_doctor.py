"""`ellm-serve doctor` reports this machine and every finding with its remedy."""

from __future__ import annotations

import pytest

from ellm_kernels import isa
from ellm_serve.cli import doctor, main
from ellm_serve.cluster.topology import allowed_cores


def test_report(capsys: pytest.CaptureFixture[str], compiled_kernels: None) -> None:
    """Facts, speeds of one and of all threads, and a verdict."""
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for title in ("CPU", "cores", "NUMA node", "memory", "huge pages", "/dev/shm", "flags"):
        assert f"\n{title}" in f"\n{out}"
    assert f"kernels       {isa.active().name}" in out
    assert f"{len(allowed_cores())} cores" in out
    assert "1 thread " in out and "GB/s" in out and "GFLOP/s" in out
    assert out.rstrip().endswith("This machine can serve.")


def test_without_probe(capsys: pytest.CaptureFixture[str]) -> None:
    """Facts only: nothing is measured or compiled."""
    assert main(["doctor", "--no-probe"]) == 0
    assert "GB/s" not in capsys.readouterr().out


def test_problem_decides_the_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot commit memory on demand is named, and the code is 1."""
    monkeypatch.setattr(doctor.platform, "release", lambda: "5.4.0-generic")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem: Linux 5.4" in out
    assert "remedy: use Linux 5.14" in out
    assert "GB/s" not in out


def test_flags_are_the_cpus_own() -> None:
    """Every reported flag says whether LLVM sees it."""
    facts = doctor.gather()
    assert set(facts.flags) == set(isa.REPORTED_FLAGS)
    assert facts.flags["avx2"] == ("avx2" in isa.host_flags())
    assert facts.variant == isa.active().name


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.1.0-18-amd64", (6, 1)), ("5.15.167.4-microsoft", (5, 15)), ("6.10-rc1+", (6, 10))],
)
def test_kernel_version(release: str, version: tuple[int, int]) -> None:
    """As different distributions write it."""
    assert doctor.kernel_version(release) == version
