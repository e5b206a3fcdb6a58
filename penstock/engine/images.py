"""Images in the engine: a waiting list on which they are decoded, and the encoder's output on the device.

The scheduler decides what is encoded and what is kept (`scheduler.images`); this module carries it out. Pixels are
prepared by a thread while a request waits. A rank without that thread prepares them when they are needed, also after
a preemption.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, PenstockError
from penstock.core.plan import Chunk, Encoding
from penstock.core.request import ImageInput, Request
from penstock.core.shares import Shares
from penstock.engine.batch import HostStep, StepAhead
from penstock.engine.collaborator import Arrival, Collaborator
from penstock.engine.image_steps import RopePlaces, seeing_both_ways, with_rope_places, write_spare_rows
from penstock.engine.staging import Staging
from penstock.kernels.interface import AttentionBatch, KVStore
from penstock.models.config import ArchitectureConfig
from penstock.models.decoder import Decoder
from penstock.models.model import Model, StagedModel
from penstock.models.vision import Pixels, VisionModel

logger = logging.getLogger(__name__)


T = TypeVar("T")


class FairThread(Generic[T]):
    """A job is a generator: each step ends with a `yield`, and the job's result is what the generator returns. The
    jobs of a tenant go one after the other, in the order of `submit`."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        # Jobs by tenant; the tenant whose turn is next comes first.
        self._lines: dict[str, deque[_Job[T]]] = {}

    def submit(self, tenant: str, steps: Generator[None, None, T]) -> Future[T]:
        job = _Job(steps)
        with self._lock:
            self._lines.setdefault(tenant, deque()).append(job)
        self._thread.submit(self._take_turn)
        return job.result

    def close(self) -> None:
        with self._lock:
            self._lines.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take_turn(self) -> None:
        """Do one step of the first job of the tenant whose turn it is."""
        with self._lock:
            tenant = next(iter(self._lines), None)
            if tenant is None:
                return
            line = self._lines[tenant]
            job = line[0]
        is_over = job.step()
        with self._lock:
            if self._lines.pop(tenant, None) is None:  # closed meanwhile
                return
            if is_over:
                line.popleft()
            if line:
                self._lines[tenant] = line
        if not is_over:
            with suppress(RuntimeError):  # closed meanwhile
                self._thread.submit(self._take_turn)


class _Job(Generic[T]):
    def __init__(self, steps: Generator[None, None, T]) -> None:
        self.result: Future[T] = Future()
        self._steps = steps
        self._is_begun = False

    def step(self) -> bool:
        """Do the next step. Returns whether the job is over."""
        if not self._is_begun and not self.result.set_running_or_notify_cancel():
            return True
        self._is_begun = True
        try:
            next(self._steps)
        except StopIteration as end:
            self.result.set_result(end.value)
        except BaseException as error:
            self.result.set_exception(error)
        else:
            return False
        return True


_IDLE_WAIT_S = 0.002  # for pixels, when the engine has nothing else to do
_RETRY_AFTER_S = 1.0
_MAX_FILE_BYTES = 4 << 30  # of the images of all live requests
_MAX_PIXEL_BYTES = 2 << 30  # prepared ahead; further images are prepared in the step that encodes them
_NOWHERE = np.empty(0, dtype=np.int64)


class ImageQueue(Collaborator):
    """Holds requests until their images are decoded: an image of each tenant in turn. Other requests do not wait with
    them."""

    def __init__(self, encoder: ImageEncoder, *, max_waiting: int = 1024) -> None:
        self._encoder = encoder
        self._decoder: FairThread[dict[bytes, Pixels]] = FairThread("images")
        self._requests = Shares(max_waiting)  # that wait, by tenant
        self._bytes = Shares(_MAX_FILE_BYTES)  # of the files of live requests, by tenant
        self._waiting: dict[str, tuple[Arrival, Future[dict[bytes, Pixels]]]] = {}
        self._bytes_of: dict[str, tuple[str, int]] = {}  # tenants and bytes of live requests

    def __len__(self) -> int:
        return len(self._waiting)

    def must_wait(self, arrival: Arrival) -> bool:
        return bool(arrival.request.images) or self._encoder.vision.card.prompt_sees_both_ways

    def enter(self, arrival: Arrival, now: float) -> None:
        request = arrival.request
        if request.id in self._waiting:
            raise InvalidRequest(f"A request with the id {request.id!r} is already being served.")
        self._encoder.check(request)
        num_bytes = sum(len(image.data) for image in request.images)
        tenant = request.tenant
        is_full = num_bytes + self._bytes.used > self._bytes.capacity and bool(self._bytes_of)
        is_full |= len(self._waiting) >= self._requests.capacity
        if is_full or self._bytes.is_full_for(tenant) or self._requests.is_full_for(tenant):
            raise Overloaded("Too many requests wait for their images.", retry_after_s=_RETRY_AFTER_S)
        wanted = [image for image in request.images if image.digest not in self._encoder]
        self._bytes_of[request.id] = tenant, num_bytes
        self._bytes.add(tenant, num_bytes)
        self._requests.add(tenant)
        self._waiting[request.id] = arrival, self._decoder.submit(tenant, self._prepare(request, wanted))

    def forget(self, request_id: str) -> None:
        tenant, num_bytes = self._bytes_of.pop(request_id, ("", 0))
        self._bytes.add(tenant, -num_bytes)
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._requests.add(waiting[0].request.tenant, -1)
            waiting[1].cancel()

    def ready(self, now: float, *, is_idle: bool) -> Iterator[tuple[Arrival, PenstockError | None]]:
        if is_idle and self._waiting:
            wait([pixels for _, pixels in self._waiting.values()], _IDLE_WAIT_S, FIRST_COMPLETED)
        for request_id, (arrival, pixels) in tuple(self._waiting.items()):
            deadline_s = arrival.request.deadline_s
            is_late = deadline_s is not None and deadline_s <= now
            if not is_late and not pixels.done():
                continue
            self._leave(request_id)
            if is_late:
                yield (
                    arrival,
                    DeadlineExceeded("The request's deadline passed while its images were decoded."),
                )
            elif (error := pixels.exception()) is None:
                self._encoder.offer(pixels.result())
                yield arrival, None
            else:
                yield arrival, error if isinstance(error, PenstockError) else _unreadable(error)

    def close(self) -> None:
        self._waiting.clear()
        self._decoder.close()

    def _prepare(
        self, request: Request, images: Sequence[ImageInput]
    ) -> Generator[None, None, dict[bytes, Pixels]]:
        """Decode images, on the thread, one in each step. Raises InvalidRequest if the prompt's image tokens do not
        match the image processor's output."""
        prepared = {}
        for image in images:
            pixels = self._encoder.vision.prepare(image.data)
            places = self._encoder.places_of(request, image)
            if (pixels.num_rows, pixels.num_tiles) != (len(places), image.num_tiles):
                raise InvalidRequest(
                    f"The prompt has {len(places)} tokens for an image, and the model makes {pixels.num_rows} of it.",
                    param="messages",
                )
            prepared[image.digest] = pixels
            yield
        return prepared


def _unreadable(error: BaseException) -> InvalidRequest:
    logger.warning("an image could not be decoded", exc_info=error)
    return InvalidRequest(f"An image cannot be decoded: {type(error).__name__}.", param="messages")


@dataclass(frozen=True, slots=True)
class _Live:
    request: Request
    places: list[NDArray[np.int64]]  # for each image: the positions of its image tokens in the prompt
    rope: RopePlaces | None


@runtime_checkable
class RunsInner(Protocol):
    """A rank's part of a model, around the part itself."""

    def run_inner(self, run: Callable[[StagedModel], Tensor]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlacedImages:
    """The rows of a step that the encoder's output replaces. Columns beyond the hidden size are added to the same
    rows after the first layers, one after the other."""

    at: NDArray[np.int64]  # positions in T
    rows: Tensor | None  # [len(at), width]; None for no position
    failed: NDArray[np.int64]  # positions in T of images that the encoder failed on
    step: HostStep
    staging: Staging

    def forward(self, model: Model, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        """Run a model as `Model.forward` does, with these rows in place of embeddings."""
        if isinstance(model, RunsInner):
            return model.run_inner(lambda inner: self._run(inner, token_ids, batch, kv))
        return self._run(model, token_ids, batch, kv)

    def _run(self, model: Model, token_ids: Tensor, batch: AttentionBatch, kv: KVStore) -> Tensor:
        assert isinstance(model, Decoder), "the loader has checked this"
        residual = model.embed(token_ids)
        if self.failed.size:
            residual[self.staging.to_device(self.failed)] = torch.nan
        at = self.staging.to_device(self.at)
        deeper: Sequence[Tensor] = ()
        if self.rows is not None:
            first, *deeper = self.rows.to(residual.dtype).split(residual.shape[1], dim=1)
            residual[at] = first
            model.rows_replaced(token_ids, at, residual)
        if self.step.spare_places is not None:
            axes = torch.tensor(model.config.rope_axes, device=residual.device)
            for table in model.rope_tables():
                write_spare_rows(table, model.max_model_len, axes, self.step.spare_places, self.staging)
        if not deeper:
            model.run_layers(residual, batch, kv)
            return model.normed(residual)

        def add_deeper(layer: int) -> None:
            if 0 < layer <= len(deeper):
                residual[at] += deeper[layer - 1]

        model.run_layers_with(residual, batch, kv, add_deeper)
        add_deeper(model.num_layers)
        return model.normed(residual)


class ImageEncoder:
    """Keeps pixels until they are encoded, and the encoder's output until a plan drops it, both by digest.

    If the encoder fails on an image, only the requests with that image end. Rows of NaN replace the output of the
    encoder, and a request with NaN logits ends with an error."""

    def __init__(self, vision: VisionModel, staging: Staging, config: ArchitectureConfig, spare: int) -> None:
        """`spare` is the first spare row of rope tables."""
        self.vision = vision
        self._staging = staging
        self._has_rope_axes = bool(config.rope_axes)
        self._window = min((window for window in config.windows if window), default=None)
        self._parts_ahead: tuple[int | None, ...] | None = None
        if config.sees_images_in_windows:
            self._parts_ahead = tuple(None if window is None else 0 for window in config.windows)
        self._spare = spare
        self._live: dict[str, _Live] = {}
        self._pixels: dict[bytes, Pixels] = {}
        self._parts: dict[bytes, list[Tensor]] = {}  # of tiles, in order
        self._is_complete: set[bytes] = set()
        self._failed: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        """Return whether an image needs no pixels. Called from the loop's own thread."""
        return digest in self._is_complete or digest in self._pixels

    def check(self, request: Request) -> None:
        """Raise InvalidRequest for a prompt whose tokens must all attend to each other, and do not."""
        if not self.vision.card.prompt_sees_both_ways:
            return
        if not request.images:
            raise InvalidRequest("This model answers about an image, and the request has none.")
        num_tokens = len(request.prompt_token_ids)
        if self._window is not None and num_tokens > self._window:
            raise InvalidRequest(
                f"The prompt has {num_tokens} tokens with its image, and the model attends to at most {self._window}."
            )

    def offer(self, pixels: Mapping[bytes, Pixels]) -> None:
        """Take prepared images, as long as there is room for them."""
        room = _MAX_PIXEL_BYTES - sum(each.num_bytes for each in self._pixels.values())
        for digest, each in pixels.items():
            if each.num_bytes <= room:
                self._pixels[digest] = each
                room -= each.num_bytes

    def places_of(self, request: Request, image: ImageInput) -> NDArray[np.int64]:
        """Return the positions in the prompt that stand for rows of the encoder's output."""
        tokens = np.array(request.prompt_token_ids[image.start : image.end], dtype=np.int64)
        return image.start + np.flatnonzero(tokens == self.vision.card.image_token_id)

    def begin(self, request: Request) -> None:
        if request.images:
            places = [self.places_of(request, image) for image in request.images]
            rope = RopePlaces.of(request) if self._has_rope_axes else None
            self._live[request.id] = _Live(request, places, rope)

    def end(self, request_id: str) -> None:
        """Forget a request, and the pixels that no other request waits for."""
        ended = self._live.pop(request_id, None)
        if ended is None:
            return
        wanted = {image.digest for live in self._live.values() for image in live.request.images}
        for image in ended.request.images:
            if image.digest not in wanted:
                self._pixels.pop(image.digest, None)

    def run(self, encodings: Sequence[Encoding], dropped: Sequence[bytes]) -> None:
        """Carry out a plan. An image that cannot be encoded for lack of memory is encoded when a chunk needs it."""
        for digest in dropped:
            self._parts.pop(digest, None)
            self._pixels.pop(digest, None)
            self._is_complete.discard(digest)
            self._failed.discard(digest)
        for encoding in encodings:
            live = self._live.get(encoding.request_id)
            if live is None:  # it ended after the plan; another request may need the image all the same
                continue
            image = live.request.images[encoding.image]
            with torch.inference_mode():
                self._encode(image, encoding.first_tile + encoding.num_tiles)

    def _encode(self, image: ImageInput, num_tiles: int) -> list[Tensor]:
        """Encode an image up to `num_tiles` tiles, from where earlier steps have ended. Returns the tiles that are
        encoded: not all of them if the encoder fails on this image."""
        parts = self._parts.setdefault(image.digest, [])
        if len(parts) >= num_tiles or image.digest in self._failed:
            return parts
        try:
            self._encode_further(image, num_tiles, parts)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            logger.exception("the encoder failed on an image of %d bytes", len(image.data))
            self._failed.add(image.digest)
            self._pixels.pop(image.digest, None)
        if len(parts) == image.num_tiles:
            self._is_complete.add(image.digest)
            self._pixels.pop(image.digest, None)
        return parts

    def _encode_further(self, image: ImageInput, num_tiles: int, parts: list[Tensor]) -> None:
        pixels = self._pixels.get(image.digest)
        if pixels is None:
            pixels = self._pixels[image.digest] = self.vision.prepare(image.data)
        while len(parts) < num_tiles:
            count = min(self.vision.tiles_at_once, num_tiles - len(parts))
            parts += self.vision.encode(pixels, len(parts), count)

    def arranged(self, chunks: Sequence[Chunk], step: HostStep) -> HostStep:
        """Return the step with the positions and contexts of image tokens."""
        live = {each.request_id: found for each in chunks if (found := self._live.get(each.request_id))}
        if live and self._has_rope_axes:
            known = {request_id: each.rope for request_id, each in live.items() if each.rope is not None}
            step = with_rope_places(step, chunks, known, self._spare)
        if not live or not self.vision.card.sees_both_ways:
            return step
        ahead = seeing_both_ways(step, chunks, {key: each.request for key, each in live.items()})
        if self._parts_ahead is None:
            return ahead
        if len(ahead.rows) == len(step.rows):  # no chunk has tokens of an image
            return step
        return replace(step, ahead=StepAhead(ahead, self._parts_ahead))

    def place(self, chunks: Sequence[Chunk], step: HostStep) -> PlacedImages | None:
        """Return the encoder's output for the image tokens of a step; None when there are none."""
        if not self._live:
            return None
        at: list[NDArray[np.int64]] = [_NOWHERE]
        failed: list[NDArray[np.int64]] = [_NOWHERE]
        rows: list[Tensor] = []
        for index, chunk in enumerate(chunks):
            live = self._live.get(chunk.request_id)
            if live is None:
                continue
            start, end = chunk.start, chunk.start + chunk.num_tokens
            for image, places in zip(live.request.images, live.places, strict=True):
                if image.start < end and image.end > start:
                    first, last = np.searchsorted(places, (start, end))
                    if last > first:
                        positions = places[first:last] - start + step.chunk_starts[index]
                        parts = self._encode(image, image.num_tiles)
                        if image.digest in self._failed:
                            failed.append(positions)
                        else:
                            at.append(positions)
                            rows.append(torch.cat(parts)[first:last])
        if len(at) == len(failed) == 1:
            return None
        return PlacedImages(
            np.concatenate(at), torch.cat(rows) if rows else None, np.concatenate(failed), step, self._staging
        )
