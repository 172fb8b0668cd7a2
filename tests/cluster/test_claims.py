"""A claim dies with its process, and nothing that nobody claims stays for ever."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ellm_serve.cluster.claims import (
    Claim,
    GroupInfo,
    GroupInUse,
    Manifest,
    claim_group,
    is_claimed,
    list_groups,
    read_manifest,
    remove_unclaimed,
)
from ellm_serve.cluster.segment import Segment
from ellm_serve.errors import ConfigError, StartupError

MIB = 1 << 20
OWNER = """
import sys, time
from pathlib import Path
from ellm_serve.cluster.claims import Manifest, claim_group
from ellm_serve.cluster.segment import Segment
directory = Path(sys.argv[1])
claim = claim_group("a", directory=directory)
for part in sys.argv[2:]:
    Segment.create(claim.segment_name(part), 1, committed=True, directory=directory)
if "weights" in sys.argv:
    claim.keep(Manifest("f", "l", {"weights": 2 << 20}))
print("ready", flush=True)
time.sleep(600)
"""
RACER = """
import sys
from pathlib import Path
from ellm_serve.cluster.claims import GroupInUse, claim_group
print("ready", flush=True)
sys.stdin.readline()
try:
    claim = claim_group("a", directory=Path(sys.argv[1]))
    print("won", flush=True)
except GroupInUse:
    print("lost", flush=True)
sys.stdin.readline()
"""


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A process of its own, once it says that it is ready."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert answer(process) == "ready"
    return process


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    """SIGKILL, and waits until it has happened."""
    process.kill()
    process.communicate()


@contextmanager
def owner(directory: Path, *parts: str) -> Iterator[subprocess.Popen[str]]:
    """A process that owns group `a` with these segments; killed at the end."""
    process = start(OWNER, directory, *parts)
    try:
        yield process
    finally:
        end(process)


def create(directory: Path, name: str) -> None:
    """A committed segment of 2 MiB, without any claim."""
    Segment.create(name, 1, committed=True, directory=directory).close()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make_old(directory: Path, age_s: float = 3600) -> None:
    """As if nothing had been written for a while."""
    for path in directory.iterdir():
        os.utime(path, (time.time() - age_s,) * 2, follow_symlinks=False)


def only_group(directory: Path) -> GroupInfo:
    (group,) = list_groups(directory=directory)
    return group


def test_killed_owner_leaves_no_claim(shm: Path) -> None:
    """The kernel frees the lock, and then the segments can be removed; not before."""
    with owner(shm, "kv", "control"):
        group = only_group(shm)
        assert group.claimed and not group.persistent
        assert is_claimed("a", directory=shm)
        assert group.bytes == 4 * MIB
        assert remove_unclaimed(False, directory=shm) == []
        with pytest.raises(GroupInUse, match="another process"):
            claim_group("a", directory=shm)
    assert not only_group(shm).claimed
    assert not is_claimed("a", directory=shm)
    assert names(shm) == ["ellm-a-control", "ellm-a-kv", "ellm-a.lock"]
    assert remove_unclaimed(True, directory=shm) == [shm / "ellm-a-control", shm / "ellm-a-kv"]
    assert names(shm) == []


def test_lasting_parts_survive(shm: Path) -> None:
    """Weights stay for the next start, the control block does not; `False` takes all."""
    with owner(shm, "weights", "control"):
        assert read_manifest("a", directory=shm) == Manifest("f", "l", {"weights": 2 * MIB})
    assert only_group(shm).persistent
    assert remove_unclaimed(True, directory=shm) == [shm / "ellm-a-control"]
    assert remove_unclaimed(True, directory=shm) == []
    assert names(shm) == ["ellm-a-weights", "ellm-a.json", "ellm-a.lock"]
    assert only_group(shm).persistent
    assert remove_unclaimed(False, directory=shm) == [shm / "ellm-a-weights"]
    assert names(shm) == []


def test_next_owner_takes_over(shm: Path) -> None:
    """It finds what was meant to survive and nothing else, so that all other names are free."""
    with owner(shm, "weights", "control"):
        pass
    with claim_group("a", directory=shm) as claim:
        assert names(shm) == ["ellm-a-weights", "ellm-a.json", "ellm-a.lock"]
        Segment.attach(claim.segment_name("weights"), directory=shm).close()
        create(shm, claim.segment_name("control"))
        claim.forget()
        assert read_manifest("a", directory=shm) is None
    assert names(shm) == []


def test_closing_keeps_lasting_parts(shm: Path) -> None:
    """A clean end leaves what a crash would, without the rest."""
    claim = claim_group("a", directory=shm)
    create(shm, claim.segment_name("weights"))
    create(shm, claim.segment_name("control"))
    claim.keep(Manifest("f", "l", {"weights": 2 * MIB}))
    claim.close()
    claim.close()
    assert names(shm) == ["ellm-a-weights", "ellm-a.json", "ellm-a.lock"]
    assert not only_group(shm).claimed


def test_one_of_many_wins(shm: Path) -> None:
    """Processes that claim at the same moment, over and over listed by another."""
    racers = [start(RACER, shm) for _ in range(4)]
    done = threading.Event()

    def keep_listing() -> None:
        while not done.is_set():
            list_groups(directory=shm)

    lister = threading.Thread(target=keep_listing)
    lister.start()
    try:
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        assert sorted(map(answer, racers)) == ["lost", "lost", "lost", "won"]
    finally:
        done.set()
        lister.join()
        for racer in racers:
            end(racer)


def test_claims_and_removals_do_not_cross(shm: Path) -> None:
    """A cleaner that runs all the time never takes a segment from its owner.

    The lock file itself is removed again and again: whoever has locked a removed one owns nothing.
    """
    done = threading.Event()

    def keep_removing() -> None:
        while not done.is_set():
            remove_unclaimed(False, directory=shm, grace_s=0)

    cleaners = [threading.Thread(target=keep_removing) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        for _ in range(50):
            with claim_group("a", directory=shm) as claim:
                create(shm, claim.segment_name("kv"))
                with pytest.raises(BlockingIOError):
                    lock_without_waiting(shm / "ellm-a.lock")
                assert (shm / "ellm-a-kv").exists()
    finally:
        done.set()
        for cleaner in cleaners:
            cleaner.join()
    assert names(shm) == []


def test_lock_file_is_removed_before_it_is_locked(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that has no name any more excludes nobody."""
    flock = fcntl.flock
    times = iter(["remove", "replace"])

    def late_flock(descriptor: int, operation: int) -> None:
        match next(times, ""):
            case "remove":
                (shm / "ellm-a.lock").unlink()
            case "replace":
                (shm / "ellm-a.lock").rename(shm / "old")
                (shm / "ellm-a.lock").touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late_flock)
    with claim_group("a", directory=shm), pytest.raises(BlockingIOError):
        lock_without_waiting(shm / "ellm-a.lock")


def test_listing_is_no_claim(shm: Path) -> None:
    """Whoever lists at the same time holds a shared lock for a moment."""
    (shm / "ellm-a.lock").touch()
    with (shm / "ellm-a.lock").open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not only_group(shm).claimed


def lock_without_waiting(path: Path) -> None:
    """Raises BlockingIOError if somebody has it."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_death_before_the_claim(shm: Path) -> None:
    """A segment without a lock file: spared while it is young, not for ever."""
    create(shm, "ellm-a-kv")
    assert only_group(shm).age_s < 60
    assert not only_group(shm).claimed
    assert remove_unclaimed(False, directory=shm) == []
    assert names(shm) == ["ellm-a-kv"]
    make_old(shm)
    assert only_group(shm).age_s > 3000
    assert remove_unclaimed(True, directory=shm) == [shm / "ellm-a-kv"]
    assert names(shm) == []


def test_lock_file_alone_goes_at_once(shm: Path) -> None:
    """Left by a death between claim and first segment."""
    with owner(shm):
        assert only_group(shm).claimed
    assert remove_unclaimed(True, directory=shm) == []
    assert names(shm) == []


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"fingerprint": "f"}', '{"fingerprint": 1, "layout": "l", "part_bytes": {}}']
    + ['{"fingerprint": "f", "layout": "l", "part_bytes": {"weights": "2"}}', "\ufffd" * 3],
)
def test_broken_manifest_keeps_nothing(shm: Path, text: str) -> None:
    """Weights that cannot be trusted are worth nothing."""
    create(shm, "ellm-a-weights")
    (shm / "ellm-a.json").write_text(text, encoding="utf-16" if "\ufffd" in text else "utf-8")
    assert read_manifest("a", directory=shm) is None
    assert not only_group(shm).persistent
    remove_unclaimed(True, directory=shm, grace_s=0)
    assert names(shm) == []


@pytest.mark.parametrize("size", [None, 2 * MIB + 1, 4 * MIB])
def test_incomplete_group_keeps_nothing(shm: Path, size: int | None) -> None:
    """A part is missing, or not of the size that was written down."""
    create(shm, "ellm-a-w0")
    claim_and_abandon(shm, Manifest("f", "l", {"w0": 2 * MIB, "w1": size or 2 * MIB}))
    if size is not None:
        create(shm, "ellm-a-w1")
    assert read_manifest("a", directory=shm) is None
    assert remove_unclaimed(True, directory=shm, grace_s=0)
    assert names(shm) == []


def claim_and_abandon(directory: Path, manifest: Manifest) -> None:
    """A manifest as an owner writes it, without its lock."""
    path = directory / "other"
    path.mkdir()
    claim = claim_group("a", directory=path)
    claim.keep(manifest)
    (path / "ellm-a.json").rename(directory / "ellm-a.json")
    claim.close()
    path.rmdir()


def test_manifest_is_replaced_as_a_whole(shm: Path) -> None:
    """A leftover of a death while writing does no harm, and the file is private."""
    (shm / "ellm-a.json.new").symlink_to(shm / "elsewhere")
    with claim_group("a", directory=shm) as claim:
        create(shm, claim.segment_name("w"))
        for fingerprint in ("one", "two"):
            claim.keep(Manifest(fingerprint, "l", {"w": 2 * MIB}))
            assert json.loads((shm / "ellm-a.json").read_text())["fingerprint"] == fingerprint
        assert (shm / "ellm-a.json").stat().st_mode & 0o777 == 0o600
        assert names(shm) == ["ellm-a-w", "ellm-a.json", "ellm-a.lock"]


def test_manifest_names_parts_only(shm: Path) -> None:
    """A name that no segment can have is refused when it is written."""
    with claim_group("a", directory=shm) as claim, pytest.raises(ConfigError):
        claim.keep(Manifest("f", "l", {"../b": 1}))
    assert names(shm) == []


def test_strangers_stay(shm: Path) -> None:
    """Other programs' files, links and names that only look alike; groups do not mix."""
    for name in ("ellm", "ellm-", "ellm-a", "ellm-a.txt", "other-a-kv", "ellm-ä-kv"):
        (shm / name).write_text("x")
    (shm / "ellm-a-dir").mkdir()
    (shm / "ellm-b-link").symlink_to(shm / "other-a-kv")
    before = names(shm)
    assert list_groups(directory=shm) == []
    create(shm, "ellm-a_b-kv")
    with claim_group("a", directory=shm):
        groups = [(group.group_id, group.claimed) for group in list_groups(directory=shm)]
        assert groups == [("a", True), ("a_b", False)]
        assert remove_unclaimed(False, directory=shm, grace_s=0) == [shm / "ellm-a_b-kv"]
    assert names(shm) == before


@pytest.mark.parametrize("group_id", ["", "a-b", "a/b", "..", "ä", "a" * 65, "a\n"])
def test_group_ids(shm: Path, group_id: str) -> None:
    """Only what makes a name that can be taken apart again."""
    with pytest.raises(ConfigError, match=re.escape(repr(group_id))):
        claim_group(group_id, directory=shm)
    assert names(shm) == []


def test_lock_that_is_a_link(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's trap in a directory where anybody may write: named, not followed."""
    create(shm, "ellm-a-kv")
    (shm / "ellm-a.lock").symlink_to(shm / "elsewhere")
    make_old(shm)
    with pytest.raises(StartupError, match="ellm-a.lock cannot be locked"):
        claim_group("a", directory=shm)
    assert only_group(shm).claimed
    assert remove_unclaimed(False, directory=shm) == []
    assert "ellm-a.lock cannot be locked" in caplog.text
    assert names(shm) == ["ellm-a-kv", "ellm-a.lock"]


def test_directory_that_is_missing(shm: Path) -> None:
    """One line on claiming; nothing to list or to remove."""
    missing = shm / "missing"
    with pytest.raises(StartupError, match="No such file"):
        claim_group("a", directory=missing)
    assert list_groups(directory=missing) == []
    assert remove_unclaimed(False, directory=missing) == []


def test_claim_outlives_its_name_in_no_child(shm: Path) -> None:
    """A program that the owner started does not hold the claim after the owner has closed it."""
    claim: Claim = claim_group("a", directory=shm)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        claim.close()
        claim_group("a", directory=shm).close()
    finally:
        child.communicate(b"\n")
