"""Request fields that are refused: those of other servers that change an answer, and those that another API of this
server has. They are refused by name, because an ignored field is a broken promise.
"""

from __future__ import annotations

from typing import Any

from penstock.core.errors import InvalidRequest

_GRAMMARS_ELSEWHERE = {"regex": "regex", "ebnf": "grammar", "json_schema": "json", "grammar": "grammar"}

# Fields of other servers that change an answer, and the values with which they do not. A shape that has a field takes
# it; the table is only asked about fields that a shape does not know.
FOREIGN_FIELDS: dict[str, tuple[Any, ...]] = {
    # other APIs of this server
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "stop_sequences": ([],),
    "max_tokens": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "num_predict": (-1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "output_config": ({},),
    "format": ("",),
    "messages": ([],),
    "prompt": ("",),
    "input": ("",),
    "system": ("", []),
    "instructions": ("",),
    "tools": ([],),
    "options": ({},),
    "think": (),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "guided_whitespace_pattern": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "add_special_tokens": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "prompt_embeds": (),
    "detokenize": (True,),
    "extra_args": ({},),
    # SGLang
    "min_new_tokens": (0,),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
    "custom_logit_processor": (),
    "lora_path": (),
    "session_params": ({},),
    "stop_regex": ([],),
    "input_embeds": ([],),
    "sampling_seed": (),
    "return_logprob": (False,),
    "top_logprobs_num": (0,),
    # llama.cpp
    "n_predict": (-1,),
    "mirostat": (0,),
    "tfs_z": (1,),
    "dynatemp_range": (0,),
    "repeat_penalty": (1,),
    "n_keep": (0, -1),
    "n_probs": (0,),
    "min_keep": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "samplers": ([],),
    "lora": ([],),
    "image_data": ([],),
    "adaptive_target": (-1,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": (True,),
    "thinking_forced_open": (False,),
    # text-generation-webui, TabbyAPI, Aphrodite
    "mirostat_mode": (0,),
    "tfs": (1,),
    "typical": (1,),
    "top_a": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "smoothing_factor": (0,),
    "guidance_scale": (1,),
    "negative_prompt": ("",),
    "penalty_alpha": (0,),
    "encoder_repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "custom_token_bans": ("", []),
    "banned_tokens": ("", []),
    "banned_strings": ("", []),
    "ban_eos_token": (False,),
    "dynamic_temperature": (False,),
    "temperature_last": (False,),
    "nsigma": (0,),
    "repetition_penalty_range": (0,),
    "dry_range": (0,),
    "skew": (0,),
    "grammar_string": ("",),
    "sampler_priority": ([],),
    "sampler_order": ([],),
    "sampler_seed": (-1,),
    "rep_pen": (1,),
    "rep_pen_range": (0,),
    "max_length": (),
    "stopping_strings": ([],),
    "truncation_length": (0,),
    "add_bos_token": (True,),
    "preset": (),
    "character": (),
    "instruction_template": (),
    "num_beams": (1,),
    "beam_width": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "num_return_sequences": (1,),
    # Text Generation Inference
    "max_new_tokens": (),
    "do_sample": (True,),
    "watermark": (False,),
    "decoder_input_details": (False,),
    "return_full_text": (False,),
    "adapter_id": (),
    "top_n_tokens": (0,),
    # Mistral
    "random_seed": (),
    "safe_prompt": (False,),
    # OpenRouter
    "models": ([],),
    "plugins": ([],),
    "transforms": ([],),
}
_BEAMS_ELSEWHERE = (
    "/v1/chat/completions and /v1/completions have use_beam_search; n or best_of is the number of beams."
)
_NO_MIROSTAT = (
    "Its state is made of the probabilities of all earlier tokens, which a resumed answer does not have. Use "
    "top_n_sigma, min_p or typical_p."
)
_BY_LENGTH = "Use max_tokens, or max_output_tokens in the Responses API."
_HINTS = {
    "max_tokens": "Use max_output_tokens.",
    "max_completion_tokens": _BY_LENGTH,
    "max_output_tokens": "Use max_tokens.",
    "num_predict": _BY_LENGTH,
    "max_length": _BY_LENGTH,
    "stop": "Use stop_sequences.",
    "stop_sequences": "Use stop.",
    "stopping_strings": "Use stop.",
    "response_format": "Use text.format in the Responses API, and output_config.format in the Messages API.",
    "output_config": "Use response_format, or text.format in the Responses API.",
    "format": "Use response_format, or text.format in the Responses API.",
    "system": "Send the system prompt as a message.",
    "instructions": "Send the instructions as a message.",
    "options": "Send each option as a field of its own.",
    "think": "Use reasoning_effort.",
    "messages": "Conversations go to /v1/chat/completions.",
    "prompt": "Prompts go to /v1/completions.",
    "input": "Inputs go to /v1/responses.",
    "tools": "Tools need a conversation, as in /v1/chat/completions.",
    "prompt_logprobs": "/v1/chat/completions and /v1/completions have prompt_logprobs.",
    "return_token_ids": "/v1/chat/completions and /v1/completions have return_token_ids.",
    "echo": "/v1/completions has echo.",
    "best_of": "/v1/completions has best_of; with use_beam_search, /v1/chat/completions has it too.",
    "suffix": "/v1/completions has suffix.",
    "n": "/v1/chat/completions and /v1/completions have n.",
    "logprobs": "/v1/chat/completions and /v1/completions have logprobs; the Responses API has top_logprobs.",
    "top_logprobs": "/v1/chat/completions has top_logprobs, and /v1/completions has logprobs.",
    "sampling_seed": "Use seed.",
    "random_seed": "Use seed.",
    "sampler_seed": "Use seed.",
    "rep_pen": "Use repetition_penalty.",
    "rep_pen_range": "Use repeat_last_n.",
    "truncation_length": "Use truncate_prompt_tokens.",
    "add_bos_token": "Use add_special_tokens.",
    "return_logprob": "Use logprobs.",
    "top_logprobs_num": "Use top_logprobs.",
    "top_n_tokens": "Use top_logprobs.",
    "num_return_sequences": "Use n.",
    "max_new_tokens": "Use max_tokens.",
    "n_predict": "Use max_tokens.",
    "min_new_tokens": "Use min_tokens.",
    "repeat_penalty": "Use repetition_penalty.",
    "typical": "Use typical_p.",
    "no_stop_trim": "Use include_stop_str_in_output.",
    "ban_eos_token": "Use ignore_eos.",
    "banned_strings": "Use bad_words.",
    "n_probs": "Use logprobs.",
    "lora_path": "Name the adapter as the model.",
    "adapter_id": "Name the adapter as the model.",
    "grammar_string": "Use structured_outputs.grammar.",
    "nsigma": "Use top_n_sigma.",
    "repetition_penalty_range": "Use repeat_last_n.",
    "dry_range": "Use dry_penalty_last_n.",
    "mirostat": _NO_MIROSTAT,
    "mirostat_mode": _NO_MIROSTAT,
    **dict.fromkeys(("use_beam_search", "num_beams", "beam_width"), _BEAMS_ELSEWHERE),
    **dict.fromkeys(("length_penalty", "early_stopping"), "It belongs to use_beam_search."),
} | {name: f"Use structured_outputs.{ours}." for name, ours in _GRAMMARS_ELSEWHERE.items()}
FOREIGN_FIELDS |= dict.fromkeys(_GRAMMARS_ELSEWHERE, ())


def refuse_foreign(field: str, value: Any) -> None:
    """Raise InvalidRequest for a field of another server, unless its value changes nothing."""
    if value is None or field not in FOREIGN_FIELDS:
        return
    if any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in FOREIGN_FIELDS[field]
    ):
        return
    raise InvalidRequest(f"The field {field} is not supported.", param=field, hint=_HINTS.get(field))
