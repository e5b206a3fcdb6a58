"""Guesses of an EAGLE head in plain torch, from which trees of drafts are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.draft_costs import Shape
from penstock.core.errors import ConfigError
from penstock.engine.learning.trainable import TrainableHead, TrainingData
from penstock.models.drafters.files import read_heads
from penstock.models.drafters.heads import EagleHead, Target, load_heads

POSITIONS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses from which trees are taken, at P positions of a text. Parents come before their children."""

    scores: Tensor  # [P, M], logarithms of the joint probabilities of paths
    is_right: Tensor  # bool [P, M]: the text follows the path up to this guess
    depths: Tensor  # [M], from 1 on

    def accepted(self, shape: Shape) -> list[int]:
        """Return how many guesses of the best tree of a shape the text follows, for each position."""
        count = int((self.depths <= shape.depth).sum())
        # A guess that is certain is as probable as its parent, and a stable order leaves it behind the parent.
        order = self.scores[:, :count].sort(dim=1, descending=True, stable=True).indices
        chosen = self.is_right.gather(1, order[:, : shape.nodes])
        accepted: list[int] = chosen.sum(dim=1).tolist()
        return accepted


class TreeHead:
    """An EAGLE head in plain torch that guesses trees. Each guess sees the text and its own ancestors."""

    def __init__(self, folder: Path, target: Target, num_positions: int) -> None:
        served = load_heads(folder, target, num_positions)  # refuses heads of other models
        refusal = ConfigError(f"{folder} is no EAGLE head as `penstock draft train` writes it.")
        if not isinstance(served, EagleHead):
            raise refusal
        stored, device = read_heads(folder).tensors, target.ops.device
        self.head = TrainableHead(served.config, num_positions).to(device).requires_grad_(False)
        if set(stored) - {"d2t"} != set(self.head.published()):
            raise refusal
        self.served = served
        for name, weight in self.head.published().items():
            weight.copy_(stored[name])
        token_ids = served._token_ids
        self.lesson = TrainingData(target, None if token_ids is None else token_ids.cpu())

    @torch.inference_mode()
    def guess(self, text: Sequence[int], prompt_len: int, width: int, depth: int) -> Guesses:
        """Guess behind each token of the answer, except the last one."""
        tokens = torch.tensor([text], dtype=torch.int32, device=self.lesson.device)
        embedded, hidden = self.lesson.states(tokens)
        past: list[tuple[Tensor, Tensor]] = []
        made = self.head(embedded[:, 1:], hidden[:, :-1], past)[0]
        # The newest token at p is the head's input number p - 1, and the true guesses are the tokens behind p.
        inputs = torch.arange(prompt_len - 1, len(text) - 2, device=tokens.device)
        ends = torch.nn.functional.pad(tokens[0].long(), (0, depth), value=-1)
        truth = ends[inputs[:, None] + 2 + torch.arange(depth, device=tokens.device)]
        prefix = past[0][0][0], past[0][1][0]
        parts = [
            self._grown(made, prefix, at, wanted, width, depth)
            for at, wanted in zip(
                inputs.split(POSITIONS_AT_ONCE), truth.split(POSITIONS_AT_ONCE), strict=True
            )
        ]
        counts = torch.tensor([width] + [width**2] * (depth - 1))
        depths = torch.repeat_interleave(torch.arange(1, depth + 1), counts)
        return Guesses(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]), depths)

    def _grown(
        self, made: Tensor, prefix: tuple[Tensor, Tensor], at: Tensor, truth: Tensor, width: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Grow trees behind the head's inputs `at`, int64 [P]. Returns scores and rightness."""
        lesson, rows = self.lesson, torch.arange(len(at), device=at.device)[:, None]
        states, joint = made[at][:, None], made.new_zeros(len(at), 1)
        right = torch.ones_like(joint, dtype=torch.bool)
        own: tuple[Tensor, Tensor] | None = None
        scores, rights = [], []
        for ahead in range(depth):
            shares, chosen = (states @ lesson.output.T).log_softmax(dim=-1).topk(width)
            tokens = chosen if lesson.draft_ids is None else lesson.draft_ids[chosen]
            scores.append((joint[..., None] + shares).flatten(1))
            rights.append((right[..., None] & (tokens == truth[:, ahead, None, None])).flatten(1))
            if ahead == depth - 1:
                break
            joint, kept = scores[-1].topk(width)
            parents = kept // width
            if own is not None:
                own = own[0][rows, parents], own[1][rows, parents]
            right, tokens = rights[-1].gather(1, kept), tokens.flatten(1).gather(1, kept)
            states, own = self._pass(tokens, states[rows, parents], prefix, at, ahead + 1, own)
        return torch.cat(scores, dim=1), torch.cat(rights, dim=1)

    def _pass(
        self, tokens: Tensor, states: Tensor, prefix: tuple[Tensor, Tensor], at: Tensor, ahead: int,
        own: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
        """Compute a depth of trees: tokens [P, W] and their parents' states → their states, and the keys and values
        of their paths, [P, W, path, heads, dim]. `prefix` has those of the text, [heads, L, dim] each."""
        head = self.head
        embedded = self.lesson.target.model.embed(tokens.flatten().to(torch.int32)).float()
        x = head.fc(torch.cat([embedded.view_as(states), states], dim=-1))
        query, key, value = head.attended(x, head.rope[at + ahead][:, None])
        keys, values = key[:, :, None], value[:, :, None]
        if own is not None:
            keys, values = torch.cat([own[0], keys], dim=2), torch.cat([own[1], values], dim=2)
        seen = torch.einsum("pwhd,hld->pwhl", query, prefix[0])
        is_later = torch.arange(prefix[0].shape[1], device=at.device) > at[:, None]
        seen = seen.masked_fill(is_later[:, None, None], float("-inf"))
        scores = torch.cat([seen, torch.einsum("pwhd,pwjhd->pwhj", query, keys)], dim=-1)
        shares = (scores * head.config.attention_scale).softmax(dim=-1)
        of_text, of_path = shares.split([seen.shape[-1], keys.shape[2]], dim=-1)
        mixed = torch.einsum("pwhl,hld->pwhd", of_text, prefix[1])
        mixed += torch.einsum("pwhj,pwjhd->pwhd", of_path, values)
        return head.finished(x, mixed), (keys, values)
