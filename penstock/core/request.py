"""A request after the gateway has checked and tokenized it.

Requests are immutable: the scheduler keeps the changing state of a request in a record of its own.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta


class Tier(enum.StrEnum):
    """The urgency of a request. The scheduler serves tiers in this order, with aging so that none starves."""

    PRIORITY = "priority"
    DEFAULT = "default"
    BATCH = "batch"


class FinishReason(enum.StrEnum):
    """The reason why a request ended."""

    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CONTENT_FILTER = "content_filter"  # a safety policy cut the answer short
    ABORT = "abort"  # the client disconnected or cancelled
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the engine could not continue the request
    INVALID = "invalid"  # the caller's error: the grammar grew too complex, or the options allow no token


class Grammar(msgspec.Struct, frozen=True):
    """The form that an answer must have. The gateway checks it, the engine compiles it and masks logits with it."""

    kind: Literal["json", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str = ""  # the schema, the pattern, the grammar, a JSON list of choices, or the tags as JSON

    def owner(self, tenant: str) -> str:
        """Return the tenant that may find the grammar in a cache. Tenants share no grammar, because the saved time
        would reveal the requests of others. A grammar without a text belongs to no tenant: all requests for JSON
        share it."""
        return tenant if self.text else ""


# Turns the hidden states of the last layer into a vector: their mean, the state of the last or of the first token, a
# mean with weights that rise with the position, or the maximum of each element. "all" keeps one vector for each
# token.
Pooling: TypeAlias = Literal["mean", "last", "first", "weighted_mean", "max", "all"]


class CacheBreakpoint(msgspec.Struct, frozen=True, array_like=True):
    """The client asks to keep the first `num_tokens` of the prompt for `ttl_s` seconds after each use. `earlier` are
    shorter prefixes that an earlier request may have asked to keep: when this prefix is not cached, the longest of
    them is reused."""

    num_tokens: int
    ttl_s: float
    earlier: tuple[int, ...] = ()


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. An engine that meets one for the first time reads it from `path`; `digest` stands for its
    weights, so that other weights under the same name are another adapter."""

    name: str
    path: str
    digest: str


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling settings that a model's makers recommend, for requests without these settings. None: no
    recommendation."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0: no limit
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None

    def stated(self) -> dict[str, float | int]:
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class Dry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Penalise a token that would lengthen a repetition of tokens earlier in the prompt or the answer ("don't repeat
    yourself"): by multiplier * base ** (length - allowed_length), from the allowed length on."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int | None = None  # only this many last tokens are searched; None: all
    # A bitmap of tokens that break a repetition: bit i % 8 of byte i // 8 stands for token i.
    breakers: bytes = b""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings by which logits become tokens. `n` is not here: the gateway submits n requests that share a
    prefix."""

    max_tokens: int  # 0 computes the prompt alone, and samples nothing
    min_tokens: int = 0
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int | None = None  # the engine draws one when absent
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    # Number of alternatives to report besides the sampled token; 0 reports it alone.
    logprobs: int | None = None
    # The same for the prompt tokens, except for the first, which has no prediction; None reports none. An answer that
    # another engine has begun does not report them again.
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()  # handled by the gateway, because engines see no text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    typical_p: float = 1.0  # keep the most typical tokens, up to this share of the probability
    xtc_probability: float = 0.0  # of leaving out, at a position, the most probable tokens ...
    xtc_threshold: float = 0.1  # ... of at least this probability, except for the least probable of them
    top_n_sigma: float = 0.0  # keep tokens within this many standard deviations of the highest logit; 0: all
    dry: Dry | None = None
    # The three penalties apply to the last n tokens of prompt and answer together; None: to the whole answer, and the
    # repetition penalty to the prompt too.
    repeat_last_n: int | None = None
    allowed_token_ids: tuple[int, ...] = ()  # only these; empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer must not contain

    @property
    def depends_on_answer(self) -> bool:
        """Return whether a token is sampled in another way for the tokens before it, or their number: by a grammar,
        penalties and the like. Temperature and the cuts of probabilities change all positions alike."""
        return bool(
            self.grammar is not None
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.dry is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.typical_p < 1.0
            or self.xtc_probability
            or self.top_n_sigma
        )


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image in a prompt: the prompt tokens `[start, start + num_tokens)` stand for the image.

    `digest` identifies the contents of the file. The encoder computes an image in `num_tiles` parts of `tile_patches`
    patches each; the scheduler may spread the parts over several steps. Steps without the image's tokens need no
    `data`, so logs leave the bytes out."""

    start: int
    num_tokens: int
    digest: bytes
    num_tiles: int = 1
    tile_patches: int = 1
    grid: tuple[int, int] = (0, 0)  # rows and columns of image tokens, where positions depend on them
    # The image's tokens attend to each other, so that one step must compute all of them.
    is_whole: bool = False
    data: bytes = b""  # the file, as the client sent it

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate; with `pooling`, a prompt to embed. `tenant` salts the prefix cache and is the unit of
    fairness between users.

    `output_token_ids` are the start of an answer that another engine has begun: they follow the prompt and count as
    output in every respect, and only later tokens are emitted."""

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    tenant: str = ""
    tier: Tier = Tier.DEFAULT
    cache_salt: str = ""  # must be equal, besides the tenant, for a cached prefix to be reused
    cache_breakpoints: tuple[CacheBreakpoint, ...] = ()  # in ascending order of num_tokens
    # The shortest prefix that a breakpoint keeps; None for the setting of the engine.
    min_cacheable_tokens: int | None = None
    deadline_s: float | None = None  # on the engine's clock; set from AddRequest.timeout_s on arrival
    pooling: Pooling | None = None  # the answer is one vector instead of tokens
    normalizes: bool | None = None  # scale the vector to length 1; None does as the model's files say
    # The token at which the second text of a pair begins, for encoders; 0: a single text.
    second_text_at: int = 0
    model: str = ""  # the name that the client asked for; empty where there is only one
    adapter: Adapter | None = None  # LoRA weights that are added to the model's own for this request
    output_token_ids: tuple[int, ...] = ()
    images: tuple[ImageInput, ...] = ()  # in ascending order of start, without overlap
    prediction: tuple[int, ...] = ()  # the answer that the client expects; only drafters read it
    region: str = ""  # the preferred region; only the router reads this field and the next
    affinity_key: str = ""  # a session or prompt_cache_key: requests with the same key likely share a prefix
    # The predicted wait at which the request leaves its region; None: as the router is set, infinite: never.
    spill_over_s: float | None = None

    @property
    def prefix_salt(self) -> str:
        """Return the salt that two requests must have in common, besides their tokens, to share KV. No name of a
        tenant holds a NUL, so the parts of a salt cannot be mistaken for each other."""
        if self.adapter is not None:
            return f"{self.tenant}\0{self.cache_salt}\0{self.adapter.digest}"
        return f"{self.tenant}\0{self.cache_salt}" if self.cache_salt else self.tenant

    @property
    def key_token_ids(self) -> tuple[int, ...]:
        """Return the prompt as block hashes see it: the tokens of an image are replaced by values derived from the
        image's contents. Two prompts whose images differ have no block with such a token in common. These values are
        negative, so that none equals a text token."""
        if not self.images:
            return self.prompt_token_ids
        keys = list(self.prompt_token_ids)
        for image in self.images:
            base = -1 - (int.from_bytes(image.digest, "little") << 32)
            end = min(image.end, len(keys))
            keys[image.start : end] = [base - offset for offset in range(end - image.start)]
        return tuple(keys)

    def without_image_data(self) -> Request:
        """Return the same request without the bytes of its images, for logs."""
        if not self.images:
            return self
        images = tuple(msgspec.structs.replace(image, data=b"") for image in self.images)
        return msgspec.structs.replace(self, images=images)
