"""Checkpoint: index and files reconciled, every tensor accounted for, nothing read wrongly."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ellm_serve.errors import ModelError
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.tensors import EMBEDDING, LM_HEAD, model_tensors
from tests.tiny_models import (
    INDEX,
    Array,
    random_tensors,
    write_model,
    write_safetensors,
    write_weights,
)

NORM = "model.norm.weight"


def rewrite(directory: Path, **changes: Array | None) -> None:
    """Writes the model's weights again with some tensors changed, added or (None) removed."""
    tensors = random_tensors(directory) | {k.replace("__", "."): v for k, v in changes.items()}
    write_weights(directory, {name: each for name, each in tensors.items() if each is not None})


def sharded(directory: Path) -> Path:
    return write_model(directory, moe=True, shards=3)


def shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_arrays_are_the_stored_bits(tmp_path: Path, dtype: str, shards: int) -> None:
    """An offset that is wrong by one element would still look like weights."""
    write_model(tmp_path, moe=True, dtype=dtype, shards=shards)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.reconcile(ModelConfig.from_dir(tmp_path))
    expected = random_tensors(tmp_path, dtype)
    assert set(checkpoint.names) == set(expected)
    for name, values in expected.items():
        array = checkpoint.expect(name, values.shape)
        assert array.dtype == values.dtype
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, values)
        checkpoint.release(name)
    checkpoint.finish()
    # Released pages come back with the same bytes.
    np.testing.assert_array_equal(checkpoint.array(NORM), expected[NORM])


def test_info(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, moe=False, dtype="f16", vocab=320))
    info = checkpoint.info(EMBEDDING)
    assert (info.dtype, info.shape) == ("F16", (320, 128))
    assert info.file == tmp_path / "model.safetensors"
    assert info.num_bytes == 2 * 320 * 128


def test_released_pages_leave_the_process(tmp_path: Path) -> None:
    """Otherwise loading counts the checkpoint twice: mapped pages and packed weights."""
    values = np.ones(16 << 20, np.uint8).view(np.float32)
    write_safetensors(tmp_path / "model.safetensors", {"a": values})
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.array("a").sum() != 0
    before = mapped_bytes(tmp_path)
    checkpoint.release("a")
    assert before >= values.nbytes
    assert mapped_bytes(tmp_path) < values.nbytes // 8


def mapped_bytes(directory: Path) -> int:
    """Resident bytes of this process's mappings of files in the directory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split()[0]:
            ours = str(directory) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


# --- index and files ---------------------------------------------------------------------------


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    """Skipping it would start a server that answers garbage."""
    sharded(tmp_path)
    (tmp_path / shard(2)).unlink()
    lost = sum(f == shard(2) for f in weight_map(tmp_path).values())
    with pytest.raises(ModelError, match=f"1 of 3 weight files .*00002.*{lost} of .*incomplete"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_noticed_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert EMBEDDING in Checkpoint.open(tmp_path)
    (tmp_path / shard(3)).unlink()
    with pytest.raises(ModelError, match="weight files 3 of 3.*incomplete"):
        Checkpoint.open(tmp_path)


def test_a_stale_index_warns_when_all_tensors_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Merged or re-split checkpoints often keep the old index."""
    sharded(tmp_path)
    renamed = {name: file.replace("of-00003", "of-00030") for name, file in
               weight_map(tmp_path).items()}  # fmt: skip
    write_weight_map(tmp_path, renamed)
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint.open(tmp_path)
    assert "is stale" in caplog.text
    checkpoint.reconcile(ModelConfig.from_dir(tmp_path))


def test_an_index_that_names_the_wrong_shard_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sharded(tmp_path)
    assert weight_map(tmp_path)[EMBEDDING] == shard(1)
    write_weight_map(tmp_path, weight_map(tmp_path) | {EMBEDDING: shard(2)})
    with caplog.at_level(logging.WARNING):
        assert Checkpoint.open(tmp_path).info(EMBEDDING).file.name == shard(1)
    assert "is stale: 1 tensors" in caplog.text


def test_an_index_entry_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_weight_map(tmp_path, weight_map(tmp_path) | {"model.extra.weight": shard(2)})
    with pytest.raises(ModelError, match="1 tensors that no file holds .*model.extra.weight"):
        Checkpoint.open(tmp_path)


def test_the_index_decides_between_duplicates(tmp_path: Path) -> None:
    """A file the index does not name (another layout of the same weights) is left alone."""
    sharded(tmp_path)
    stray = {EMBEDDING: np.zeros((256, 128), np.uint16), "output.weight": np.zeros(2, np.uint16)}
    write_safetensors(tmp_path / "consolidated.safetensors", stray)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info(EMBEDDING).file.name == shard(1)
    checkpoint.reconcile(ModelConfig.from_dir(tmp_path))


def test_the_index_decides_when_two_shards_hold_a_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(write_model(tmp_path, moe=False))
    (tmp_path / "model.safetensors").unlink()
    write_safetensors(tmp_path / shard(1, 2), tensors)
    write_safetensors(tmp_path / shard(2, 2), {NORM: tensors[NORM] + np.uint16(1)})
    with pytest.raises(ModelError, match=f"{NORM}.* is in .*00001.*00002"):
        Checkpoint.open(tmp_path)
    write_weight_map(tmp_path, dict.fromkeys(tensors, shard(1, 2)) | {NORM: shard(2, 2)})
    checkpoint = Checkpoint.open(tmp_path)
    np.testing.assert_array_equal(checkpoint.array(NORM), tensors[NORM] + np.uint16(1))


def test_a_tensor_the_index_forgot_is_still_accounted_for(tmp_path: Path) -> None:
    """A scale tensor missing from the index must not vanish."""
    sharded(tmp_path)
    entries = weight_map(tmp_path)
    del entries[NORM]
    write_weight_map(tmp_path, entries)
    assert NORM in Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin", 3])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, name: object) -> None:
    sharded(tmp_path)
    write_weight_map(tmp_path, {EMBEDDING: name})
    with pytest.raises(ModelError, match="embed_tokens"):
        Checkpoint.open(tmp_path)


def test_a_directory_without_weights_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no .*safetensors.*incomplete download"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        Checkpoint.open(tmp_path)


def weight_map(directory: Path) -> dict[str, str]:
    entries: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return entries


def write_weight_map(directory: Path, entries: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": entries}))


# --- every tensor accounted for ----------------------------------------------------------------


def test_unused_tensors_are_refused_and_grouped_by_layer(tmp_path: Path) -> None:
    """Scale tensors of a quantised checkpoint, if ignored, give token salad."""
    write_model(tmp_path, moe=False)
    scale = np.ones(1, np.float32)
    extra = {f"model.layers.1.mlp.{each}_proj.weight_scale_inv": scale for each in ("up", "down")}
    rewrite(tmp_path, **extra)
    checkpoint = Checkpoint.open(tmp_path)
    pattern = "2 tensors.*layer 1: mlp.down_proj.weight_scale_inv, mlp.up_proj.weight_scale_inv"
    with pytest.raises(ModelError, match=pattern):
        checkpoint.reconcile(ModelConfig.from_dir(tmp_path))
    for name, shape in model_tensors(ModelConfig.from_dir(tmp_path)).items():
        checkpoint.expect(name, shape)
    with pytest.raises(ModelError, match=pattern):
        checkpoint.finish()


def test_a_forgotten_tensor_is_noticed_at_the_end(tmp_path: Path) -> None:
    write_model(tmp_path, moe=True)
    checkpoint = Checkpoint.open(tmp_path)
    for name, shape in model_tensors(ModelConfig.from_dir(tmp_path)).items():
        if name != "model.layers.0.self_attn.k_norm.weight":
            checkpoint.expect(name, shape)
    with pytest.raises(ModelError, match=r"1 tensors.*layer 0: self_attn\.k_norm\.weight"):
        checkpoint.finish()


def test_tensors_inference_never_needs_are_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, moe=False)
    spare = np.ones(4, np.float32)
    rewrite(
        tmp_path,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": spare, "mtp.fc.weight": spare},
    )
    with caplog.at_level(logging.WARNING):
        Checkpoint.open(tmp_path).reconcile(ModelConfig.from_dir(tmp_path))
    assert "rotary_emb.inv_freq is ignored" in caplog.text
    assert "mtp.fc.weight is ignored" in caplog.text


def test_missing_tensors_are_listed_by_layer(tmp_path: Path) -> None:
    write_model(tmp_path, moe=True)
    rewrite(
        tmp_path,
        **{
            "model.layers.0.mlp.experts.3.up_proj.weight": None,
            "model.layers.1.self_attn.q_proj.weight": None,
        },
    )
    pattern = "2 tensors: layer 0: mlp.experts.3.up_proj.weight; layer 1: self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=pattern):
        Checkpoint.open(tmp_path).reconcile(ModelConfig.from_dir(tmp_path))


def test_a_long_list_is_shortened(tmp_path: Path) -> None:
    """A checkpoint of another model must not print thousands of names."""
    write_model(tmp_path, moe=False, layers=1)
    config = ModelConfig.from_dir(write_model(tmp_path / "other", moe=True, layers=12))
    with pytest.raises(ModelError, match=r"\(\+\d+ more\).*and 6 more layers") as caught:
        Checkpoint.open(tmp_path).reconcile(config)
    assert len(str(caught.value)) < 2000


def test_wrong_shape_names_expected_and_found(tmp_path: Path) -> None:
    write_model(tmp_path, moe=False)
    rewrite(tmp_path, model__norm__weight=np.zeros(64, np.uint16))
    checkpoint = Checkpoint.open(tmp_path)
    pattern = r"model\.norm\.weight.*shape \[128\].*has \[64\] \(BF16\)"
    with pytest.raises(ModelError, match=pattern):
        checkpoint.expect(NORM, (128,))
    with pytest.raises(ModelError, match=pattern):
        checkpoint.reconcile(ModelConfig.from_dir(tmp_path))


def test_expecting_an_absent_tensor_names_it(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, moe=False))
    with pytest.raises(ModelError, match="no tensor 'model.nothing'"):
        checkpoint.expect("model.nothing", (1,))


def test_using_a_tensor_twice_is_a_bug(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, moe=False))
    checkpoint.expect(NORM, (128,))
    with pytest.raises(AssertionError, match="twice"):
        checkpoint.expect(NORM, (128,))


@pytest.mark.parametrize("values", [np.zeros(128, np.int64), np.zeros(128, np.uint8)])
def test_integer_tensors_are_never_taken_for_weights(tmp_path: Path, values: Array) -> None:
    write_model(tmp_path, moe=False)
    rewrite(tmp_path, model__norm__weight=values)
    checkpoint = Checkpoint.open(tmp_path)
    for read in (
        lambda: checkpoint.array(NORM),
        lambda: checkpoint.expect(NORM, (128,)),
        lambda: checkpoint.reconcile(ModelConfig.from_dir(tmp_path)),
    ):
        with pytest.raises(ModelError, match="dtype (I64|U8).*bf16, fp16 or fp32"):
            read()


# --- tied embeddings ---------------------------------------------------------------------------


def test_tied_without_lm_head(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_model(tmp_path, moe=False, tie=True))
    assert LM_HEAD not in checkpoint
    checkpoint.reconcile(ModelConfig.from_dir(tmp_path))


def test_tied_with_another_lm_head_follows_the_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, moe=False, tie=True)
    rewrite(tmp_path, lm_head__weight=np.zeros((256, 128), np.uint16))
    config = ModelConfig.from_dir(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    with caplog.at_level(logging.WARNING):
        checkpoint.reconcile(config)
    assert "lm_head.weight is ignored: config.json says tie_word_embeddings" in caplog.text
    for name, shape in model_tensors(config).items():
        checkpoint.expect(name, shape)
    checkpoint.finish()


def test_untied_without_lm_head_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, moe=False)
    rewrite(tmp_path, lm_head__weight=None)
    with pytest.raises(ModelError, match="set tie_word_embeddings to true"):
        Checkpoint.open(tmp_path).reconcile(ModelConfig.from_dir(tmp_path))


# --- transformers as the judge -----------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("moe", "tie"), [(False, False), (False, True), (True, False)])
def test_transformers_reads_the_tiny_models(
    tmp_path: Path, moe: bool, tie: bool, shards: int
) -> None:
    """Every test that uses a tiny model rests on its layout being the published one."""
    import torch
    from transformers import AutoModelForCausalLM

    write_model(tmp_path, moe=moe, tie=tie, shards=shards, layers=3, mlp_only_layers=[1])
    # The declared return type leaves out what output_loading_info adds.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    model, report = loaded
    assert not any(report.values()), report
    logits = model(torch.arange(24)[None]).logits[0].detach().numpy()
    # Non-degenerate: positions disagree about the best token, and no token wins by far.
    assert len(set(logits.argmax(-1).tolist())) > 8
    assert 1 < logits.std() < 6


def test_symlinked_files_are_read(tmp_path: Path) -> None:
    """The hub's cache is made of them; a dangling one is a missing file."""
    sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    Checkpoint.open(snapshot).reconcile(ModelConfig.from_dir(snapshot))
    shutil.rmtree(tmp_path / "blobs")
    with pytest.raises(ModelError):
        Checkpoint.open(snapshot)
