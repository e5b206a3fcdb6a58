"""Tiny checkpoints of families that scale images to one size, or cut them into tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from penstock.core.image_layout import lfm2_shape
from penstock.models.vision_processors import Cohere2VisionProcessor, Lfm2VlProcessor
from tests.models.tiny_vision import (
    EITHER_TEMPLATE,
    PARTS_TEMPLATE,
    TEXT,
    VISION,
    PlainProcessor,
    PrefixProcessor,
    SavedSettings,
    TinyVision,
    byte_tokenizer,
    save_vision,
)

IDEFICS3_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


def idefics3(folder: Path, *, smol: bool = False) -> TinyVision:
    from transformers import (
        Idefics3Config,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        SmolVLMConfig,
        SmolVLMImageProcessorPil,
    )

    tokenizer = byte_tokenizer(folder, IDEFICS3_TOKENS)
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    settings: dict[str, Any] = {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": VISION,
        "scale_factor": 2,
        "image_token_id": image_id,
        "pad_token_id": 0,
    }
    config = SmolVLMConfig(**settings) if smol else Idefics3Config(**settings)
    kind = SmolVLMImageProcessorPil if smol else Idefics3ImageProcessorPil
    images = kind(size={"longest_edge": 96}, max_image_size={"longest_edge": 32})
    model = save_vision(folder, config, tokenizer, images, PARTS_TEMPLATE.replace("IMAGE", "<image>"))
    # SmolVLM's own processor writes the same text, but needs a package that spells numbers.
    return TinyVision(folder, model, Idefics3Processor(images, tokenizer, image_seq_len=4))


CLIP_SIZES: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}


def _with_clip(
    folder: Path, config_kind: Any, processor_kind: Any, images: Any, settings: dict[str, Any]
) -> TinyVision:
    """Write a checkpoint of the LLaVA family, whose tower is CLIP's. `settings` are those of the class alone."""
    tokenizer = byte_tokenizer(folder, ("<image>",))
    config = config_kind(
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        **settings,
    )
    model = save_vision(folder, config, tokenizer, images, PARTS_TEMPLATE.replace("IMAGE", "<image>"))
    processor = processor_kind(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return TinyVision(folder, model, processor)


def llava(folder: Path) -> TinyVision:
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaProcessor

    settings = {"text_config": {"model_type": "llama", **TEXT}, "image_seq_length": 16}
    return _with_clip(folder, LlavaConfig, LlavaProcessor, CLIPImageProcessorPil(**CLIP_SIZES), settings)


def vipllava(folder: Path) -> TinyVision:
    from transformers import CLIPImageProcessorPil, VipLlavaConfig

    tokenizer = byte_tokenizer(folder, ("<image>",))
    config = VipLlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layers=[-2, -1],
        image_seq_length=16,
        tie_word_embeddings=False,
    )
    images = CLIPImageProcessorPil(**CLIP_SIZES)
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<image>"))

    def written(made: Any, number: int) -> str:
        return "<image>" * 16

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<image>", written, {}))


def llava_next(folder: Path, *, video: bool = False) -> TinyVision:
    from transformers import (
        LlavaNextConfig,
        LlavaNextImageProcessorPil,
        LlavaNextProcessor,
        LlavaNextVideoConfig,
    )

    shapes = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]}
    images = LlavaNextImageProcessorPil(**CLIP_SIZES, **shapes)
    settings = {"text_config": {"model_type": "qwen2", **TEXT}, **shapes}
    kind = LlavaNextVideoConfig if video else LlavaNextConfig
    return _with_clip(folder, kind, LlavaNextProcessor, images, settings)


def llava_onevision(folder: Path) -> TinyVision:
    from transformers import LlavaOnevisionConfig, LlavaOnevisionImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<image>", "<video>"))
    shapes = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96], [96, 32]]}
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        vision_aspect_ratio="anyres_max_1",
        **shapes,
    )
    images = LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, **shapes)
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<image>"))

    def written(made: Any, number: int) -> str:
        counter = onevision_counter(images, num_image_tokens=16, vision_aspect_ratio="anyres_max_1")
        height, width = made["image_sizes"][number].tolist()
        return "<image>" * counter._get_number_of_features(height, width, 32, 32)

    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<image>", written, {}))


def onevision_counter(images: Any, **settings: Any) -> Any:
    """Return transformers' processor without a tokenizer and without the parts that need torchvision."""
    from transformers import LlavaOnevisionProcessor

    counter = object.__new__(LlavaOnevisionProcessor)
    vars(counter).update(image_processor=images, **settings)
    return counter


def gemma3(folder: Path) -> TinyVision:
    from transformers import Gemma3Config, Gemma3ImageProcessorPil, Gemma3Processor

    tokenizer = byte_tokenizer(folder, ("<start_of_image>", "<image_soft_token>", "<end_of_image>"))
    tokenizer.boi_token, tokenizer.image_token, tokenizer.eoi_token = (
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
    )
    names = ("boi_token", "eoi_token", "image_token")
    ids = {name: tokenizer.convert_tokens_to_ids(getattr(tokenizer, name)) for name in names}
    tokenizer.boi_token_id, tokenizer.image_token_id = ids["boi_token"], ids["image_token"]
    config = Gemma3Config(
        text_config={
            **TEXT,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 16,
            "sliding_window": 256,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config=VISION,
        tie_word_embeddings=False,  # a tied random model only repeats its last token
        mm_tokens_per_image=16,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    template = EITHER_TEMPLATE.replace("IMAGE", "<start_of_image>")
    model = save_vision(folder, config, tokenizer, images, template)
    return TinyVision(folder, model, Gemma3Processor(images, tokenizer, image_seq_length=16))


def paligemma(folder: Path, *, second: bool = False) -> TinyVision:
    from transformers import PaliGemmaConfig, SiglipImageProcessorPil

    tokenizer = byte_tokenizer(folder, ("<image>",))
    text: dict[str, Any] = {"model_type": "gemma", **TEXT}
    if second:
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        text |= {"model_type": "gemma2", "layer_types": layers, "sliding_window": 64}
        text |= {"num_hidden_layers": 3, "query_pre_attn_scalar": 16}
    config = PaliGemmaConfig(
        text_config=text,
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=64,
        hidden_size=64,
        tie_word_embeddings=False,
    )
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    model = save_vision(folder, config, tokenizer, images, None)

    def written(made: Any, number: int) -> str:
        return "<image>" * 16

    return TinyVision(folder, model, PrefixProcessor(images, tokenizer, "<image>", written, {}))


def internvl(folder: Path) -> TinyVision:
    from transformers import GotOcr2ImageProcessorPil, InternVLConfig

    names = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    tokenizer = byte_tokenizer(folder, names)
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    model = save_vision(
        folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n")
    )

    def written(made: Any, number: int) -> str:
        count = int(made["num_patches"][number])
        if number == len(made["num_patches"]) - 1:
            del made["num_patches"]  # which the model does not take
        return f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>"

    options = {"crop_to_patches": True}
    return TinyVision(folder, model, PlainProcessor(images, tokenizer, "<IMG_CONTEXT>", written, options))


COHERE_TOKENS = ("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>")
COHERE_TEXT: dict[str, Any] = {
    **TEXT,
    "model_type": "cohere2",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 32,
    "logit_scale": 0.25,
}


def aya_vision(folder: Path) -> TinyVision:
    from transformers import AyaVisionConfig, AyaVisionProcessor, GotOcr2ImageProcessorPil

    tokenizer = byte_tokenizer(folder, COHERE_TOKENS)
    config = AyaVisionConfig(
        text_config=COHERE_TEXT,
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    model = save_vision(folder, config, tokenizer, images, EITHER_TEMPLATE.replace("IMAGE", "<image>"))
    processor = AyaVisionProcessor(images, tokenizer, patch_size=8, img_size=32, downsample_factor=2)
    return TinyVision(folder, model, processor)


def cohere2_vision(folder: Path) -> TinyVision:
    from transformers import Cohere2VisionConfig

    tokenizer = byte_tokenizer(folder, COHERE_TOKENS)
    config = Cohere2VisionConfig(
        text_config=COHERE_TEXT,
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
        alignment_intermediate_size=32,
        tie_word_embeddings=False,
    )
    settings = {"size": {"height": 32, "width": 32}, "max_patches": 6}
    template = EITHER_TEMPLATE.replace("IMAGE", "<|IMG_PATCH|>")
    model = save_vision(folder, config, tokenizer, SavedSettings(settings), template)

    def written(made: Any, number: int) -> str:
        count = made["num_patches"][number]
        if number == len(made["num_patches"]) - 1:
            del made["num_patches"]  # which the model does not take
        tile = "<|IMG_PATCH|>" * 4 + "<|IMG_LINE_BREAK|>"
        return f"<|START_OF_IMG|>{tile * count}<|END_OF_IMG|>"

    processor = Cohere2VisionProcessor(settings)
    return TinyVision(folder, model, PlainProcessor(processor, tokenizer, "<|IMG_PATCH|>", written, {}))


LFM2_TOKENS = ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")


def lfm2_vl(folder: Path) -> TinyVision:
    from transformers import Lfm2VlConfig

    places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = byte_tokenizer(folder, (*LFM2_TOKENS, *places))
    config = Lfm2VlConfig(
        text_config={
            "model_type": "lfm2",
            **TEXT,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 3,
        },
        vision_config={
            "model_type": "siglip2_vision_model",
            **VISION,
            "num_patches": 16,
            "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projector_hidden_size=32,
        tie_word_embeddings=False,
    )
    settings = {"encoder_patch_size": 8, "tile_size": 32, "max_tiles": 4}
    settings |= {"min_image_tokens": 2, "max_image_tokens": 8}
    template = EITHER_TEMPLATE.replace("IMAGE", "<image>")
    model = save_vision(folder, config, tokenizer, SavedSettings(settings), template)
    processor = Lfm2VlProcessor(settings)
    sizes: list[tuple[int, int]] = []

    def processed(images: Sequence[Image.Image], return_tensors: str) -> dict[str, Any]:
        sizes[:] = [image.size for image in images]
        return processor(images, return_tensors)

    def written(made: Any, number: int) -> str:
        columns, rows, wide, tall = lfm2_shape(processor.numbers, *sizes[number])
        whole = "<image>" * (wide * tall // 16**2)
        if columns * rows == 1:
            return f"<|image_start|>{whole}<|image_end|>"
        tiles = "".join(
            f"<|img_row_{row + 1}_col_{column + 1}|>" + "<image>" * 4
            for row in range(rows)
            for column in range(columns)
        )
        return f"<|image_start|>{tiles}<|img_thumbnail|>{whole}<|image_end|>"

    return TinyVision(folder, model, PlainProcessor(processed, tokenizer, "<image>", written, {}))
