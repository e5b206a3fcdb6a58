"""Says what known architectures need that no native family has, so that a refusal names it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

# The architectures that need each of these, by their class without its head and by `model_type`.
_NEEDED_BY: Mapping[str, frozenset[str]] = {
    "several residual streams, and attention sinks beside latents": frozenset({"HYV4", "hy_v4"}),
    "attention that weighs and drops keys by their values": frozenset({"Doge", "doge"}),
    "scores by distance, and short convolutions over keys and values": frozenset(
        {"Inkling", "inkling_text", "inkling_mm_model", "Inkling2", "inkling2_text", "inkling2"}
    ),
    "the recurrent layers of RWKV": frozenset({"Rwkv", "rwkv", "rwkv5", "rwkv6", "rwkv7"}),
    "the recurrent layers of xLSTM": frozenset({"xLSTM", "xlstm"}),
    "patches of bytes in place of tokens": frozenset({"Blt", "blt"}),
    "an encoder of texts, and attention to what the encoder makes": frozenset(
        {
            *(
                "T5",
                "t5",
                "MT5",
                "mt5",
                "UMT5",
                "umt5",
                "LongT5",
                "longt5",
                "SwitchTransformers",
                "switch_transformers",
            ),
            *("T5Gemma", "t5gemma", "Bart", "bart", "MBart", "mbart", "PLBart", "plbart", "LED", "led"),
            *(
                "Marian",
                "marian",
                "MarianMT",
                "Pegasus",
                "pegasus",
                "M2M100",
                "m2m_100",
                "NllbMoe",
                "nllb-moe",
            ),
            *("Blenderbot", "blenderbot", "ProphetNet", "prophetnet"),
        }
    ),
    "an encoder of sound": frozenset(
        {
            *("Whisper", "whisper", "Moonshine", "moonshine", "MoonshineStreaming", "moonshine_streaming"),
            *("Speech2Text", "speech_to_text", "Voxtral", "voxtral", "VoxtralRealtime", "voxtral_realtime"),
            *("Qwen2Audio", "qwen2_audio", "Qwen3ASR", "qwen3_asr", "GraniteSpeech", "granite_speech"),
            *("CohereAsr", "cohere_asr", "AudioFlamingo3", "audioflamingo3", "GlmAsr", "glmasr"),
            *("KyutaiSpeechToText", "kyutai_speech_to_text"),
        }
    ),
}
_HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "Model")


def missing_feature(name: str) -> str | None:
    """Return what an architecture needs and Penstock does not have; None where that is not known."""
    for head in _HEADS:
        name = name.removesuffix(head)
    return next((feature for feature, names in _NEEDED_BY.items() if name in names), None)
