"""The identity of a LoRA adapter on disk, on which gateway and engine must agree. Reads bytes; knows no tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_DIGEST_BYTES = 16


def adapter_digest(folder: Path) -> str:
    """Of all that an adapter computes with, wherever the folder is. Raises OSError."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
