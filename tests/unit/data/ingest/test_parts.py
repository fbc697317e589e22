import pyarrow.parquet as pq
import pytest

from recmill.data.ingest.parts import PartFile
from tests.unit.data.ingest.small_dataset import write_dataset


@pytest.mark.parametrize("options", [{}, {"compression": "none", "use_dictionary": False}, {"compression": "zstd"}])
def test_a_row_group_decodes_from_its_own_bytes(tmp_path, options):
    dataset = write_dataset(tmp_path / "dataset", [[7, 1, 40, 13]], **options)
    path = f"{dataset.path}/part-00000.parquet"
    columns = ["history", "label", "age"]
    part = PartFile(path, columns=columns)
    with pq.ParquetFile(path) as file:
        for index in (3, 0, 2, 1):
            raw = part.read(index)
            assert part.decode(index, raw).equals(file.read_row_group(index, columns=columns))
            assert part.byte_range(index) == (raw.start, raw.start + raw.nbytes)
    part.close()
