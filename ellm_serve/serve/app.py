"""The Serve application: one deployment, one replica per host, its sockets in the same group.

    serve run configs/builtin.yaml
    serve deploy configs/serve.yaml

`args` of the application in such a file are the fields of `ServeConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from ellm_serve.cluster.crew import STRATEGY, worker_bundle
from ellm_serve.cluster.local_ray import SOCKET_RESOURCE
from ellm_serve.config import ServeConfig
from ellm_serve.errors import StartupError
from ellm_serve.serve.replica import Replica

APPLICATION = "ellm-serve"
DEPLOYMENT = "Engine"

# Of the replica itself; Ray counts CPUs only to place things.
_NUM_CPUS = 0.1
# Requests beyond batch and queue must reach the application, which alone can refuse them in
# OpenAI's words; so do health checks and scrapes.
_SPARE_REQUESTS = 1024
_HEALTH_PERIOD_S = 2.0
# For giving memory back, when the last request has ended.
_CLOSE_S = 10.0


def build_app(args: Mapping[str, object]) -> Application:
    """What `import_path` in a Serve file names.

    Keys are read here, from the file or the environment of whoever deploys. `sockets: auto` means
    as many as a node of the cluster has.

    Raises:
        StartupError: a field is wrong, or the cluster cannot hold it; one line says what to change.
    """
    return bind(ServeConfig.from_values(args, "args"))


def bind(config: ServeConfig, log_path: str | None = None) -> Application:
    """The application of a configuration; `log_path` as for `Replica`."""
    config = with_sockets(config).with_keys()
    return deployment(config).bind(config, log_path)


def with_sockets(config: ServeConfig) -> ServeConfig:
    """The same with a number of sockets, which the replica's placement group needs to know.

    Raises:
        StartupError: no node has that many.
    """
    if config.workers != "ray":
        return config
    if not ray.is_initialized():
        if config.sockets is None:
            raise StartupError("sockets: auto needs a running Ray cluster; give a number")
        return config
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = int(max((node.get(SOCKET_RESOURCE, 0) for node in nodes), default=0))
    wanted = config.sockets or most
    if not 0 < wanted <= most:
        raise StartupError(
            f"no node of the Ray cluster has {wanted or 'a'} {SOCKET_RESOURCE}; start them with"
            f" ray start --resources='{{\"{SOCKET_RESOURCE}\": {wanted or 1}}}', lower sockets, or"
            " set workers: threads"
        )
    return config.model_copy(update={"sockets": wanted})


def deployment(config: ServeConfig) -> serve.Deployment:
    """Serve's side of the configuration: nothing of it must answer or give up before we do."""
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "ray_actor_options": {"num_cpus": _NUM_CPUS},
        "max_ongoing_requests": config.batch_size + config.max_queued_requests + _SPARE_REQUESTS,
        "max_queued_requests": -1,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "graceful_shutdown_timeout_s": config.drain_timeout_s + _CLOSE_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "logging_config": {"enable_access_log": False},
    }
    if config.workers == "ray":
        assert config.sockets is not None
        workers = [worker_bundle() for _ in range(config.sockets)]
        options["placement_group_bundles"] = [{"CPU": _NUM_CPUS}, *workers]
        options["placement_group_strategy"] = STRATEGY
    return serve.deployment(serve.ingress()(Replica), **options)
