"""Tiny checkpoints of families whose towers take an image in its own shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

QWEN35_TEXT: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def gemma4(folder: Path, **text: Any) -> TinyVision:
    from transformers import Gemma4Config, Gemma4ImageProcessorPil

    names = ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>")
    tokenizer = byte_tokenizer(folder, names)
    begin, end, image, video, audio = tokenizer.convert_tokens_to_ids(list(names))
    config = Gemma4Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 32,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 400,
            **text,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 512,
        },
        boi_token_id=begin,
        eoi_token_id=end,
        image_token_id=image,
        video_token_id=video,
        audio_token_id=audio,
        tie_word_embeddings=False,
    )
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<|image|>"))
    processor = PlainProcessor(images, tokenizer, "<|image|>", _gemma4_rows, {}, marks_images=True)
    return TinyVision(folder, model, processor)


def gemma4_unified(folder: Path) -> TinyVision:
    """Gemma 4 12B, whose window is longer than the context."""
    from transformers import Gemma4ImageProcessorPil, Gemma4UnifiedConfig

    names = ("<|image>", "<image|>", "<|image|>", "<|video|>", "<|audio|>")
    tokenizer = byte_tokenizer(folder, names)
    begin, end, image, video, audio = tokenizer.convert_tokens_to_ids(list(names))
    config = Gemma4UnifiedConfig(
        text_config={
            **TEXT,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 2048,
            "global_head_dim": 32,
        },
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 80,
            "output_proj_dims": 32,
        },
        audio_config={"audio_embed_dim": 16},
        boi_token_id=begin,
        eoi_token_id=end,
        image_token_id=image,
        video_token_id=video,
        audio_token_id=audio,
        tie_word_embeddings=False,
    )
    settings = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    saved = SavedSettings({"image_processor_type": "Gemma4UnifiedImageProcessor", **settings})
    model = save_vision(folder, config, tokenizer, saved, EITHER_TEMPLATE.replace("IMAGE", "<|image|>"))
    # Transformers 5.23 makes the masks of this class in two ways. Those that `generate` makes for a cache of a fixed
    # size are those of the other large models: image tokens see each other in layers with a window only.
    model.generation_config.cache_implementation = "static"
    images = Gemma4ImageProcessorPil(patch_size=8, pooling_kernel_size=1, max_soft_tokens=70)
    processor = PlainProcessor(images, tokenizer, "<|image|>", _gemma4_rows, {}, marks_images=True)
    return TinyVision(folder, model, processor)


def _gemma4_rows(made: Any, number: int) -> str:
    count = int(made["num_soft_tokens_per_image"][number])
    if number == len(made["num_soft_tokens_per_image"]) - 1:
        del made["num_soft_tokens_per_image"]  # which the model does not take
    return f"<|image>{'<|image|>' * count}<image|>"


def qwen(folder: Path, version: str) -> TinyVision:
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = byte_tokenizer(
        folder, ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    )
    ids = [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")]
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    patch = 4
    if version == "2":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    elif version == "2_5_":
        vision |= {"fullatt_block_indexes": [1], "window_size": 16}
    elif version == "3":
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    else:
        vision |= {"num_position_embeddings": 64}
    text = {**TEXT, "num_hidden_layers": 3}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    if version.startswith("3_5"):
        text |= QWEN35_TEXT
    settings = {
        "text_config": text,
        "vision_config": {**vision, "patch_size": patch, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "image_token_id": ids[0],
        "video_token_id": ids[1],
    }
    kind = version if version.startswith("3_5") else f"{version}VL"
    config = getattr(transformers, f"Qwen{kind}Config")(**settings)
    images = Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    template = EITHER_TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return "<|image_pad|>" * (int(made["image_grid_thw"][number].prod()) // 4)

    processor = PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}, marks_images=True)
    return TinyVision(folder, model, processor)


def exaone(folder: Path) -> TinyVision:
    from transformers import Exaone4_5_Config, Qwen2VLImageProcessorPil

    names = ("<vision>", "<|image_pad|>", "</vision>", "<|video_pad|>")
    tokenizer = byte_tokenizer(folder, names)
    _, image, _, video = tokenizer.convert_tokens_to_ids(list(names))
    layers = ["sliding_attention", "full_attention"]
    config = Exaone4_5_Config(
        text_config={"model_type": "exaone4", **TEXT, "layer_types": layers, "sliding_window": 16},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "num_key_value_heads": 1,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 16,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    template = EITHER_TEMPLATE.replace("IMAGE", "".join(names[:3]))
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return "<|image_pad|>" * (int(made["image_grid_thw"][number].prod()) // 4)

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}))


def paddleocr_vl(folder: Path) -> TinyVision:
    from transformers import PaddleOCRVLConfig, PaddleOCRVLImageProcessorPil

    names = ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(folder, names)
    begin, image, end, video = tokenizer.convert_tokens_to_ids(list(names))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = PaddleOCRVLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**VISION, "patch_size": 4, "spatial_merge_size": 2},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    images = PaddleOCRVLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 2400}
    )
    template = EITHER_TEMPLATE.replace("IMAGE", "".join(names[:3]))
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return names[1] * (int(made["image_grid_thw"][number].prod()) // 4)

    processor = PlainProcessor(images, tokenizer, names[1], written, {}, marks_images=True)
    return TinyVision(folder, model, processor)


def lighton_ocr(folder: Path) -> TinyVision:
    from transformers import LightOnOcrConfig, PixtralImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<|image_pad|>",))
    config = LightOnOcrConfig(
        text_config={"model_type": "qwen3", **TEXT},
        vision_config={**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 64},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        tie_word_embeddings=False,
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 16, "width": 16})
    template = EITHER_TEMPLATE.replace("IMAGE", "<|image_pad|>")
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        rows, columns = (int(side) // 16 for side in made["image_sizes"][number])
        return "<|image_pad|>" * (rows * columns)

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<|image_pad|>", written, {}))


def pixtral(folder: Path, *, mistral3: bool = False) -> TinyVision:
    from transformers import (
        LlavaConfig,
        Mistral3Config,
        PixtralImageProcessorPil,
    )

    tokenizer = byte_tokenizer(folder, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
    vision = {**VISION, "model_type": "pixtral", "head_dim": 16}
    settings: dict[str, Any] = {
        "text_config": {"model_type": "mistral", **TEXT, "sliding_window": None},
        "vision_config": {**vision, "image_size": 64},
        "image_token_id": tokenizer.convert_tokens_to_ids("[IMG]"),
        "vision_feature_layer": -1,
    }
    if mistral3:
        config = Mistral3Config(**settings, spatial_merge_size=2)
    else:
        config = LlavaConfig(**settings, vision_feature_select_strategy="full", image_seq_length=1)
    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "[IMG]"))
    patch = 16 if mistral3 else 8

    def written(made: Any, number: int) -> str:
        rows, columns = (int(side) // patch for side in made["image_sizes"][number])
        lines = ["[IMG]" * columns] * rows
        return "[IMG_BREAK]".join(lines) + "[IMG_END]"

    options = {"patch_size": {"height": patch, "width": patch}}
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "[IMG]", written, options))


GLM_TOKENS = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")


def glm(folder: Path, kind: str) -> TinyVision:
    import transformers
    from transformers import Glm4vImageProcessorPil, Glm46VImageProcessorPil

    tokenizer = byte_tokenizer(folder, GLM_TOKENS)
    begin, image, end, video = tokenizer.convert_tokens_to_ids(list(GLM_TOKENS))
    text = {**TEXT, "num_hidden_layers": 3}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    }
    if kind == "Glm4vMoe":
        text |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        image_token_id=image,
        video_token_id=video,
        image_start_token_id=begin,
        image_end_token_id=end,
        tie_word_embeddings=False,
    )
    processor_kind = Glm46VImageProcessorPil if kind == "Glm46V" else Glm4vImageProcessorPil
    images = processor_kind(patch_size=4, merge_size=2, size={"shortest_edge": 512, "longest_edge": 4800})
    template = EITHER_TEMPLATE.replace("IMAGE", "<|begin_of_image|><|image|><|end_of_image|>")
    model = save_vision(folder, config, tokenizer, images, template)

    def written(made: Any, number: int) -> str:
        return "<|image|>" * (int(made["image_grid_thw"][number].prod()) // 4)

    processor = PlainProcessor(images, tokenizer, "<|image|>", written, {}, marks_images=True)
    return TinyVision(folder, model, processor)
