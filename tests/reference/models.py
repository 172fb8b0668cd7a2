"""Logits of transformers, in float32 and in its own bf16, and how far two runs lie apart.

Routing is a choice: where two experts are all but equal, any rounding may take the other one, and
the logits jump. `clear` tells the positions where no choice hangs on a rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Ids = tuple[int, ...]


# Of the router logits' spread; with bf16 operands they carry errors of some thousandths of it.
CLEAR_GAP = 0.015


@dataclass(frozen=True)
class Reference:
    """What transformers computes for one prompt.

    gaps: per position, by how much of the router logits' standard deviation the last chosen expert
    beat the next one, least of all layers.
    """

    logits: F32  # [position, vocab]
    gaps: F32  # [position]

    @property
    def clear(self) -> NDArray[np.bool_]:
        """[position]"""
        return self.gaps >= CLEAR_GAP


def run_reference(directory: Path, prompts: list[Ids], dtype: str) -> list[Reference]:
    """Every prompt in one forward pass; the model is gone when this returns."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    routed: dict[str, Any] = {
        "output_router_logits": True
    } if model.config.model_type == "qwen3_moe" else {}  # fmt: skip
    results = []
    with torch.inference_mode():
        for ids in prompts:
            output = model(torch.tensor([ids]), **routed)
            gaps = np.full(len(ids), np.inf, np.float32)
            for scores in output.router_logits if routed else ():
                best = scores.float().topk(model.config.num_experts_per_tok + 1).values
                gap = (best[:, -2] - best[:, -1]) / scores.float().std(correction=0)
                gaps = np.minimum(gaps, gap.numpy())
            results.append(Reference(output.logits[0].float().numpy(), gaps))
    return results


@dataclass(frozen=True)
class Distance:
    """Largest and mean absolute difference of two sets of logits."""

    largest: float
    mean: float

    @classmethod
    def between(cls, a: F32, b: F32) -> Distance:
        distance = np.abs(a.astype(np.float64) - b)
        return cls(float(distance.max()), float(distance.mean()))

    def __str__(self) -> str:
        return f"max {self.largest:.4f}, mean {self.mean:.5f}"
