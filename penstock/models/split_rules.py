r"""Rules that cut text before byte-level merges, by the names that GGUF files have for them. Imports no torch.

A rule is one pattern or several: each of them cuts further what those before it have left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SplitRule:
    """The rule that cuts text before merging: patterns, or GPT-2's own, perhaps after isolating digits."""

    patterns: tuple[str, ...] = ()
    isolate_digits: bool = False
    normalize: bool = False  # Unicode NFC
    whole_words: bool = False  # a piece that is in the vocabulary is not built by merges
    adds_bos: bool = False  # unless the metadata says otherwise


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")


def _words_then(digits: str, *, letters: str = r"\p{L}", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """Return a pattern of the family that began with GPT-4: contractions, words, digits, symbols, line ends,
    spaces."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?[{letters}]+"
    return "|".join([_CONTRACTIONS, words, digits, rf" ?{symbols}", *_SPACES])


def _cased_words(
    digits: str, *, contractions: bool = False, apart: str = "", after_symbols: str = r"[\r\n/]*"
) -> str:
    """Return a pattern of the family of o200k: words end where lower case meets upper case. Letters of the class
    `apart` make words of their own."""
    other = f"&&[^{apart}]" if apart else ""
    upper, lower = (
        rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]",
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{other}]",
    )
    end = f"{_CONTRACTIONS}?" if contractions else ""
    return "|".join(
        [
            *([f"[{apart}]+"] if apart else []),
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}",
            digits,
            rf" ?[^\s\p{{L}}\p{{N}}]+{after_symbols}",
            *_SPACES,
        ]
    )


_THREE_DIGITS = r"\p{N}{1,3}"
_THOUSANDS = r"\d{1,3}(?=(?:\d{3})*\b)"  # digits of a number, in threes from its end
_LLAMA3 = SplitRule((_words_then(_THREE_DIGITS),), whole_words=True, adds_bos=True)
_QWEN2 = SplitRule((_words_then(r"\p{N}"),), normalize=True)
_QWEN35 = SplitRule(
    (_words_then(r"\p{N}", letters=r"\p{L}\p{M}", symbols=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), normalize=True
)
_NUMBERS_OF_ONE = SplitRule((_words_then(r"\p{N}"),))
_NUMBERS_OF_THREE = SplitRule((_words_then(_THREE_DIGITS),))
_O200K = SplitRule((_cased_words(_THREE_DIGITS, contractions=True),))
_KIMI = SplitRule(
    (_cased_words(_THREE_DIGITS, contractions=True, apart=r"\p{Han}", after_symbols=r"[\r\n]*"),)
)
_DEEPSEEK3 = SplitRule(
    (
        _THREE_DIGITS,
        "[一-龥぀-ゟ゠-ヿ]+",
        "|".join(
            [
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
                r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
                r" ?[\p{P}\p{S}]+[\r\n]*",
                *_SPACES,
            ]
        ),
    )
)
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case, as Unicode 10 had them: Georgian had none.
_CASED = r"[\p{Lu}\p{Ll}\p{Lt}&&[^ა-ჿ]]"
_DEEPSEEK_LLM = SplitRule(
    (r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _ASIAN, r"\p{N}+")
)
_DEEPSEEK_CODER = SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))
_BLOOM = SplitRule((r" ?[^(\s|.,!?…。，、।۔،)]+",))
_SEED = SplitRule((_words_then(r"\p{N}", symbols=r"[^\s\p{L}\p{N}\r\n]+"),))
_GPT2 = SplitRule()
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON = SplitRule((r"[\p{P}$+<=>^~|`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]"))
_DIGITS_THEN_GPT2 = SplitRule(isolate_digits=True)

_BY_RULE: tuple[tuple[SplitRule, str], ...] = (
    (
        _GPT2,
        "default gpt-2 phi-2 olmo mpt exaone4 modern-bert roberta-bpe granite-docling jais trillion mellum a.x-4.0 "
        "gigachat jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    ),
    (_DIGITS_THEN_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 lfm2 pixtral midm-2.0 jina-v5-nano"),
    (_QWEN2, "qwen2 deepseek-r1-qwen megrez kormo f2llmv2"),
    (_QWEN35, "qwen35"),
    (_NUMBERS_OF_ONE, "stablelm2 hunyuan solar-open grok-2"),
    (_NUMBERS_OF_THREE, "dbrx smaug-bpe chatglm-bpe"),
    (SplitRule(_NUMBERS_OF_THREE.patterns, whole_words=True), "glm4 glm5"),
    (SplitRule((_cased_words(r"\p{N}"),), whole_words=True, adds_bos=True), "tekken"),
    (_O200K, "gpt-4o minimax-m2 kanana2 talkie"),
    (SplitRule((_THOUSANDS, *_O200K.patterns)), "tiny_aya cohere2moe"),
    (SplitRule(_O200K.patterns, adds_bos=True), "llama4"),
    (_KIMI, "kimi-k2"),
    (_DEEPSEEK3, "deepseek-v3 hunyuan-dense joyai-llm"),
    (_DEEPSEEK_LLM, "deepseek-llm"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_BLOOM, "bloom gpt3-finnish poro-chat"),
    (SplitRule((*_BLOOM.patterns, r"\p{N}")), "viking"),
    (SplitRule((_THREE_DIGITS, _words_then(r"\p{N}+")), whole_words=True), "minicpm5"),
    (_SEED, "seed-coder"),
    (_FALCON, "falcon"),
)
SPLIT_RULES: Mapping[str, SplitRule] = {name: rule for rule, names in _BY_RULE for name in names.split()}
