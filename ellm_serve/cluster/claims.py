"""Who owns which segments: a group of names is claimed by a lock that dies with its process.

The files of a group in the shared-memory directory:

    ellm-<group>.lock      locked (flock) by the owner for its life; made before anything else
    ellm-<group>-<part>    segments
    ellm-<group>.json      which of them are meant to survive, and what is in them

What nobody claims is removed, surviving parts excepted. Files of other users are never touched.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ellm_serve.closing import Closing
from ellm_serve.cluster.segment import SHM, segment_name
from ellm_serve.errors import ConfigError, StartupError

logger = logging.getLogger(__name__)

# A group without a lock file was left by something that died before it could claim, or is just
# being written by something that does not claim first.
GRACE_S = 60.0
# Listing holds a lock for microseconds, removing for as long as it takes to free the memory.
_CLAIM_WAIT_S = 1.0
_POLL_S = 0.01

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

_GROUP = re.compile(r"[A-Za-z0-9_]{1,64}")
_FILE = re.compile(r"ellm-(?P<group>[A-Za-z0-9_]{1,64})(?:-.+|\.(?:lock|json|json\.new))")


class GroupInUse(StartupError):
    """Another process has claimed the group."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What survives of a group: the sizes of its lasting parts, and what they hold.

    A start may attach if its own fingerprint and layout are the same. Sizes are those of the files
    (`Segment.size_bytes`).
    """

    fingerprint: str
    layout: str
    part_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A group that is there. `persistent` tells that its lasting parts are complete."""

    group_id: str
    bytes: int
    claimed: bool
    persistent: bool
    age_s: float


class Claim(Closing):
    """The right to a group's names, until it is closed or this process dies in whatever way.

    The lock belongs to the open file: a forked child without exec keeps it as well.
    """

    def __init__(self, group_id: str, directory: Path, descriptor: int) -> None:
        """Takes over a locked descriptor. Use `claim_group`."""
        self.group_id = group_id
        self.directory = directory
        self._descriptor: int | None = descriptor

    def segment_name(self, part: str) -> str:
        return segment_name(self.group_id, part)

    def keep(self, manifest: Manifest) -> None:
        """Marks parts as meant to survive; whole or not at all, whenever this process dies.

        Call it when their contents are complete.
        """
        for part in manifest.part_bytes:
            self.segment_name(part)
        path = _manifest_path(self.directory, self.group_id)
        fresh = path.with_suffix(".json.new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, _NEW_FILE, 0o600), "w", encoding="utf-8") as file:
            json.dump(asdict(manifest), file)
        fresh.replace(path)

    def forget(self) -> None:
        """Nothing is meant to survive any more."""
        _manifest_path(self.directory, self.group_id).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the claim up and removes what is not meant to survive."""
        if self._descriptor is not None:
            _remove_group(self.directory, self.group_id, keep_persistent=True)
            os.close(self._descriptor)
            self._descriptor = None


def claim_group(group_id: str, *, directory: Path = SHM) -> Claim:
    """Claims a group, new or left behind, before any of its segments is created.

    Nothing but what is meant to survive is left of an earlier owner.

    Raises:
        GroupInUse: another process has it.
        StartupError: the directory cannot be used.
    """
    if not _GROUP.fullmatch(group_id):
        raise ConfigError(f"group id {group_id!r}: use 1 to 64 letters, digits or _")
    path = _lock_path(directory, group_id)
    deadline = time.monotonic() + _CLAIM_WAIT_S
    try:
        while (descriptor := _try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise GroupInUse(
                    f"shared memory group {group_id} belongs to another process"
                    f" ({path} is locked); stop it first"
                )
            time.sleep(_POLL_S)
        _remove_parts(directory, group_id, keep_persistent=True)
    except OSError as error:
        raise StartupError(f"{path} cannot be locked: {error.strerror}") from error
    return Claim(group_id, directory, descriptor)


def read_manifest(group_id: str, *, directory: Path = SHM) -> Manifest | None:
    """What survives of a group; None if nothing is marked or a part is missing."""
    manifest = _parse_manifest(_manifest_path(directory, group_id))
    if manifest is None:
        return None
    for part, size in manifest.part_bytes.items():
        status = _own_status(directory / f"ellm-{group_id}-{part}")
        if status is None or status.st_size != size:
            return None
    return manifest


def is_claimed(group_id: str, *, directory: Path = SHM) -> bool:
    """Whether a living process owns the group."""
    try:
        descriptor = os.open(
            _lock_path(directory, group_id), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        )
    except FileNotFoundError:
        return False
    except OSError:  # another user's lock file
        return True
    try:
        # Shared, so that two listings do not take each other for an owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def list_groups(*, directory: Path = SHM) -> list[GroupInfo]:
    """All groups of this user, by id; `bytes` counts memory in use."""
    found: dict[str, list[os.stat_result]] = {}
    for group_id, _, status in _own_files(directory):
        found.setdefault(group_id, []).append(status)
    return [
        GroupInfo(
            group_id=group_id,
            bytes=sum(status.st_blocks for status in statuses) * 512,
            claimed=is_claimed(group_id, directory=directory),
            persistent=read_manifest(group_id, directory=directory) is not None,
            age_s=max(0.0, time.time() - max(status.st_mtime for status in statuses)),
        )
        for group_id, statuses in sorted(found.items())
    ]


def remove_unclaimed(
    keep_persistent: bool, *, directory: Path = SHM, grace_s: float = GRACE_S
) -> list[Path]:
    """Removes segments that nobody claims, and returns them.

    `keep_persistent` spares parts that are meant to survive. A group without a lock file is spared
    while its newest file is younger than `grace_s`.
    """
    removed = []
    for group in list_groups(directory=directory):
        path = _lock_path(directory, group.group_id)
        if not path.exists() and group.age_s < grace_s:
            continue
        try:
            with _locked(path) as free:
                if free:
                    removed += _remove_group(directory, group.group_id, keep_persistent)
        except OSError as error:
            logger.warning("%s cannot be locked or removed: %s", path, error.strerror)
    return removed


def _remove_group(directory: Path, group_id: str, keep_persistent: bool) -> list[Path]:
    """Removes a group whose lock is held, the lock file last; the segments that are gone."""
    removed = _remove_parts(directory, group_id, keep_persistent)
    lock = _lock_path(directory, group_id)
    if _group_paths(directory, group_id) == [lock]:
        lock.unlink()
    return removed


def _remove_parts(directory: Path, group_id: str, keep_persistent: bool) -> list[Path]:
    """Removes segments and manifest of a group whose lock is held; the segments that are gone."""
    manifest = read_manifest(group_id, directory=directory) if keep_persistent else None
    kept = {_lock_path(directory, group_id).name}
    if manifest is not None:
        kept.add(_manifest_path(directory, group_id).name)
        kept |= {f"ellm-{group_id}-{part}" for part in manifest.part_bytes}
    removed = [path for path in _group_paths(directory, group_id) if path.name not in kept]
    for path in removed:
        path.unlink(missing_ok=True)
    return [path for path in removed if path.name.startswith(f"ellm-{group_id}-")]


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Holds a lock file if nobody else does; yields whether."""
    descriptor = _try_lock(path)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """A locked descriptor of the file at `path`, made if need be; None if somebody holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock the file may have been removed, and made anew by another process.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _parse_manifest(path: Path) -> Manifest | None:
    """None for a file that is missing, not this user's or not a manifest."""
    if _own_status(path) is None:
        return None
    try:
        match json.loads(path.read_text(encoding="utf-8")):
            case {
                "fingerprint": str(fingerprint),
                "layout": str(layout),
                "part_bytes": dict(parts),
            }:
                if all(isinstance(size, int) for size in parts.values()):
                    return Manifest(fingerprint, layout, parts)
    except (OSError, ValueError):
        pass
    return None


def _own_status(path: Path) -> os.stat_result | None:
    """Of a regular file of this user; anybody may write into a shared-memory directory."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() else None


def _own_files(directory: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Group, path and status of every file of a group."""
    for path in sorted(directory.glob("ellm-*")):
        match, status = _FILE.fullmatch(path.name), _own_status(path)
        if match is not None and status is not None:
            yield match["group"], path, status


def _group_paths(directory: Path, group_id: str) -> list[Path]:
    return [path for group, path, _ in _own_files(directory) if group == group_id]


def _lock_path(directory: Path, group_id: str) -> Path:
    return directory / f"ellm-{group_id}.lock"


def _manifest_path(directory: Path, group_id: str) -> Path:
    return directory / f"ellm-{group_id}.json"
