"""Names the kernel variant under test in pytest's header."""

from __future__ import annotations

from ellm_kernels import isa


def pytest_report_header() -> str:
    """One line of the header."""
    return f"kernels: {isa.active().name} (runnable here: {', '.join(isa.runnable())})"
