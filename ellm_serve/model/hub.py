"""From what the user calls a model to a directory: built in, local, or on the Hugging Face hub.

Downloading, resuming and progress bars are huggingface_hub's; here its many exceptions become one
line each. Code files and pickled weights are never fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

# The base of every network error: httpx's or httpx2's, depending on huggingface_hub's version.
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

from ellm_serve.errors import ModelError

BUILTIN = "builtin"

# Weights, configuration and index, tokenizer in any of its published forms, chat template.
WANTED = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "*.model")
# `original/` and `consolidated*` repeat the weights in another layout.
UNWANTED = ("*.py", "*.bin", "original/*", "consolidated*.safetensors")


def resolve_model(
    model: str,
    revision: str | None = None,
    cache_dir: Path | None = None,
    offline: bool = False,
    wanted: Sequence[str] = WANTED,
) -> Path:
    """The directory of `model`; downloads it when it is a hub id that is not in the cache.

    `offline`, or HF_HUB_OFFLINE in the environment, allows the cache only. `wanted` are patterns of
    the files to download.
    """
    if model == BUILTIN:
        return _builtin()
    local = Path(model).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise ModelError(f"{model} is a file; give the directory that holds config.json")
    offline = offline or constants.HF_HUB_OFFLINE
    name = model if revision is None else f"{model} at revision {revision}"
    try:
        snapshot = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=offline,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED),
        )
    except (errors.HFValidationError, errors.XetDownloadError, HTTPError, OSError) as error:
        raise ModelError(_explain(name, offline, error)) from error
    return Path(snapshot)


def _explain(name: str, offline: bool, error: Exception) -> str:
    """One line for one of huggingface_hub's exceptions; the order is from special to general."""
    match error:
        case errors.HFValidationError():
            return (
                f"{name!r} is neither a directory nor a hub id (owner/name) nor {BUILTIN!r};"
                " is the path right?"
            )
        case errors.LocalEntryNotFoundError() if offline:
            return (
                f"{name} is not completely in the cache and downloads are off; run once with"
                " network access"
            )
        case errors.GatedRepoError():
            return f"{name} is gated; accept its terms on the hub and log in with `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{name} does not exist on the hub: no such revision"
        case errors.RepositoryNotFoundError():
            return f"{name} is not on the hub, or is private (log in with `hf auth login`)"
        case errors.LocalEntryNotFoundError():
            reason = str(error.__cause__ or "no connection").partition("\n")[0]
            return f"{name} is not completely cached and the hub cannot be reached ({reason})"
        case _:
            return f"downloading {name} failed: {str(error).partition(chr(10))[0]}"


def _builtin() -> Path:
    path = Path(__file__).parent.parent / "builtin"
    if not (path / "config.json").exists():
        raise ModelError(f"the built-in model is missing from {path}; reinstall ellm-serve")
    return path
