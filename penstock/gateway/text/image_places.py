"""Puts the tokens of images into a prompt. Knows the rules of `core.image_layout`, and no pixel.

A chat template writes one token for each image. `expanded` replaces that token by the text of the image's layout, in
which every image token still stands for a run of such tokens; after the text is tokenized, `with_runs` repeats them.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.image_layout import NUMBER, ImageLayout, VisionCard, image_layout
from penstock.core.request import ImageInput
from penstock.gateway.prompts import ChatMessage, ChatPrompt, ImagePart
from penstock.gateway.text.template import RenderedChat


class ImagePlaces:
    """The images of one prompt. Raises InvalidRequest for an image that the model cannot see."""

    def __init__(self, card: VisionCard, parts: Sequence[ImagePart]) -> None:
        if card.prompt_sees_both_ways and len(parts) > 1:
            raise InvalidRequest("This model takes one image in a request.", param=parts[1].param)
        self._card = card
        self._parts = parts
        self._layouts = [self._layout(part) for part in parts]
        # Places in the rendered text, and by how much later text moved.
        self._shifts: list[tuple[int, int]] = []

    def _layout(self, part: ImagePart) -> ImageLayout:
        assert part.loaded is not None, "the gateway has loaded the images"
        try:
            return image_layout(self._card, part.loaded.width, part.loaded.height)
        except InvalidRequest as error:
            raise error.with_param(part.param) from error

    def check(self, rendered: RenderedChat) -> None:
        """Raise InvalidRequest unless the template has written as many places as there are images."""
        if len(self._find(rendered)) != len(self._parts):
            raise self._misplaced()

    def expanded(self, rendered: RenderedChat) -> RenderedChat:
        """Return the text with the layout of every image in its place."""
        token = self._card.template_token
        pieces: list[str] = []
        end = moved = 0
        for number, (at, layout) in enumerate(zip(self._find(rendered), self._layouts, strict=True)):
            text = layout.text.replace(NUMBER, str(number))
            pieces += (rendered.text[end:at], text)
            end = at + len(token)
            moved += len(text) - len(token)
            self._shifts.append((end, moved))
        pieces.append(rendered.text[end:])
        ranges = tuple((self.moved(start), self.moved(stop)) for start, stop in rendered.plain_ranges)
        return RenderedChat("".join(pieces), ranges)

    def moved(self, position: int) -> int:
        """Return where a position of the rendered text is in the expanded text."""
        index = bisect_right(self._shifts, position, key=lambda shift: shift[0])
        return position + (self._shifts[index - 1][1] if index else 0)

    def with_runs(
        self, token_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[ImageInput, ...], list[int]]:
        """Return the prompt's tokens, the images in it, and for each number of tokens before, the number now."""
        image_token = self._card.image_token_id
        runs = iter([(number, run) for number, layout in enumerate(self._layouts) for run in layout.runs])
        told: list[int] = []
        counts = [0]
        spans: dict[int, tuple[int, int]] = {}
        for token_id in token_ids:
            if token_id == image_token:
                number, run = next(runs, (None, 0))
                if number is None:
                    raise self._misplaced()
                first, _ = spans.get(number, (len(told), 0))
                told += [token_id] * run
                spans[number] = first, len(told)
            else:
                told.append(token_id)
            counts.append(len(told))
        if next(runs, None) is not None:
            raise self._misplaced()
        images = tuple(self._image(number, *spans[number]) for number in sorted(spans))
        if self._card.prompt_sees_both_ways:
            images = tuple(_over_prompt(image, told) for image in images)
        return tuple(told), images, counts

    def _image(self, number: int, start: int, end: int) -> ImageInput:
        layout, loaded = self._layouts[number], self._parts[number].loaded
        assert loaded is not None
        return ImageInput(
            start=start,
            num_tokens=end - start,
            digest=loaded.digest,
            num_tiles=layout.num_tiles,
            tile_patches=layout.tile_patches,
            grid=layout.grid,
            is_whole=self._card.sees_both_ways,
            data=loaded.data,
        )

    def _find(self, rendered: RenderedChat) -> list[int]:
        """Return where the template wrote images. A client that spells the token out writes plain text."""
        plain = {start for start, _ in rendered.plain_ranges}
        found = re.finditer(re.escape(self._card.template_token), rendered.text)
        return [match.start() for match in found if match.start() not in plain]

    def _misplaced(self) -> InvalidRequest:
        return InvalidRequest(
            "The chat template of this model has no place for an image in one of these turns.",
            param=self._parts[0].param,
        )


def _over_prompt(image: ImageInput, token_ids: Sequence[int]) -> ImageInput:
    """Return an image that takes the whole prompt with it: every token depends on every other one, so two prompts
    share KV only if they are equal."""
    prompt = msgspec.msgpack.encode((image.digest, token_ids))
    digest = hashlib.blake2b(prompt, digest_size=len(image.digest)).digest()
    return msgspec.structs.replace(image, start=0, num_tokens=len(token_ids), digest=digest)


def with_images_in_user_turns(prompt: ChatPrompt) -> ChatPrompt:
    """Return the chat with the images of tools' results in a turn of the user behind them, for templates whose tool
    turns hold text only."""
    messages: list[ChatMessage] = []
    waiting: list[ImagePart] = []
    for message in (*prompt.messages, None):
        if waiting and (message is None or message.role != "tool"):
            messages.append(ChatMessage("user", tuple(waiting)))
            waiting = []
        if message is None:
            break
        if message.role == "tool" and not isinstance(message.content, str):
            waiting += [part for part in message.content if isinstance(part, ImagePart)]
            texts = tuple(part for part in message.content if not isinstance(part, ImagePart))
            message = msgspec.structs.replace(message, content=texts)
        messages.append(message)
    return msgspec.structs.replace(prompt, messages=tuple(messages))


def moved_positions(positions: Mapping[int, int], counts: Sequence[int]) -> dict[int, int]:
    """Return numbers of tokens, by places in the text, after runs were written out."""
    return {place: counts[count] for place, count in positions.items()}
