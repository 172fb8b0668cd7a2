"""Whether packed weights that are still in shared memory are the ones a start would make.

Reads file names, sizes, times and safetensors headers of the checkpoint and no weights, so it takes
milliseconds for any model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ellm_serve import model
from ellm_serve.errors import ModelError
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.safetensors_file import MAX_HEADER_BYTES
from ellm_serve.version import __version__


def weights_fingerprint(
    model_dir: Path, config: ModelConfig, layout: str, shard_facts: Mapping[str, int | str]
) -> str:
    """A hex digest of everything packed weights depend on.

    `layout` is `layout_version()`; `shard_facts` tell how they are cut (rank count, split, …).

    Raises:
        ModelError: a checkpoint file cannot be read.
    """
    facts = {
        "config": asdict(config),
        "layout": layout,
        "shards": dict(shard_facts),
        "files": [_file_facts(path) for path in sorted(model_dir.glob("*.safetensors"))],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def layout_version() -> str:
    """Changes whenever the code that packs weights, or that reads packed ones, could differ."""
    from ellm_kernels import isa, jit

    digest = hashlib.sha256()
    for path in sorted(Path(model.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}-{isa.active().name}-{jit.source_hash()}-{digest.hexdigest()[:16]}"


def _file_facts(path: Path) -> tuple[str, int, int, str]:
    try:
        status = path.stat()
        return path.name, status.st_size, status.st_mtime_ns, _header_digest(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        size = file.read(8)
        length = min(int.from_bytes(size, "little"), MAX_HEADER_BYTES)
        return hashlib.sha256(size + file.read(length)).hexdigest()
