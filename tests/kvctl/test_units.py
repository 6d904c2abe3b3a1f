"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore import units
from kvstore.errors import BadSetting


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), ("4096", 4096), ("1B", 1), ("64MiB", 64 << 20), ("64 MiB", 64 << 20), ("10GB", 10**10),
        ("10 gb", 10**10),
        ("1.5GiB", 3 << 29), (".5KiB", 512), ("2TB", 2 * 10**12), ("1_000kB", 10**6), (1 << 40, 1 << 40),
    ],
)  # fmt: skip
def test_a_decimal_prefix_is_a_power_of_1000_and_a_binary_one_of_1024(text: str | int, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["4G", "4Gi", "4g"])
def test_a_bare_g_is_refused_with_both_readings(text: str) -> None:
    with pytest.raises(BadSetting, match="4GiB or 4GB"):
        units.parse_size(text)


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1e9", "1.5B", "0x10", "1 2", "1XB", "99999999PiB", "nan", "١KiB", True, -5, 1 << 63]
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(BadSetting):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h", 7200), ("30m", 1800), ("45s", 45), ("250ms", 0.25), ("7d", 604800), ("1h30m", 5400), ("1h 30m", 5400),
        ("90", 90), ("1.5", 1.5), ("0", 0), ("500us", 0.0005), (90, 90), (0.5, 0.5),
    ],
)  # fmt: skip
def test_durations_are_read(text: str | float, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "h", "1m1h", "1h1h", "-3s", "1e4", "2h later", "inf", "2000000000", float("nan"), -1, True]
)
def test_what_is_no_duration_is_refused(text: str | float) -> None:
    with pytest.raises(BadSetting):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0005, "500us"), (0.25, "250ms"), (0.9996, "1s"), (1.25, "1.2s"), (45, "45s"), (59.96, "1m"),
        (61, "1m1s"),
        (3599.6, "1h"), (3661, "1h1m"), (86399, "1d"), (90000, "1d1h"), (float("inf"), "never"), (-90, "-1m30s"),
    ],
)  # fmt: skip
def test_durations_are_shown_in_two_units(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (10 << 20, "10 MiB"), (10**9, "954 MiB"), (1 << 40, "1 TiB"),
        ((1 << 30) - 1, "1 GiB"), (999 << 30, "999 GiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_binary_units(size_bytes: int, text: str) -> None:
    assert units.format_size(size_bytes) == text


def test_a_setting_is_shown_to_the_byte() -> None:
    assert units.describe_size(10**10) == "10000000000 bytes (9.31 GiB)"
    assert units.describe_size(1) == "1 byte"


@given(st.floats(min_value=0, max_value=9e8) | st.floats(min_value=0, max_value=1))
@example(0.0025)
def test_a_shown_duration_reads_back_as_nearly_itself(seconds: float) -> None:
    read = units.parse_duration(units.format_duration(seconds))
    assert read == pytest.approx(seconds, rel=0.05, abs=1e-6)


@given(st.integers(min_value=0, max_value=units.SIZE_BYTES_MAX))
def test_a_described_size_starts_with_its_bytes(size_bytes: int) -> None:
    assert units.parse_size(units.describe_size(size_bytes).split()[0]) == size_bytes


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (units.parse_size, units.parse_duration):
        try:
            assert parse(text) >= 0
        except BadSetting:
            pass
