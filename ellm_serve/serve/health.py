"""Is it alive, is it ready, what is it doing: for probes, balancers and dashboards.

Alive from the first second of the process until the engine has failed or no longer moves; ready
only once a warm-up step has passed, and no longer when the service drains.
"""

from __future__ import annotations

from ellm_serve.errors import Unavailable
from ellm_serve.metrics import Gauges
from ellm_serve.serve.context import AppState
from ellm_serve.serve.service import Service

# What a client is told to wait: for a start or a restart, and for another replica to take over.
START_RETRY_S = 10.0
DRAIN_RETRY_S = 5.0


def failure(state: AppState) -> str | None:
    """Why this process will not answer any more; None while it may."""
    if state.failed is not None:
        return state.failed
    return None if state.service is None else state.service.engine.health()


def unreadiness(state: AppState) -> dict[str, object] | None:
    """Phase and progress on the way to be ready; None: it is."""
    if failure(state) is not None:
        return {"phase": "failed", "progress": {}}
    if state.draining:
        return {"phase": "draining", "progress": {"open_requests": state.num_open}}
    if state.service is None:
        return {"phase": state.phase, "progress": dict(state.progress)}
    return None


def service_of(state: AppState) -> Service:
    """What answers a new request.

    Raises:
        Unavailable: nothing does, yet or any more.
    """
    if state.failed is not None:
        raise Unavailable("The engine has failed and is being restarted.", START_RETRY_S)
    if state.draining:
        raise Unavailable("The server is shutting down and takes no new requests.", DRAIN_RETRY_S)
    if state.service is None:
        raise Unavailable(f"The server is not ready yet: {state.phase}.", START_RETRY_S)
    return state.service


def gauges(state: AppState) -> Gauges:
    """What the engine is doing now; zeros while there is none."""
    if state.service is None:
        return Gauges()
    engine = state.service.engine
    stats, length = engine.stats(), engine.limits.sequence_length
    busy = sum(session.num_tokens for session in stats.sessions if session.busy)
    return Gauges(
        num_running=stats.num_prefilling + stats.num_decoding,
        num_waiting=stats.num_waiting,
        kv_usage=busy / (stats.num_slots * length),
        num_slots=stats.num_slots,
        sequence_length=length,
        num_sessions=len(stats.sessions),
        num_session_tokens=sum(session.num_tokens for session in stats.sessions),
        total_evictions=stats.num_evictions,
        total_forks=stats.num_forks,
        total_cancelled_in_prefill=stats.steps.num_cancelled_in_prefill,
    )
