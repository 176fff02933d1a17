"""A checker of JSON Schema's formats that knows all that a grammar enforces: jsonschema's own needs packages for some of them."""

from __future__ import annotations

import ipaddress
import re
from datetime import date
from urllib.parse import urlsplit

import jsonschema

CHECKER = jsonschema.FormatChecker(formats=())

SECONDS = r"\d+S"
MINUTES = rf"\d+M({SECONDS})?"
HOURS = rf"\d+H({MINUTES})?"
TIME = rf"T({HOURS}|{MINUTES}|{SECONDS})"
DAYS = r"\d+D"
MONTHS = rf"\d+M({DAYS})?"
YEARS = rf"\d+Y({MONTHS})?"
DURATION = re.compile(rf"P(({DAYS}|{MONTHS}|{YEARS})({TIME})?|{TIME}|\d+W)")
CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([Zz]|[+-](\d\d):(\d\d))", re.ASCII)
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
DOMAIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


@CHECKER.checks("time")
def is_time(value: object) -> bool:
    """RFC 3339's `full-time`; a leap second is one at midnight of Greenwich only."""
    if not isinstance(value, str):
        return True
    parts = CLOCK.fullmatch(value)
    if parts is None:
        return False
    hour, minute, second = (int(parts[i]) for i in (1, 2, 3))
    ahead = [int(parts[i] or 0) for i in (6, 7)]
    if hour > 23 or minute > 59 or ahead[0] > 23 or ahead[1] > 59:
        return False
    offset = (ahead[0] * 60 + ahead[1]) * (-1 if parts[5].startswith("-") else 1)
    return second < 60 or (second == 60 and (hour * 60 + minute - offset) % (24 * 60) == 23 * 60 + 59)


@CHECKER.checks("date", ValueError)
def is_date(value: object) -> bool:
    return not isinstance(value, str) or (len(value) == 10 and value.isascii() and date.fromisoformat(value).year > 0)


@CHECKER.checks("date-time", ValueError)
def is_date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    return value[10:11] in ("T", "t") and is_date(value[:10]) and is_time(value[11:])


@CHECKER.checks("duration")
def is_duration(value: object) -> bool:
    return not isinstance(value, str) or DURATION.fullmatch(value) is not None


@CHECKER.checks("uuid")
def is_uuid(value: object) -> bool:
    return not isinstance(value, str) or re.fullmatch(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", value) is not None


@CHECKER.checks("ipv4", ValueError)
def is_ipv4(value: object) -> bool:
    return not isinstance(value, str) or bool(ipaddress.IPv4Address(value))


@CHECKER.checks("ipv6", ValueError)
def is_ipv6(value: object) -> bool:
    return not isinstance(value, str) or bool(ipaddress.IPv6Address(value))


@CHECKER.checks("hostname")
def is_hostname(value: object) -> bool:
    return not isinstance(value, str) or (len(value) <= 253 and all(map(LABEL.fullmatch, value.split("."))))


@CHECKER.checks("email")
def is_email(value: object) -> bool:
    """RFC 5321's `Mailbox`, but for the local part: a domain, whose labels it does not bound, or an address in brackets."""
    if not isinstance(value, str):
        return True
    local, _, host = value.rpartition("@")
    return bool(local) and (DOMAIN.fullmatch(host) is not None or (host.startswith("[") and host.endswith("]")))


@CHECKER.checks("uri", ValueError)
def is_uri(value: object) -> bool:
    return not isinstance(value, str) or bool(urlsplit(value).scheme)
