"""The control groups this process is in: where their files lie, version 1 and 2 alike.

A limit may be set at any level, so callers look at every directory from the process's own group up
to the mount point. All paths hang below an injectable root.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One controller's groups, the process's own first."""

    version: int
    directories: tuple[Path, ...]

    @classmethod
    def find(cls, controller: str, root: Path = Path("/")) -> Cgroup | None:
        """The groups that limit this process; None without the controller."""
        paths = dict(_own_paths(root))
        for version, mount_root, mount in _mounts(controller, root):
            path = paths.get(controller if version == 1 else "")
            if path is not None:
                return cls(version, _levels(root, mount, mount_root, path))
        return None

    def values(self, name: str) -> Iterator[tuple[Path, str]]:
        """(directory, text) of a file at every level that has it."""
        for directory in self.directories:
            text = read_text(directory / name)
            if text is not None:
                yield directory, text


def read_text(path: Path) -> str | None:
    """A small file's text without white space around it; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _own_paths(root: Path) -> Iterator[tuple[str, str]]:
    """(controller, path of the group); version 2 has an empty controller."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts(controller: str, root: Path) -> list[tuple[int, str, str]]:
    """(version, root inside the hierarchy, mount point); version 1 first, where it has it."""
    found = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        mount_root, mount = fields.split(" ")[3:5]
        if kind == "cgroup2":
            found.append((2, mount_root, mount))
        elif kind == "cgroup" and controller in options.split(","):
            found.append((1, mount_root, mount))
    return sorted(found)


def _levels(root: Path, mount: str, mount_root: str, path: str) -> tuple[Path, ...]:
    # Inside a container the group's path is often the host's, and the mount shows only its end.
    group = PurePosixPath(path)
    inside = group.relative_to(mount_root) if group.is_relative_to(mount_root) else PurePosixPath()
    top = root / mount.lstrip("/")
    own = top / inside
    parents = [parent for parent in own.parents if parent.is_relative_to(top)]
    return tuple(dict.fromkeys([own, *parents, top]))
