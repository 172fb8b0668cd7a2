"""What this machine can do: read bandwidth and matrix-product peaks, by plain loops.

    python -m benchmarks.machine

Every other benchmark is measured against these ceilings (and measures them again in its own run).
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import Report, Result, check_quiet, parser
from ellm_serve.cluster.probe import measure_bandwidth, measure_bf16, measure_int8
from ellm_serve.cluster.topology import allowed_cores


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser(__doc__ or "").parse_args(arguments)
    check_quiet()
    cores = allowed_cores()
    report = Report("machine")
    for used in (cores[:1], cores):
        threads = {"threads": len(used)}
        report.add(Result("read_bandwidth", threads, measure_bandwidth(used) / 1e9, "GB/s"))
        report.add(Result("bf16_peak", threads, measure_bf16(used) / 1e9, "GFLOP/s"))
        report.add(Result("int8_peak", threads, measure_int8(used) / 1e9, "GOP/s"))
    report.finish()


if __name__ == "__main__":
    main()
