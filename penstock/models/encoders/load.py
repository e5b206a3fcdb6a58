"""Finds and loads encoders: models in which every token attends to the whole text, for embeddings, labels and
scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.engine_config import LoadFormat
from penstock.core.errors import ModelLoadError
from penstock.kernels.interface import Ops
from penstock.models.config import Fields, read_settings
from penstock.models.encoders.base import Encoder
from penstock.models.encoders.bert import Bert, DistilBert, Electra, MPNet, Roberta
from penstock.models.encoders.deberta import DebertaV2
from penstock.models.encoders.eurobert import EmbeddingGemma, EuroBert
from penstock.models.encoders.gguf import gguf_head, is_gguf_encoder, open_gguf_encoder
from penstock.models.encoders.gte import Gte, JinaV3
from penstock.models.encoders.modernbert import ModernBert
from penstock.models.encoders.nomic_bert import NomicBert
from penstock.models.gguf_file import GGUFFile
from penstock.models.pooling import PoolingSettings, architectures, gguf_pooling, read_pooling
from penstock.models.pooling_head import Head, embedding_head
from penstock.models.quantized_floats import open_folder
from penstock.models.random_weights import RandomSource
from penstock.models.weights import OnProgress, WeightLoader

ENCODERS: tuple[type[Encoder], ...] = (
    Bert,
    Electra,
    Roberta,
    DistilBert,
    MPNet,
    DebertaV2,
    ModernBert,
    NomicBert,
    EmbeddingGemma,
    EuroBert,
    Gte,
    JinaV3,
)


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    model: Encoder
    head: Head
    settings: PoolingSettings

    @property
    def max_text_len(self) -> int:
        longest: int = self.model.config.max_text_len
        return min(longest, self.settings.max_text_len or longest)


def encoder_for(fields: Fields) -> type[Encoder] | None:
    """Return the encoder that `config.json` names, or None for a decoder or a model that is not known."""
    for encoder in ENCODERS:
        if any(name in encoder.huggingface_names for name in architectures(fields)):
            if encoder is EmbeddingGemma and fields.raw("use_bidirectional_attention") is not True:
                return None
            return encoder
    return None


def is_encoder(path: Path) -> bool:
    """Return whether the model is an encoder, which writes no text."""
    if path.is_file():
        return is_gguf_encoder(path)
    settings = read_settings(path / "config.json") if path.is_dir() else None
    return settings is not None and encoder_for(Fields(settings, str(path / "config.json"))) is not None


def load_encoder(
    path: Path,
    ops: Ops,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> LoadedEncoder:
    if path.is_file():
        file = GGUFFile(path)
        kind, fields, source = open_gguf_encoder(file)
        settings, loader = (
            gguf_pooling(file, is_decoder=False),
            WeightLoader(source, ops, on_progress=on_progress),
        )
        model = kind(kind.read_config(fields), loader)
        return LoadedEncoder(
            model, gguf_head(file, loader, model.config.hidden_size, settings.num_labels), settings
        )
    fields = Fields(read_settings(path / "config.json") or {}, str(path / "config.json"))
    encoder = encoder_for(fields)
    if encoder is None:
        known = ", ".join(sorted(each.name for each in ENCODERS))
        raise ModelLoadError(f"{fields.where} names no encoder that is known; known are {known}.")
    settings = read_pooling(path, fields, is_decoder=False)
    source = (
        RandomSource(seed, norm_offset=0.0, device=ops.device)
        if load_format == "random"
        else open_folder(path, None, is_pickled=load_format == "pt")
    )
    loader = WeightLoader(source, ops, on_progress=on_progress)
    model = encoder(encoder.read_config(fields), loader)
    if settings.num_labels is not None:
        return LoadedEncoder(model, model.classifier(loader, settings.num_labels), settings)
    return LoadedEncoder(model, embedding_head(settings, model.config.hidden_size, ops.device), settings)
