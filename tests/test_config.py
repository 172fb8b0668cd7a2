"""A configuration is complete and right, or refused in one line that names the key."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from ellm_serve.config import EngineConfig, ServeConfig, parse_size, resolve
from ellm_serve.config.fields import Kind, fields_of
from ellm_serve.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_defaults() -> None:
    """Only the model must be given."""
    config = EngineConfig.from_options(model="m")
    assert config.batch_size == 4
    assert config.sequence_length is None
    assert config.threads is None


def test_vllm_names() -> None:
    """Names that people know from vLLM mean the same here; dashes count as underscores."""
    config = EngineConfig.from_values(
        {"model": "m", "max_model_len": 1024, "max-num-seqs": 2, "max_num_batched_tokens": 512}
    )
    assert (config.sequence_length, config.batch_size, config.prefill_block) == (1024, 2, 512)


def test_one_thing_under_two_names_is_refused() -> None:
    """Whichever won, somebody would be surprised."""
    values = {"model": "m", "max_model_len": 1024, "sequence_length": 2048}
    with pytest.raises(ConfigError, match="'max_model_len' and 'sequence_length' mean the same"):
        EngineConfig.from_values(values)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sequnce_length", "sequence_length"),
        ("max_model_length", "max_model_len"),
        ("bachsize", "batch_size"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, nearest: str) -> None:
    """A typing error must not be ignored, and need not be searched for."""
    with pytest.raises(ConfigError, match=f"unknown key '{key}'; did you mean {nearest}?"):
        EngineConfig.from_values({"model": "m", key: 1})


def test_unknown_key_without_a_near_one_lists_all() -> None:
    """Then the reader needs the list."""
    with pytest.raises(ConfigError, match="known: model, .*batch_size"):
        EngineConfig.from_values({"model": "m", "zzz": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence_length", 0),
        ("sequence_length", -1),
        ("sequence_length", "long"),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("batch_size", True),
        ("batch_size", "4"),
        ("batch_size", None),
        ("threads", 0),
        ("prefill_block", 1),
        ("prefill_budget_s", 0.0),
        ("kv_budget_bytes", "12 parsecs"),
        ("kv_budget_bytes", 0),
        ("model", ""),
        ("model", 5),
        ("offline", "yes"),
    ],
)
def test_wrong_values(key: str, value: object) -> None:
    """One line, which names source, key and value; nothing is silently converted."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_values({"model": "m", key: value}, "settings.yaml")
    message = str(caught.value)
    assert message.startswith(f"settings.yaml: {key}: ")
    assert repr(value) in message
    assert "\n" not in message


def test_model_is_required() -> None:
    """The message does not show the other values instead."""
    with pytest.raises(ConfigError, match=r"^x: model: field required$"):
        EngineConfig.from_values({"batch_size": 2}, "x")


def test_auto_is_none() -> None:
    """`auto` may be written down."""
    config = EngineConfig.from_options(
        model="m", sequence_length="auto", threads="auto", kv_budget_bytes="auto"
    )
    assert (config.sequence_length, config.threads, config.kv_budget_bytes) == (None, None, None)


def test_frozen() -> None:
    """Nobody writes to a configuration later."""
    config = EngineConfig.from_options(model="m")
    with pytest.raises(pydantic.ValidationError):
        config.batch_size = 8  # type: ignore[misc]


def test_resolve_fills_in_what_was_open_and_keeps_the_rest() -> None:
    """A new configuration; the old one still says what was asked for."""
    config = EngineConfig.from_options(model="m", threads=2, revision=None)
    full = resolve(config, sequence_length=8192, threads=16, kv_budget_bytes=1 << 30)
    assert (full.sequence_length, full.threads, full.kv_budget_bytes) == (8192, 2, 1 << 30)
    assert config.sequence_length is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("12GB", 12_000_000_000),
        ("12 GiB", 12 << 30),
        ("1.5k", 1500),
        ("2MiB", 2 << 20),
        ("3T", 3_000_000_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Decimal and binary units differ by 7 % at GB: both are understood as written."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1e9", "1 2"])
def test_no_sizes(text: str) -> None:
    """Anything else is an error, not zero."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml(tmp_path: Path) -> None:
    """A file, with flags that win over it under either name."""
    path = write(tmp_path / "c.yaml", "model: m\nmax_model_len: 4096\nkv_budget_bytes: 8GiB\n")
    config = EngineConfig.from_yaml(path, {"sequence_length": 512})
    assert (config.model, config.sequence_length, config.kv_budget_bytes) == ("m", 512, 8 << 30)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("1: 2\n", "must be a mapping"),
        ("model: [unclosed\n", "is not YAML"),
        ("model: m\nbatchsize: 2\n", "did you mean batch_size"),
        ("", "model: field required"),
        ("model: !!python/object/apply:os.getcwd []\n", "is not YAML"),
    ],
)
def test_wrong_yaml(tmp_path: Path, text: str, reason: str) -> None:
    """One line with the file's name; no code in a file is ever run."""
    with pytest.raises(ConfigError, match=reason) as caught:
        EngineConfig.from_yaml(write(tmp_path / "c.yaml", text))
    assert "c.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_yaml(tmp_path: Path) -> None:
    """Says which file."""
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        EngineConfig.from_yaml(tmp_path / "none.yaml")


def serve(**values: object) -> ServeConfig:
    return ServeConfig.from_options(model="m", **values)


def test_a_service_has_every_field_of_its_engine() -> None:
    """Flat: one name, one place."""
    config = serve(batch_size=2, served_model_name="a")
    assert config.batch_size == 2
    assert set(EngineConfig.model_fields) < set(ServeConfig.model_fields)


def test_workers_of_a_service_survive() -> None:
    """Ray is there anyway."""
    assert (serve().workers, EngineConfig.from_options(model="m").workers) == ("ray", "threads")


def test_resolve_keeps_the_kind_of_configuration() -> None:
    """A service's fields are not lost when its engine's are decided."""
    config = serve(api_keys=["k"], default_chat_template_kwargs={"a": 1})
    full = resolve(config, sequence_length=64, threads=2, kv_budget_bytes=1)
    assert full.sequence_length == 64
    assert (full.api_keys, full.default_chat_template_kwargs) == (("k",), {"a": 1})


@pytest.mark.parametrize("value", ["one", ["one"], ("one",)])
def test_one_name_needs_no_list(value: object) -> None:
    """As vLLM's flag and its file both allow."""
    assert serve(served_model_name=value).names == ("one",)


def test_the_model_is_its_own_name() -> None:
    """As it was given, like vLLM's."""
    assert serve().names == ("m",)


def test_largest_n() -> None:
    """More answers than rows would queue behind each other."""
    assert (serve(batch_size=3).largest_n, serve(max_n=7).largest_n) == (3, 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("served_model_name", [""]),
        ("served_model_name", [1]),
        ("chat_template_content_format", "openai"),
        ("max_logprobs", 21),
        ("max_body_bytes", 0),
        ("request_timeout_s", 0),
        ("request_timeout_s", float("nan")),
        ("drain_timeout_s", -1),
        ("sse_keep_alive_interval", float("inf")),
        ("access_log", True),
        ("override_generation_config", [1]),
    ],
)
def test_wrong_values_of_a_service(key: str, value: object) -> None:
    """Refused like an engine's."""
    with pytest.raises(ConfigError, match=f"options: {key}: "):
        serve(**{key: value})


@pytest.mark.parametrize(
    ("key", "nearest"), [("api_kei", "api_key"), ("served_model", "served_model_name")]
)
def test_unknown_key_of_a_service(key: str, nearest: str) -> None:
    """Names the nearest; names of a service are unknown to an engine alone."""
    with pytest.raises(ConfigError, match=f"'{key}'; did you mean {nearest}?"):
        serve(**{key: "x"})
    with pytest.raises(ConfigError, match="unknown key 'api_key'"):
        EngineConfig.from_options(model="m", api_key="x")


def test_keys_are_not_shown() -> None:
    """Neither with the configuration nor in an error about it."""
    assert "sesame" not in repr(serve(api_keys="sesame"))
    with pytest.raises(ConfigError) as caught:
        serve(api_keys=["fine", ["sesame"]])
    assert "sesame" not in str(caught.value)


def test_keys_from_everywhere(tmp_path: Path) -> None:
    """Given, from the file and from the environment; once each, and the file is not read again."""
    file = write(tmp_path / "keys", "two\n\n  three  \none\n")
    config = serve(api_key="one", api_key_file=str(file))
    found = config.with_keys({"VLLM_API_KEY": "four", "ELLM_API_KEY": "one", "OTHER": "x"})
    assert found.api_keys == ("one", "two", "three", "four")
    file.unlink()
    assert found.with_keys({}).api_keys == found.api_keys


@pytest.mark.parametrize(("text", "reason"), [(None, "cannot read"), ("\n \n", "holds no key")])
def test_key_file_without_keys(tmp_path: Path, text: str | None, reason: str) -> None:
    """Would otherwise open the service to everybody."""
    path = tmp_path / "keys"
    if text is not None:
        write(path, text)
    with pytest.raises(ConfigError, match=f"api_key_file: .*{reason}") as caught:
        serve(api_key_file=str(path)).with_keys({})
    assert "\n" not in str(caught.value)


def test_file_of_a_serve_application(tmp_path: Path) -> None:
    """The same file is deployed and read here; flags win."""
    text = "applications:\n- name: x\n  args: {model: m, max_num_seqs: 2, api_key: [a, b]}\n"
    config = ServeConfig.from_yaml(write(tmp_path / "c.yaml", text), {"batch_size": 3})
    assert (config.model, config.batch_size, config.api_keys) == ("m", 3, ("a", "b"))


@pytest.mark.parametrize("text", ["applications: []", "applications: [{}]", "applications: 1"])
def test_file_without_one_application(tmp_path: Path, text: str) -> None:
    """One line that says what is missing."""
    with pytest.raises(ConfigError, match="must have one application with args"):
        ServeConfig.from_yaml(write(tmp_path / "c.yaml", text))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_files(path: Path) -> None:
    """Right as they are."""
    assert ServeConfig.from_yaml(path).model


def test_every_field_has_a_kind_and_a_description() -> None:
    """Command line and documentation are made from them."""
    kinds = {field.name: field.kind for field in fields_of(ServeConfig)}
    assert kinds["model"] is Kind.TEXT
    assert kinds["sequence_length"] is Kind.INTEGER
    assert kinds["prefill_budget_s"] is kinds["request_timeout_s"] is Kind.NUMBER
    assert kinds["workers"] is Kind.CHOICE
    assert kinds["dev_mode"] is Kind.SWITCH
    assert kinds["api_keys"] is Kind.NAMES
    assert kinds["override_generation_config"] is Kind.MAPPING
    assert all(field.description for field in fields_of(ServeConfig))
