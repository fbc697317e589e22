"""Sources and logs on an object store, through fsspec: DuckDB needs no extension for it."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest

from recmill.artifacts import InputError
from recmill.data.preparation.prepared_log import prepare_log
from recmill.data.schema import Schema
from recmill.data.vocabulary import Vocabulary
from tests.event_logs import Options, Shop
from tests.object_store import s3_bucket

pytest.importorskip("moto", reason="moto, a local S3 server, is not installed")


@pytest.mark.slow
def test_sources_on_s3_give_the_log_of_local_files(tmp_path: Path) -> None:
    path = Shop.random(3, 60).write(tmp_path / "shop", Options(splits={"test": 0.3}))
    prepare_log(path, out=tmp_path / "local")
    with s3_bucket() as bucket:
        filesystem, root = fsspec.core.url_to_fs(bucket, skip_instance_cache=True)
        for file in sorted((tmp_path / "shop").iterdir()):
            filesystem.put_file(str(file), f"{root}/shop/{file.name}")
        remote = tmp_path / "log.yaml"  # here, with its sources there
        text = path.read_text()
        for name in ("events", "products", "customers", "purchases"):
            text = text.replace(f'"{name}.parquet"', f'"{bucket}/shop/{name}.parquet"')
        remote.write_text(text)
        prepare_log(remote, out=tmp_path / "remote")
        prepare_log(f"{bucket}/shop/log.yaml", out=f"{bucket}/raw")  # the log.yaml and the log there, too
        for file in ("log-00000.parquet", "vocabulary/item.parquet"):
            expected = pq.read_table(tmp_path / "local" / file)
            assert pq.read_table(tmp_path / "remote" / file) == expected
            with fsspec.open(f"{bucket}/raw/{file}", "rb") as opened:
                assert pq.read_table(opened) == expected
        assert Schema.load(f"{bucket}/raw") == Schema.load(tmp_path / "local")
        items = Vocabulary.load(f"{bucket}/raw", "item")
        assert items.rows(["nobody", items.values[0].as_py()]).tolist() == [0, 1]
        remote.write_text(text.replace("shop/events", "shop/nothing"))
        with pytest.raises(InputError, match=r"sources\.events\.path: no file at s3://"):
            prepare_log(remote, out=tmp_path / "none")
