"""Every field of a configuration is a flag, and a wrong flag is refused in one line."""

from __future__ import annotations

import argparse

import pytest

from ellm_serve.cli import main
from ellm_serve.cli.config_flags import add_config_flags, given_options
from ellm_serve.config import ServeConfig


def given(*arguments: str) -> dict[str, object]:
    """What these flags say."""
    parser = argparse.ArgumentParser()
    add_config_flags(parser, ServeConfig)
    return given_options(parser.parse_args(arguments), ServeConfig)


def test_only_what_is_given() -> None:
    """Defaults are the configuration's, so that a file can lie between."""
    assert given() == {}


def test_kinds_of_values() -> None:
    """Read as what the field wants."""
    assert given(
        "--sequence-length", "512", "--prefill-budget-s", "0.1", "--kv-budget-bytes", "1GB",
        "--sockets", "auto", "--offline", "--no-metrics-open", "--revision", "123",
        "--served-model-name", "a", "b", "--override-generation-config", '{"top_k": 1}',
        "--access-log", "json",
    ) == {
        "sequence_length": 512, "prefill_budget_s": 0.1, "kv_budget_bytes": "1GB",
        "sockets": "auto", "offline": True, "metrics_open": False, "revision": "123",
        "served_model_name": ["a", "b"], "override_generation_config": {"top_k": 1},
        "access_log": "json",
    }  # fmt: skip


def test_names_from_vllm() -> None:
    """Flags that people have in their scripts."""
    assert given(
        "--max-model-len", "9", "--max-num-seqs", "2", "--api-key", "x", "--api-key", "y",
        "--drain-timeout", "5", "--disable-fastapi-docs", "--chat-template", "t.jinja",
    ) == {
        "sequence_length": 9, "batch_size": 2, "api_keys": ["x", "y"], "drain_timeout_s": 5.0,
        "disable_docs": True, "chat_template": "t.jinja",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequnce-length", "5"], "did you mean --sequence-length?"),
        (["--max-model-length=5"], "did you mean --max-model-len?"),
        (["--zzz"], "serve does not know --zzz (see"),
        (["--sequence"], "serve does not know --sequence"),  # abbreviations would change meaning
        (["--port", "http"], "argument --port: invalid int value: 'http'"),
        (["--access-log", "xml"], "argument --access-log: invalid choice: 'xml'"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's code, one line."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *flags])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sequence-length", "0"], "options: sequence_length: input should be greater"),
        (["--batch-size", "many"], "options: batch_size: input should be a valid integer"),
        (["--override-generation-config", "{"], "options: override_generation_config: "),
        (["--config", "/no/file.yaml"], "cannot read /no/file.yaml"),
        (["--api-key-file", "/no/keys"], "api_key_file: cannot read /no/keys"),
        (["--ssl-certfile", "/no/cert"], "--ssl-certfile and --ssl-keyfile belong together"),
        (["--ssl-certfile", "/no/c", "--ssl-keyfile", "/no/k"], "cannot read /no/c"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1 port 8000: "),
        (["--port", "123456"], "cannot listen on 127.0.0.1 port 123456: "),
        (["--model", "/no/model", "--port", "0"], "'/no/model' is neither a directory nor"),
        (["/no/model", "--port", "0"], "'/no/model' is neither a directory nor"),
        (["--kv-budget", "1kB", "--port", "0"], "less than one slot"),
        (["--threads", "4096", "--port", "0"], "threads 4096 is more than"),
    ],
)
def test_wrong_settings(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused in one line before Ray starts."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["serve", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ellm-serve: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_taken_port(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would share the port, and half of the requests would go astray."""
    import socket

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}: " in capsys.readouterr().err
