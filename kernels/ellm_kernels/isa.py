"""What this CPU can do and which kernel variant is used.

The choice is made once per process, before Numba compiles anything: from CPUID (as LLVM reads it),
or from `ELLM_ISA`. A forced variant also narrows what LLVM may emit, so that forcing `avx2` on an
AVX-512 machine runs the code an AVX2 machine would run.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import llvmlite.binding as llvm
import numba


@dataclass(frozen=True)
class Isa:
    """One kernel variant.

    needs: CPU flags (LLVM's names) without which it cannot run.
    cpu:   the LLVM CPU compiled for when the variant is forced; None means the host's own.
    mr, nv: register tile of the matrix product, rows × vectors of 16 float32.
    fma:   multiply-add with one rounding.
    bf16_dot: `vdpbf16ps` multiplies bf16 pairs directly; otherwise they are widened to float32.
    scalef: `vscalefps` builds powers of two.
    """

    name: str
    needs: tuple[str, ...]
    cpu: str | None
    mr: int
    nv: int
    fma: bool
    bf16_dot: bool
    scalef: bool


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
VARIANTS = (
    # 6 × 4 accumulators + 4 panel vectors + broadcast fit 32 zmm registers
    # (532 of ~535 GFLOP/s on a Zen 5 core, 231-235 of 233-237 on Zen 4).
    Isa("avx512_bf16", (*_AVX512, "avx512bf16"), None, 6, 4, True, True, True),
    # The f32 form needs two products per pair and two widened copies of the panel vector.
    Isa("avx512", _AVX512, "skylake-avx512", 6, 4, True, False, True),
    # 16 float32 are two ymm registers here: 4 × 1 tiles leave room in sixteen of them.
    Isa("avx2", ("avx2", "fma"), "x86-64-v3", 4, 1, True, False, False),
    Isa("generic", (), "x86-64", 2, 1, False, False, False),
)
REPORTED_FLAGS = {
    "avx2": "avx2",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512bf16",
    "avx512_vnni": "avx512vnni",
    "avx512_fp16": "avx512fp16",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}


class UnsupportedIsa(ValueError):
    """`ELLM_ISA` names a variant that does not exist or cannot run on this CPU."""


@functools.cache
def host_flags() -> frozenset[str]:
    """The CPU flags of this machine under LLVM's names."""
    return frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)


def host_cpu_name() -> str:
    """LLVM's name of this CPU's microarchitecture, for example `znver5`."""
    return str(llvm.get_host_cpu_name())


def choose(forced: str | None, flags: frozenset[str]) -> Isa:
    """The best variant the flags allow, or the forced one.

    Raises:
        UnsupportedIsa: the forced name is unknown, or a flag it needs is missing.
    """
    if not forced:
        return next(isa for isa in VARIANTS if set(isa.needs) <= flags)
    for isa in VARIANTS:
        if isa.name == forced:
            missing = sorted(set(isa.needs) - flags)
            if missing:
                raise UnsupportedIsa(
                    f"ELLM_ISA={forced} needs {', '.join(missing)}, which this CPU lacks"
                )
            return isa
    raise UnsupportedIsa(
        f"ELLM_ISA={forced} is unknown; known: {', '.join(isa.name for isa in VARIANTS)}"
    )


def runnable() -> tuple[str, ...]:
    """Names of all variants this CPU can run, best first."""
    return tuple(isa.name for isa in VARIANTS if set(isa.needs) <= host_flags())


@functools.cache
def active() -> Isa:
    """The variant of this process. Narrows Numba's target the first time it is asked."""
    forced = os.environ.get("ELLM_ISA") or None
    isa = choose(forced, host_flags())
    if isa.cpu is not None:
        numba.config.CPU_NAME = isa.cpu
        numba.config.CPU_FEATURES = ""
    return isa
