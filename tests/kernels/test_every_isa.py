"""The kernel tests again for every other variant this CPU can run, each in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ellm_kernels import isa

HERE = Path(__file__).parent
OTHERS = [name for name in isa.runnable() if name != isa.active().name]


@pytest.mark.slow
@pytest.mark.parametrize("variant", OTHERS)
def test_kernel_tests_pass_when_forced(variant: str) -> None:
    """A fallback that nobody's own machine chooses is still right."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", str(HERE)]
    command += ["-p", "no:cacheprovider", f"--ignore={__file__}"]
    result = subprocess.run(
        command,
        cwd=HERE.parents[1],
        env={**os.environ, "ELLM_ISA": variant},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
