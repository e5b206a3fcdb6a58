"""Writes a model folder in Hugging Face form: settings, tokenizer, weights in shards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from penstock.core.errors import ModelLoadError
from penstock.models.config import RopeScaling
from penstock.models.generation import DEFAULT_TEMPLATE, makers_defaults
from penstock.models.load import Checkpoint, load_tokenizer

_SHARD_BYTES = 4 << 30
# Architectures whose settings GGUF metadata holds in full.
_WRITABLE_FROM_GGUF = ("llama", "qwen2", "qwen3")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.onnx")


class ShardWriter:
    """Writes tensors into shards, and holds at most one shard in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > _SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        self._flush()
        total = len(self._shards)
        if total == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{total:05d}.safetensors"
            self._part(index).rename(self._folder / file)
            places.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        write_json(self._folder / "model.safetensors.index.json", content)

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}
        self._pending_bytes = 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_settings(checkpoint: Checkpoint, folder: Path, quantization: dict[str, Any]) -> None:
    """Write config.json and the tokenizer: everything that a folder needs besides its weights."""
    if checkpoint.gguf is not None:
        settings = _settings_of_gguf(checkpoint)
        _write_tokenizer(checkpoint.path, folder)
    else:
        settings = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
        _copy_other_files(checkpoint.path, folder)
    write_json(folder / "config.json", {**settings, "quantization_config": quantization})
    _share_with_others(folder)


def _share_with_others(folder: Path) -> None:
    """Give all files the mode that new files have here. Weights are written through temporary files, which only their
    owner may read."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def require_writable(checkpoint: Checkpoint) -> None:
    if not checkpoint.architecture.layout(checkpoint.config).is_writable:
        raise ModelLoadError(
            f"{checkpoint.path.name} holds a model of kind {checkpoint.config.architecture}, whose matrices are "
            "stored in a form that cannot be written yet.",
            hint="Serve it with --quantization int8 instead, which rounds the weights while they are loaded.",
        )
    if checkpoint.gguf is not None and checkpoint.config.architecture not in _WRITABLE_FROM_GGUF:
        raise ModelLoadError(
            f"{checkpoint.path.name} holds a model of kind {checkpoint.config.architecture}, which can be quantized "
            "from safetensors only.",
            hint="Give the folder of the original checkpoint.",
        )


def _settings_of_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    class_name, model_type = checkpoint.architecture.huggingface_names[:2]
    settings: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "torch_dtype": "bfloat16",
    }
    if config.rope.scaling is not None:
        settings["rope_scaling"] = _rope_scaling(config.rope.scaling)
    return settings


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    described: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_max_positions is not None:
        described["original_max_position_embeddings"] = scaling.original_max_positions
    return described


def _write_tokenizer(path: Path, folder: Path) -> None:
    files = load_tokenizer(path)
    assert files is not None  # a GGUF file always has one
    (folder / "tokenizer.json").write_bytes(files.tokenizer_json)
    settings: dict[str, Any] = {**files.special_tokens, "add_bos_token": files.add_bos_token}
    if files.chat_template is not None:
        templates = {DEFAULT_TEMPLATE: files.chat_template, **files.named_templates}
        listed = [{"name": name, "template": text} for name, text in templates.items()]
        settings["chat_template"] = listed if files.named_templates else files.chat_template
    write_json(folder / "tokenizer_config.json", settings)
    beside = path.parent / "generation_config.json"
    if beside.is_file():
        shutil.copy(beside, folder)
    else:
        stated = {"eos_token_id": list(files.eos_token_ids), **makers_defaults(path).stated()}
        write_json(folder / "generation_config.json", stated)


def _copy_other_files(source: Path, folder: Path) -> None:
    skipped = {file.name for pattern in _WEIGHT_FILES for file in source.glob(pattern)}
    for file in source.iterdir():
        if file.is_file() and file.name not in skipped and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
