"""Request fields beyond the APIs of the providers. All dialects take fields with vLLM's names. Fields of other
servers that change an answer are refused, and so are fields of another API of this server. They are refused by name,
because an ignored field is a broken promise."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.request import Grammar, Tier
from penstock.gateway.prompts import AnswerText, GenerationRequest
from penstock.gateway.text.grammars import StructuredOutputs

TOP_K_OFF = -1  # as other servers write it; 0 means the same
SIGMAS_OFF = -1  # as in llama.cpp; 0 means the same


class ExtensionFields(msgspec.Struct, kw_only=True):
    """Every field may be null, which is the same as absent."""

    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | str | None = None
    repeat_last_n: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # accepted: no detokenizer here adds spaces
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def extended_options(self) -> dict[str, Any]:
        """Return the given fields of `SamplingOptions`, without the grammar."""
        options: dict[str, Any] = {
            name: value for name in _PLAIN if (value := getattr(self, name)) is not None
        }
        options |= {name: tuple(value) for name in _LISTS if (value := getattr(self, name)) is not None}
        if self.dry_sequence_breakers is not None:
            options["dry_sequence_breakers"] = _breakers(self.dry_sequence_breakers)
        if self.top_n_sigma is not None:
            options["top_n_sigma"] = 0.0 if self.top_n_sigma == SIGMAS_OFF else self.top_n_sigma
        if self.top_k is not None:
            options["top_k"] = 0 if self.top_k == TOP_K_OFF else self.top_k
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
        return options

    def extended_grammar(self, *others: Grammar | None) -> Grammar | None:
        """Return the grammar of the answer. Several fields can set it, and those of one request must agree: clients
        send the fields of an older and of a newer vLLM together."""
        outputs = self.structured_outputs
        own = None if outputs is None else outputs.to_grammar("structured_outputs")
        given = list({each: None for each in (*others, own, self._guided_grammar()) if each is not None})
        if len(given) > 1:
            raise InvalidRequest(
                "Give only one of response_format, structured_outputs and guided_….", param="response_format"
            )
        if given and self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids cannot be combined with structured output.", param="allowed_token_ids"
            )
        return given[0] if given else None

    def _guided_grammar(self) -> Grammar | None:
        fields = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if fields == _NOT_GUIDED:
            return None
        json, regex, choice, grammar = fields
        return StructuredOutputs(json=json, regex=regex, choice=choice, grammar=grammar).to_grammar("guided")

    def extended_request(self, request: GenerationRequest, *, has_tier: bool) -> GenerationRequest:
        """Return the request with what these fields ask for besides sampling. An explicit tier outranks
        `priority`."""
        limit = self.truncate_prompt_tokens
        if limit is not None and (limit == 0 or not -1 <= limit < 2**63):
            raise InvalidRequest(
                "truncate_prompt_tokens must be at least 1, or -1 for as many as fit.",
                param="truncate_prompt_tokens",
            )
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt must have 1 to {MAX_SALT_CHARS} characters.", param="cache_salt"
            )
        tier = request.tier
        if self.priority and not has_tier:
            tier = Tier.PRIORITY if self.priority < 0 else Tier.BATCH
        shown = self.skip_special_tokens, self.include_stop_str_in_output
        if tier is request.tier and limit is None and self.cache_salt is None and shown == (None, None):
            return request
        return msgspec.structs.replace(
            request,
            tier=tier,
            truncates_to=limit,
            cache_salt=self.cache_salt or "",
            text=AnswerText(
                shows_special_tokens=self.skip_special_tokens is False,
                includes_stop=bool(self.include_stop_str_in_output),
            ),
        )


def _breakers(given: list[str] | str) -> tuple[str, ...]:
    """Some clients write the list as a text: a JSON list, with or without its brackets."""
    if not isinstance(given, str):
        return tuple(given)
    text = given.strip()
    try:
        return tuple(msgspec.json.decode(text if text.startswith("[") else f"[{text}]", type=list[str]))
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            "dry_sequence_breakers must be a list of texts.", param="dry_sequence_breakers"
        ) from error


MAX_SALT_CHARS = 256
_NOT_GUIDED = (None, None, None, None)
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words")
# fmt: off
_PLAIN = (
    "seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "typical_p", "repetition_penalty",
    "xtc_probability", "xtc_threshold", "min_tokens", "ignore_eos", "repeat_last_n",
    "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
)
# fmt: on
EXTENSION_FIELDS = (*ExtensionFields.__struct_fields__[4:], "prompt_logprobs", "return_token_ids")


_GRAMMARS_ELSEWHERE = {"regex": "regex", "ebnf": "grammar", "json_schema": "json", "grammar": "grammar"}

# Fields of other servers that change an answer, and the values with which they do not. A shape that has a field takes
# it; the table is only asked about fields that a shape does not know.
# fmt: off
FOREIGN_FIELDS: dict[str, tuple[Any, ...]] = {
    # other APIs of this server
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "stop": ([], ""), "stop_sequences": ([],),
    "max_tokens": (), "max_completion_tokens": (), "max_output_tokens": (), "num_predict": (-1,),
    "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},), "output_config": ({},),
    "format": ("",), "messages": ([],), "prompt": ("",), "input": ("",), "system": ("", []),
    "instructions": ("",), "tools": ([],), "options": ({},), "think": (),
    # vLLM
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "logits_processors": ([],),
    "mm_processor_kwargs": ({},), "kv_transfer_params": ({},), "vllm_xargs": ({},),
    "include_reasoning": (True,), "return_tokens_as_token_ids": (False,), "guided_whitespace_pattern": (),
    "logprob_token_ids": ([],), "repetition_detection": (), "add_special_tokens": (False,),
    "prompt_logprobs": (), "return_token_ids": (False,), "prompt_embeds": (), "detokenize": (True,),
    "extra_args": ({},),
    # SGLang
    "min_new_tokens": (0,), "no_stop_trim": (False,), "separate_reasoning": (True,),
    "stream_reasoning": (True,), "return_hidden_states": (False,), "custom_logit_processor": (),
    "lora_path": (), "session_params": ({},), "stop_regex": ([],), "input_embeds": ([],), "sampling_seed": (),
    "return_logprob": (False,), "top_logprobs_num": (0,),
    # llama.cpp
    "n_predict": (-1,), "mirostat": (0,), "tfs_z": (1,), "dynatemp_range": (0,), "repeat_penalty": (1,),
    "n_keep": (0, -1), "n_probs": (0,), "min_keep": (0,), "n_indent": (0,), "t_max_predict_ms": (0, -1),
    "samplers": ([],), "lora": ([],), "image_data": ([],), "adaptive_target": (-1,),
    "post_sampling_probs": (False,), "reasoning_format": ("auto", "deepseek"), "parse_tool_calls": (True,),
    "thinking_forced_open": (False,),
    # text-generation-webui, TabbyAPI, Aphrodite
    "mirostat_mode": (0,), "tfs": (1,), "typical": (1,), "top_a": (0,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "smoothing_factor": (0,), "guidance_scale": (1,), "negative_prompt": ("",),
    "penalty_alpha": (0,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,),
    "custom_token_bans": ("", []), "banned_tokens": ("", []), "banned_strings": ("", []),
    "ban_eos_token": (False,), "dynamic_temperature": (False,), "temperature_last": (False,), "nsigma": (0,),
    "repetition_penalty_range": (0,), "dry_range": (0,), "skew": (0,), "grammar_string": ("",),
    "sampler_priority": ([],), "sampler_order": ([],), "sampler_seed": (-1,), "rep_pen": (1,),
    "rep_pen_range": (0,), "max_length": (), "stopping_strings": ([],), "truncation_length": (0,),
    "add_bos_token": (True,), "preset": (), "character": (), "instruction_template": (), "num_beams": (1,),
    "beam_width": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "num_return_sequences": (1,),
    # Text Generation Inference
    "max_new_tokens": (), "do_sample": (True,), "watermark": (False,), "decoder_input_details": (False,),
    "return_full_text": (False,), "adapter_id": (), "top_n_tokens": (0,),
    # Mistral
    "random_seed": (), "safe_prompt": (False,),
    # OpenRouter
    "models": ([],), "plugins": ([],), "transforms": ([],),
}
# fmt: on
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
