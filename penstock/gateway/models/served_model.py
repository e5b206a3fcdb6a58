"""A model as clients see it: its names, and how prompts for it are rendered, tokenized and checked.

Its dialect is the format of its tool calls, and whether it thinks before it answers. The dialect decides for every
chat what the answers may hold, and keeps a model from thinking if a grammar leaves no room for it. This module knows
no running request and no other model.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.gateway_config import GatewayConfig
from penstock.core.grammar_text import token_ids_by_number
from penstock.core.messages import EngineReady, ModelCard
from penstock.core.request import Adapter, CacheBreakpoint, Grammar, ImageInput, SamplingParams
from penstock.gateway.checks import check_request, check_token_ids, too_long
from penstock.gateway.images import check_images
from penstock.gateway.prompts import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    RequestWarning,
    SamplingOptions,
    TextPrompt,
    image_parts,
    num_characters,
)
from penstock.gateway.text.caching import KeptText, Piece, breakpoints_at, locate, marked_pieces, tools_salt
from penstock.gateway.text.grammars import GrammarChecker
from penstock.gateway.text.image_places import ImagePlaces, moved_positions, with_images_in_user_turns
from penstock.gateway.text.template import ChatTemplate, RenderedChat
from penstock.gateway.text.token_options import OPTIONS, TokenOptions, infill_ids, laid_out
from penstock.gateway.text.tokenizer import DIRECT_ENCODE_CHARS, TextTokenizer, TooManyTokens
from penstock.gateway.tools.answer_form import (
    HARMONY_REASONING,
    AnswerForm,
    answer_form,
    forces_calls,
    reasoning_of,
)
from penstock.gateway.tools.call_parser import CONTROL_TOKENS
from penstock.gateway.tools.formats import tool_format_of
from penstock.gateway.turns import in_thread

MAX_LOOSE_CHARACTERS = 1 << 20  # of a text that need not fit the context
MAX_LOOSE_TOKENS = 1 << 19  # of such a text
MAX_DETOKENIZED = 1 << 18  # tokens that need not fit the context
COUNTED_FACTOR = 2  # of a text that must fit, this many times the context is still counted exactly
MORE_COUNTED_TOKENS = 1 << 16
CUT_MARGIN_TOKENS = 64


class PreparedPrompt(msgspec.Struct, frozen=True):
    """A prompt in tokens, which prefixes of it to keep, and what its answers consist of; None for nothing but
    text."""

    token_ids: tuple[int, ...]
    form: AnswerForm | None = None
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    cache_salt: str = ""
    images: tuple[ImageInput, ...] = ()


class Dialect:
    def __init__(self, card: ModelCard, tokenizer: TextTokenizer, config: GatewayConfig) -> None:
        self.tool_format = tool_format_of(card, config.tool_call_parser)
        self.reasoning = reasoning_of(card, config.reasoning_parser)
        texts: tuple[str, ...] = ()
        self._bounds_thinking = False
        if self.reasoning is not None:
            texts = self.reasoning.texts
            tokens = token_ids_by_number(card.tokenizer_json)
            self._bounds_thinking = self.reasoning.end in tokens and any(
                self.reasoning.start.startswith(token) for token in tokens
            )
        if self.tool_format is not None:
            texts += self.tool_format.control_texts
        if self.reasoning is HARMONY_REASONING:
            texts += CONTROL_TOKENS
        self._shown_token_ids = tokenizer.special_ids_of(texts)

    def unbound_thoughts(self, prompt: Prompt) -> RequestWarning | None:
        """Return the warning that nothing can enforce the prompt's budget for thoughts."""
        if not isinstance(prompt, ChatPrompt) or prompt.max_thinking_tokens is None:
            return None
        if self.reasoning is None or self._bounds_thinking:
            return None
        return RequestWarning(
            "thinking_not_bounded",
            "This model marks its thoughts with text, so their length cannot be bounded.",
            "thinking",
        )

    def without_thinking_where_held(self, prompt: ChatPrompt, grammar: Grammar | None) -> ChatPrompt:
        """Return the chat without thinking if the grammar leaves no room for thoughts. Without tokens that mark the
        end of thoughts, the grammar describes the whole answer, so the model must not begin with its thoughts."""
        if self.reasoning is None or (grammar is None and not forces_calls(prompt)):
            return prompt
        if self._bounds_thinking and prompt.thinks is not False:
            return prompt
        return msgspec.structs.replace(prompt, thinks=False)

    def close_thinking(self, prompt: ChatPrompt, rendered: RenderedChat) -> RenderedChat:
        """Close the reasoning that some templates open even if thinking is off."""
        if prompt.thinks is False and self.reasoning is not None and self._opens_thinking(rendered):
            text = f"{rendered.text.rstrip()}\n{self.reasoning.end}\n\n"
            return msgspec.structs.replace(rendered, text=text)
        return rendered

    def answer_form(
        self, prompt: ChatPrompt, rendered: RenderedChat, grammar: Grammar | None
    ) -> AnswerForm | None:
        if self.tool_format is None and forces_calls(prompt):
            raise InvalidRequest("This server does not parse tool calls.", param="tool_choice")
        return answer_form(
            prompt,
            self.tool_format,
            reasoning=self.reasoning,
            reasoning_is_open=self._opens_thinking(rendered),
            shown_token_ids=self._shown_token_ids,
            grammar=grammar,
            bounds_thinking=self._bounds_thinking,
        )

    def _opens_thinking(self, rendered: RenderedChat) -> bool:
        return self.reasoning is not None and rendered.text.rstrip().endswith(self.reasoning.start)


class ServedModel:
    """A model as the gateway serves it, built from an engine's model card. Lives as long as engines serve that model.

    An adapter is a model of its own, which shares all but its name with the model that it adapts."""

    def __init__(self, engine: EngineReady, config: GatewayConfig) -> None:
        self.engine = engine
        self.card = engine.model  # under the name that clients know it by
        self.adapter: Adapter | None = None
        self.tokenizer = TextTokenizer(engine.model)
        self.dialect = Dialect(engine.model, self.tokenizer, config)
        self.template = ChatTemplate(engine.model, self.dialect.tool_format)
        self._infill = infill_ids(self.tokenizer.token_id)
        self._token_options = TokenOptions(self.tokenizer, engine.model.vocab_size)
        self._config = config
        self._grammars = GrammarChecker()
        self._special_token_ids = token_ids_by_number(engine.model.tokenizer_json)

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def max_model_len(self) -> int:
        return self.card.max_model_len

    @property
    def max_output_tokens(self) -> int:
        return self.engine.max_output_tokens

    @property
    def can_infill(self) -> bool:
        """Return whether the model can fill in the middle of a text."""
        return self._infill is not None

    @property
    def base_name(self) -> str:
        """Return the name of the model whose engines serve requests for this one."""
        return self.engine.model.name

    @cached_property
    def fingerprint(self) -> bytes:
        """Return a digest of everything besides the request that answers depend on."""
        weights = b"" if self.adapter is None else self.adapter.digest.encode()
        card = msgspec.msgpack.encode(self.card)  # the identity of the base model's weights is in the card
        return hashlib.blake2b(card, digest_size=32).digest() + weights

    def adapted(self, adapter: Adapter) -> ServedModel:
        twin = copy.copy(self)
        twin.__dict__.pop("fingerprint", None)
        twin.adapter = adapter
        twin.card = msgspec.structs.replace(self.card, name=adapter.name)
        return twin

    def check(self, request: GenerationRequest) -> None:
        """Everything that can be checked cheaply: options, and lengths that cannot fit the context however the
        prompt is tokenized. Raises InvalidRequest."""
        if not self.card.generates:
            made, path = "embeddings", "/v1/embeddings"
            if self.card.pooler.labels:
                is_reranker = self.card.pooler.scores_pairs
                made, path = ("scores", "/v1/rerank") if is_reranker else ("labels", "/v1/classify")
            raise InvalidRequest(
                f"The model {self.card.name!r} makes {made} and writes no text.",
                param="model",
                hint=f"Ask {path}.",
            )
        check_request(request, self.card.vocab_size)
        self.check_images(request.prompts)
        for prompt in request.prompts:
            unbound = self.dialect.unbound_thoughts(prompt)
            if unbound is not None and request.endpoint != "messages":  # where a budget is required
                raise InvalidRequest(unbound.message, param=unbound.param)
            if not isinstance(prompt, ChatPrompt):
                if isinstance(prompt, TextPrompt) and prompt.suffix is not None and self._infill is None:
                    raise InvalidRequest(
                        f"The model {self.card.name!r} has no tokens to fill in the middle of a text.",
                        param="suffix",
                    )
                content = prompt.text if isinstance(prompt, TextPrompt) else prompt.token_ids
                if request.truncates_to is None:
                    answer = 0 if request.sampling.max_tokens == 0 else 1
                    self._check_length(content, "prompt", num_answer=answer)
            elif not request.drops_oldest_turns and request.truncates_to is None:
                self._check_num_characters(num_characters(prompt), "messages")

    def check_images(self, prompts: Sequence[Prompt]) -> None:
        card = self.card
        sees = card.vision is not None
        check_images(prompts, card.name, self._config, sees=sees, hint=card.images_hint)

    def _check_length(self, text: str | Sequence[int], param: str, num_answer: int) -> None:
        if isinstance(text, str):
            self._check_num_characters(len(text), param)
        elif len(text) + num_answer > self.max_model_len:
            raise too_long(self.max_model_len, len(text), param)

    def _check_num_characters(self, num_characters: int, param: str) -> None:
        """Refuse a text before it is tokenized: no token has more characters than the vocabulary's longest."""
        at_least = num_characters // self.tokenizer.max_characters_per_token
        if at_least >= self.max_model_len:
            raise too_long(self.max_model_len, at_least, param, is_lower_bound=True)

    def check_detokenizable(self, num_tokens: int, param: str) -> None:
        """Refuse tokens that need not fit the context, if their text would keep others waiting."""
        most = max(MAX_DETOKENIZED, self.max_model_len)
        if num_tokens > most:
            raise InvalidRequest(
                f"There are {num_tokens} tokens, and at most {most} are made into text at a time.",
                param=param,
            )

    def check_tokenizable(self, num_characters: int, param: str) -> None:
        """Refuse a text that need not fit the context, if tokenizing it would keep others waiting for seconds."""
        most = max(MAX_LOOSE_CHARACTERS, self.max_model_len * self.tokenizer.max_characters_per_token)
        if num_characters > most:
            raise InvalidRequest(
                f"{param} has {num_characters} characters, and at most {most} are tokenized at a time.",
                param=param,
            )

    async def tokenize(
        self, text: str, param: str, *, add_special_tokens: bool, plain_ranges: Sequence[tuple[int, int]] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of a text that need not fit the context. Raises InvalidRequest where that would keep
        others waiting for seconds."""
        self.check_tokenizable(len(text), param)
        most = max(MAX_LOOSE_TOKENS, self._most_tokens)
        try:
            await self.tokenizer.check_length(text, most)
        except TooManyTokens as error:
            raise InvalidRequest(
                f"{param} has at least {error.at_least} tokens, and at most {most} are made at a time.",
                param=param,
                hint="Send it in parts.",
            ) from error
        return await self.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, plain_ranges=plain_ranges
        )

    @property
    def _most_tokens(self) -> int:
        """Return up to how many tokens a text that must fit the context is counted exactly."""
        return COUNTED_FACTOR * self.max_model_len + MORE_COUNTED_TOKENS

    async def _check_num_tokens(self, text: str, param: str, *, is_cut: bool = False) -> None:
        """Refuse a text that is sure not to fit before all of it is tokenized: no text that a client sends may
        occupy the threads for long. A chat that `is_cut` later may have more tokens."""
        most = max(MAX_LOOSE_TOKENS, self._most_tokens) if is_cut else self._most_tokens
        try:
            await self.tokenizer.check_length(text, most)
        except TooManyTokens as error:
            raise too_long(self.max_model_len, error.at_least, param, is_lower_bound=True) from error

    async def _last_part(self, text: str, num_tokens: int) -> str:
        """Return the end of a text that is sure to hold its last tokens. The places where the text is cut may change
        a few tokens."""
        num_tokens += CUT_MARGIN_TOKENS
        num_kept = num_tokens * self.tokenizer.max_characters_per_token
        return await self.tokenizer.shortened(text[-num_kept:], num_tokens, "left")

    def known(self, token_ids: tuple[int, ...], param: str) -> tuple[int, ...]:
        """Return the same token ids. A tokenizer may know tokens that the model has no embedding for; a text that
        spells one out is refused with InvalidRequest, since no engine could compute it."""
        if self.tokenizer.max_token_id >= self.card.vocab_size:
            check_token_ids(token_ids, self.card.vocab_size, param=param)
        return token_ids

    async def prepare(
        self, prompt: Prompt, grammar: Grammar | None = None, *, truncates_to: int | None = None
    ) -> PreparedPrompt:
        """`grammar` is what the request itself demands of its answers. With `truncates_to`, only this many of the
        last tokens are taken, and a text may be longer than the context."""
        prepared = await self._prepare(prompt, grammar, truncates_to)
        if truncates_to is None or len(prepared.token_ids) <= truncates_to:
            return prepared
        if prepared.images:
            raise InvalidRequest(
                "A prompt with images cannot be cut to truncate_prompt_tokens.",
                param="truncate_prompt_tokens",
            )
        return PreparedPrompt(prepared.token_ids[-truncates_to:], prepared.form)

    async def _encode_text(self, prompt: TextPrompt) -> tuple[int, ...]:
        token_ids = await self.tokenizer.encode(
            prompt.text, add_special_tokens=prompt.add_special_tokens and prompt.suffix is None
        )
        if prompt.suffix is None or self._infill is None:
            return token_ids
        behind = await self.tokenizer.encode(prompt.suffix, add_special_tokens=False)
        start = self.tokenizer.bos_ids if prompt.add_special_tokens else ()
        return (*start, *laid_out(*self._infill, token_ids, behind))

    async def _prepare(
        self, prompt: Prompt, grammar: Grammar | None, truncates_to: int | None
    ) -> PreparedPrompt:
        if isinstance(prompt, TextPrompt):
            if truncates_to is None:
                self._check_num_characters(len(prompt.text) + len(prompt.suffix or ""), "prompt")
            else:
                text = await self._last_part(prompt.text, truncates_to)
                prompt = msgspec.structs.replace(prompt, text=text)
                self._check_num_characters(len(prompt.suffix or ""), "prompt")
            for text in (prompt.text, prompt.suffix or ""):
                await self._check_num_tokens(text, "prompt")
            return PreparedPrompt(self.known(await self._encode_text(prompt), "prompt"))
        if isinstance(prompt, ChatPrompt):
            check = self._check_num_characters if truncates_to is None else self.check_tokenizable
            check(num_characters(prompt), "messages")
            prompt = self.dialect.without_thinking_where_held(prompt, grammar)
            prompt, rendered, places = await self._rendered(prompt)
            check(len(rendered.text), "messages")
            await self._check_num_tokens(rendered.text, "messages", is_cut=truncates_to is not None)
            form = self.dialect.answer_form(prompt, rendered, grammar)
            if places is not None:
                return await self._with_images(prompt, rendered, places, form)
            pieces = marked_pieces(prompt)
            if pieces:
                token_ids, breakpoints = await self._with_breakpoints(prompt, pieces, rendered)
                return PreparedPrompt(
                    self.known(token_ids, "messages"), form, breakpoints, tools_salt(prompt)
                )
            # A template writes the special tokens itself.
            token_ids = await self.tokenizer.encode(
                rendered.text, add_special_tokens=False, plain_ranges=rendered.plain_ranges
            )
            return PreparedPrompt(self.known(token_ids, "messages"), form)
        check_token_ids(prompt.token_ids, self.card.vocab_size, param="prompt")
        return PreparedPrompt(prompt.token_ids)

    async def _rendered(self, prompt: ChatPrompt) -> tuple[ChatPrompt, RenderedChat, ImagePlaces | None]:
        """Render a chat. Images of tools' results move behind them where the template has no other place for them."""
        rendered = self.dialect.close_thinking(prompt, await self.template.render_later(prompt))
        parts = image_parts(prompt)
        if not parts or self.card.vision is None:
            return prompt, rendered, None
        places = ImagePlaces(self.card.vision, parts)
        try:
            places.check(rendered)
        except InvalidRequest:
            prompt = with_images_in_user_turns(prompt)
            rendered = self.dialect.close_thinking(prompt, await self.template.render_later(prompt))
            places = ImagePlaces(self.card.vision, image_parts(prompt))
            places.check(rendered)
        return prompt, rendered, places

    async def _with_images(
        self, prompt: ChatPrompt, rendered: RenderedChat, places: ImagePlaces, form: AnswerForm | None
    ) -> PreparedPrompt:
        expanded = places.expanded(rendered)
        pieces = marked_pieces(prompt)
        kept = await self._kept(prompt, pieces, rendered) if pieces else []
        ends = sorted({end for prefix in kept for end in (prefix.end, *prefix.earlier)})
        token_ids, positions = await self.tokenizer.encode_marked(
            expanded.text, expanded.plain_ranges, [places.moved(end) for end in ends]
        )
        token_ids, images, counts = places.with_runs(self.known(token_ids, "messages"))
        before = {end: positions[places.moved(end)] for end in ends}
        breakpoints = breakpoints_at(kept, moved_positions(before, counts))
        salt = tools_salt(prompt) if pieces else ""
        return PreparedPrompt(token_ids, form, breakpoints, salt, images)

    async def _with_breakpoints(
        self, prompt: ChatPrompt, pieces: Sequence[Piece], rendered: RenderedChat
    ) -> tuple[tuple[int, ...], tuple[CacheBreakpoint, ...]]:
        kept = await self._kept(prompt, pieces, rendered)
        ends = sorted({end for prefix in kept for end in (prefix.end, *prefix.earlier)})
        token_ids, positions = await self.tokenizer.encode_marked(rendered.text, rendered.plain_ranges, ends)
        return token_ids, breakpoints_at(kept, positions)

    async def _kept(
        self, prompt: ChatPrompt, pieces: Sequence[Piece], rendered: RenderedChat
    ) -> list[KeptText]:
        """Return the prefixes of a rendered chat that its marks ask to keep."""

        def render(variant: ChatPrompt) -> str:
            return self.dialect.close_thinking(variant, self.template.render(variant)).text

        if len(rendered.text) <= DIRECT_ENCODE_CHARS:
            return locate(prompt, pieces, rendered.text, render)
        # Off the event loop, because this renders the chat a few times more.
        return await in_thread(locate, prompt, pieces, rendered.text, render)

    async def prediction_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a predicted answer, cut to what the context could hold. Special tokens spelled out in
        the text are plain text."""
        text = text[: self.max_model_len * self.tokenizer.max_characters_per_token]
        text = await self.tokenizer.shortened(text, self.max_model_len)
        token_ids = await self.tokenizer.encode(
            text, add_special_tokens=False, plain_ranges=((0, len(text)),)
        )
        return self.known(token_ids[: self.max_model_len], "prediction")

    async def sampling_options(self, options: SamplingOptions) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that a request or the model's makers state."""
        filled = options.with_defaults(self.card.sampling_defaults)
        fields = {name: value for name, value in msgspec.structs.asdict(filled).items() if value is not None}
        del fields["fallback"]
        if not filled.top_k:
            fields.pop("top_k", None)
        for name in OPTIONS:
            fields.pop(name, None)
        return fields | await self._token_options.fields(options)

    async def with_checked_grammar(
        self, sampling: SamplingParams, workspace_id: str
    ) -> tuple[SamplingParams, tuple[RequestWarning, ...]]:
        """Return the grammar as engines take it, and warnings about the parts that it does not enforce. Raises
        InvalidRequest when no engine could compile the grammar."""
        if sampling.grammar is None:
            return sampling, ()
        checked = await self._grammars.check(sampling.grammar, self._special_token_ids, workspace_id)
        return msgspec.structs.replace(sampling, grammar=checked.grammar), checked.warnings

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return a prompt of token ids as text, for guards."""
        check_token_ids(token_ids, self.card.vocab_size, param="prompt")
        return await self.tokenizer.decode_later(token_ids)

    async def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return (await self.prepare(prompt)).token_ids
