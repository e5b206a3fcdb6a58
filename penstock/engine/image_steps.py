"""Arranges a step for images whose tokens differ from text in more than their embeddings: tokens that attend to each
other, and positions in three dimensions. Knows no pixel.

Tokens that attend to each other: every token of such an image becomes a sequence of its own for attention, whose
context ends with the image. All keys of a step are written before any is read, so the token attends to the whole
image.

Positions in three dimensions: the tokens of an image share the time of the image's first token, and have a row and a
column. Text continues after the largest of them. The angles of an image token mix three rows of the rope table, so
the token gets a spare row of the table, which is written before the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.core.plan import Chunk
from penstock.core.request import Request
from penstock.engine.batch import HostStep
from penstock.engine.staging import Staging

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RopePlaces:
    """The positions of a prompt with images: time, row and column of each token, and what is added to the index of a
    token after the prompt."""

    places: Int64Array  # [prompt, 3]
    is_image: NDArray[np.bool_]  # [prompt]
    shift: int

    @staticmethod
    def of(request: Request) -> RopePlaces:
        num_prompt = len(request.prompt_token_ids)
        places = np.zeros((num_prompt, 3), dtype=np.int64)
        is_image = np.zeros(num_prompt, dtype=np.bool_)
        done = position = 0
        for image in request.images:
            text = image.start - done
            places[done : image.start] = (position + np.arange(text))[:, None]
            position += text
            rows, columns = image.grid
            index = np.arange(image.num_tokens)
            places[image.start : image.end] = position + np.stack(
                [np.zeros_like(index), index // max(1, columns), index % max(1, columns)], axis=1
            )
            is_image[image.start : image.end] = True
            position += max(rows, columns)
            done = image.end
        places[done:] = (position + np.arange(num_prompt - done))[:, None]
        return RopePlaces(places, is_image, position - done)


def with_rope_places(
    step: HostStep, chunks: Sequence[Chunk], known: Mapping[str, RopePlaces], first_spare: int
) -> HostStep:
    """Return the step with the positions of prompts with images. Image tokens get the rows of the rope table from
    `first_spare` on; `HostStep.spare_places` says what these rows mix."""
    positions = step.positions.copy()
    mixed: list[Int64Array] = []
    num_mixed = 0
    for index, chunk in enumerate(chunks):
        rope = known.get(chunk.request_id)
        if rope is None:
            continue
        at = np.arange(chunk.start, chunk.start + chunk.num_tokens)
        own = at + rope.shift
        in_prompt = at < len(rope.places)
        own[in_prompt] = rope.places[at[in_prompt], 0]
        (images,) = np.nonzero(in_prompt & np.pad(rope.is_image, (0, 1))[np.minimum(at, len(rope.places))])
        own[images] = first_spare + num_mixed + np.arange(len(images))
        mixed.append(rope.places[at[images]])
        num_mixed += len(images)
        positions[step.chunk_starts[index] : step.chunk_starts[index + 1]] = own
    spare = np.concatenate(mixed) if num_mixed else None
    return replace(step, positions=positions, spare_places=spare)


def write_spare_rows(
    table: Tensor, first_spare: int, axes: Tensor, places: Int64Array, staging: Staging
) -> None:
    """Write the angles of image tokens after the rows of a rope table. `axes` says for each pair of a head which of
    time, row and column turns it."""
    half = len(axes)
    rows = staging.to_device(places)[:, axes]  # [tokens, pairs]
    pairs = torch.arange(half, device=table.device)
    angles = torch.cat([table[rows, pairs], table[rows, half + pairs]], dim=1)
    table[first_spare : first_spare + len(places)] = angles


def seeing_both_ways(step: HostStep, chunks: Sequence[Chunk], requests: Mapping[str, Request]) -> HostStep:
    """Return the step with a sequence for each token of the images that chunks compute."""
    starts, contexts, rows = [0], list[int](), list[int]()
    num_decodes = 0
    for index, chunk in enumerate(chunks):
        first = int(step.chunk_starts[index])
        cuts = _cuts(chunk, requests.get(chunk.request_id), splits_drafts=len(step.rows) > len(chunks))
        row = int(step.rows[np.searchsorted(step.query_starts, first)])
        for begin, end, context in cuts:
            if len(contexts) == num_decodes and end - begin == 1:
                num_decodes += 1
            starts.append(first + end - chunk.start)
            contexts.append(context)
        rows += [row] * len(cuts)
    query_starts = np.array(starts, dtype=np.int32)
    return replace(
        step,
        query_starts=query_starts,
        context_lens=np.array(contexts, dtype=np.int32),
        rows=np.array(rows, dtype=np.int64),
        max_query_len=int(np.diff(query_starts).max()),
        max_context_len=max(contexts),
        num_decodes=num_decodes,
        looks_ahead=True,
    )


def _cuts(chunk: Chunk, request: Request | None, *, splits_drafts: bool) -> list[tuple[int, int, int]]:
    """Cut a chunk into sequences: begin and end, in tokens of the request, and the end of the context. Drafts are cut
    as `BatchRows.build` cuts them."""
    begin, end = chunk.start, chunk.start + chunk.num_tokens
    if splits_drafts and chunk.drafts:
        return [(token, token + 1, token + 1) for token in range(begin, end)]
    cuts: list[tuple[int, int, int]] = []
    for image in () if request is None else request.images:
        if image.end <= begin or image.start >= end:
            continue
        if image.start > begin:
            cuts.append((begin, image.start, image.start))
        first, begin = max(begin, image.start), min(end, image.end)
        cuts += [(token, token + 1, image.end) for token in range(first, begin)]
    if begin < end:
        cuts.append((begin, end, end))
    return cuts
