"""Further tiny checkpoints of vision-language families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from penstock.core.image_layout import fitting_grid
from penstock.models.vision_processors import KimiProcessor, Llama4Processor
from tests.models.tiny_families import TINY
from tests.models.tiny_vision import (
    EITHER_TEMPLATE,
    TEXT,
    VISION,
    PlainProcessor,
    SavedSettings,
    TinyVision,
    byte_tokenizer,
    save_vision,
)
from tests.models.vision_grids import QWEN35_TEXT

MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def llama4(folder: Path) -> TinyVision:
    from transformers import Llama4Config

    names = ("<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>",
             "<|tile_y_separator|>")  # fmt: skip
    tokenizer = byte_tokenizer(folder, names)
    begin, end, _, patch, *_ = tokenizer.convert_tokens_to_ids(list(names))
    config = Llama4Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "floor_scale": 8,
        },
        vision_config={
            **VISION,
            "num_hidden_layers": 2,
            "vision_output_dim": 40,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "intermediate_size": 128,
        },
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=patch,
    )
    settings = {"size": {"height": 32, "width": 32}, "max_patches": 6}
    template = EITHER_TEMPLATE.replace("IMAGE", "<|image|>")
    model = save_vision(folder, config, tokenizer, SavedSettings(settings), template)
    processor = Llama4Processor(settings)
    sizes: list[tuple[int, int]] = []

    def processed(images: Any, return_tensors: str) -> dict[str, Any]:
        sizes[:] = [image.size for image in images]
        made = processor(images, return_tensors)
        return {"pixel_values": made["pixel_values"].float()}

    def written(made: Any, number: int) -> str:
        columns, rows = fitting_grid(processor.numbers, *sizes[number])
        rows_of_tiles = (
            "<|tile_x_separator|>".join(["<|patch|>" * 4] * columns) + "<|tile_y_separator|>"
        ) * rows
        return f"{names[0]}{rows_of_tiles if rows * columns > 1 else ''}<|image|>{'<|patch|>' * 4}{names[1]}"

    return TinyVision(folder, model, PlainProcessor(processed, tokenizer, "<|image|>", written, {}))


def kimi_k25(folder: Path) -> TinyVision:
    from transformers import Kimi_K25Config

    names = ("<|media_begin|>", "<|media_pad|>", "<|media_end|>", "<|video|>")
    tokenizer = byte_tokenizer(folder, names)
    begin, image, end, video = tokenizer.convert_tokens_to_ids(list(names))
    config = Kimi_K25Config(
        text_config={"model_type": "deepseek_v3", **TEXT, **MLA},
        vision_config={**VISION, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=32,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    # As the makers' file has them.
    settings = {"media_proc_cfg": {"in_patch_limit": 96, "patch_size": 4, "merge_kernel_size": 2,
                                   "patch_limit_on_one_side": 20}}  # fmt: skip
    template = EITHER_TEMPLATE.replace("IMAGE", "".join(names[:3]))
    model = save_vision(folder, config, tokenizer, SavedSettings(settings), template)

    def written(made: Any, number: int) -> str:
        return names[1] * (int(made["image_grid_thw"][number].prod()) // 4)

    # Transformers 5.23 writes names that differ from those of the makers.
    _renamed(
        folder,
        {
            "language_model.model.blocks.": "language_model.model.layers.",
            "model.mm_projector.": "mm_projector.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        },
    )
    processor = KimiProcessor(settings)
    return TinyVision(folder, model, PlainProcessor(processor, tokenizer, names[1], written, {}))


def _renamed(folder: Path, names: Mapping[str, str]) -> None:
    """Change the beginnings of the names of tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = {}
    for name, tensor in tensors.items():
        old = next((old for old in names if name.startswith(old)), "")
        changed[names.get(old, "") + name.removeprefix(old)] = tensor
    save_file(changed, file)


def omni(folder: Path, version: str) -> TinyVision:
    """The part of an omni model that thinks, in a folder as of the whole model."""
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    names = (
        "<|vision_bos|>",
        "<|IMAGE|>",
        "<|vision_eos|>",
        "<|VIDEO|>",
        "<|AUDIO|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
    )
    tokenizer = byte_tokenizer(folder, names)
    begin, image, end, video, audio, sound, silence = tokenizer.convert_tokens_to_ids(list(names))
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    text: dict[str, Any] = {**TEXT, "num_hidden_layers": 3}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if version == "2_5":
        vision |= {"fullatt_block_indexes": [1], "window_size": 16}  # type: ignore[dict-item]
    else:
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}  # type: ignore[dict-item]
        text |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text["rope_parameters"]["mrope_interleaved"] = True
    sizes = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32}
    config = getattr(
        transformers, "Qwen2_5OmniThinkerConfig" if version == "2_5" else "Qwen3OmniMoeThinkerConfig"
    )(
        text_config=text,
        vision_config={**vision, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        audio_config={**sizes, "output_dim": 64, "num_mel_bins": 16, "downsample_hidden_size": 8},
        image_token_id=image,
        video_token_id=video,
        audio_token_id=audio,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        audio_start_token_id=sound,
        audio_end_token_id=silence,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    model = save_vision(
        folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "".join(names[:3]))
    )

    def written(made: Any, number: int) -> str:
        return names[1] * (int(made["image_grid_thw"][number].prod()) // 4)

    config_file = folder / "config.json"
    thinker = json.loads(config_file.read_text())
    kind = "qwen2_5_omni" if version == "2_5" else "qwen3_omni_moe"
    name = "Qwen2_5OmniModel" if version == "2_5" else "Qwen3OmniMoeForConditionalGeneration"
    whole = {"architectures": [name], "model_type": kind, "thinker_config": thinker}
    config_file.write_text(json.dumps({**whole, "enable_audio_output": False, "dtype": "float32"}))
    _renamed(folder, {"": "thinker."})
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, names[1], written, {}))


def got_ocr2(folder: Path) -> TinyVision:
    from transformers import GotOcr2Config, GotOcr2ImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"))
    config = GotOcr2Config(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 4,
            "window_size": 6,
            "global_attn_indexes": [1],
            "mlp_dim": 48,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<imgpad>"),
        tie_word_embeddings=False,
    )
    processor = GotOcr2ImageProcessorPil(size={"height": 64, "width": 64})
    model = save_vision(folder, config, tokenizer, processor, None)

    def processed(images: Any, return_tensors: str) -> dict[str, Any]:
        return {"pixel_values": processor(images, return_tensors=return_tensors)["pixel_values"]}

    def written(made: Any, number: int) -> str:
        return "<imgpad>" * 16

    return TinyVision(folder, model, PlainProcessor(processed, tokenizer, "<imgpad>", written, {}))


def video_llama3(folder: Path) -> TinyVision:
    from transformers import VideoLlama3Config, VideoLlama3ImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<|image_pad|>", "<|video_pad|>"))
    image, video = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    config = VideoLlama3Config(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**VISION, "patch_size": 4},
        image_token_id=image,
        video_token_id=video,
    )
    images = VideoLlama3ImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<|image_pad|>"))

    def written(made: Any, number: int) -> str:
        return "<|image_pad|>" * (int(made["image_grid_thw"][number].prod()) // 4)

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}))


def minicpm_v(folder: Path) -> TinyVision:
    from transformers import MiniCPMV4_6Config, MiniCPMV4_6ImageProcessorPil, MiniCPMV4_6Processor

    names = (
        "<image>",
        "</image>",
        "<slice>",
        "</slice>",
        "<image_id>",
        "</image_id>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    tokenizer = byte_tokenizer(folder, names)
    image, video = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    config = MiniCPMV4_6Config(
        text_config={"model_type": "qwen3_5_text", **TEXT, "num_hidden_layers": 3, **QWEN35_TEXT},
        vision_config={**VISION, "num_hidden_layers": 3, "patch_size": 4},
        insert_layer_id=1,
        image_token_id=image,
        video_token_id=video,
    )
    images = MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=32, max_slice_nums=5)
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<|image_pad|>"))
    composed = object.__new__(MiniCPMV4_6Processor)
    vars(composed).update(image_processor=images, slice_mode=True, image_token=names[6])
    for place, kind in enumerate(("image", "slice", "image_id")):
        setattr(composed, f"{kind}_start_token", names[2 * place])
        setattr(composed, f"{kind}_end_token", names[2 * place + 1])

    def written(made: Any, number: int) -> str:
        text = composed.replace_image_token(made, number, image_token_divisor=16)
        if number == len(made["grids"]) - 1:
            for name in ("grids", "num_patches_per_image"):
                del made[name]  # which the model does not take
        return f"<image_id>{number}</image_id>{text}"

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}))


def deepseek_ocr2(folder: Path) -> TinyVision:
    from transformers import DeepseekOcr2Config, DeepseekOcr2ImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<image>",))
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32}
    config = DeepseekOcr2Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
        vision_config={
            "sam_config": {**heads, "output_channels": 16, "image_size": 64, "patch_size": 1, "mlp_dim": 48,
                           "window_size": 6, "global_attn_indexes": [], "downsample_channels": [24, 32]},
            "encoder_config": {**heads, "num_key_value_heads": 2, "intermediate_size": 48},
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    processor = DeepseekOcr2ImageProcessorPil(size={"height": 64, "width": 64}, tile_size=48, max_patches=3)
    model = save_vision(folder, config, tokenizer, processor, EITHER_TEMPLATE.replace("IMAGE", "<image>"))

    def written(made: Any, number: int) -> str:
        return "<image>" * (257 + 144 * int(made["num_local_patches"][number]))

    return TinyVision(folder, model, PlainProcessor(processor, tokenizer, "<image>", written, {}))


def deepseek_vl(folder: Path) -> TinyVision:
    from transformers import DeepseekVLConfig, DeepseekVLImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<image_placeholder>",))
    config = DeepseekVLConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<image_placeholder>"),
    )
    images = DeepseekVLImageProcessorPil(size={"height": 32, "width": 32}, min_size=2)
    template = EITHER_TEMPLATE.replace("IMAGE", "<image_placeholder>")
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return "<image_placeholder>" * 16

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<image_placeholder>", written, {}))


def qianfan_ocr(folder: Path) -> TinyVision:
    from transformers import GotOcr2ImageProcessorPil, QianfanOCRConfig

    tokenizer = byte_tokenizer(folder, ("<img>", "</img>", "<IMG_CONTEXT>"))
    config = QianfanOCRConfig(
        text_config={"model_type": "qwen3", **TEXT},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<image>"))
    # Transformers 5.23 writes names that differ from those of the makers.
    _renamed(folder, {"language_model.model.encoder.layers.": "language_model.model.layers."})

    def written(made: Any, number: int) -> str:
        count = int(made["num_patches"][number])
        if number == len(made["num_patches"]) - 1:
            del made["num_patches"]  # which the model does not take
        return f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>"

    options = {"crop_to_patches": True}
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<image>", written, options))


def lfm3_vl(folder: Path) -> TinyVision:
    from transformers import Lfm3VlConfig, Qwen2VLImageProcessorPil

    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(folder, names)
    begin, image, end, video = tokenizer.convert_tokens_to_ids(list(names))
    config = Lfm3VlConfig(
        text_config=TINY["lfm3"].config().to_dict() | {"vocab_size": 400, "max_position_embeddings": 2048},
        vision_config={**VISION, "patch_size": 4, "num_key_value_heads": 1,
                       "layer_types": ["conv", "full_attention"]},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    model = save_vision(
        folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "".join(names[:3]))
    )

    def written(made: Any, number: int) -> str:
        return names[1] * (int(made["image_grid_thw"][number].prod()) // 4)

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, names[1], written, {}))
