"""Which file holds which tensor: the index and the files on disk, reconciled.

The index is believed where the files agree with it. Where they do not, either every tensor it
lists is found once in another file (a stale index: warn and go on) or the model is refused.
Nothing is ever skipped silently.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from ellm_serve.errors import ModelError
from ellm_serve.model.fields import JsonFields
from ellm_serve.model.safetensors_file import SafetensorsFile

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


def locate_tensors(path: Path) -> dict[str, SafetensorsFile]:
    """Opens the files of a model directory; gives the one file to read each tensor from."""
    if (path / INDEX).exists():
        return _by_index(path, _weight_map(path / INDEX))
    if (path / SINGLE).exists():
        return _scan([SafetensorsFile(path / SINGLE)])
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} holds no *.safetensors files{_download_hint(path)}")
    shards = [file for file in files if _SHARD.fullmatch(file.name)]
    _check_shard_numbers(path, shards)
    return _scan([SafetensorsFile(file) for file in shards or files])


def _weight_map(index: Path) -> dict[str, str]:
    fields = JsonFields.from_file(index)
    entries = fields.child("weight_map")
    if entries is None:
        raise ModelError(f"{index}: weight_map is missing or empty")
    # A plain name only: an index must not be able to point outside its directory.
    names = {tensor: Path(entries.text(tensor)).name for tensor in entries.values}
    for tensor, name in names.items():
        if name != entries.text(tensor) or not name.endswith(".safetensors"):
            raise entries.refuse(tensor, "the plain name of a .safetensors file")
    return names


def _by_index(path: Path, weight_map: Mapping[str, str]) -> dict[str, SafetensorsFile]:
    listed = sorted(set(weight_map.values()))
    opened = {name: SafetensorsFile(path / name) for name in listed if (path / name).exists()}
    located = {
        tensor: opened[name]
        for tensor, name in weight_map.items()
        if name in opened and tensor in opened[name].tensors
    }
    if len(located) < len(weight_map):
        located |= _find_lost(path, weight_map, opened, weight_map.keys() - located.keys())
    # Tensors in listed files that the index does not know are kept: they must be accounted for.
    extra = {name for file in opened.values() for name in file.tensors} - located.keys()
    return located | _scan(opened.values(), extra)


def _find_lost(
    path: Path,
    weight_map: Mapping[str, str],
    opened: Mapping[str, SafetensorsFile],
    lost: Set[str],
) -> dict[str, SafetensorsFile]:
    """Tensors that are not where the index says, from any other file of the directory."""
    found = _scan(opened.values(), lost)
    others = [file for file in sorted(path.glob("*.safetensors")) if file.name not in opened]
    found |= _scan([SafetensorsFile(file) for file in others], lost - found.keys())
    if len(found) < len(lost):
        raise _lost_tensors(path, weight_map, lost - found.keys())
    logger.warning(
        "%s is stale: %d tensors are not in the files it names; all were found in %s",
        path / INDEX,
        len(lost),
        ", ".join(sorted({file.path.name for file in found.values()})),
    )
    return found


def _lost_tensors(path: Path, weight_map: Mapping[str, str], lost: Set[str]) -> ModelError:
    files = {weight_map[tensor] for tensor in lost}
    missing = sorted(name for name in files if not (path / name).exists())
    if missing:
        return ModelError(
            f"{path} lacks {len(missing)} of {len(set(weight_map.values()))} weight files"
            f" ({', '.join(missing)}) and with them {len(lost)} of {len(weight_map)} tensors"
            f"{_download_hint(path)}"
        )
    names = sorted(lost)
    return ModelError(
        f"{path / INDEX} lists {len(lost)} tensors that no file holds"
        f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    )


def _scan(
    files: Iterable[SafetensorsFile], wanted: Set[str] | None = None
) -> dict[str, SafetensorsFile]:
    """The file of each tensor (of those wanted); one that two files hold is refused."""
    holders: dict[str, SafetensorsFile] = {}
    for file in files:
        for tensor in file.tensors if wanted is None else file.tensors.keys() & wanted:
            if tensor in holders:
                raise ModelError(
                    f"tensor {tensor!r} is in {holders[tensor].path} and in {file.path.name};"
                    " remove one file, or add the index that tells which one counts"
                )
            holders[tensor] = file
    return holders


def _check_shard_numbers(path: Path, shards: Sequence[Path]) -> None:
    """Without an index the names alone tell how many files there should be."""
    matches = [match for file in shards if (match := _SHARD.fullmatch(file.name))]
    if not matches:
        return
    count = max(int(match["count"]) for match in matches)
    missing = sorted(set(range(1, count + 1)) - {int(match["number"]) for match in matches})
    if missing:
        raise ModelError(
            f"{path} lacks weight files {', '.join(map(str, missing[:8]))} of {count}"
            f"{_download_hint(path)}"
        )


def _download_hint(path: Path) -> str:
    """What to tell the user about files that are not there."""
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        return "; only safetensors weights are read, convert the checkpoint"
    return "; incomplete download? fetch the model again to resume it"
