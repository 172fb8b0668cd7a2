"""`ellm-serve clean` frees what nobody owns and says so."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ellm_serve.cli import doctor, main
from ellm_serve.cluster.claims import Manifest, claim_group
from ellm_serve.cluster.segment import Segment


def create(directory: Path, name: str) -> None:
    """A segment that has been there for an hour."""
    Segment.create(name, 1, committed=True, directory=directory).close()
    os.utime(directory / name, (time.time() - 3600,) * 2)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """`left` has no owner, `warm` is kept for the next start."""
    create(tmp_path, "ellm-left-kv")
    with claim_group("warm", directory=tmp_path) as claim:
        create(tmp_path, "ellm-warm-w")
        claim.keep(Manifest("f", "l", {"w": 2 << 20}))
    return tmp_path


def test_clean(groups: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is owned or kept stays and is listed; --all takes what is kept."""
    with claim_group("mine", directory=groups):
        create(groups, "ellm-mine-kv")
        assert main(["clean", "--shm-dir", str(groups)]) == 0
        out = capsys.readouterr().out
        assert f"removed {groups}/ellm-left-kv\n" in out
        assert "ellm-mine, 2 MB, in use" in out
        assert "ellm-warm, 2 MB, kept for a faster start" in out
        assert main(["clean", "--all", "--shm-dir", str(groups)]) == 0
        assert f"removed {groups}/ellm-warm-w\n" in capsys.readouterr().out
        assert names(groups) == ["ellm-mine-kv", "ellm-mine.lock"]
    assert main(["clean", "--shm-dir", str(groups)]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def test_doctor_lists_groups(
    groups: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their state, so that lost memory can be found."""
    monkeypatch.setattr(doctor, "_SHM", groups)
    main(["doctor", "--no-probe"])
    out = capsys.readouterr().out
    assert "segments      ellm-left: 2 MB, owned by nobody (ellm-serve clean removes it)" in out
    assert "segments      ellm-warm: 2 MB, kept for a faster start" in out
