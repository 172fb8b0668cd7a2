"""What an engine and a service are started with: frozen, strict, complete.

An unknown key, a wrong type and a value out of range are refused in one line; nothing is ignored.
None means "decide at start"; `resolve` puts the decisions into a new configuration and nobody
writes to one later. vLLM's names for the same things are accepted (`ALIASES`).
"""

from ellm_serve.config.engine import EngineConfig, resolve
from ellm_serve.config.serve import ServeConfig
from ellm_serve.config.values import ALIASES, AUTO, parse_size, read_yaml

__all__ = [
    "ALIASES",
    "AUTO",
    "EngineConfig",
    "ServeConfig",
    "parse_size",
    "read_yaml",
    "resolve",
]
