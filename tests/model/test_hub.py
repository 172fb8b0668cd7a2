"""resolve_model: directories, the cache, and downloads from a hub on the loopback interface.

huggingface_hub fixes its settings when it is imported, so each case runs in its own process with
the endpoint and the cache in its environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import ellm_serve
from ellm_serve.errors import ModelError
from ellm_serve.model.checkpoint import Checkpoint
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import resolve_model
from tests.tiny_models import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(ellm_serve.__file__).parent.parent

SCRIPT = """
import json, sys
from pathlib import Path
from ellm_serve.errors import ModelError
from ellm_serve.model.hub import resolve_model
model, revision, offline = json.loads(sys.argv[1])
try:
    print("path", resolve_model(model, revision, offline=offline))
except ModelError as error:
    print("error", error)
"""


class Hub(ThreadingHTTPServer):
    """Serves one directory as the model `acme/tiny`; records the files that were fetched."""

    daemon_threads = True

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {file.name: file.read_bytes() for file in sorted(files.iterdir())}
        self.fetched: list[str] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        if path in (f"/api/models/acme/tiny/revision/{name}" for name in ("main", COMMIT)):
            self.reply(json.dumps({"id": "acme/tiny", "sha": COMMIT}).encode())
        elif path.startswith("/api/models/acme/tiny/revision/"):
            self.reply(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/models/acme/tiny/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in self.server.files.items()
            ]
            self.reply(json.dumps(tree).encode())
        elif path.startswith(f"/acme/tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            data = self.server.files[name]
            if body:
                self.server.fetched.append(name)
            headers = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": COMMIT}
            self.reply(data, 200, headers, body)
        elif path.startswith("/api/models/acme/gated/"):
            self.reply(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        else:
            self.reply(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def reply(
        self, data: bytes, status: int = 200, headers: dict[str, str] | None = None,
        body: bool = True,
    ) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    source = write_model(tmp_path / "source", moe=True, shards=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        (source / name).write_text(f"{{}} {name}")
    for name in ("modeling_tiny.py", "pytorch_model.bin", "README.md"):
        (source / name).write_text("not wanted")
    server = Hub(source)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(
    tmp_path: Path, endpoint: str, model: str, revision: str | None = None, offline: bool = False
) -> str:
    """First word: path or error; the rest: what came out."""
    clean = {k: v for k, v in os.environ.items() if not k.upper().startswith(("HF_", "HTTP"))}
    environment = clean | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    arguments = json.dumps([model, revision, offline])
    command = [sys.executable, "-c", SCRIPT, arguments]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "a refusal is one line"
    return done.stdout.strip()


def test_download_then_offline(tmp_path: Path, hub: Hub) -> None:
    """What was fetched once is a complete model, and needs no network the second time."""
    kind, _, path = resolve(tmp_path, hub.endpoint, "acme/tiny").partition(" ")
    assert kind == "path", path
    Checkpoint.open(Path(path)).reconcile(ModelConfig.from_dir(Path(path)))
    assert {"tokenizer.json", "merges.txt", "chat_template.jinja"} <= set(hub.fetched)
    # Code and pickles are never fetched.
    assert not {"modeling_tiny.py", "pytorch_model.bin"} & set(hub.fetched)
    num_fetched = len(hub.fetched)
    assert resolve(tmp_path, hub.endpoint, "acme/tiny", offline=True) == f"path {path}"
    assert resolve(tmp_path, hub.endpoint, "acme/tiny", COMMIT) == f"path {path}"
    assert len(hub.fetched) == num_fetched


def test_an_interrupted_download_is_told_offline_and_resumed_online(
    tmp_path: Path, hub: Hub
) -> None:
    _, _, path = resolve(tmp_path, hub.endpoint, "acme/tiny").partition(" ")
    (Path(path) / "model-00002-of-00002.safetensors").unlink()
    offline = resolve(tmp_path, hub.endpoint, "acme/tiny", offline=True)
    assert offline.startswith("error acme/tiny is not completely in the cache")
    assert resolve(tmp_path, hub.endpoint, "acme/tiny") == f"path {path}"
    Checkpoint.open(Path(path))


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("acme/absent", None, "acme/absent is not on the hub, or is private"),
        ("acme/gated", None, "acme/gated is gated"),
        ("acme/tiny", "v9", "acme/tiny at revision v9 does not exist on the hub"),
    ],
)
def test_hub_refusals(
    tmp_path: Path, hub: Hub, model: str, revision: str | None, message: str
) -> None:
    assert resolve(tmp_path, hub.endpoint, model, revision).startswith(f"error {message}")


def test_no_network(tmp_path: Path) -> None:
    # Port 9 (discard) of the loopback interface refuses connections.
    output = resolve(tmp_path, "http://127.0.0.1:9", "acme/tiny")
    assert output.startswith(
        "error acme/tiny is not completely cached and the hub cannot be reached"
    )


def test_not_in_the_cache_while_offline(tmp_path: Path) -> None:
    output = resolve(tmp_path, "http://127.0.0.1:9", "acme/tiny", offline=True)
    assert output.startswith("error acme/tiny is not completely in the cache and downloads are off")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="is a file; give the directory"):
        resolve_model(str(file))


@pytest.mark.parametrize("model", ["./no/such/dir", "/no/such/dir", "a b", "a/b/c"])
def test_a_mistyped_path_is_not_looked_up(model: str) -> None:
    with pytest.raises(ModelError, match="neither a directory nor a hub id"):
        resolve_model(model, offline=True)
