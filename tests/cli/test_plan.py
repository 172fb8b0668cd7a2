"""`ellm-serve plan` works from config.json alone and says what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.cli import main
from ellm_serve.config import EngineConfig
from tests.tiny_models import write_model

# Given ceilings: nothing is measured, nothing is compiled.
FIXED = ["--bandwidth", "100GB", "--peak", "1T", "--threads", "2", "--available", "8GB"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three sparse layers and a dense one, without weights."""
    directory = write_model(tmp_path / "model", moe=True, layers=4, mlp_only_layers=[1])
    (directory / "model.safetensors").unlink()
    return directory


def plan(model: Path, *flags: str) -> int:
    return main(["plan", "--model", str(model), *FIXED, *flags])


def report(model: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert plan(model, *flags, "--json") == 0
    parsed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return parsed


def test_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of layer once, both steps, and the memory plan with its slots."""
    assert plan(model, "--sequence-length", "512", "--batch-size", "2") == 0
    out = capsys.readouterr().out
    assert out.count("0.experts") == 2
    assert out.count("1.mlp") == 2
    assert "2.experts" not in out
    assert out.count("layers 2-3 like 0") == 2
    assert "decode step: 1 row(s), context 512" in out
    assert "prefill block: 512 row(s)" in out
    assert "memory: 2 slots x 512 tokens, KV" in out
    assert "largest sequence length with batch size 2: 1024" in out


def test_json_lists_every_op(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is folded, and the roofline is no more than the sum of its ops."""
    parsed = report(model, capsys, "--rows", "3", "--context", "100")
    decode = parsed["decode_step"]
    names = [op["name"] for op in decode["ops"]]
    assert names[0] == "embed" and names[-1] == "lm_head"
    assert {"0.experts", "1.mlp", "2.experts", "3.experts"} <= set(names)
    assert (decode["rows"], decode["context"], decode["logit_rows"]) == (3, 100, 3)
    total = sum(op["predicted_s"] for op in decode["ops"])
    assert 0 < decode["predicted_s"] <= total * (1 + 1e-9)
    assert parsed["machine"] == {
        "bytes_per_s": 1e11,
        "flops_per_s": 1e12,
        "threads": 2,
        "sockets": 1,
    }
    assert parsed["memory"]["fits"] is True


def test_decode_layer_costs_at_most_six_barriers(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three sparse layers, one dense one, and the step's own."""
    decode = report(model, capsys)["decode_step"]
    assert 4 < decode["barriers"] <= 4 * 6 + 2


def test_memory_that_does_not_suffice(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is still shown, the reason is one line, and the exit code is not 0."""
    assert plan(model, "--available", "100MB") == 1
    captured = capsys.readouterr()
    assert "taken at start" in captured.out
    assert "no --sequence-length fits" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--sequence-length", "0"], "sequence_length: input should be greater"),
        (["--sequence-length", "2000"], "exceeds the model's 1024 positions"),
        (["--kv-budget", "1kB"], "less than one slot of 512 tokens"),
    ],
)
def test_mistakes(
    model: Path, flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each."""
    assert plan(model, *flags) == 1
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--context", "x"], ["--peak", "fast"]])
def test_flags_of_the_wrong_form(
    model: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """argparse refuses them."""
    with pytest.raises(SystemExit) as caught:
        plan(model, *flags)
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_configuration_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names the model; a flag wins over the file."""
    path = tmp_path / "engine.yaml"
    path.write_text(f"model: {model}\nbatch_size: 3\nmax_model_len: 256\n", encoding="utf-8")
    flags = ["--config", str(path), "--sequence-length", "512", "--json"]
    assert main(["plan", *FIXED, *flags]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert parsed["model"] == str(model)
    assert parsed["memory"]["kv"]["num_slots"] == 3
    assert parsed["memory"]["kv"]["sequence_length"] == 512


def test_vllm_names_of_flags(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--max-model-len` and `--max-num-seqs` mean the same."""
    parsed = report(model, capsys, "--max-model-len", "512", "--max-num-seqs", "7")
    assert parsed["memory"]["kv"]["num_slots"] == 7
    assert parsed["memory"]["kv"]["sequence_length"] == 512


def test_measured_ceiling(
    model: Path, capsys: pytest.CaptureFixture[str], compiled_kernels: None
) -> None:
    """Without given ceilings this machine's are used."""
    assert main(["plan", "--model", str(model), "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["bytes_per_s"] > 1e8
    assert machine["flops_per_s"] > 1e8


def test_every_option_of_the_engine_is_described() -> None:
    """The reference of all fields is generated from these texts."""
    fields = EngineConfig.model_fields
    assert [name for name, field in fields.items() if not field.description] == []
