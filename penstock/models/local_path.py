"""Finds the model at a path of this machine: a folder, a .gguf file, or a folder of the Hugging Face hub's cache.
Says what a path holds instead of a model; never reads weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from penstock.core.errors import ModelLoadError
from penstock.models.gguf_choice import choose_gguf

_LFS_POINTER = b"version https://git-lfs"
_LARGEST_POINTER = 1 << 10  # bytes

logger = logging.getLogger(__name__)


def checked_local_path(path: Path) -> Path:
    """Return the folder or the .gguf file of the model at `path`. Raises ModelLoadError if there is none."""
    if (path / "snapshots").is_dir():
        path = snapshot_of(path) or path
    if path.is_dir():
        path = _model_in(path)
    elif path.suffix != ".gguf":
        folder = f", such as {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise ModelLoadError(
            f"{path} is neither a folder nor a .gguf file.",
            hint=f"For safetensors, give the folder that holds config.json{folder}.",
        )
    # Files of the hub's cache are links, whose names tell the other parts of a model.
    return path.parent.resolve() / path.name if path.is_file() else path.resolve()


def snapshot_of(folder: Path, revision: str | None = None) -> Path | None:
    """Return the model in a folder of the hub's cache; None for a download that never ended. Without a revision, a
    branch, a tag or a commit, the main branch is taken; if the cache does not know that, the latest snapshot."""
    reference = folder / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    if commit is not None and "/" not in commit and (folder / "snapshots" / commit).is_dir():
        snapshots = [folder / "snapshots" / commit]
    else:
        snapshots = [each for each in folder.glob("snapshots/*") if each.is_dir() and revision is None]
    usable = [each for each in snapshots if (each / "config.json").exists() or [*each.rglob("*.gguf")]]
    latest = max(usable, key=lambda each: each.stat().st_mtime, default=None)
    return None if latest is None else checked_local_path(latest)


def _model_in(folder: Path) -> Path:
    """Return `folder`, or the GGUF file in it that is the model."""
    _refuse_pointers(folder)
    # Repositories of GGUF files may include the original's config.json.
    has_weights = any(folder.glob("*.safetensors")) or not any(folder.rglob("*.gguf"))
    return folder if (folder / "config.json").is_file() and has_weights else _gguf_in(folder)


def _refuse_pointers(folder: Path) -> None:
    """Raise ModelLoadError for a clone without Git LFS, which has small texts where the large files belong."""
    for file in sorted(folder.glob("*.*")):
        if file.is_file() and file.stat().st_size < _LARGEST_POINTER:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
            if is_pointer:
                raise ModelLoadError(
                    f"{file} is a pointer of Git LFS, not the file itself.",
                    hint=f"Run `git lfs install && git lfs pull` in {folder}.",
                )


def _refuse_adapter(folder: Path) -> None:
    """Raise ModelLoadError for the folder of a LoRA adapter."""
    if not (folder / "adapter_config.json").is_file():
        return
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))[
            "base_model_name_or_path"
        ]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    raise ModelLoadError(
        f"{folder} is a LoRA adapter, not a model.",
        hint=f"Serve its base model with it: penstock serve {base or 'MODEL'} --lora-modules {folder.name}={folder}",
    )


def _gguf_in(folder: Path) -> Path:
    """Return the model of a folder with GGUF files."""
    files = sorted(folder.rglob("*.gguf"))
    if not files:
        _refuse_adapter(folder)
        raise ModelLoadError(
            f"The folder {folder} has neither a config.json nor a .gguf file, so it is not a model folder.",
            hint="Give the folder that holds config.json and the .safetensors files, or a .gguf file.",
        )
    chosen = choose_gguf(files, f"The folder {folder}")
    if len(files) > 1:
        logger.warning("%s has %d .gguf files: taking %s", folder, len(files), chosen.relative_to(folder))
    return chosen
