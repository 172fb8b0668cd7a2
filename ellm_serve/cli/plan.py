"""`ellm-serve plan`: the program of a model, what it costs on this machine, and its memory.

Needs `config.json` only: no weights are read and no memory is taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ellm_serve.cli.options import add_engine_flags, engine_options
from ellm_serve.cli.verb import Subparsers
from ellm_serve.config import EngineConfig, ServeConfig, parse_size, read_yaml


def add_parser(subparsers: Subparsers) -> None:
    """Declares the verb."""
    parser = subparsers.add_parser(
        "plan",
        help="show a model's program and memory without loading it",
        description="Shows what a model would do on this machine: every op with its dimensions,"
        " bytes, operations and predicted time, and the memory plan. Exit code 1 if the memory"
        " does not suffice.",
    )
    add_engine_flags(parser)
    # With a configuration file its model counts, so the flag's own default must not.
    parser.set_defaults(model=None)
    group = parser.add_argument_group("plan")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    group.add_argument(
        "--rows", type=_count, default=1, metavar="N", help="rows of the decode step (default: 1)"
    )
    group.add_argument(
        "--context", type=_count, default=None, metavar="N",
        help="positions attended to (default: 4096, or the sequence length)",
    )  # fmt: skip
    group.add_argument(
        "--bandwidth", type=_size, metavar="SIZE", help="bytes read per second (default: measured)"
    )
    group.add_argument(
        "--peak", type=_size, metavar="OPS", help="bf16 operations per second, like 3T"
        " (default: measured)",
    )  # fmt: skip
    group.add_argument(
        "--available", type=_size, metavar="SIZE", help="memory to plan for (default: what is free)"
    )
    group.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _config(args: argparse.Namespace) -> EngineConfig:
    given = engine_options(args)
    if args.config is not None:
        # The file of a Serve application has more fields, and Ray workers unless it says otherwise.
        service = "applications" in read_yaml(args.config)
        return (ServeConfig if service else EngineConfig).from_yaml(args.config, given)
    from ellm_serve.model.hub import BUILTIN

    return EngineConfig.from_options(**({"model": BUILTIN} | given))


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 1 if it does not fit."""
    config = _config(args)
    from ellm_serve.cli import plan_report as report
    from ellm_serve.cluster.startup import load_model_config

    model = load_model_config(config)[1]
    team, ceiling = report.machine_for(config, args.bandwidth, args.peak)
    memory = report.plan_for(config, model, team, args.available)
    stages = report.stages_for(config, model, memory.plan, team, args.rows, args.context)
    show = report.as_json if args.json else report.as_text
    print(show(config.model, memory, stages, ceiling, team))
    if memory.refusal is not None:
        raise memory.refusal
    return 0
