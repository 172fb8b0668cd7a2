"""The segments of a group of socket workers, made and owned by the engine's process.

    shared            control block, mailboxes, exchanges, logits; all memory taken at once
    weights-<rank>    a packed shard, filled by the worker; may outlive the engine
    kv-<rank>         sparse, committed chunk by chunk by the engine

Weights that are kept for a faster start have a group id made of their fingerprint, so that the next
engine of the same model finds them.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ellm_serve.cluster.claims import (
    Claim,
    GroupInUse,
    Manifest,
    claim_group,
    read_manifest,
    remove_unclaimed,
)
from ellm_serve.cluster.fingerprint import layout_version, weights_fingerprint
from ellm_serve.cluster.numa import bind_memory
from ellm_serve.cluster.segment import SHM, Segment
from ellm_serve.cluster.sockets import SocketPlace
from ellm_serve.engine.group import GroupOptions
from ellm_serve.errors import MemoryPlanError, StartupError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.region import HUGE_PAGE, round_up
from ellm_serve.model.weights import WeightLayout

logger = logging.getLogger(__name__)


@dataclass
class GroupMemory:
    """Open segments and the claim on their names. `packed`: the weights are there already."""

    claim: Claim
    shared: Segment
    weights: Sequence[Segment]
    kv: Sequence[Segment]
    packed: bool
    _keep: Manifest | None

    @classmethod
    def open(
        cls,
        model_dir: Path,
        config: ModelConfig,
        options: GroupOptions,
        places: Sequence[SocketPlace],
        *,
        keep_weights: bool = False,
        directory: Path = SHM,
    ) -> Self:
        """Removes what dead engines left, claims a group and makes its segments.

        Raises:
            MemoryPlanError: there is not enough memory.
            StartupError: shared memory cannot be used.
        """
        for path in remove_unclaimed(keep_persistent=True, directory=directory):
            logger.info("removed %s, which nobody owned", path)
        wanted = _manifest(model_dir, config, options) if keep_weights else None
        claim, wanted = _claim(wanted, directory)
        try:
            return cls._make(claim, wanted, config, options, places)
        except MemoryError as error:
            claim.close()
            raise MemoryPlanError(str(error)) from None
        except OSError as error:
            claim.close()
            raise StartupError(f"shared memory in {directory}: {error}") from error

    @classmethod
    def _make(
        cls,
        claim: Claim,
        wanted: Manifest | None,
        config: ModelConfig,
        options: GroupOptions,
        places: Sequence[SocketPlace],
    ) -> Self:
        found = read_manifest(claim.group_id, directory=claim.directory)
        packed = found is not None and found == wanted
        if not packed:
            claim.forget()

        def create(part: str, size: int, committed: bool = False) -> Segment:
            name = claim.segment_name(part)
            (claim.directory / name).unlink(missing_ok=True)
            return Segment.create(name, size, committed=committed, directory=claim.directory)

        weights = []
        for rank, size in enumerate(_weights_bytes(config, options)):
            part = f"weights-{rank}"
            if packed:
                name = claim.segment_name(part)
                weights.append(Segment.attach(name, directory=claim.directory))
            else:
                weights.append(create(part, size))
        shared = create("shared", options.layout(config).size_bytes, committed=True)
        kv = []
        for rank, place in enumerate(places):
            segment = create(f"kv-{rank}", options.kv_shape(config).size_bytes)
            if place.node is not None:
                bind_memory(segment.address, segment.size_bytes, place.node)
            kv.append(segment)
        return cls(claim, shared, weights, kv, packed, wanted)

    def weights_packed(self) -> None:
        """Says that all shards are complete; from now on they survive, if that was asked for."""
        self.packed = True
        if self._keep is not None:
            self.claim.keep(self._keep)

    def close(self) -> None:
        """Gives everything back but weights that are to survive; may be called twice."""
        self.claim.close()
        for segment in (self.shared, *self.weights, *self.kv):
            segment.close()


def _weights_bytes(config: ModelConfig, options: GroupOptions) -> list[int]:
    return [
        WeightLayout.from_shard(options.shard(config, rank)).size_bytes
        for rank in range(len(options.sockets))
    ]


def _manifest(model_dir: Path, config: ModelConfig, options: GroupOptions) -> Manifest:
    facts: dict[str, int | str] = {
        "sockets": len(options.sockets),
        "expert_split": str(options.expert_split),
    }
    layout = layout_version()
    parts = {
        f"weights-{rank}": round_up(size, HUGE_PAGE)
        for rank, size in enumerate(_weights_bytes(config, options))
    }
    return Manifest(weights_fingerprint(model_dir, config, layout, facts), layout, parts)


def _claim(wanted: Manifest | None, directory: Path) -> tuple[Claim, Manifest | None]:
    """A claim, and what of it may survive."""
    if wanted is not None:
        group_id = f"kept_{wanted.fingerprint[:24]}"
        try:
            return claim_group(group_id, directory=directory), wanted
        except GroupInUse:
            logger.warning("another engine uses the kept weights of this model; packing our own")
    return claim_group(secrets.token_hex(8), directory=directory), None
