"""Request fields beyond the providers' own APIs, with vLLM's names. All dialects take the same ones.
`foreign_fields` has those that are refused.
"""

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
        """Return the grammar of the answer. Several fields can set it, and a request may use only one of them."""
        outputs = self.structured_outputs
        own = None if outputs is None else outputs.to_grammar("structured_outputs")
        given = [each for each in (*others, own, self._guided_grammar()) if each is not None]
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
_PLAIN = (
    *(
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "typical_p",
        "repetition_penalty",
    ),
    *("xtc_probability", "xtc_threshold", "min_tokens", "ignore_eos", "repeat_last_n"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
EXTENSION_FIELDS = (*ExtensionFields.__struct_fields__[4:], "prompt_logprobs", "return_token_ids")
