import pytest

from recmill.artifacts import InputError
from recmill.data.ingest import evaluation_split, split_groups
from tests.unit.data.ingest.small_dataset import write_dataset


def rows(dataset, split):
    return [group.num_rows for group in split_groups(dataset, split)]


def test_named_splits_are_taken_as_they_are(tmp_path):
    dataset = write_dataset(tmp_path, [[5, 6], [7], [8]], splits=["train", "valid", "test"])
    assert (rows(dataset, "train"), rows(dataset, "valid"), rows(dataset, "test")) == ([5, 6], [7], [8])
    assert rows(dataset, "all") == [5, 6, 7, 8]
    assert evaluation_split(dataset) == "test"


def test_valid_stands_in_for_a_missing_test_split(tmp_path):
    dataset = write_dataset(tmp_path, [[5], [7]], splits=["train", "valid"])
    assert evaluation_split(dataset) == "valid"
    with pytest.raises(InputError, match="no split 'test'; it has train, valid"):
        split_groups(dataset, "test")


def test_without_a_held_out_split_the_trailing_tenth_is_the_test_split(tmp_path):
    dataset = write_dataset(tmp_path, [[50, 20], [20, 6, 5]])
    assert rows(dataset, "train") == [50, 20, 20]
    assert rows(dataset, "test") == [6, 5]
    assert evaluation_split(dataset) == "test"


def test_the_held_out_tenth_is_never_everything(tmp_path):
    dataset = write_dataset(tmp_path, [[1, 500]])
    assert (rows(dataset, "train"), rows(dataset, "test")) == ([1], [500])


def test_a_single_row_group_cannot_be_held_out(tmp_path):
    dataset = write_dataset(tmp_path, [[50]])
    with pytest.raises(InputError, match="--eval-fraction or a smaller --rows-per-group"):
        split_groups(dataset, "train")
    assert rows(dataset, "all") == [50]
