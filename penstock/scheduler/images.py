"""Plans the encoding of images: which tiles a step encodes, and which results the executor keeps. Knows digests and
counts of tokens, no pixel and no tensor.

A chunk may compute the tokens of an image only when all tiles of the image are encoded, in the same step or before. A
step encodes as many tiles as its time allows, and at least one, so that an image of many tiles is spread over steps
between which running requests decode.

Results are cached by the digest of the image. A running request holds the image that it is about to compute, from the
first tile until its chunks are past the image. Room for all tokens of an image is taken with the first tile, so that
every holder can continue; images that no request holds are dropped in order of their last use.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from penstock.core.errors import InvalidRequest
from penstock.core.plan import Encoding
from penstock.core.request import ImageInput, Request
from penstock.scheduler.sequence import Sequence
from penstock.scheduler.step_builder import StepBuilder


def check_images(request: Request, max_step_tokens: int) -> None:
    """Raise InvalidRequest for images that no step could compute."""
    end = 0
    for image in request.images:
        if image.start < end or image.num_tokens < 1 or image.end > len(request.prompt_token_ids):
            raise InvalidRequest("The places of images in the prompt are not in order.", param="messages")
        if image.is_whole and image.num_tokens > max_step_tokens:
            raise InvalidRequest(
                f"An image has {image.num_tokens} tokens, and this server computes at most {max_step_tokens} in one "
                "step.",
                param="messages",
                hint="Raise --max-num-batched-tokens.",
            )
        end = image.end


@dataclass(slots=True)
class _Entry:
    image: ImageInput
    num_tiles_done: int = 0  # once all steps planned so far have run
    holders: set[int] = field(default_factory=set)  # numbers of running requests


class ImageEncodings:
    def __init__(self, capacity_tokens: int) -> None:
        """The results of images with more tokens than `capacity_tokens` together are not kept. A single image may
        have more."""
        self._capacity_tokens = capacity_tokens
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        self._dropped: list[bytes] = []

        self.num_tokens = 0  # of all entries
        # Counters since construction.
        self.num_images = 0
        self.num_encoded = 0
        self.num_queries = 0
        self.num_hits = 0

    def reach(self, sequence: Sequence, num_tokens: int, most: int, step: StepBuilder) -> int:
        """Return how many of a request's next `num_tokens` tokens this step can compute, and add the encodings that
        these tokens need to the step. An image that is computed as a whole may extend the result up to `most`
        tokens."""
        start = sequence.num_computed
        end = min(start + num_tokens, sequence.num_known)
        for index, image in enumerate(sequence.request.images):
            if image.end <= start:
                continue
            if image.start >= end:
                break
            if not self._encode(sequence, index, step):
                return max(0, image.start - start)
            if image.is_whole and end < image.end:
                if image.end - start > most:
                    return max(0, image.start - start)
                end = image.end
        return end - start

    def passed(self, sequence: Sequence) -> None:
        """Release the images whose tokens are computed."""
        for image in sequence.request.images:
            if image.end > sequence.num_computed:
                break
            self._let_go(image.digest, sequence.number)

    def stop(self, sequence: Sequence) -> None:
        """Release all images of a request that stops running."""
        for image in sequence.request.images:
            self._let_go(image.digest, sequence.number)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the digests of images that the executor must forget."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _encode(self, sequence: Sequence, index: int, step: StepBuilder) -> bool:
        """Hold an image for a request, and encode as many tiles as the step has time for. Returns whether the image
        is done."""
        image = sequence.request.images[index]
        entry = self._entries.get(image.digest)
        if entry is None or sequence.number not in entry.holders:
            if entry is None and not self._make_room(image.num_tokens):
                return False
            self.num_queries += 1
            self.num_hits += entry is not None
        if entry is None:
            entry = self._entries[image.digest] = _Entry(image)
            self.num_tokens += image.num_tokens
        entry.holders.add(sequence.number)
        self._entries.move_to_end(image.digest)
        missing = image.num_tiles - entry.num_tiles_done
        num_tiles = min(missing, step.encoder_room(image.tile_patches)) if missing else 0
        if num_tiles:
            step.add_encoding(
                Encoding(sequence.request_id, index, entry.num_tiles_done, num_tiles), image.tile_patches
            )
            entry.num_tiles_done += num_tiles
            self.num_encoded += num_tiles == missing
        return num_tiles == missing

    def _make_room(self, num_tokens: int) -> bool:
        """Drop images until there is room for one more of `num_tokens`. Returns False when the rest is held."""
        idle = [digest for digest, entry in self._entries.items() if not entry.holders]
        while self._entries and self.num_tokens + num_tokens > self._capacity_tokens:
            if not idle:
                return False
            digest = idle.pop(0)
            self.num_tokens -= self._entries.pop(digest).image.num_tokens
            self._dropped.append(digest)
        return True

    def _let_go(self, digest: bytes, number: int) -> None:
        if (entry := self._entries.get(digest)) is not None:
            entry.holders.discard(number)
