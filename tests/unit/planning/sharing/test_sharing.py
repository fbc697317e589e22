import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import AccessProfile, InputError
from recmill.artifacts.plan import SharedTablePlan
from recmill.artifacts.profile import TableProfile
from recmill.planning.sharing.choice import (
    choose_exact_width,
    choose_sharing,
    full_bytes,
    read_exact_rows,
    target_bytes,
)
from recmill.planning.tiers.row_files import write_slots


@pytest.fixture
def profile(tmp_path):
    """A small table, a large one with a hot head, a large one that is read evenly."""
    counts = {
        "small": np.full(10, 100),
        "skewed": np.sort(1_000_000 // np.arange(1, 20_001) ** 1.5).astype(np.int64)[::-1],
        "even": np.full(20_000, 50),
    }
    (tmp_path / "counts").mkdir()
    tables = {}
    for name, reads in counts.items():
        rows = np.arange(len(reads))[::-1].copy()  # the last row is read most
        pq.write_table(pa.table({"row": rows, "count": reads}), tmp_path / "counts" / f"{name}.parquet")
        tables[name] = TableProfile(
            num_rows=len(reads),
            dim=16,
            features=(name,),
            num_accesses=int(reads.sum()),
            num_distinct=len(reads),
            zipf_exponent=None,
            drift=None,
        )
    return AccessProfile(
        path=str(tmp_path), num_samples=1, tables=tables, duplication={}, layout=None, split=None, confidence=None
    )


def test_tables_that_fit_are_kept(profile):
    choice = choose_sharing(profile, compress="auto", memory_budget_bytes=10**9)
    assert choice.shared is None
    assert choice.chosen_bytes == 40_010 * 17 * 4
    assert all(reason.startswith("keep") for reason in choice.reasons.values())


def test_each_table_gets_what_its_size_and_skew_ask_for(profile):
    choice = choose_sharing(profile, compress=10)
    assert set(choice.shared.tables) == {"skewed", "even"}
    assert choice.shared.tables["even"] == SharedTablePlan(kind="share", exact_rows=0)
    assert choice.shared.tables["skewed"].kind == "both"
    assert choice.reasons["small"].startswith("keep")
    assert "of its reads are exact" in choice.reasons["skewed"]
    assert choice.exact_rows["skewed"][:3].tolist() == [19_999, 19_998, 19_997]
    assert choice.chosen_bytes <= sum(map(full_bytes, profile.tables.values())) / 10


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("compress", [2, 10, 100, "50x", "60KB", 40_000])
def test_the_bytes_asked_for_are_kept(profile, compress, precision):
    choice = choose_sharing(profile, compress=compress, precision=precision)
    target = target_bytes(compress, full_bytes=sum(map(full_bytes, profile.tables.values())), memory_budget_bytes=None)
    assert 0.9 * target < choice.chosen_bytes <= target


def test_exact_rows_get_fewer_and_narrower_with_compression(profile):
    ten, more = (choose_sharing(profile, compress=factor) for factor in (10, 400))
    assert ten.shared.exact_width == 4
    assert more.shared.exact_width == 2  # never less
    assert len(ten.exact_rows["skewed"]) > len(more.exact_rows["skewed"]) > 0
    assert "are exact with 4 weights each" in ten.reasons["skewed"]
    assert choose_exact_width(64, 10**0.5) == 16
    assert choose_exact_width(64, 10.0) == 2


def test_in_bytes_three_times_as_many_slots_fit(profile):
    plain, packed = (choose_sharing(profile, compress=10, precision=precision) for precision in ("float32", "int8"))
    assert packed.shared.precision == "int8"
    assert packed.shared.array_bytes % 17 == 0  # lines of 16 weights and an exponent
    assert 3 < (packed.shared.array_bytes * 16 / 17) / (plain.shared.array_bytes / 4) < 3.6
    assert packed.shared.exact_width > plain.shared.exact_width
    assert choose_exact_width(64, 3.2**0.5, "int8") == 48  # whole lines: 50 would share one with the next row
    with pytest.raises(InputError, match="precision is 'int4', expected float32 or int8"):
        choose_sharing(profile, compress=10, precision="int4")


def test_auto_compresses_as_far_as_the_budget_asks_for(profile):
    choice = choose_sharing(profile, compress="auto", memory_budget_bytes=500_000)
    assert 450_000 < choice.chosen_bytes <= 500_000


def test_exact_rows_are_written_and_read_in_slot_order(profile, tmp_path):
    choice = choose_sharing(profile, compress=10)
    write_slots(tmp_path / "exact", choice.exact_rows)
    assert np.array_equal(read_exact_rows(tmp_path, "skewed"), choice.exact_rows["skewed"])
    assert not (tmp_path / "exact" / "even.parquet").exists()


@pytest.mark.parametrize(("compress", "message"), [("much", "expected auto"), (1, "above 1"), ("100B", "to share")])
def test_what_makes_no_sense_is_refused(profile, compress, message):
    with pytest.raises(InputError, match=message):
        choose_sharing(profile, compress=compress)


def test_sizes_are_read_as_people_write_them():
    for text, expected in (("10MB", 10**7), ("1.5 MiB", 1_572_864), ("2kb", 2000), (20_000, 20_000), ("100x", 100)):
        assert target_bytes(text, full_bytes=10_000, memory_budget_bytes=None) == expected
