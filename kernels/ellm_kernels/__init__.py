"""Kernels: arrays and integers, compiled by Numba. The package itself compiles nothing."""


def load_entries() -> None:
    """Imports every module whose functions Python calls, so that `jit.compile_all` knows them."""
    from ellm_kernels import control, interpreter, pack, probe, sampling  # noqa: F401
