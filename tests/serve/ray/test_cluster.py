"""The service on a Ray cluster that is there already: it comes, it goes, and the cluster stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ellm_serve.cluster.local_ray import ADDRESS_VARIABLE, start_local_ray
from ellm_serve.config import ServeConfig
from ellm_serve.errors import ConfigError, StartupError
from tests.serve.client import wait_until
from tests.serve.ray.command import ROOT, START_S, Service, free_port

pytestmark = [
    pytest.mark.ray,
    # Ray's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The environment of a command that joins it; on the loopback address, with one socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ADDRESS_VARIABLE, raising=False)
        with start_local_ray(1):
            import ray
            from ray import serve

            yield {ADDRESS_VARIABLE: ray.get_runtime_context().gcs_address}
            serve.shutdown()


@pytest.fixture(scope="module")
def port() -> int:
    """Serve keeps its port for as long as it runs, whatever is deployed."""
    return free_port()


def start(port: int, cluster: dict[str, str], *flags: str) -> Service:
    command = ["-m", "ellm_serve", "serve", "--port", str(port), "--sequence-length", "8192"]
    return Service([*command, *flags], port, cluster)


def applications() -> dict[str, Any]:
    from ray import serve

    return dict(serve.status().applications)


def test_what_the_replica_finds_wrong(port: int, cluster: dict[str, str]) -> None:
    """One line, code 1, and nothing stays deployed."""
    with start(port, cluster, "--chat-template", "/no/such.jinja") as service:
        assert service.process.wait(START_S) == 1
        errors = service.errors.splitlines()
        assert errors[-1].startswith("ellm-serve: ")
        assert "/no/such.jinja" in errors[-1]
        assert service.output == ""
        assert "Traceback" not in service.errors
    assert applications() == {}


def test_two_signals_end_at_once(port: int, cluster: dict[str, str]) -> None:
    """A stream that may not finish says so; then the application is gone, and Serve is not."""
    body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    with start(port, cluster) as service:
        service.wait_ready()
        wait_until(lambda: "ready:" in service.output, "ready line")
        with service.client.open("/v1/completions", body) as stream:
            events = stream.events()
            received = [next(events)]
            service.process.send_signal(signal.SIGINT)
            wait_until(lambda: service.ready() == 503, "not ready")
            service.process.send_signal(signal.SIGINT)
            received.extend(events)
        assert "[DONE]" not in received
        assert '"error"' in received[-1]
        assert service.process.wait(60) == 0
        assert "1 running requests were ended" in service.errors
        assert service.ready() == 404
    assert applications() == {}


def test_serve_run(port: int, cluster: dict[str, str], tmp_path: Path) -> None:
    """Ray's own command deploys the file that comes with the package."""
    file = tmp_path / "builtin.yaml"
    text = (ROOT / "configs/builtin.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("port: 8000", f"port: {port}"), encoding="utf-8")
    command = ["-m", "ray.serve.scripts", "run", str(file)]
    with Service(command, port, cluster) as service:
        service.wait_ready()
        models = service.client.get("/v1/models").json
        assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [
            ("builtin", 4096)
        ]
        service.stop(signal.SIGINT)


def test_sockets_of_the_cluster(cluster: dict[str, str]) -> None:
    """`auto` is what a node has; more than that would wait for ever."""
    from ellm_serve.serve.app import with_sockets

    def sockets(**values: object) -> int | None:
        return with_sockets(ServeConfig.from_options(model="builtin", **values)).sockets

    assert sockets() in (1, 2)  # 2: a cluster of other tests
    assert sockets(workers="threads") is None
    with pytest.raises(StartupError, match='no node of the Ray cluster has 3 cpu_socket.*": 3'):
        sockets(sockets=3)


def test_serve_never_answers_for_us() -> None:
    """Its own limits are beyond ours, and its shutdown waits for ours."""
    from ellm_serve.serve.app import deployment

    values = {"sockets": 2, "batch_size": 3, "max_queued_requests": 5000, "drain_timeout_s": 7}
    made = deployment(ServeConfig.from_options(model="builtin", **values))
    assert made.max_ongoing_requests > 5003
    assert made.max_queued_requests == -1
    options = made._deployment_config
    assert options.graceful_shutdown_timeout_s > 7


def test_wrong_args() -> None:
    """One line that names the nearest key."""
    from ellm_serve.serve.app import build_app

    with pytest.raises(ConfigError, match="args: unknown key 'modle'; did you mean model?"):
        build_app({"modle": "builtin"})
