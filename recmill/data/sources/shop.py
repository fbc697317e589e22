"""CSV files as somebody exports them from a shop: text ids, times as text, nulls, no sessions, no labels.

    events.csv     event_time, customer_id, product_id, event (view, cart or purchase), device
    products.csv   product_id, category, brand, price, name
    customers.csv  customer_id, country, birth_year, signed_up

Customers prefer some categories and prices, so a model can learn who puts what into the cart.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts import InputError, write_text_atomically

FILES = ("events.csv", "products.csv", "customers.csv")
START = datetime(2025, 3, 1, tzinfo=UTC)
DAYS = 28
CATEGORIES = ("shoes", "shirts", "coats", "hats", "bags", "socks", "belts", "scarves")
BRANDS = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Ginkgo", "Hazel", "Ivy", "Juniper")
COUNTRIES = ("DE", "FR", "NL", "PL", "ES", "IT")
DEVICES = ("mobile", "desktop", "tablet")


@dataclass(frozen=True, kw_only=True)
class ShopConfig:
    num_visits: int = 6_000
    seed: int = 0
    num_customers: int = 1_500
    num_products: int = 400

    def __post_init__(self) -> None:
        if min(self.num_visits, self.num_customers, self.num_products) < 1:
            raise InputError(f"a shop needs at least one visit, customer and product, received {self}")


def write_shop(out: str | Path, config: ShopConfig | None = None) -> dict[str, int]:
    """Write the three files into `out`; the number of rows of each. The same seed gives the same files."""
    config = config or ShopConfig()
    folder = Path(out)
    if foreign := [path.name for path in folder.glob("*") if path.name not in FILES]:
        raise InputError(f"{out}: holds other files ({', '.join(sorted(foreign)[:3])}); give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(config.seed)
    category = rng.integers(0, len(CATEGORIES), config.num_products)
    price = np.round(np.exp(rng.normal(3.2, 0.8, config.num_products)), 2)
    products = _products(rng, category, price)
    # A taste per customer and category, and how much a customer minds a high price.
    taste = rng.normal(0, 1.5, (config.num_customers, len(CATEGORIES)))
    thrift = np.abs(rng.normal(0.6, 0.4, config.num_customers))
    customers = _customers(rng, config.num_customers)
    score = taste[:, category] - thrift[:, None] * (np.log(price) - 3.2)
    events = _events(rng, config, score)
    for name, rows in zip(FILES, (events, products, customers), strict=True):
        write_text_atomically(folder / name, _csv(rows))
    return {name: len(rows) - 1 for name, rows in zip(FILES, (events, products, customers), strict=True)}


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _products(rng: np.random.Generator, category: np.ndarray, price: np.ndarray) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = [("product_id", "category", "brand", "price", "name")]
    for number, (kind, cost) in enumerate(zip(category, price, strict=True)):
        brand = "" if rng.random() < 0.1 else BRANDS[rng.integers(0, len(BRANDS))]
        rows.append((f"P-{number:05d}", CATEGORIES[kind], brand, f"{cost:.2f}", f"{CATEGORIES[kind]} no. {number}"))
    return rows


def _customers(rng: np.random.Generator, num_customers: int) -> list[Sequence[Any]]:
    rows: list[Sequence[Any]] = [("customer_id", "country", "birth_year", "signed_up")]
    for number in range(num_customers):
        born = "" if rng.random() < 0.15 else int(rng.integers(1950, 2008))
        since = START - timedelta(days=float(rng.uniform(1, 900)))
        rows.append((_customer(number), COUNTRIES[rng.integers(0, len(COUNTRIES))], born, f"{since:%Y-%m-%d %H:%M:%S}"))
    return rows


def _customer(number: int) -> str:
    return f"C{number:06d}"


def _events(rng: np.random.Generator, config: ShopConfig, score: np.ndarray) -> list[Sequence[Any]]:
    """Visits of a customer: some products are looked at, and those that suit go into the cart, some are bought."""
    popularity = np.cumsum(1 / np.arange(1, config.num_products + 1) ** 0.8)
    rows: list[tuple[datetime, str, str, str, str]] = []
    for _ in range(config.num_visits):
        customer = int(rng.integers(0, config.num_customers))
        now = START + timedelta(seconds=float(rng.uniform(0, DAYS * 86_400)))
        device = "" if rng.random() < 0.05 else DEVICES[int(np.searchsorted((0.6, 0.9), rng.random()))]
        drawn = rng.random(1 + rng.poisson(3)) * popularity[-1]
        for product in np.searchsorted(popularity, drawn):
            odds = 1 / (1 + np.exp(1.5 - score[customer, product]))
            event = "view"
            if rng.random() < odds:
                event = "purchase" if rng.random() < 0.3 else "cart"
            rows.append((now, _customer(customer), f"P-{product:05d}", event, device))
            now += timedelta(seconds=float(rng.exponential(90)) + 1)
    rows.sort()
    header = ("event_time", "customer_id", "product_id", "event", "device")
    return [header, *((f"{row[0]:%Y-%m-%d %H:%M:%S}", *row[1:]) for row in rows)]
