"""The names of models, the callers that may use them, and their regions: the table `[models]` of the settings file.

    [models.aliases]
    "gpt-4o-mini" = "qwen2.5-coder-1.5b"

    [models.auto]
    small = "smollm2-135m"
    large = "qwen2.5-coder-1.5b"

    [models.splits]
    "gpt-4o" = { "qwen2.5-coder-1.5b" = 9, "llama-70b" = 1 }

    [models.fallbacks."llama-70b"]
    models = ["qwen2.5-coder-1.5b"]

    [models.regions."llama-70b"]
    region = "eu"
    policy = "pin"

    [models.workspaces.ws_research]
    allowed = ["smollm2-135m", "sql-adapter"]
    region = "eu"

Plain data: `catalogue`, `auto` and `routes` act on it.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from penstock.core.errors import ConfigError
from penstock.core.figures import NotNegative, Positive, ShareOrZero
from penstock.core.identity import Principal

# The largest contribution of one sign. Two strong signs make a large prompt, one makes a medium one.
WEIGHTS = {
    "length": 0.35,  # of the whole prompt
    "code": 0.35,  # in the question or around it
    "maths": 0.35,
    "reasoning": 0.30,  # words that ask for an argument instead of a fact
    "instructions": 0.30,  # how many demands there are
    "language": 0.20,  # other than English, in which small models are weakest
    "tools": 0.20,  # to choose from
    "turns": 0.10,  # to keep in mind
}
_CHARACTERS_FOR_FULL_LENGTH = 8_000
_CHARACTERS_PER_TOKEN = 4
_READ_CHARACTERS = 4_000  # from each end: a long text is not read whole to know that it is long

_CODE_BLOCK = re.compile(r"```|^\s{4,}\S.*[;{}()=]\s*$", re.MULTILINE)
_CODE_WORDS = re.compile(
    r"\b(?:def|class|return|import|function|const|struct|SELECT|INSERT|UPDATE|public static|fn|"
    r"regex|SQL|API|JSON|stack ?trace|traceback|exception|compile[rs]?|refactor|unit tests?|"
    r"algorithm|complexity|python|javascript|typescript|java|rust|golang|c\+\+)\b",
    re.IGNORECASE,
)
_MATHS = re.compile(
    r"\\(?:frac|sum|int|sqrt|begin|alpha|beta|cdot|lim)|[∑∫√≤≥≠∞∂π]|\d\s*[-+*/^=<>]\s*\d|\b[a-z]\s*[\^=]\s*[\da-z(]|"
    r"\b(?:prove|proof|theorem|lemma|integral|derivative|equation|polynomial|matrix|matrices|eigenvalues?|"
    r"probability|calculate|compute|solve|percent|average speed|how many)\b",
    re.IGNORECASE,
)
_REASONING = re.compile(
    r"\b(?:why|explain|analy[sz]e|compare|contrast|evaluate|justify|derive|design|plan|prioriti[sz]e|critique|"
    r"trade-?offs?|implications?|step by step|pros and cons|root cause|argue|assess|infer|hypothes[ie]s)\b",
    re.IGNORECASE,
)
_DEMANDS = re.compile(
    r"^\s*(?:[-*•]|\d+[.)])\s+\S|\b(?:must|should|make sure|ensure|do not|don't|exactly|at least|at most|"
    r"only if|unless|then|also|finally)\b|\?",
    re.IGNORECASE | re.MULTILINE,
)
_WORD = re.compile(r"[^\W\d_]+")
_ENGLISH_WORDS = (
    "a an and are as at be but by can do for from how i if in is it me my not of on or please so that the this to "
    "was we what when where which who why will with write you your"
)
_ENGLISH = frozenset(_ENGLISH_WORDS.split())
_MIN_WORDS_TO_TELL_A_LANGUAGE = 6
_ENGLISH_SHARE = 0.2  # of these words, in ordinary text; other languages share few of them


class Complexity(enum.StrEnum):
    """The size of model that a prompt calls for, in ascending order."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@dataclass(frozen=True, slots=True)
class Thresholds:
    medium_from: float = 0.3
    large_from: float = 0.6


@dataclass(frozen=True, slots=True)
class PromptText:
    """`question` is the last message; `context` everything before it. Prompts of token ids have a length only."""

    question: str
    context: str = ""
    num_token_ids: int = 0  # whose text is not known
    num_turns: int = 1
    num_tools: int = 0


@dataclass(frozen=True, slots=True)
class Assessment:
    score: float  # 0 to 1
    complexity: Complexity
    reasons: tuple[tuple[str, float], ...]  # signs and what they contributed, the strongest first


def assess(prompt: PromptText, thresholds: Thresholds | None = None) -> Assessment:
    """Estimate how hard a prompt is, by counting signs in its text.

    Each sign is a number from 0 to 1, times a weight; the sum, cut off at 1, is the score. A prompt with several
    signs goes to the larger model. A prompt without signs counts as easy however important it is; the cascade on low
    confidence is for such prompts."""
    thresholds = thresholds or Thresholds()
    contributions = {name: WEIGHTS[name] * strength for name, strength in _signs(prompt).items() if strength}
    score = min(1.0, sum(contributions.values()))
    if score >= thresholds.large_from:
        complexity = Complexity.LARGE
    elif score >= thresholds.medium_from:
        complexity = Complexity.MEDIUM
    else:
        complexity = Complexity.SMALL
    reasons = sorted(contributions.items(), key=lambda reason: (-reason[1], reason[0]))
    return Assessment(score, complexity, tuple(reasons))


def _signs(prompt: PromptText) -> dict[str, float]:
    question = _excerpt(prompt.question)
    context = _excerpt(prompt.context)
    num_characters = len(prompt.question) + len(prompt.context) + _CHARACTERS_PER_TOKEN * prompt.num_token_ids
    blocks = len(_CODE_BLOCK.findall(question)) + 0.5 * len(_CODE_BLOCK.findall(context))
    return {
        "length": _share(num_characters, _CHARACTERS_FOR_FULL_LENGTH),
        "code": min(1.0, _share(blocks, 2) + _share(len(_CODE_WORDS.findall(question)), 2)),
        "maths": _share(len(_MATHS.findall(question)), 2),
        "reasoning": _share(len(_REASONING.findall(question)), 2),
        "instructions": _share(max(0, len(_DEMANDS.findall(question)) - 1), 6),
        "language": _foreign_share(question),
        "tools": _share(prompt.num_tools, 4),
        "turns": _share(prompt.num_turns - 1, 10),
    }


def _excerpt(text: str) -> str:
    if len(text) <= 2 * _READ_CHARACTERS:
        return text
    return text[:_READ_CHARACTERS] + "\n" + text[-_READ_CHARACTERS:]


def _share(count: float, full: float) -> float:
    return min(1.0, max(0.0, count / full))


def _foreign_share(text: str) -> float:
    """Return how little a text looks like English: by letters of other scripts, or by the lack of everyday English
    words."""
    words: list[str] = _WORD.findall(text.lower())
    letters = sum(map(len, words))
    if not letters:
        return 0.0
    other_scripts = sum(letter > "\u024f" for word in words for letter in word) / letters
    if other_scripts > 0.5 or len(words) < _MIN_WORDS_TO_TELL_A_LANGUAGE:
        return other_scripts
    everyday = sum(word in _ENGLISH for word in words) / len(words)
    return max(other_scripts, 1.0 - _share(everyday, _ENGLISH_SHARE))


FallbackReason: TypeAlias = Literal["error", "context", "budget", "queue"]
AUTO = "auto"  # the name that leaves the choice to the gateway


class AutoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models behind the name `auto`. A size without a model is served by the next larger one that has one."""

    small: str | None = None
    medium: str | None = None
    large: str | None = None
    medium_from: ShareOrZero = 0.3
    large_from: ShareOrZero = 0.6
    # An answer whose tokens had a lower mean log-probability is asked for again, of the next larger model.
    min_mean_logprob: Annotated[float, Meta(le=0)] = -1.0
    max_escalations: Annotated[int, Meta(ge=0, le=2)] = 1

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(medium_from=self.medium_from, large_from=self.large_from)

    @property
    def models(self) -> tuple[str, ...]:
        """Return all that are named, smallest first."""
        return self.models_from(Complexity.SMALL)

    def models_from(self, complexity: Complexity) -> tuple[str, ...]:
        """Return the models that are large enough for a prompt, smallest first; the largest model when none is."""
        sizes = (self.small, self.medium, self.large)
        first = tuple(Complexity).index(complexity)
        found = [name for name in sizes[first:] if name is not None]
        found = found or [name for name in sizes if name is not None][-1:]
        return tuple(dict.fromkeys(found))

    def check(self) -> None:
        if self.small is None and self.medium is None and self.large is None:
            raise ConfigError("models.auto names no model.", hint="Set small, medium or large.")
        if self.medium_from > self.large_from:
            raise ConfigError("models.auto.medium_from is above large_from.")
        if AUTO in (self.small, self.medium, self.large):
            raise ConfigError(f"models.auto names {AUTO!r}, which is itself.")


class ModelAccess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models that one key or workspace may use, and its region."""

    allowed: tuple[str, ...] | None = None  # names of models, adapters or aliases; None allows all
    region: str | None = None  # where its requests should be served, unless they say so themselves

    def allows(self, names: tuple[str, ...]) -> bool:
        return self.allowed is None or any(name in self.allowed for name in names)


class RegionPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The region in which the requests for one model are served."""

    # Region of requests that name none, or of all requests with the policy "pin"; empty for the region in the
    # caller's settings.
    region: str = ""
    policy: Literal["prefer", "pin"] = "prefer"
    # The predicted wait at which a request goes elsewhere.
    spill_over_s: NotNegative | None = None

    def applied(self, region: str) -> tuple[str, float | None]:
        """Return the region of a request that would be served in `region`, and the wait at which it leaves."""
        if self.policy == "pin":
            return self.region or region, math.inf
        return region or self.region, self.spill_over_s


class Fallbacks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The models that answer instead of one, in this order, and the kinds of failures that are reason enough."""

    models: Annotated[tuple[str, ...], Meta(min_length=1, max_length=8)]
    on: tuple[FallbackReason, ...] = ("error", "context", "budget", "queue")


_NO_RULES = ModelAccess()


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    aliases: dict[str, str] = {}
    auto: AutoSettings | None = None
    splits: dict[str, dict[str, Positive]] = {}  # names that stand for models by weight
    fallbacks: dict[str, Fallbacks] = {}  # by model
    regions: dict[str, RegionPolicy] = {}  # by model
    workspaces: dict[str, ModelAccess] = {}
    keys: dict[str, ModelAccess] = {}

    def allows(self, principal: Principal, names: tuple[str, ...]) -> bool:
        """Return whether a caller may use a model that goes by these names. The key itself, its table here and its
        workspace's must all allow it."""
        if principal.allowed_models is not None and not any(map(principal.may_use, names)):
            return False
        if not self.keys and not self.workspaces:
            return True
        return all(access.allows(names) for access in self._access(principal))

    def region_of(self, principal: Principal) -> str:
        """Return the region that the key or the workspace prefers; empty for none."""
        if not self.keys and not self.workspaces:
            return ""
        return next((access.region for access in self._access(principal) if access.region), "")

    def placed(self, region: str, principal: Principal, model: str) -> tuple[str, float | None]:
        """Return where a request that names `region` is served, and the predicted wait at which it goes elsewhere:
        None as the router is set, infinite for never."""
        region = region or self.region_of(principal)
        policy = self.regions.get(model)
        return (region, None) if policy is None else policy.applied(region)

    def check(self) -> None:
        if self.auto is not None:
            self.auto.check()
        for name, weights in self.splits.items():
            if not weights:
                raise ConfigError(f"models.splits.{name} names no model.")
            if name in self.aliases or name == AUTO or name in weights:
                raise ConfigError(
                    f"models.splits.{name} has a name that is an alias, `auto`, or one of its own models."
                )
        for name, fallbacks in self.fallbacks.items():
            if name in fallbacks.models:
                raise ConfigError(f"models.fallbacks.{name} names the model itself.")
        for alias, name in self.aliases.items():
            if name in self.aliases:
                raise ConfigError(f"models.aliases.{alias} points to {name!r}, which is an alias itself.")
            if alias == AUTO and self.auto is not None:
                raise ConfigError(f"models.aliases has {AUTO!r}, and models.auto is there too.")

    def _access(self, principal: Principal) -> tuple[ModelAccess, ModelAccess]:
        return (
            self.keys.get(principal.key_id, _NO_RULES),
            self.workspaces.get(principal.workspace_id, _NO_RULES),
        )
