"""ellm-serve: Qwen3-family language models on CPU servers.

`LLM` is imported when it is first used, so that `import ellm_serve` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ellm_serve.request import SamplingParams
from ellm_serve.version import __version__

if TYPE_CHECKING:
    from ellm_serve.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from ellm_serve.llm import LLM

        return LLM
    raise AttributeError(f"module 'ellm_serve' has no attribute {name!r}")
