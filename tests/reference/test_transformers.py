"""Logits and greedy answers against transformers in float32.

The yardstick is what transformers loses by running in bf16 itself: we keep more in float32, so we
must be at least as near to its float32 results. Run with `-s` to see the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ellm_serve
from benchmarks.make_model import PRESETS, write_preset
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.solo import SoloExecutor
from ellm_serve.text.tokenizer import Tokenizer
from tests.reference.models import Distance, Ids, run_reference
from tests.running import Model, prefill
from tests.tiny_models import random_tensors, write_model, write_weights

pytestmark = pytest.mark.reference
MakeExecutor = Callable[..., SoloExecutor]

LENGTHS = (1, 7, 64, 513)
BUILTIN = Path(ellm_serve.__file__).parent / "builtin"
needs_builtin = pytest.mark.skipif(
    not (BUILTIN / "model.safetensors").exists(), reason="the built-in model has no weights yet"
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
TINY: dict[str, dict[str, Any]] = {
    "dense": {"moe": False},
    "dense, tied, 4 layers": {"moe": False, "tie": True, "layers": 4, "heads": 8, "kv_heads": 1},
    "dense, yarn": {"moe": False, "rope_scaling": YARN},
    "experts": {"moe": True},
    "experts, yarn": {"moe": True, "rope_scaling": YARN},
    "experts, sparse": {
        "moe": True, "layers": 4, "decoder_sparse_step": 2, "top_k": 3, "norm_topk_prob": False,
    },
}  # fmt: skip


def logits(executor: SoloExecutor, prompts: list[Ids]) -> list[Any]:
    """Ours, of every position of every prompt, each in a fresh slot."""
    rows = []
    for ids in prompts:
        rows.append(prefill(executor, ids))
        executor.release(0)
    return rows


def compare(model: Model, executor: SoloExecutor, reference: Path | None = None) -> None:
    """Prints and checks how far both lie from float32, of the same checkpoint unless told."""
    directory = reference or model.directory
    prompts = [model.ids(length, seed=length) for length in LENGTHS]
    ours = logits(executor, prompts)
    executor.close()
    exact = run_reference(directory, prompts, "float32")
    rough = [one.logits for one in run_reference(directory, prompts, "bfloat16")]
    print(f"\n{model.config.architecture}")
    for mine, one, theirs in zip(ours, exact, rough, strict=True):
        print(
            f"  {len(mine):4} tokens: ours {Distance.between(mine, one.logits)};"
            f" bf16 {Distance.between(theirs, one.logits)}"
        )
    check(*map(np.concatenate, (ours, [one.logits for one in exact], rough,
                                [one.clear for one in exact])))  # fmt: skip


def check(ours: Any, exact: Any, rough: Any, clear: Any) -> None:
    """The mean over all positions; the largest where no choice of experts hangs on a rounding."""
    us, them = (Distance.between(one[clear], exact[clear]) for one in (ours, rough))
    unclear = f"{(~clear).sum()} of {len(clear)} positions"
    print(f"  std {exact.std():.2f}; without {unclear}: ours {us}; bf16 {them}")
    assert clear.mean() > 0.5
    assert us.largest <= 1.5 * them.largest, (us, them)
    assert us.mean <= them.mean, (us, them)
    assert Distance.between(ours, exact).mean <= Distance.between(rough, exact).mean


def long_executor(make_executor: MakeExecutor, model: Model) -> SoloExecutor:
    return make_executor(
        model, num_slots=1, sequence_length=1024, prefill_block=520, max_logit_rows=520
    )


@pytest.mark.parametrize("arguments", TINY.values(), ids=TINY.keys())
def test_tiny_models(
    arguments: dict[str, Any], make_model: Callable[..., Model], make_executor: MakeExecutor
) -> None:
    """Every feature of the configuration that changes the arithmetic."""
    model = make_model(**arguments)
    compare(model, long_executor(make_executor, model))


@needs_builtin
def test_builtin_model(make_executor: MakeExecutor) -> None:
    """Trained weights: outliers, sharp attention, confident routing."""
    model = Model.load(BUILTIN)
    compare(model, long_executor(make_executor, model))


@pytest.mark.slow
def test_true_layer_dimensions(tmp_path: Path, make_executor: MakeExecutor) -> None:
    """Two layers of Qwen3-Coder-30B-A3B: 32 heads on 4, 128 experts, 8 per token."""
    write_preset(PRESETS["moe2"], tmp_path)
    model = Model.load(tmp_path)
    compare(model, long_executor(make_executor, model))


# --- greedy decoding -----------------------------------------------------------------------------

NEAR_TIE = 1e-2
NUM_TOKENS = 200


def greedy(executor: SoloExecutor, prompt: Ids, count: int) -> Ids:
    """The prompt in one block, then token by token."""
    row = prefill(executor, prompt)[-1]
    executor.commit(0, len(prompt) + count)
    chosen = [int(row.argmax())]
    while len(chosen) < count:
        at = len(prompt) + len(chosen) - 1
        row = executor.decode([Span(0, at, (chosen[-1],), LogitRows.LAST)])[0]
        chosen.append(int(row.argmax()))
    return tuple(chosen)


def check_greedy(model: Model, executor: SoloExecutor, prompt: Ids) -> None:
    """Our tokens are the reference's, or the first other one is a near tie there.

    Where the tie is less near, transformers' own bf16 run must be unable to tell as well.
    """
    chosen = greedy(executor, prompt, NUM_TOKENS)
    executor.close()
    # Teacher forcing: up to the first difference the reference sees what it would have said itself.
    forced = [prompt + chosen[:-1]]
    told = run_reference(model.directory, forced, "float32")[0]
    rows = told.logits[len(prompt) - 1 :]
    best = rows.argmax(1)
    differing = np.flatnonzero(best != chosen)
    if not len(differing):
        print(f"\n{model.config.architecture}: {NUM_TOKENS} greedy tokens equal")
        return
    at = int(differing[0])
    gap = float(rows[at, best[at]] - rows[at, chosen[at]])
    print(
        f"\n{model.config.architecture}: token {at} is {chosen[at]}, not {best[at]}; gap {gap:.4g}"
    )
    if gap >= NEAR_TIE:
        rough = run_reference(model.directory, forced, "bfloat16")[0].logits[len(prompt) - 1 :]
        assert rough[at].argmax() == chosen[at], "bf16 would not have said this either"
        assert gap < 10 * NEAR_TIE


@needs_builtin
@pytest.mark.parametrize("window", range(6))
def test_greedy_answer_of_the_builtin_model(make_executor: MakeExecutor, window: int) -> None:
    """A long answer to real text accumulates every error there is."""
    model = Model.load(BUILTIN)
    text = (BUILTIN / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_dir(BUILTIN).encode(text)[512 * window :][:64]
    check_greedy(model, long_executor(make_executor, model), tuple(ids))


# --- tied embeddings -----------------------------------------------------------------------------


def untied(directory: Path) -> None:
    """An lm_head of its own and a configuration that does not speak of tying."""
    write_model(directory, moe=False)
    config = json.loads((directory / "config.json").read_text())
    del config["tie_word_embeddings"]
    (directory / "config.json").write_text(json.dumps(config))


def tied(directory: Path) -> None:
    """No lm_head."""
    write_model(directory, moe=False, tie=True)


@pytest.mark.parametrize("write", [untied, tied])
def test_tied_embeddings(
    tmp_path: Path, make_executor: MakeExecutor, write: Callable[[Path], None]
) -> None:
    """Each way a checkpoint may speak of tying gives the reference's logits."""
    write(tmp_path)
    model = Model.load(tmp_path)
    compare(model, long_executor(make_executor, model))


def test_tied_beside_another_head(tmp_path: Path, make_executor: MakeExecutor) -> None:
    """config.json decides: a head that it says is not the one leaves no trace.

    Hence the reference is the checkpoint without that head. Given both, transformers goes by the
    file (5.24: "so we will NOT tie them"); earlier versions went by config.json.
    """
    plain, both = tmp_path / "plain", tmp_path / "both"
    tied(plain)
    tied(both)
    tensors = random_tensors(both)
    head = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    write_weights(both, tensors | {"lm_head.weight": head})
    model = Model.load(both)
    compare(model, long_executor(make_executor, model), plain)
