"""A name for the weights in a file or folder: other weights of the same shape have another name."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".gguf", ".bin")
HEADER_BYTES = 64 << 10
NUM_SAMPLES = 512  # spread evenly over each file
SAMPLE_BYTES = 1 << 10


def weights_identity(path: Path) -> str:
    """A digest over the names, sizes, headers and samples of the weight files. Reading all of the weights would take
    as long as loading them; training changes nearly all of them, so that samples tell two versions apart. Copies of
    the same files on other machines have the same identity."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    digest = hashlib.blake2b(digest_size=16)
    for weights in files:
        size = weights.stat().st_size
        digest.update(f"{'' if weights is path else weights.name}\0{size}\0".encode())
        with weights.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
            step = max(SAMPLE_BYTES, (size - HEADER_BYTES) // NUM_SAMPLES)
            for position in range(HEADER_BYTES, size, step):
                file.seek(position)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
