"""An engine without a server tokenizes prompts as the gateway of a server does."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, processors

from penstock.core.engine_config import CacheConfig, EngineConfig, ModelConfig
from penstock.core.request import SamplingParams
from penstock.engine.offline import OfflineEngine
from tests.engine.byte_model import write_byte_model
from tests.gateway.fake_engine import BOS_ID, EOS_ID


def test_prompts_are_whole_and_have_all_first_tokens(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(  # as GLM 4's
        single="<|end|> <|begin|> $A", special_tokens=[("<|end|>", EOS_ID), ("<|begin|>", BOS_ID)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", load_format="random"),
        cache=CacheConfig(num_kv_blocks=32),
        num_threads=1,
    )
    engine = OfflineEngine(config, folder)
    text = "a prompt that is longer than the tokenizer's own limit"
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    by_text, by_ids, by_fewer = engine.generate(
        [text, [EOS_ID, BOS_ID, *text.encode()], [*text.encode()]], sampling
    )
    engine.close()
    assert by_text.token_ids == by_ids.token_ids
    assert by_ids.token_ids != by_fewer.token_ids
