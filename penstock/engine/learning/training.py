"""Trains an EAGLE head for a model, from text that the model wrote itself. Knows no command line and no prompts.

The model writes answers, which are kept in the output folder; its hidden states over these answers are computed when
a batch needs them. The head learns to predict the model's next hidden state and its distribution over tokens, for
several positions ahead: it is fed with its own predictions, as it is when it drafts.

Training runs in plain torch with autograd. `penstock.models.drafters` serves the result.

A drafter is measured as it is served: acceptance by position, and tokens per second of one stream.
"""

from __future__ import annotations

import gc
import json
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.clock import SystemClock
from penstock.core.engine_config import EngineConfig
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.messages import DrafterStats, ModelCard
from penstock.core.request import SamplingParams
from penstock.engine.device import choose_ops
from penstock.engine.learning.texts import TEXTS, OnStage, Prompts, Texts, TrainSettings, write_texts
from penstock.engine.learning.trainable import TrainableHead, TrainingData, head_config, shifted
from penstock.engine.offline import OfflineEngine
from penstock.models.drafters.files import write_heads
from penstock.models.drafters.heads import Target
from penstock.models.load import load_model, open_checkpoint, weight_source
from penstock.models.model import staged

AHEAD = 4  # positions that the head learns to draft, and is measured on
LOSS_DECAY = 0.8  # from one position to the next
STATE = "training.pt"
CURVE = "curve.json"
NUM_WARM_UPS = 4  # prompts that are answered before a measurement


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: Tensor  # int32 [B, L]
    counts: Tensor  # bool [B, L - 1]: the head's output there leads to a token of an answer


@dataclass(frozen=True, slots=True)
class Measured:
    """Losses and acceptance of one pass over a batch. Counts are by position ahead."""

    loss: Tensor
    reached: list[int]  # chains of drafts that were right so far
    accepted: list[int]  # ... and whose next draft is the model's choice too


class Trainer:
    """Trains a head epoch by epoch. Its state can be saved after every batch."""

    def __init__(self, lesson: TrainingData, settings: TrainSettings, texts: Texts) -> None:
        torch.manual_seed(settings.seed)
        self.lesson, self._settings, self._texts = lesson, settings, texts
        self.config = head_config(lesson.target.model.config)
        longest = max(map(len, texts.token_ids))
        self.head = TrainableHead(self.config, longest).to(lesson.device)
        rate = min(1e-3, 0.6 / self.config.hidden_size)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        per_epoch = sum(1 for _ in self._batches(0, held_out=False))
        if not per_epoch:
            raise ConfigError(
                "The answers are too short to train with.", hint="Give more prompts, or more --tokens."
            )
        self.num_steps = per_epoch * settings.epochs
        self._per_epoch = per_epoch
        self.step = 0
        self.curve: list[dict[str, Any]] = []

    def run(self, on_stage: OnStage, checkpoint: Callable[[], None], every: int = 200) -> None:
        """Train to the end. Measures acceptance after every epoch, and calls `checkpoint` now and then."""
        while self.step < self.num_steps:
            epoch, done = divmod(self.step, self._per_epoch)
            losses = []
            for number, batch in enumerate(self._batches(epoch, held_out=False)):
                if number < done:
                    continue
                losses.append(self._learn(batch))
                self.step += 1
                on_stage("Training", self.step / self.num_steps)
                if self.step % every == 0:
                    checkpoint()
            loss = float(torch.stack(losses).mean())
            self.curve.append({"epoch": epoch + 1, "loss": loss, "acceptance": self.measure()})
            checkpoint()

    def measure(self) -> list[float]:
        """Return the acceptance of each position on held-out texts, given that all positions before it were
        accepted."""
        reached, accepted = [0] * AHEAD, [0] * AHEAD
        self.head.eval()
        with torch.no_grad():
            for batch in self._batches(0, held_out=True):
                measured = self._pass(batch)
                reached = [a + b for a, b in zip(reached, measured.reached, strict=True)]
                accepted = [a + b for a, b in zip(accepted, measured.accepted, strict=True)]
        self.head.train()
        return [a / max(1, b) for a, b in zip(accepted, reached, strict=True)]

    def state(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "draft_ids": self.lesson.draft_ids,
            "step": self.step,
            "num_steps": self.num_steps,
            "curve": self.curve,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.curve = state["step"], state["curve"]

    def _learn(self, batch: _Batch) -> Tensor:
        warm_up = max(1, self.num_steps // 20)
        share = min(
            (self.step + 1) / warm_up,
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.step / self.num_steps)),
        )
        rate = min(1e-3, 0.6 / self.config.hidden_size)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * share
        loss = self._pass(batch).loss
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 0.5)
        self._optimizer.step()
        return loss.detach()

    def _pass(self, batch: _Batch) -> Measured:
        lesson, token_ids = self.lesson, batch.token_ids
        embedded, hidden = lesson.states(token_ids)
        embedded, features, wanted = embedded[:, 1:], hidden[:, :-1], hidden[:, 1:]
        scale = wanted.square().mean().sqrt()
        counts = batch.counts.to(lesson.device)
        shares, chosen = lesson.answers(wanted[counts])
        is_cuda = lesson.device.type == "cuda"
        past: list[tuple[Tensor, Tensor]] = []
        losses, reached, accepted = [], [], []
        chain = counts
        for ahead in range(AHEAD):
            with torch.autocast("cuda", torch.bfloat16, enabled=is_cuda):
                made = self.head(embedded, features, past)
                logits = functional.linear(made[counts], lesson.output)
            features = shifted(made, 1)
            logits, errors = logits.float(), (made.float() - wanted)[counts] / scale
            divergence = functional.kl_div(logits.log_softmax(dim=1), shares, reduction="batchmean")
            regression = functional.smooth_l1_loss(errors, torch.zeros_like(errors))
            losses.append(LOSS_DECAY**ahead * (divergence + 0.5 * regression))
            drafted = logits.detach().argmax(dim=1)
            if lesson.draft_ids is not None:
                drafted = lesson.draft_ids[drafted]
            right = torch.zeros_like(counts)
            right[counts] = drafted == chosen
            chain = chain & counts
            reached.append(int(chain.sum()))
            chain = chain & right
            accepted.append(int(chain.sum()))
            chain = torch.cat([torch.zeros_like(chain[:, :1]), chain[:, :-1]], dim=1)
        return Measured(torch.stack(losses).sum(), reached, accepted)

    def _batches(self, epoch: int, *, held_out: bool) -> Iterator[_Batch]:
        """Yield texts of similar lengths together, in an order that depends on the seed and the epoch alone."""
        texts, chosen = self._texts, self._texts.chosen(held_out=held_out)
        chosen = [index for index in chosen if len(texts.token_ids[index]) > AHEAD + 1]
        chosen.sort(key=lambda index: len(texts.token_ids[index]))
        groups: list[list[int]] = []
        for index in chosen:
            length = len(texts.token_ids[index])
            if not groups or (len(groups[-1]) + 1) * length > self._settings.batch_tokens:
                groups.append([])
            groups[-1].append(index)
        generator = torch.Generator().manual_seed(self._settings.seed * 1_000_003 + epoch)
        for number in torch.randperm(len(groups), generator=generator).tolist():
            yield self._batch(groups[number])

    def _batch(self, group: Sequence[int]) -> _Batch:
        texts = self._texts
        longest = max(len(texts.token_ids[index]) for index in group)
        token_ids = torch.zeros(len(group), longest, dtype=torch.int32)
        counts = torch.zeros(len(group), longest - 1, dtype=torch.bool)
        for row, index in enumerate(group):
            ids, prompt_len = texts.token_ids[index], texts.prompt_lens[index]
            token_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            # The output at p leads to token p + 2. A head drafts once it has seen the first token of the answer.
            counts[row, max(0, prompt_len - 1) : len(ids) - 1] = True
        return _Batch(token_ids, counts)


def draft_vocabulary(texts: Texts, vocab_size: int, wanted: int | None) -> Tensor | None:
    """Choose the tokens that a head can draft: the most frequent ones of the texts, in ascending order. None for
    all. The output matrix is the largest part of a draft's work."""
    count = wanted or max(8192, vocab_size // 4)
    if count >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids, prompt_len in zip(texts.token_ids, texts.prompt_lens, strict=True):
        counts += torch.bincount(torch.tensor(ids[prompt_len:]), minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


def write_head(trainer: Trainer, folder: Path) -> None:
    """Write the head in EAGLE's published format. A smaller vocabulary is `d2t`, as EAGLE 3 has it; the rows of the
    output matrix are the model's own, and are not repeated."""
    config, model = trainer.config, trainer.lesson.target.model.config
    tensors = trainer.head.tensors()
    draft_ids = trainer.lesson.draft_ids
    if draft_ids is not None:
        tensors["d2t"] = draft_ids.cpu() - torch.arange(len(draft_ids))
    settings = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu" if config.activation == "silu" else "gelu_pytorch_tanh",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": model.vocab_size if draft_ids is None else len(draft_ids),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    write_heads(folder, settings, tensors)
    (folder / CURVE).write_text(json.dumps(trainer.curve, indent=2) + "\n", encoding="utf-8")


def save_state(trainer: Trainer, folder: Path) -> None:
    partial = folder / f".{STATE}.part"
    torch.save(trainer.state(), partial)
    partial.replace(folder / STATE)


def load_state(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """Load the state of an interrupted training; None if it was interrupted before its first checkpoint."""
    if not (folder / STATE).exists():
        return None
    try:
        state: dict[str, Any] = torch.load(folder / STATE, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelLoadError(
            f"{folder / STATE} cannot be read, so the training cannot be resumed.",
            hint="Remove the file to train the head again from the answers that are there.",
        ) from error
    return state


def train_head(
    config: EngineConfig,
    model_path: Path,
    prompts: Prompts,
    settings: TrainSettings,
    on_stage: OnStage,
    *,
    resume: bool = False,
) -> Trainer:
    """Train a head for a model and write it to the output folder. With `resume`, an interrupted training
    continues."""
    folder = settings.output
    has_texts = (folder / TEXTS).exists()
    if has_texts and not resume:
        raise ConfigError(
            f"{folder} holds an earlier training.", hint="Go on with --resume, or give another --output."
        )
    texts = Texts.load(folder) if has_texts else Texts()
    num_threads = torch.get_num_threads()
    write_texts(config, model_path, prompts, settings, texts, on_stage)
    gc.collect()  # the engine's memory
    torch.cuda.empty_cache()
    target = load_target(config, model_path)
    torch.set_num_threads(num_threads)  # an engine leaves its kernels all cores but one
    state = load_state(folder, target.ops.device)
    vocab_size = target.model.config.vocab_size
    if max(max(ids) for ids in texts.token_ids) >= vocab_size:
        raise _of_another_model(folder)
    chosen = state["draft_ids"] if state else draft_vocabulary(texts, vocab_size, settings.vocabulary)
    num_chosen = vocab_size if chosen is None else len(chosen)
    if settings.vocabulary is not None and num_chosen != min(settings.vocabulary, vocab_size):
        raise ConfigError(
            f"The training in {folder} is of a head that can draft {num_chosen:,} tokens.",
            hint="Leave --vocabulary out, or give another --output.",
        )
    trainer = Trainer(TrainingData(target, chosen), settings, texts)
    if state is not None:
        try:
            trainer.restore(state)
        except (KeyError, ValueError, RuntimeError) as error:  # tensors of other sizes
            raise _of_another_model(folder) from error

    def checkpoint() -> None:
        save_state(trainer, folder)
        write_head(trainer, folder)

    trainer.run(on_stage, checkpoint)
    return trainer


def _of_another_model(folder: Path) -> ConfigError:
    return ConfigError(
        f"The training in {folder} is of another model, or of other settings.", hint="Give another --output."
    )


def load_target(config: EngineConfig, model_path: Path) -> Target:
    ops, settings = choose_ops(config), config.model
    model = load_model(
        model_path,
        ops,
        quantization=settings.quantization,
        load_format=settings.load_format,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
    )
    source = weight_source(open_checkpoint(model_path), settings.load_format, settings.seed, ops.device)
    return Target(staged(model), source, ops)


@dataclass(frozen=True, slots=True)
class DraftFigures:
    answers: list[list[int]]
    tokens_per_s: float
    drafters: tuple[DrafterStats, ...]


def measure(
    config: EngineConfig,
    model_path: Path,
    prompts: Callable[[ModelCard], Sequence[Sequence[int]]],
    num_measured: int,
    max_tokens: int,
) -> DraftFigures:
    """Answer the first prompts one after the other. Before, the next few prompts are answered and every prompt is
    computed once, so that neither compilation, nor recorded graphs, nor a cold cache counts."""
    clock = SystemClock()
    engine = OfflineEngine(config, model_path)
    try:
        room = engine.card.max_model_len - max_tokens
        fitting = [prompt for prompt in prompts(engine.card) if 0 < len(prompt) <= room]
        if not fitting:
            raise ConfigError(f"No prompt leaves room for {max_tokens} tokens in the model's context.")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        measured = fitting[:num_measured]
        for prompt in fitting[num_measured:][:NUM_WARM_UPS] or measured[:1]:
            engine.generate([prompt], sampling)
        for prompt in measured:
            engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        began_s = clock.now()
        answers = [engine.generate([prompt], sampling)[0].token_ids for prompt in measured]
        elapsed_s = clock.now() - began_s
        return DraftFigures(answers, sum(map(len, answers)) / elapsed_s, engine.stats().drafters)
    finally:
        engine.close()
