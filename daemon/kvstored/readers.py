"""How the text of each kind of setting is read: tiers, addresses, users, quotas, sizes, durations.

Invariants
1. A reader takes the text of a flag or a variable as well as a value of the file, and raises BadSetting only.
2. Nothing here looks at other settings, nor at the machine but for the names of users and groups.
"""

from __future__ import annotations

import grp
import ipaddress
import pwd
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvstore.errors import BadSetting
from kvstore.units import parse_duration, parse_size, parse_whole

TIERS = ("gpu", "cpu", "ssd", "remote")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Principals:
    """A set of users and groups, as the kernel vouches for them at the other end of a unix socket."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def include(self, uid: int, gids: frozenset[int]) -> bool:
        """Return whether a process of user `uid` with the groups `gids` is one of these."""
        return uid in self.uids or not self.gids.isdisjoint(gids)


def read_switch(given: Any) -> bool:
    """Return a yes or no."""
    if isinstance(given, bool):
        return given
    word = str(given).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise BadSetting(f"{given!r} is neither true nor false: write one of those")


def read_tiers(given: Any) -> tuple[str, ...]:
    """Return the tiers named, fastest first, or ("auto",)."""
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else _as_list(given)
    if not all(isinstance(name, str) for name in names):
        raise BadSetting(f"{given!r} is not a list of tiers: write cpu,ssd or auto")
    named = cast("list[str]", names)
    if named == ["auto"]:
        return ("auto",)
    for name in named:
        if name not in TIERS:
            raise BadSetting(f"there is no tier {name!r}: write auto, or some of {','.join(TIERS)}")
        if named.count(name) > 1:
            raise BadSetting(f"the tier {name} is named twice: name it once")
    return tuple(tier for tier in TIERS if tier in named)


def read_writer(given: Any) -> str:
    """Return the name of a writer of objects."""
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        raise BadSetting(f"{given!r} is no name: write letters, digits and ._- (64 at most)")
    return given


def read_path(given: Any) -> Path:
    """Return an absolute path; ~ is the home directory."""
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        raise BadSetting(f"{given!r} is not a path: write one such as /var/lib/kvstored")
    try:
        return Path(given).expanduser().absolute()
    except RuntimeError as exc:
        raise BadSetting(f"{given!r} names a home directory that can't be found: write it out") from exc


def read_address(given: Any) -> tuple[str, int] | None:
    """Return host and port, or None for "off". A port alone means this machine only."""
    text = str(given).strip()
    if text == "off":
        return None
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host or "127.0.0.1"
    number = None if isinstance(given, bool) else parse_whole(port)
    if number is None or number > 65535:
        raise BadSetting(f"{given!r} is not HOST:PORT with a port up to 65535: write 127.0.0.1:9469, or off")
    if bracketed or ":" in host:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError as exc:
            raise BadSetting(f"{given!r} is not HOST:PORT: an IPv6 address is written [::1]:9469") from exc
        if not bracketed:
            raise BadSetting(f"{given!r} could be cut in two ways: write [{host}]:{port}")
    return host, number


def read_fraction(given: Any) -> float:
    """Return a part of one: 0.95, or 95%."""
    text = str(given).strip()
    try:
        part = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        part = -1.0
    if not 0 < part <= 1 or isinstance(given, bool):
        raise BadSetting(f"{given!r} is not a fraction above 0 and up to 1: write 0.95 or 95%")
    return part


def read_principals(given: Any) -> Principals:
    """Return users and groups, from uid:N and gid:N entries (names will do for numbers)."""
    uids: set[int] = set()
    gids: set[int] = set()
    for entry in _texts(given, "uid:0"):
        for part in entry.split(","):
            kind, _, name = part.strip().partition(":")
            if kind == "uid":
                uids.add(_numeric_id(name, lambda user: pwd.getpwnam(user).pw_uid, "user"))
            elif kind == "gid":
                gids.add(_numeric_id(name, lambda group: grp.getgrnam(group).gr_gid, "group"))
            else:
                raise BadSetting(f"{part.strip()!r} names no user and no group: write uid:1000 or gid:kv")
    return Principals(frozenset(uids), frozenset(gids))


def read_tenants(given: Any) -> dict[str, Principals]:
    """Return the users and groups of each tenant, from NAME=uid:N,gid:N entries or a table of lists."""
    if isinstance(given, Mapping):
        named = {str(name): read_principals(who) for name, who in cast("Mapping[str, Any]", given).items()}
    else:
        named = {}
        for entry in _texts(given, "team-a=uid:1000"):
            name, separator, who = entry.partition("=")
            if not separator:
                raise BadSetting(f"{entry!r} is not NAME=WHO: write team-a=uid:1000,gid:1001")
            if name.strip() in named:
                raise BadSetting(f"the tenant {name.strip()} is named twice: list all its users in one entry")
            named[name.strip()] = read_principals([who])
    for name in named:
        _check_name(name)
    return named


def read_quotas(given: Any) -> dict[str, dict[str, int]]:
    """Return bytes per tenant and tier, from TENANT:TIER=SIZE entries or a table of tables."""
    quotas: dict[str, dict[str, int]] = {}
    for tenant, tier, size in _quota_entries(given):
        _check_name(tenant)
        if tier not in TIERS:
            raise BadSetting(f"there is no tier {tier!r}: write {tenant}:cpu=SIZE or {tenant}:ssd=SIZE")
        if tier in quotas.setdefault(tenant, {}):
            raise BadSetting(f"the quota {tenant}:{tier} is given twice: keep one")
        quotas[tenant][tier] = parse_size(size)
    return quotas


def choice(*words: str) -> Callable[[Any], str]:
    """Return a parser that takes one of `words`."""

    def read_choice(given: Any) -> str:
        word = str(given).strip()
        if word not in words:
            raise BadSetting(f"{given!r} is not one of {', '.join(words)}: write one of those")
        return word

    return read_choice


def integer(low: int, high: int) -> Callable[[Any], int]:
    """Return a parser that takes a whole number from `low` to `high`."""

    def read_integer(given: Any) -> int:
        number = None if isinstance(given, bool) else parse_whole(str(given))
        if number is None or not low <= number <= high:
            raise BadSetting(f"{given!r} is not a whole number from {low} to {high}: write one")
        return number

    return read_integer


def duration(low_s: float, high_s: float) -> Callable[[Any], float]:
    """Return a parser that takes a duration from `low_s` to `high_s`."""

    def read_duration(given: Any) -> float:
        seconds = parse_duration(given)
        if not low_s <= seconds <= high_s:
            raise BadSetting(f"{given!r} is not from {low_s:g} s to {high_s:g} s: choose a value between")
        return seconds

    return read_duration


def size(low_bytes: int) -> Callable[[Any], int]:
    """Return a parser that takes a size of `low_bytes` or more."""

    def read_size(given: Any) -> int:
        size_bytes = parse_size(given)
        if size_bytes < low_bytes:
            raise BadSetting(f"{given!r} is {size_bytes} bytes and at least {low_bytes} are needed: give more")
        return size_bytes

    return read_size


def _as_list(given: Any) -> list[Any]:
    return list(cast("Iterable[Any]", given)) if isinstance(given, list) else [given]


def _texts(given: Any, example: str) -> list[str]:
    entries = _as_list(given)
    if not all(isinstance(entry, str) and entry.strip() for entry in entries):
        raise BadSetting(f"{given!r} is not a list of texts: write entries such as {example}")
    return [entry.strip() for entry in cast("list[str]", entries)]


def _quota_entries(given: Any) -> list[tuple[str, str, Any]]:
    if not isinstance(given, Mapping):
        entries: list[tuple[str, str, Any]] = []
        for entry in _texts(given, "team-a:cpu=8GiB"):
            where, separator, size_text = entry.partition("=")
            tenant, colon, tier = where.partition(":")
            if not separator or not colon:
                raise BadSetting(f"{entry!r} is not TENANT:TIER=SIZE: write team-a:cpu=8GiB")
            entries.append((tenant.strip(), tier.strip(), size_text))
        return entries
    entries = []
    for tenant, tiers in cast("Mapping[str, Any]", given).items():
        if not isinstance(tiers, Mapping):
            raise BadSetting(f'{tiers!r} is not a table of tiers: write [quota.{tenant}] with cpu = "8GiB"')
        entries += [(tenant, tier, size_text) for tier, size_text in cast("Mapping[str, Any]", tiers).items()]
    return entries


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadSetting(
            f"{name!r} is not a tenant's name: use up to 64 letters, digits, dots, dashes and underscores"
        )


def _numeric_id(name: str, look_up: Callable[[str], int], what: str) -> int:
    number = parse_whole(name)
    if number is not None and number < 1 << 32:
        return number
    try:
        return look_up(name)
    except (KeyError, ValueError) as exc:
        raise BadSetting(f"there is no {what} {name!r} here: give its number or another name") from exc
