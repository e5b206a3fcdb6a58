"""Real ones are found, look-alikes are left alone."""

from __future__ import annotations

import pytest

from penstock.gateway.guards.policy import KINDS, passes_luhn, pii_detectors
from penstock.gateway.guards.scanner import Scanner, scan_whole

DETECTORS = pii_detectors(KINDS, {"swedish_id": r"\b\d{6}-\d{4}\b"})


def redacted(text: str) -> str:
    return scan_whole(text, Scanner(DETECTORS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to Jo.Doe@example.com.", "write to [EMAIL]."),
        ("a@b is no address", "a@b is no address"),
        ("user@host.x", "user@host.x"),
        ("call +1 (415) 555-0100 now", "call [PHONE] now"),
        ("call (415) 555-0100 or 0044 20 7946 0958", "call [PHONE] or [PHONE]"),
        ("in 2024, 3.141592653 and 1,000,000", "in 2024, 3.141592653 and 1,000,000"),
        ("IBAN DE89370400440532013000.", "IBAN [IBAN]."),
        ("GB82 WEST 1234 5698 7654 32 IS MINE", "[IBAN] IS MINE"),
        ("DE89 3704 1044 0532 0130 01", "DE89 3704 1044 0532 0130 01"),
        ("ZZ89 3704 1044 0532 0130 00", "ZZ89 3704 1044 0532 0130 00"),
        ("card 4111-1111-1111-1111", "card [CREDIT_CARD]"),
        ("5500 0000 0000 0004 12/27", "[CREDIT_CARD] 12/27"),
        ("3782 822463 10005", "[CREDIT_CARD]"),
        ("4111 1111 1111 1112", "4111 1111 1111 1112"),
        ("0000 0000 0000 0000", "0000 0000 0000 0000"),
        ("host 10.0.0.255 answers", "host [IP_ADDRESS] answers"),
        ("10.0.0.256 and 1.2.3", "10.0.0.256 and 1.2.3"),
        ("at fe80::1:2, or ::1:2.", "at [IP_ADDRESS], or [IP_ADDRESS]."),
        ("at 12:30:45 std::vector", "at 12:30:45 std::vector"),
        ("ssn 123-45-6789, not 000-45-6789", "ssn [US_SSN], not 000-45-6789"),
        ("id 811228-9874", "id [SWEDISH_ID]"),
    ],
)
def test_redaction(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_luhn() -> None:
    assert passes_luhn("79927398713")
    assert not any(passes_luhn(f"7992739871{digit}") for digit in "012456789")


def test_only_chosen_kinds_are_found() -> None:
    text = "a@example.com 10.0.0.1"
    assert scan_whole(text, Scanner(pii_detectors(("email",), {}))) == "[EMAIL] 10.0.0.1"
