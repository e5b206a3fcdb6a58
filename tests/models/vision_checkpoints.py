"""Tiny vision-language checkpoints with random weights, made with transformers: model, image processor, tokenizer and
chat template in one folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.models.tiny_vision import TinyVision
from tests.models.vision_grids import (
    exaone,
    gemma4,
    gemma4_unified,
    glm,
    lighton_ocr,
    paddleocr_vl,
    pixtral,
    qwen,
)
from tests.models.vision_others import (
    deepseek_ocr2,
    deepseek_vl,
    got_ocr2,
    kimi_k25,
    lfm3_vl,
    llama4,
    minicpm_v,
    omni,
    qianfan_ocr,
    video_llama3,
)
from tests.models.vision_tiles import (
    aya_vision,
    cohere2_vision,
    gemma3,
    idefics3,
    internvl,
    lfm2_vl,
    llava,
    llava_next,
    llava_onevision,
    paligemma,
    vipllava,
)

CHECKPOINTS: dict[str, Callable[[Path], TinyVision]] = {
    "idefics3": idefics3,
    "smolvlm": lambda folder: idefics3(folder, smol=True),
    "llava": llava,
    "vipllava": vipllava,
    "llava-next": llava_next,
    "llava-next-video": lambda folder: llava_next(folder, video=True),
    "llava-onevision": llava_onevision,
    "gemma3": gemma3,
    "gemma4": gemma4,
    # Larger models, whose image tokens attend to each other in layers with a window.
    "gemma4-both-ways": lambda folder: gemma4(
        folder,
        use_bidirectional_attention="vision",
        sliding_window=256,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    ),
    "gemma4-unified": gemma4_unified,
    "qwen2-vl": lambda folder: qwen(folder, "2"),
    "qwen2.5-vl": lambda folder: qwen(folder, "2_5_"),
    "qwen3-vl": lambda folder: qwen(folder, "3"),
    "qwen3.5": lambda folder: qwen(folder, "3_5"),
    "qwen3.5-moe": lambda folder: qwen(folder, "3_5Moe"),
    "pixtral": pixtral,
    "mistral3": lambda folder: pixtral(folder, mistral3=True),
    "exaone4.5": exaone,
    "lighton-ocr": lighton_ocr,
    "paddleocr-vl": paddleocr_vl,
    "internvl": internvl,
    "aya-vision": aya_vision,
    "cohere2-vision": cohere2_vision,
    "lfm2-vl": lfm2_vl,
    "glm4.1v": lambda folder: glm(folder, "Glm4v"),
    "glm4.5v": lambda folder: glm(folder, "Glm4vMoe"),
    "glm4.6v": lambda folder: glm(folder, "Glm46V"),
    "glm-ocr": lambda folder: glm(folder, "GlmOcr"),
    "llama4": llama4,
    "kimi-k2.5": kimi_k25,
    "qwen2.5-omni": lambda folder: omni(folder, "2_5"),
    "qwen3-omni": lambda folder: omni(folder, "3"),
    "got-ocr2": got_ocr2,
    "video-llama3": video_llama3,
    "minicpm-v-4.6": minicpm_v,
    "deepseek-ocr2": deepseek_ocr2,
    "deepseek-vl": deepseek_vl,
    "qianfan-ocr": qianfan_ocr,
    "lfm3-vl": lfm3_vl,
}


# Models whose prompts have one image, and whose prompts' tokens all attend to each other.
PREFIX_CHECKPOINTS: dict[str, Callable[[Path], TinyVision]] = {
    "paligemma": paligemma,
    "paligemma2": lambda folder: paligemma(folder, second=True),
}


def make_vision(name: str, folder: Path) -> TinyVision:
    folder.mkdir(parents=True, exist_ok=True)
    return (CHECKPOINTS | PREFIX_CHECKPOINTS)[name](folder)
