"""The shop's CSV files are what their description says."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from recmill.cli import main
from recmill.data.sources.shop import ShopConfig, write_shop


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    config = ShopConfig(num_visits=50, num_customers=20, num_products=10, seed=3)
    for name in ("a", "b"):
        write_shop(tmp_path / name, config)
    for file in ("events.csv", "products.csv", "customers.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_every_event_finds_its_product_and_its_customer_who_signed_up_before(tmp_path: Path) -> None:
    rows = write_shop(tmp_path, ShopConfig(num_visits=300, num_customers=50, num_products=20))
    joined, late, bought = duckdb.sql(
        f"""SELECT count(*), count(*) FILTER (signed_up >= event_time), avg((event != 'view')::INT)
            FROM '{tmp_path}/events.csv' JOIN '{tmp_path}/products.csv' USING (product_id)
            JOIN '{tmp_path}/customers.csv' USING (customer_id)"""
    ).fetchall()[0]
    assert (joined, late) == (rows["events.csv"], 0)
    assert 0.1 < bought < 0.5


def test_generate_refuses_options_that_a_shop_does_not_have(tmp_path: Path, capsys) -> None:
    for options, code in (["--sessions", "20"], 0), (["--zipf", "1.1"], 2):
        with pytest.raises(SystemExit) as stop:
            main(["generate", "--preset", "shop", "--out", str(tmp_path / "shop"), *options])
        assert (stop.value.code or 0) == code
    assert "preset 'shop' has no option --zipf" in capsys.readouterr().err
