"""Loads the vision part of a GGUF model from the `mmproj` file beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.core.errors import ModelLoadError
from penstock.core.image_layout import VisionCard
from penstock.kernels.interface import Ops
from penstock.models.config import Fields
from penstock.models.gguf_choice import choose_mmproj, folders_of_mmproj
from penstock.models.gguf_config import metadata_fields
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_tokenizer import tokenizer_from_gguf
from penstock.models.mmproj_file import MmprojFile
from penstock.models.mmproj_grids import (
    LightOnOcrProjector,
    PixtralProjector,
    Qwen3Projector,
    Qwen25Projector,
    QwenProjector,
)
from penstock.models.mmproj_projectors import (
    Gemma3Projector,
    Idefics3Projector,
    InternVLProjector,
    LlavaProjector,
    Projector,
)
from penstock.models.tokenizer import TokenizerFiles
from penstock.models.vision import TransformersVision
from penstock.models.vision_load import EXTRA, family_of, quiet_transformers
from penstock.models.vision_weights import placed_tower

logger = logging.getLogger(__name__)

PROJECTORS: dict[str, type[Projector]] = {
    "gemma3": Gemma3Projector,
    "idefics3": Idefics3Projector,
    "internvl": InternVLProjector,
    "lightonocr": LightOnOcrProjector,
    "mlp": LlavaProjector,
    "pixtral": PixtralProjector,
    "qwen2vl_merger": QwenProjector,
    "qwen2.5vl_merger": Qwen25Projector,
    "qwen3vl_merger": Qwen3Projector,
}
AUTO, NONE = "auto", "none"
_PLAIN_PLACE = "<image>"  # as many templates write an image, whatever token stands for one


def mmproj_path(model: Path, setting: str) -> Path | None:
    """Return the file of a GGUF model's vision part; None for a model without one. Raises ModelLoadError if the
    setting names a file that is not there, or if the model is no GGUF file."""
    if setting == NONE:
        return None
    if setting == AUTO:
        return _found_beside(model) if model.is_file() else None
    if not model.is_file():
        raise ModelLoadError(
            f"--mmproj is for GGUF models, and {model} is a folder.", hint="Leave --mmproj out."
        )
    path = Path(setting).expanduser()
    if not path.is_file():
        raise ModelLoadError(f"--mmproj names {setting}, and there is no such file.")
    return path


def _found_beside(model: Path) -> Path | None:
    found = (choose_mmproj(model, folder.glob("*.gguf")) for folder in folders_of_mmproj(model))
    return next((each for each in found if each is not None), None)


def load_gguf_vision(
    model: Path, setting: str, ops: Ops, chat_template: str | None = None
) -> TransformersVision | None:
    """Load the vision part of a GGUF model; None for a model without one. A file that was found beside the model, and
    cannot be used, is passed over with a warning. `chat_template` stands in for the model's own."""
    path = mmproj_path(model, setting)
    if path is None:
        return None
    text = GGUFFile(model)
    try:
        vision = load_mmproj(path, text, tokenizer_from_gguf(text), ops, chat_template)
    except ModelLoadError as error:
        if setting != AUTO:
            raise
        logger.warning("%s takes text only: %s", model.name, error)
        return None
    logger.info("images of %s are read by %s", model.name, path.name)
    return vision


def load_mmproj(
    path: Path, text: GGUFFile, tokenizer: TokenizerFiles, ops: Ops, chat_template: str | None = None
) -> TransformersVision:
    """Load the vision part in the file at `path` for a text model. Raises ModelLoadError."""
    file = MmprojFile(path)
    projector = _projector(file, text)
    try:
        import PIL.Image  # noqa: F401
        import transformers
    except ImportError as error:
        raise ModelLoadError(
            "Images need packages that are not installed.", hint=f"pip install '{EXTRA}'"
        ) from error
    spellings = {
        token["id"]: token["content"] for token in json.loads(tokenizer.tokenizer_json)["added_tokens"]
    }
    settings = {
        **projector.settings(),
        **_token_settings(projector, tokenizer, spellings, text.path.name),
        "text_config": projector.text_settings(),
        "tie_word_embeddings": False,
    }
    kind = getattr(transformers, projector.class_name())
    family = family_of(Fields({**settings, "architectures": [projector.class_name()]}, file.name))
    assert family is not None, "every projector has a class that sees images"
    try:
        with quiet_transformers():
            config = kind.config_class(**settings)
            tower = _tower(kind, config, projector, ops)
            vision = family(config, projector.processor(), tower, ops, spellings)
    except ModelLoadError:
        raise
    except (
        Exception
    ) as error:  # transformers and torch raise errors of all kinds for sizes that they cannot use
        raise ModelLoadError(f"{file.name} has settings that do not fit together: {error}.") from error
    vision.card = _with_place(vision.card, chat_template or tokenizer.chat_template)
    return vision


def _projector(file: MmprojFile, text: GGUFFile) -> Projector:
    """Return the projector of a file. Raises ModelLoadError for a type that is not known."""
    kind = file.projector_type
    if kind not in PROJECTORS:
        raise ModelLoadError(
            f"{file.name} has a projector of the type {kind!r}; known are {', '.join(PROJECTORS)}.",
            hint="Serve the folder of the original checkpoint, with --quantization int4 for a like size.",
        )
    return PROJECTORS[kind](file, metadata_fields(text))


def _tower(kind: Any, config: Any, projector: Projector, ops: Ops) -> Any:
    """Build the tower and the projector from the tensors of the file."""
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in placed_tower(kind(config), torch.device("meta")).state_dict().items()
        }
    tensors = {f"model.{name}": projector.tensor(name, shape).to(ops.dtype) for name, shape in shapes.items()}
    whole = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=ops.dtype)
    return placed_tower(whole, ops.device)


def _token_settings(
    projector: Projector, tokenizer: TokenizerFiles, spellings: Mapping[int, str], where: str
) -> dict[str, int]:
    """Find the tokens that the class needs in the vocabulary of the text model."""
    ids = {spelling: token_id for token_id, spelling in spellings.items()}
    names = projector.image_tokens
    if projector.any_token:
        special = tokenizer.special_tokens
        names += tuple(special[name] for name in ("unk_token", "pad_token") if name in special)
    image_token = next((name for name in names if name in ids), None)
    wanted = {"image_token_id": image_token or names[0], **projector.other_tokens}
    missing = [name for name in wanted.values() if name not in ids]
    if missing:
        raise ModelLoadError(
            f"The vocabulary of {where} has no token {missing[0]}, which models with images of this type have: the "
            "mmproj file belongs to another model."
        )
    return {setting: ids[name] for setting, name in wanted.items()}


def _with_place(card: VisionCard, template: str | None) -> VisionCard:
    """Return the card with what the chat template writes for an image."""
    if template is None or card.template_token in template or _PLAIN_PLACE not in template:
        return card
    return msgspec.structs.replace(card, template_token=_PLAIN_PLACE)
