"""An engine's process, to be killed by a test: a group of two Ray workers that decodes for ever.

    python -m tests.cluster.engine_process MODEL_DIR SHM_DIR KEEP

Writes the group id and the workers' process ids when it is ready.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ellm_serve.cluster.group import WorkerGroup
from ellm_serve.cluster.group_memory import GroupMemory
from ellm_serve.cluster.local_ray import start_local_ray
from ellm_serve.cluster.sockets import choose_sockets
from ellm_serve.cluster.topology import Machine
from ellm_serve.engine.executor import LogitRows, Span
from ellm_serve.engine.group import GroupOptions
from ellm_serve.model.config import ModelConfig
from tests.running import SMALL


def main(model_dir: Path, directory: Path, keep_weights: bool) -> None:
    """Runs until it is killed."""
    config = ModelConfig.from_dir(model_dir)
    places = choose_sockets(Machine.discover(), 2, 2)
    options = GroupOptions(tuple(place.cores for place in places), **SMALL)
    session = start_local_ray(2)
    memory = GroupMemory.open(
        model_dir, config, options, places, keep_weights=keep_weights, directory=directory
    )
    group = WorkerGroup(model_dir, config, options, places, memory, session)
    group.commit(0, 1)
    sys.stdout.write(" ".join([memory.claim.group_id, *map(str, group.pids)]) + "\n")
    sys.stdout.flush()
    while True:
        group.decode([Span(0, 0, (1,), LogitRows.LAST)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "keep")
