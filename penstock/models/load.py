"""Loads a model from a Hugging Face folder or a GGUF file, and names the weights in it. The only place that knows
both formats.

Tensors are read and packed one layer at a time, so that memory peaks near the packed size.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.core.engine_config import LoadFormat, ModelImplementation, Quantization
from penstock.core.errors import ConfigError, ModelLoadError
from penstock.core.figures import format_bytes
from penstock.kernels.interface import DenseWeight, Ops
from penstock.models.config import (
    ArchitectureConfig,
    Fields,
    MissingFeature,
    NotNative,
    UnknownArchitecture,
    read_settings,
    sound_settings,
)
from penstock.models.decoder import Decoder
from penstock.models.encoders.load import ENCODERS
from penstock.models.families import FAMILIES
from penstock.models.families.class_defaults import with_class_defaults
from penstock.models.gguf_choice import split_parts
from penstock.models.gguf_config import gguf_rope_axes, has_experts, refuse_unread_settings
from penstock.models.gguf_file import GGUFFile
from penstock.models.gguf_source import GGUFSource
from penstock.models.gguf_tokenizer import tokenizer_from_gguf
from penstock.models.layout import LayoutSource
from penstock.models.missing import missing_feature
from penstock.models.mmproj import AUTO, load_gguf_vision
from penstock.models.mmproj_file import MMPROJ_ARCHITECTURE
from penstock.models.model import Model
from penstock.models.pooling import (
    PoolingSettings,
    architectures,
    generating_name,
    gguf_pooling,
    read_pooling,
)
from penstock.models.pooling_head import Head, decoder_head, yes_or_no_head
from penstock.models.quantized_floats import open_folder
from penstock.models.random_weights import RandomSource
from penstock.models.rounding import as_stored
from penstock.models.safetensors_source import SafetensorsSource
from penstock.models.sentence_modules import read_modules
from penstock.models.sharding import WHOLE, Shard
from penstock.models.stored_quantization import StoredQuantization, folder_quantization
from penstock.models.tokenizer import TokenizerFiles, tokenizer_from_folder
from penstock.models.transformers_load import TransformersCheckpoint
from penstock.models.vision import TransformersVision
from penstock.models.vision_load import load_vision, text_fields
from penstock.models.weight_parts import Part
from penstock.models.weights import OnProgress, WeightLoader, WeightSource

SUFFIXES = (".safetensors", ".gguf", ".bin")
HEADER_BYTES = 64 << 10
NUM_SAMPLES = 512  # spread evenly over each file
SAMPLE_BYTES = 1 << 10
HEAD_ROWS = 1024  # of a stored head, compared with the embedding at a time


def weights_identity(path: Path) -> str:
    """Return a digest over the settings of a folder, and the names, sizes, headers and samples of the weight files.
    Reading all of the weights would take as long as loading them; training changes nearly all of them, so that
    samples tell two versions apart. Copies of the same files on other machines have the same identity."""
    files = [*split_parts(path)]
    if path.is_dir():
        settings = path / "config.json"
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES or file == settings)
    digest = hashlib.blake2b(digest_size=16)
    for weights in files:
        size = weights.stat().st_size
        digest.update(f"{'' if weights is path else weights.name}\0{size}\0".encode())
        with weights.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
            step = max(SAMPLE_BYTES, (size - HEADER_BYTES) // NUM_SAMPLES)
            for position in range(HEADER_BYTES, size, step):
                file.seek(position)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def architecture_for_huggingface(fields: Fields) -> type[Decoder]:
    """Find the architecture by the class in `architectures`, else by `model_type`. A decoder without a head, or with
    a head for classification, is found by its name with a head for tokens."""
    asked = list(architectures(fields))
    if not asked and fields.has("model_type"):
        asked = [fields.text("model_type")]
    names = {*asked, *map(generating_name, asked)}
    names |= {name.replace("ForCausalLM", "LMHeadModel") for name in names}  # as GPT-2 is called
    for architecture in FAMILIES:
        if names.intersection(architecture.huggingface_names):
            return architecture
    if not asked:
        raise ModelLoadError(
            f"{fields.where} names neither architectures nor a model_type.",
            hint="Give the folder of a language model in Hugging Face form.",
        )
    if _DRAFTING_HEAD.search(asked[0]):
        raise ModelLoadError(
            f"{asked[0]} drafts for another model, and is none by itself.",
            hint="Serve the model that it was trained for, with --speculate heads=FOLDER.",
        )
    missing = missing_feature(asked[0])
    if missing is not None:
        raise MissingFeature(
            f"{asked[0]} needs {missing}, which Penstock does not have.",
            hint="Run the model in another server, and name that server with --external.",
        )
    raise UnknownArchitecture(
        f"The architecture {asked[0]} is not known; known are {_known_families()}; and as encoders "
        f"{', '.join(sorted(encoder.name for encoder in ENCODERS))}.",
        hint="Try --model-implementation transformers, which runs most decoders that transformers knows.",
    )


def architecture_for_gguf(file: GGUFFile) -> type[Decoder]:
    asked = file.architecture
    if asked == MMPROJ_ARCHITECTURE:
        raise ModelLoadError(
            f"{file.path.name} is the vision part of a model.",
            hint="Give the model, and this file with --mmproj.",
        )
    for architecture in FAMILIES:
        if has_experts(file) and asked in architecture.gguf_mixtures:
            return architecture
    for architecture in FAMILIES:
        if asked in architecture.gguf_names:
            return architecture
    known = ", ".join(sorted({name for architecture in FAMILIES for name in architecture.gguf_names}))
    raise ModelLoadError(
        f"The architecture {asked!r} of {file.path.name} is not known; known are {known}.",
        hint="Give the folder of the original checkpoint, with --model-implementation transformers.",
    )


def _known_families() -> str:
    return ", ".join(sorted({architecture.name for architecture in FAMILIES}))


logger = logging.getLogger(__name__)
_DRAFTING_HEAD = re.compile("eagle|medusa", re.IGNORECASE)


UNPACKED = 1.25  # times the bytes of the weights as they come: more than scales and padding add
_LARGEST_ROPE_TABLE = 1 << 28  # elements: 1 GiB


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose settings have been read, and whose weights have not."""

    path: Path
    architecture: type[Decoder]
    config: ArchitectureConfig
    gguf: GGUFFile | None
    quantization: StoredQuantization | None = None

    def source(self, *, is_pickled: bool = False) -> WeightSource:
        if self.gguf is None:
            stored = open_folder(self.path, self.quantization, is_pickled=is_pickled)
            return LayoutSource(stored, self.architecture.layout(self.config))
        return LayoutSource(GGUFSource(self.gguf), self.architecture.gguf_layout(self.config))


def open_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        raise ModelLoadError(f"There is no model at {path}.")
    if path.is_dir():
        fields = text_fields(path, _read_config(path / "config.json"))
        architecture = architecture_for_huggingface(fields)
        with sound_settings(fields.where):
            config = architecture.config_from_huggingface(with_class_defaults(fields, architecture.name))
        pooling = read_pooling(path, fields, is_decoder=True)
        if pooling.only_pools and pooling.score_tokens is None:  # there may be no head for tokens
            config = dataclasses.replace(config, tie_embeddings=True)
        config = dataclasses.replace(
            config,
            rope_axes=_rope_axes(fields.raw("rope_axes") or (), config),
            num_mtp_layers=_num_mtp_layers(fields),
        )
        return Checkpoint(path, architecture, config, None, folder_quantization(path, fields))
    file = GGUFFile(path)
    architecture = architecture_for_gguf(file)
    with sound_settings(file.path.name):
        config = architecture.config_from_gguf(file)
    refuse_unread_settings(file, config)
    config = dataclasses.replace(config, rope_axes=_rope_axes(gguf_rope_axes(file), config))
    return Checkpoint(path, architecture, config, file)


def _rope_axes(axes: Sequence[int], config: ArchitectureConfig) -> tuple[int, ...]:
    """Return the axis of each pair of a head, of which some may not be rotated."""
    return (*axes, *(0,) * (config.head_dim // 2 - len(axes))) if axes else ()


def _num_mtp_layers(fields: Fields) -> int:
    key = "num_nextn_predict_layers"
    return fields.integer(key) if fields.raw(key) else 0


def pooling_settings(path: Path) -> PoolingSettings:
    """Read from a decoder's files how it makes vectors."""
    if path.is_dir():
        fields = text_fields(path, _read_config(path / "config.json"))
        return read_pooling(path, fields, is_decoder=True)
    return gguf_pooling(GGUFFile(path), is_decoder=True)


def load_pooling_head(
    path: Path, settings: PoolingSettings, model: Model, ops: Ops, load_format: LoadFormat, seed: int
) -> Head:
    """Load the layers after a decoder's pooling."""
    source: WeightSource = RandomSource(seed, norm_offset=0.0, device=ops.device)
    if load_format != "random" and settings.num_labels is not None:
        if path.is_file():
            loader = WeightLoader(GGUFSource(GGUFFile(path)), ops)
            return yes_or_no_head(model.config.hidden_size, loader)
        source = SafetensorsSource(path)
    return decoder_head(settings, model.config.hidden_size, WeightLoader(source, ops), model.logits)


def open_any_checkpoint(
    path: Path, implementation: ModelImplementation = "auto", *, trust_remote_code: bool = False
) -> Checkpoint | TransformersCheckpoint:
    """Open a model for the code that will run it. `auto` takes transformers only for folders of which the
    architecture or a setting is not native."""
    if implementation == "native" or not (path / "config.json").is_file():
        if implementation == "transformers":
            raise ModelLoadError(
                f"Transformers' code needs a folder in Hugging Face form, which {path} is not.",
                hint="Leave --model-implementation out.",
            )
        return open_checkpoint(path)
    fields = _read_config(path / "config.json")
    if implementation == "auto":
        try:
            architecture_for_huggingface(text_fields(path, fields))
            return open_checkpoint(path)
        except NotNative as unknown:
            return TransformersCheckpoint.instead_of_native(path, fields, unknown, trust_remote_code)
    return TransformersCheckpoint.open(path, fields, trust_remote_code=trust_remote_code)


def load_model(
    path: Path,
    ops: Ops,
    *,
    implementation: ModelImplementation = "auto",
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    shard: Shard = WHOLE,
    spare_rope_rows: int = 0,
    on_progress: OnProgress | None = None,
) -> Model:
    """Load a model. `load_format="random"` needs settings only and fills weights from `seed`. `max_model_len`
    shortens the context below what the model allows; it cannot lengthen it. Only the part of a `shard` is read.
    `spare_rope_rows`: the most image tokens of one step, for models with positions in three dimensions."""
    checkpoint = open_any_checkpoint(path, implementation, trust_remote_code=trust_remote_code)
    config = checkpoint.config
    if config.rope_axes:
        config = dataclasses.replace(config, spare_rope_rows=spare_rope_rows)
    num_positions = _num_positions(config, max_model_len)
    source = weight_source(checkpoint, load_format, seed, ops.device)
    if isinstance(checkpoint, TransformersCheckpoint):
        return checkpoint.load(source, ops, num_positions, shard, quantization, on_progress)
    config = _with_stored_head(config, source)
    loader = WeightLoader(source, ops, quantization=quantization, shard=shard, on_progress=on_progress)
    model = checkpoint.architecture(config, loader, num_positions)
    loader.refuse_unread_biases()
    logger.debug("read %s of weights", format_bytes(source.bytes_read))
    kept, read = loader.experts_kept_bytes, loader.experts_read_bytes
    if kept > UNPACKED * read:
        logger.warning(
            "experts are not kept in the form they come in: unpacked they take %s instead of %s",
            format_bytes(kept),
            format_bytes(read),
        )
    return model


def _with_stored_head(config: ArchitectureConfig, source: WeightSource) -> ArchitectureConfig:
    """Tie the head to the embedding where a checkpoint stores no head: settings may leave the tie to a class. A head
    that is stored and differs from the embedding is used, whatever the settings say."""
    names = source.names()
    if names and not any(name.startswith("lm_head.") for name in names):
        return dataclasses.replace(config, tie_embeddings=True)
    if config.tie_embeddings and "lm_head.weight" in names and _has_own_head(config, source):
        return dataclasses.replace(config, tie_embeddings=False)
    return config


def _has_own_head(config: ArchitectureConfig, source: WeightSource) -> bool:
    size, hidden = config.vocab_size, config.hidden_size
    for start in range(0, size, HEAD_ROWS):
        part = Part(range(start, min(start + HEAD_ROWS, size)), range(hidden))
        head, embedding = (
            source.matrix(f"{name}.weight", size, hidden, part) for name in ("lm_head", "model.embed_tokens")
        )
        if not isinstance(head, DenseWeight) or not isinstance(embedding, DenseWeight):
            return True
        if not torch.equal(head.values, embedding.values):
            return True
    return False


def weight_source(
    checkpoint: Checkpoint | TransformersCheckpoint, load_format: LoadFormat, seed: int, device: torch.device
) -> WeightSource:
    if load_format == "random":
        stored = None
        if isinstance(checkpoint, Checkpoint) and checkpoint.quantization is not None:
            stored = functools.partial(as_stored, checkpoint.quantization)
        return RandomSource(seed, norm_offset=checkpoint.config.norm_offset, device=device, stored=stored)
    return checkpoint.source(is_pickled=load_format == "pt")


def load_vision_part(
    path: Path,
    ops: Ops,
    *,
    load_format: LoadFormat = "auto",
    mmproj: str = AUTO,
    chat_template: str | None = None,
) -> TransformersVision | None:
    """Load the vision part of a vision-language checkpoint; None for other checkpoints. `mmproj` and `chat_template`
    are the settings of these names, for GGUF files."""
    if path.is_file():
        return load_gguf_vision(path, mmproj, ops, chat_template)
    tokenizer = load_tokenizer(path) if (path / "config.json").is_file() else None
    if tokenizer is None:
        return None
    fields = _read_config(path / "config.json")
    return load_vision(path, fields, tokenizer.tokenizer_json, ops, is_random=load_format == "random")


def load_tokenizer(path: Path) -> TokenizerFiles | None:
    """Load the tokenizer; None for a folder without one, such as a folder of random weights."""
    if path.is_dir():
        return tokenizer_from_folder(path)
    return tokenizer_from_gguf(GGUFFile(path))


def _num_positions(config: ArchitectureConfig, max_model_len: int | None) -> int:
    if max_model_len is not None and max_model_len > config.max_positions:
        raise ConfigError(
            f"max_model_len {max_model_len} is more than the {config.max_positions} positions of the model.",
            hint="Leave the flag out to use all of them. --hf-overrides stretches a model with rope_scaling.",
        )
    num_positions = max_model_len or config.max_positions
    if num_positions * config.head_dim > _LARGEST_ROPE_TABLE:
        raise ModelLoadError(
            f"The model has {num_positions:,} positions, more than a table of its angles can hold.",
            hint="Shorten the context with --max-model-len.",
        )
    return num_positions


def _read_config(path: Path) -> Fields:
    settings = read_settings(path)
    if settings is None:
        read_modules(
            path.parent
        )  # a folder of sentence-transformers without a model is refused by its modules
        raise ModelLoadError(
            f"{path.parent} has no config.json, so it is not a model folder.",
            hint="Give a folder in Hugging Face form, or a .gguf file.",
        )
    return Fields(settings, str(path))
