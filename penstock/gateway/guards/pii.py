"""Patterns find candidates for personal data in text, and checksums tell real data from look-alikes.

The patterns are made for redaction: an ambiguous form is read in the way that hides more, but a number with a wrong
checksum is left alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from penstock.gateway.guards.detector import Check, Detector

_EMAIL = r"[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,30}[A-Za-z0-9])?\.){1,5}[A-Za-z]{2,24}"
_PHONE = r"(?:\+|\b00)[1-9](?:[ .\-/()]{0,2}[0-9]){6,14}\b|(?:\(\d{3}\) ?|\b\d{3}[ .\-])\d{3}[ .\-]\d{4}\b"
_IBAN = r"\b[A-Z]{2}[0-9]{2}(?:[ \-]?[A-Za-z0-9]){11,30}\b"
_CARD = r"\b[0-9](?:[ \-]?[0-9]){12,18}\b"
_IPV4 = r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b"
_IPV6 = r"[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,44}"
_US_SSN = r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b"

# How long an IBAN is, by country.
_IBAN_LENGTHS = {
    country: int(length)
    for length, countries in (
        ("15", "NO"), ("16", "BE"), ("18", "DK FI FO GL NL SD"), ("19", "MK SI"),
        ("20", "AT BA EE KZ LT LU MN XK"), ("21", "CH CR HR LI LV"), ("22", "BG BH DE GB GE IE ME RS VA"),
        ("23", "AE GI IL IQ OM TL"), ("24", "AD CZ ES MD PK RO SA SE SK TN VG"), ("25", "LY PT ST"),
        ("26", "IS TR"), ("27", "BI DJ FR GR IT MC MR SM"), ("28", "AL AZ BY CY DO GT HU LB NI PL SV"),
        ("29", "BR EG PS QA UA"), ("30", "JO KW MU YE"), ("31", "MT SC"), ("32", "LC"), ("33", "RU"),
    )
    for country in countries.split()
}  # fmt: skip


def _end_after(text: str, start: int, end: int, num_characters: int) -> int | None:
    """Where the `num_characters`-th letter or digit of a candidate ends; None when it has fewer."""
    for position in range(start, end):
        if text[position].isalnum():
            num_characters -= 1
            if num_characters == 0:
                return position + 1
    return None


def iban_end(text: str, start: int, end: int) -> int | None:
    length = _IBAN_LENGTHS.get(text[start : start + 2])
    real_end = _end_after(text, start, end, length) if length is not None else None
    if real_end is None:
        return None
    compact = re.sub(r"[ \-]", "", text[start:real_end]).upper()
    digits = "".join(str(int(character, 36)) for character in compact[4:] + compact[:4])
    return real_end if int(digits) % 97 == 1 else None


def passes_luhn(digits: str) -> bool:
    total = 0
    for place, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + place % 2)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def card_end(text: str, start: int, end: int) -> int | None:
    """A number may be followed by another (an expiry date), so groups are dropped from the end until one fits."""
    groups = re.split(r"[ \-]", text[start:end])
    digits = "".join(groups)
    if len(set(digits)) == 1:
        return None
    for group in reversed(groups):
        if len(digits) < 13:
            return None
        if passes_luhn(digits):
            return end
        digits = digits[: len(digits) - len(group)]
        end -= len(group) + 1
    return None


def ip_end(text: str, start: int, end: int) -> int | None:
    """An address may end a sentence, so a dot or colon after it is dropped. Part of a longer word is no address."""
    if start > 0 and (text[start - 1].isalnum() or text[start - 1] in ".:"):
        return None
    if end < len(text) and text[end].isalnum():
        return None
    candidate = text[start:end].rstrip(".")
    if candidate.endswith(":") and not candidate.endswith("::"):
        candidate = candidate[:-1]
    try:
        ipaddress.ip_address(candidate)
    except ValueError:
        return None
    return start + len(candidate) if len(candidate) > 3 else None


def ssn_end(text: str, start: int, end: int) -> int | None:
    area, group, serial = text[start:end].split("-")
    is_issued = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return end if is_issued else None


_DETECTORS: Mapping[str, tuple[tuple[str, Check | None], ...]] = {
    "email": ((_EMAIL, None),),
    "phone": ((_PHONE, None),),
    "iban": ((_IBAN, iban_end),),
    "credit_card": ((_CARD, card_end),),
    "ip_address": ((_IPV4, ip_end), (_IPV6, ip_end)),
    "us_ssn": ((_US_SSN, ssn_end),),
}
KINDS = tuple(_DETECTORS)


def pii_detectors(kinds: Iterable[str], national_ids: Mapping[str, str]) -> tuple[Detector, ...]:
    """Return the detectors of these kinds. `national_ids` are more patterns by name."""
    built_in = [
        Detector(kind.upper(), pattern, check=check) for kind in kinds for pattern, check in _DETECTORS[kind]
    ]
    return (*built_in, *(Detector(name.upper(), pattern) for name, pattern in national_ids.items()))
