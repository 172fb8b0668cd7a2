"""Keeps a replica off the network when its Ray node is.

A Serve replica listens for other deployments on every interface, whatever address its node was
given, and whoever reaches that port runs code (it takes pickles). Ray has no setting for it.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

import ray.util
from ray.serve._private import replica as serve_replica

logger = logging.getLogger(__name__)

# The function by which Ray's replica opens its port: (server, address) → port.
_OPEN_PORT = "add_port_to_grpc_server"


def stay_on_loopback() -> None:
    """From now on, replicas of this process listen on their node's address if that is a loopback
    address. Call it before Serve opens the port: in the deployment's constructor."""
    address = ipaddress.ip_address(ray.util.get_node_ip_address())
    if not address.is_loopback:
        return
    open_port = getattr(serve_replica, _OPEN_PORT, None)
    if open_port is None:
        logger.warning("this version of Ray may listen on all interfaces; use a firewall")
        return
    host = f"[{address}]" if address.version == 6 else str(address)

    def open_local_port(server: Any, _address: str) -> int:
        return int(open_port(server, f"{host}:0"))

    setattr(serve_replica, _OPEN_PORT, open_local_port)
