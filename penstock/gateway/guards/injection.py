"""Heuristics find signs that a text gives orders to the model that reads it. Each sign has a weight and a reason.

A score is the probability that at least one sign is real, if each sign is right as often as its weight says. No list
of signs is complete: the score raises the price of an attack, and does not replace a model that is told what to
distrust.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock.gateway.guards.detector import Asker, Detector, Review, Subject

INLINE_CHARS = 8192
_ORDERS = r"(?:instructions?|directions?|prompts?|rules|guidelines|orders|commands|constraints)"
_PRIOR = (
    r"(?:all |any |the |your |my |of ){0,3}"
    r"(?:previous|prior|above|earlier|preceding|former|initial|original|system)"
)


@dataclass(frozen=True)
class Sign:
    name: str
    weight: float
    explanation: str
    detector: Detector


def _sign(name: str, weight: float, explanation: str, pattern: str, *, ignore_case: bool = True) -> Sign:
    return Sign(name, weight, explanation, Detector(name.upper(), pattern, ignore_case=ignore_case))


SIGNS = (
    _sign(
        "override",
        0.7,
        "asks to ignore earlier instructions",
        rf"\b(?:ignore|disregard|forget|override|bypass|drop)\s{{1,3}}{_PRIOR}\s{{1,3}}(?:\w{{1,20}}\s{{1,3}})?{_ORDERS}\b",
    ),
    _sign(
        "prompt_leak",
        0.6,
        "asks for the system prompt",
        r"\b(?:reveal|print|show|repeat|output|display|leak|tell me|give me|what (?:is|are|was|were))\s{1,3}"
        rf"(?:\w{{1,12}}\s{{1,3}}){{0,3}}(?:system|hidden|secret|initial|original)\s{{1,3}}(?:prompt|message|{_ORDERS})",
    ),
    _sign(
        "persona",
        0.5,
        "assigns a persona without limits",
        r"\b(?:you are now|act as|pretend (?:to be|you are)|from now on you(?: are|'re)?)\s{1,3}"
        r"(?:\w{1,20}\s{1,3}){0,4}(?:DAN|unrestricted|unfiltered|uncensored|jailbroken"
        r"|without (?:any )?(?:rules|limits|restrictions|filters))",
    ),
    _sign(
        "developer_mode",
        0.4,
        "claims a special mode",
        r"\b(?:developer|debug|god|sudo|admin|maintenance|jailbreak) mode\b",
    ),
    _sign(
        "role_markup",
        0.6,
        "forges the markup of another role",
        r"<\|(?:im_start|system|start_header_id|assistant)\|?>|\[/?INST\]|<<SYS>>|<(?:start_of_turn|system)>",
    ),
    _sign(
        "role_heading",
        0.3,
        "forges the heading of another role",
        r"(?m)^\s{0,3}(?:#{1,4}\s{0,2})?(?:system|assistant|developer)\s{0,2}(?:message|prompt|instructions?)?\s{0,2}:",
    ),
    _sign(
        "secrecy",
        0.4,
        "asks to keep something from the user",
        r"\b(?:do not|don't|never)\s{1,3}(?:tell|inform|mention|reveal|show|warn)\s{1,3}"
        r"(?:\w{1,12}\s{1,3}){0,4}(?:user|human|anyone)\b",
    ),
    _sign(
        "exfiltration",
        0.5,
        "asks to send text to an address",
        r"\b(?:send|post|forward|upload|exfiltrate|append)\b[^.\n]{0,80}\b(?:https?://|ftp://|webhook)",
    ),
    _sign(
        "image_beacon",
        0.5,
        "holds an image address that carries data away",
        r"!\[[^\]\n]{0,80}\]\(https?://[^)\s]{1,200}[?&][^)\s]{1,100}=",
    ),
    _sign(
        "invisible_text",
        0.7,
        "holds invisible characters that spell text",
        "[\U000e0020-\U000e007e]{4,64}|[\u200b\u200c\u200d\u2060\ufeff]{8,64}",
        ignore_case=False,
    ),
    _sign(
        "encoded_order",
        0.4,
        "asks to decode and obey",
        r"\b(?:decode|base64|rot13)\b[^\n]{0,60}\b(?:follow|obey|execute|run|do what)\b",
    ),
)


class InjectionGuard:
    """Reviews what users and tools brought in; an operator's own system prompt gives orders by right."""

    detectors: tuple[Detector, ...] = ()
    reviews = True

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    async def review(self, subject: Subject, asker: Asker) -> Review | None:
        text = subject.untrusted
        # A long text is searched in a thread, because the event loop has other requests.
        signs = found_signs(text) if len(text) < INLINE_CHARS else await asyncio.to_thread(found_signs, text)
        score = injection_score(signs)
        if score < self._threshold:
            return None
        explanations = ", ".join(f"{sign.explanation} ({sign.weight:g})" for sign in signs)
        return Review("INJECTION", f"scored {score:.2f}: {explanations}", score)


def found_signs(text: str) -> list[Sign]:
    return [sign for sign in SIGNS if sign.detector.find(text, 0) is not None]


def injection_score(signs: list[Sign]) -> float:
    chance_of_none = 1.0
    for sign in signs:
        chance_of_none *= 1.0 - sign.weight
    return 1.0 - chance_of_none
