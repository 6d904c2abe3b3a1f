"""Sizes and durations as people write them: "64 GiB", "1h30m", and back.

Invariants
1. A decimal prefix is a power of 1000 and a binary one of 1024: GB is 10**9 and GiB 2**30. A bare "G" could
   be either and is refused.
2. Parsing is exact: what is not a whole number of bytes is refused, never rounded.
3. A rounded size is never all that an operator sees of a setting: `describe_size` gives the bytes beside it.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from kvstore.errors import BadSetting

SIZE_BYTES_MAX = (1 << 63) - 1
_DIGITS_MAX = 20  # of a whole number; Python itself refuses to read thousands
DURATION_S_MAX = 1e9

_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_SIZE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)")
_DURATION_PART = re.compile(rf"({_NUMBER})\s*(ms|us|[dhms])\s*", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _SIZE_UNITS[f"{_letter}b"] = 1000**_power
    _SIZE_UNITS[f"{_letter}ib"] = 1024**_power
_SECONDS = {"d": Decimal(86400), "h": Decimal(3600), "m": Decimal(60), "s": Decimal(1),
            "ms": Decimal("1e-3"), "us": Decimal("1e-6")}  # fmt: skip


def parse_size(text: str | int) -> int:
    """Return the bytes that `text` stands for: an integer, or a number with B, kB, ... PB, KiB, ... PiB.

    Raises
    ------
    BadSetting
        The text is no size, is ambiguous ("4G"), is not a whole number of bytes, or is over 2**63 - 1 bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _checked_size(text, text)
    match = _SIZE.fullmatch(str(text).strip().replace("_", ""))
    if not match:
        raise BadSetting(
            f"{text!r} is not a size: write a number of bytes, or one with a unit, such as 512MiB or 10GB"
        )
    number, unit = Decimal(match[1]), match[2].lower()
    if unit not in _SIZE_UNITS:
        if f"{unit}b" in _SIZE_UNITS:
            letter = unit.rstrip("i").upper()
            choice = f"{match[1]}{letter}iB or {match[1]}{letter}B"
            raise BadSetting(f"{text!r} could mean two sizes: write {choice}")
        raise BadSetting(
            f"{text!r} has no known unit: use B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB"
        )
    size = number * _SIZE_UNITS[unit]
    if size != size.to_integral_value():
        raise BadSetting(f"{text!r} is not a whole number of bytes: write the size with a smaller unit")
    return _checked_size(int(size), text)


def parse_duration(text: str | float) -> float:
    """Return the seconds that `text` stands for: a number of seconds, or parts such as 7d, 1h30m, 45s, 250ms.

    Raises
    ------
    BadSetting
        The text is no duration, is negative, or is over 1e9 seconds.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _checked_duration(text, text)
    stripped = str(text).strip()
    if re.fullmatch(_NUMBER, stripped):
        return _checked_duration(float(stripped), text)
    total, at, smallest = Decimal(0), 0, Decimal("Infinity")
    while part := _DURATION_PART.match(stripped, at):
        unit = _SECONDS[part[2].lower()]
        if unit >= smallest:
            break
        total, at, smallest = total + Decimal(part[1]) * unit, part.end(), unit
    if at != len(stripped) or not at:
        raise BadSetting(
            f"{text!r} is not a duration: write seconds, or parts with d, h, m, s or ms from large to small, "
            "such as 2h, 1h30m, 45s or 250ms"
        )
    return _checked_duration(float(total), text)


def parse_whole(text: str) -> int | None:
    """Return the whole number that `text` writes in digits, None if it writes none or one beyond all limits here."""
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS_MAX else None


def format_size(size_bytes: float) -> str:
    """Return a size in the binary unit that leaves at most four digits before the point, e.g. "1.5 GiB"."""
    unit, scaled = "B", float(size_bytes)
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(scaled) < 1023.5:
            break
        unit, scaled = larger, scaled / 1024
    digits = 0 if unit == "B" else max(0, 2 - int(math.log10(max(1.0, abs(scaled)))))
    text = f"{scaled:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def describe_size(size_bytes: int) -> str:
    """Return a size to the byte and, from 1 KiB on, in a readable unit: "1073741824 bytes (1 GiB)"."""
    noun = "byte" if size_bytes == 1 else "bytes"
    return f"{size_bytes} {noun}" + (f" ({format_size(size_bytes)})" if abs(size_bytes) >= 1024 else "")


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units from a minute on, else in one: 1h30m, 45s, 1.5s, 250ms."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if not math.isfinite(seconds):
        return "never"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g}us" if round(seconds * 1e6) else "0s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    if whole >= 86400:
        whole = round(seconds / 3600) * 3600
    elif whole >= 3600:
        whole = round(seconds / 60) * 60
    text = ""
    for name, unit in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, unit)
        text += f"{count}{name}" if count else ""
    return text


def _checked_size(size_bytes: int, given: str | int) -> int:
    if not 0 <= size_bytes <= SIZE_BYTES_MAX:
        raise BadSetting(f"size {given!r} is outside 0 .. {SIZE_BYTES_MAX} bytes")
    return size_bytes


def _checked_duration(seconds: float, given: str | float) -> float:
    if not 0 <= seconds <= DURATION_S_MAX:
        raise BadSetting(f"duration {given!r} is outside 0 .. {DURATION_S_MAX:.0f} seconds")
    return float(seconds)
