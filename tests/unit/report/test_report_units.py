import pytest

from recmill.report.units import (
    format_bytes,
    format_compact,
    format_named,
    format_number,
    format_seconds,
    format_share,
    readable_name,
)


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999_950, "1 M"),
        (1_234, "1.23 k"),
        (18_480, "18.5 k"),
        (4_569_600, "4.57 M"),
        (0.5, "0.5"),
    ],
)
def test_counts_keep_three_digits(value: float, text: str) -> None:
    assert plain(format_compact(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (96, "96 B"), (1023.9, "1 KiB"), (1536, "1.5 KiB"), (64 * 2**20, "64 MiB"), (2**42, "4 TiB")],
)
def test_sizes_are_binary(value: float, text: str) -> None:
    assert plain(format_bytes(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.00042, "420 µs"),
        (0.25, "250 ms"),
        (48.3, "48.3 s"),
        (60, "1 min"),
        (91.2, "1 min 31 s"),
        (4_000, "1 h 6 min"),
    ],
)
def test_times_use_the_unit_people_would(value: float, text: str) -> None:
    assert plain(format_seconds(value)) == text


def test_shares_are_percent() -> None:
    assert [format_share(value) for value in (0, 0.5, 0.1234, 1)] == ["0%", "50%", "12.3%", "100%"]


def test_very_small_and_very_large_numbers_use_an_exponent() -> None:
    assert format_number(0.0000123) == "1.23e-05"
    assert format_number(2e16) == "2.00e+16"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("peak_memory_bytes", 2**20, "1 MiB"),
        ("rows_per_s", 512_000.0, "512 k/s"),
        ("inter_node_bytes_per_s", 2**30, "1 GiB/s"),
        ("predicted_bytes_per_step", 2**18, "256 KiB"),
        ("seconds", 12.5, "12.5 s"),
        ("busy_share", 0.93, "93%"),
        ("auc", 0.79, "0.7900"),
        ("num_rows", 400_000, "400,000"),
        ("rank_bytes", [1024, 2048], "1 KiB, 2 KiB"),
        ("anything", None, "–"),
        ("anything", float("nan"), "–"),
        ("shuffle", True, "yes"),
    ],
)
def test_a_value_reads_as_its_name_says(name: str, value: object, text: str) -> None:
    assert plain(format_named(name, value)) == text


def test_names_lose_what_the_value_says() -> None:
    assert readable_name("peak_memory_bytes") == "Peak memory"
    assert readable_name("samples_per_s") == "Samples/s"
    assert readable_name("num_distinct") == "Distinct"
    assert readable_name("best_auc") == "Best AUC"
    assert readable_name("bytes") == "Bytes"
