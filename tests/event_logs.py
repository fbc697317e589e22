"""Random event logs with side tables, and the slow, obvious definition of the samples that `recmill prepare` makes."""

from __future__ import annotations

import hashlib
import json
import math
import random
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recmill.data.preparation.reading import load_spec

BASE_MS = 1_700_000_000_000
HISTORY, VIEWED = 4, 2
HASH_ROWS = 11


@dataclass(frozen=True, kw_only=True)
class Shop:
    """Events and side tables of a shop."""

    events: list[dict[str, Any]]
    products: list[dict[str, Any]]
    customers: list[dict[str, Any]]
    purchases: list[dict[str, Any]]

    @classmethod
    def random(cls, seed: int, num_events: int) -> Shop:
        """Few users, items and times, so that ties, repeats and gaps of every kind occur; rows in no order."""
        draw = random.Random(seed)
        users, items = [f"u{n}" for n in range(draw.randint(1, 5))], [f"i{n:02}" for n in range(draw.randint(2, 8))]
        kinds, events = {}, []
        for _ in range(num_events):
            key = (draw.choice(users), BASE_MS + draw.randint(0, 40), draw.choice(items))
            others = {
                "behavior": draw.choice(["pv", "pv", "cart", "buy"]),
                "visit": f"v{draw.randint(0, 3)}",
                "request": draw.randint(0, 9),
                "channel": draw.choice(["web", "app", None]),
                "price": draw.choice([None, 0.5, 3.0, -2.0, math.nan]),
                "tags": draw.choice([None, "a|b", "b", "c| a |b", "b|b"]),
            }
            others = kinds.setdefault(key, others)  # equal in every column, or different in user, time or item
            events.append({"user": key[0], "ts": key[1], "item": key[2], **others})
        known = {events[0]["item"]}.union(item for item in items if draw.random() < 0.8)
        topics = [None, [], [5], [7, 5], [5, 9, 7]]
        products = [
            {"id": item, "brand": draw.choice(["x", "y", None]), "topics": draw.choice(topics)}
            for item in sorted(known)
        ]
        since = draw.sample(range(-5, 40), k=3)
        customers = [
            {"user": user, "since": BASE_MS + time, "tier": draw.randint(0, 2)}
            for user in [*users, "u99"]
            for time in since
        ]
        purchases = [
            {"who": draw.choice(users), "what": draw.choice(items), "at": BASE_MS + draw.randint(0, 45)}
            for _ in range(8)
        ]
        return cls(events=events, products=products, customers=customers, purchases=purchases)

    @classmethod
    def of_many(cls, seed: int, num_shops: int, num_events: int) -> Shop:
        """Random shops with users of their own, and items that some of them share."""
        shops = [cls.random(1_000 * seed + n, 1 + num_events * n // num_shops) for n in range(1, num_shops + 1)]
        names = {"events": "user", "customers": "user", "purchases": "who"}
        rows = {
            table: [row | {name: f"{n} {row[name]}"} for n, shop in enumerate(shops) for row in getattr(shop, table)]
            for table, name in names.items()
        }
        products = {row["id"]: row for shop in reversed(shops) for row in shop.products}
        return cls(products=list(products.values()), **rows)

    def write(self, folder: Path, options: Options) -> Path:
        """Parquet files and a log.yaml; returns the path of the log.yaml."""
        folder.mkdir(parents=True, exist_ok=True)
        text, whole = pa.string(), pa.int64()
        kinds = {"request": whole, "channel": text, "price": pa.float64(), "brand": text, "tags": text}
        kinds["topics"] = pa.list_(whole)
        for name in ("events", "products", "customers", "purchases"):
            rows = getattr(self, name)
            columns = {column: pa.array([row[column] for row in rows], kinds.get(column)) for column in rows[0]}
            pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        path = folder / "log.yaml"
        path.write_text(json.dumps(options.log_yaml()))  # JSON is YAML
        load_spec(path)
        return path


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a test varies in log.yaml."""

    gap_ms: int = 5  # 0: sessions by column
    by_request: bool = False
    only_views: bool = False  # samples are events of some behaviours only
    negatives: str = "none"
    per_positive: int = 1
    min_count: int = 1
    splits: dict[str, Any] = field(default_factory=dict)

    def log_yaml(self) -> dict[str, Any]:
        events: dict[str, Any] = {
            "source": "events",
            "user": "user",
            "item": "item",
            "time": {"column": "ts", "unit": "ms"},
        }
        events["session"] = {"gap": f"{self.gap_ms}ms"} if self.gap_ms else {"column": "visit"}
        events["item_columns"] = ["channel"]
        if self.by_request:
            events["request"] = "request"
        spec: dict[str, Any] = {
            "format_version": 1,
            "sources": {
                "events": {"path": "events.parquet"},
                "products": {"path": "products.parquet", "key": "id"},
                "customers": {
                    "path": "customers.parquet",
                    "key": "user",
                    "valid_from": {"column": "since", "unit": "ms"},
                },
                "purchases": {"path": "purchases.parquet"},
            },
            "events": events,
            "joins": [{"source": "products", "column": "item"}, {"source": "customers", "column": "user"}],
            "outcomes": [
                {
                    "name": "bought",
                    "source": "purchases",
                    "match": {"user": "who", "item": "what"},
                    "time": {"column": "at", "unit": "ms"},
                    "within": "6ms",
                }
            ],
            "labels": [
                {"name": "wanted", "where": [{"column": "behavior", "one_of": ["buy", "cart"]}]},
                {"name": "bought", "outcome": "bought"},
            ],
            "negatives": {"kind": self.negatives, "per_positive": self.per_positive, "seed": 3},
            "features": [
                {"name": "user", "column": "user", "kind": "sparse", "rows": {"hash": HASH_ROWS}},
                {"name": "item", "column": "item", "kind": "sparse"},
                {"name": "rare_item", "column": "item", "kind": "sparse", "rows": {"min_count": self.min_count}},
                {"name": "request", "column": "request", "kind": "sparse"},
                {"name": "channel", "column": "channel", "kind": "sparse"},
                {"name": "brand", "column": "products.brand", "kind": "sparse"},
                {"name": "tier", "column": "customers.tier", "kind": "sparse"},
                {"name": "tags", "column": "tags", "separator": "|", "kind": "sparse"},
                {"name": "topics", "column": "products.topics", "kind": "sequence"},
                {"name": "history", "history": {"of": "item", "last": HISTORY}, "table": "item"},
                {
                    "name": "viewed",
                    "history": {
                        "of": "products.brand",
                        "last": VIEWED,
                        "where": [{"column": "behavior", "equals": "pv"}],
                    },
                    "table": "brand",
                },
                {"name": "hour", "time": "hour_of_day"},
                {"name": "weekday", "time": "day_of_week"},
                {"name": "idle", "time": "hours_since_last_event"},
                {"name": "price", "column": "price", "kind": "dense", "null_value": 1.0, "transform": ["log1p"]},
                {"name": "scaled", "column": "price", "kind": "dense", "transform": ["standardise"]},
            ],
        }
        if self.only_views:
            spec["samples"] = {"where": [{"column": "behavior", "one_of": ["pv", "buy"]}]}
        return spec | ({"splits": self.splits} if self.splits else {})


def ranked(values: list[Any], *, min_count: int = 1) -> dict[Any, int]:
    """Rows of a vocabulary: the most frequent value first, then by value."""
    counts = Counter(value for value in values if value is not None)
    kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda value: (-counts[value], value))
    return {value: row for row, value in enumerate(kept, start=1)}


def tags_of(event: dict[str, Any]) -> list[str]:
    return [tag.strip() for tag in event["tags"].split("|")] if event["tags"] else []


def hashed(value: Any, num_rows: int) -> int:
    return 1 + int(hashlib.md5(str(value).encode()).hexdigest()[:15], 16) % (num_rows - 1)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The samples that a log.yaml asks for, one event at a time."""

    shop: Shop
    options: Options

    def timelines(self) -> dict[str, list[dict[str, Any]]]:
        """Every user's events in order, with their session, labels and histories."""
        shop, brands = self.shop, {row["id"]: row["brand"] for row in self.shop.products}
        found = {}
        for number, user in enumerate(sorted({event["user"] for event in shop.events})):
            own = sorted((dict(e) for e in shop.events if e["user"] == user), key=lambda e: (e["ts"], e["item"]))
            visits: dict[str, int] = {}
            session = 0
            for place, event in enumerate(own):
                if self.options.gap_ms:
                    session += bool(place and event["ts"] - own[place - 1]["ts"] > self.options.gap_ms)
                else:
                    session = visits.setdefault(event["visit"], len(visits))
                event["session_id"] = number * 2**24 + session
                event["brand"] = brands.get(event["item"])
                same = [e for e in own if self.options.by_request and e["request"] == event["request"]]
                asked = min(e["ts"] for e in [event, *same])
                event["before"] = [e for e in own if e["ts"] < asked]
                event["wanted"] = float(event["behavior"] in ("buy", "cart"))
                event["bought"] = float(
                    any(
                        p["who"] == user and p["what"] == event["item"] and 0 <= p["at"] - event["ts"] <= 6
                        for p in shop.purchases
                    )
                )
            found[user] = own
        return found

    def is_sample(self, event: dict[str, Any]) -> bool:
        return not self.options.only_views or event["behavior"] in ("pv", "buy")

    def features(self, event: dict[str, Any], item: str | None = None) -> dict[str, Any]:
        """The features of a sample; `item` is the item of a drawn negative."""
        shop, events = self.shop, self.shop.events
        drawn = item is not None
        item = item or event["item"]
        brands = {row["id"]: row["brand"] for row in shop.products}
        rows_of_brand = ranked([brands.get(e["item"]) for e in events])
        items = [e["item"] for e in events]
        channel = event["channel"]
        if drawn:  # of the newest event; nulls are row 0, the smallest
            rows = ranked([e["channel"] for e in events])
            newest = max((e["ts"], rows.get(e["channel"], 0)) for e in events if e["item"] == item)
            channel = next((value for value, row in rows.items() if row == newest[1]), None)
        tiers = sorted((row["since"], row["tier"]) for row in shop.customers if row["user"] == event["user"])
        place = bisect_right(tiers, (event["ts"], math.inf)) - 1
        known = Counter()
        for customer in {(row["user"], row["tier"]) for row in shop.customers}:
            known[customer[1]] += sum(e["user"] == customer[0] for e in events)
        rows_of_tier = {
            tier: n for n, tier in enumerate(sorted((t for t in known if known[t]), key=lambda t: (-known[t], t)), 1)
        }
        tags = ranked([tag for e in events for tag in tags_of(e)])
        topics_of = {row["id"]: row["topics"] or [] for row in shop.products}
        rows_of_topic = ranked([topic for e in events for topic in topics_of.get(e["item"], [])])
        viewed = [e for e in event["before"] if e["behavior"] == "pv"][-VIEWED:]
        hours = event["ts"] // 3_600_000
        price = event["price"] if event["price"] is not None and not math.isnan(event["price"]) else None
        prices = [e["price"] for e in events if e["price"] is not None and not math.isnan(e["price"])]
        mean, scale = (np.mean(prices), np.std(prices) or 1.0) if prices else (0.0, 1.0)
        return {
            "user": [hashed(event["user"], HASH_ROWS)],
            "item": [ranked(items)[item]],
            "rare_item": [ranked(items, min_count=self.options.min_count).get(item, 0)],
            "request": [ranked([e["request"] for e in events])[event["request"]]],
            "channel": [ranked([e["channel"] for e in events]).get(channel, 0)],
            "brand": [rows_of_brand.get(brands.get(item), 0)],
            "tier": [rows_of_tier[tiers[place][1]] if place >= 0 else 0],
            "tags": [0] if event["tags"] is None else [tags[tag] for tag in tags_of(event)],
            "topics": [rows_of_topic[topic] for topic in topics_of.get(item, [])],
            "history": [ranked(items)[e["item"]] for e in event["before"][-HISTORY:]],
            "viewed": [rows_of_brand.get(e["brand"], 0) for e in viewed],
            "hour": [hours % 24],
            "weekday": [(hours // 24 + 3) % 7],
            "idle": np.float32((event["ts"] - event["before"][-1]["ts"]) / 3_600_000 if event["before"] else 0.0),
            "price": np.float32(math.log1p(max(1.0 if price is None else price, 0.0))),
            "scaled": np.float32(0.0 if price is None else (price - mean) / scale),
        }

    def row(self, event: dict[str, Any], item: str | None = None) -> dict[str, Any]:
        labels = {name: 0.0 if item else event[name] for name in ("wanted", "bought")}
        return {"session_id": event["session_id"], "ts": event["ts"], **labels, **self.features(event, item)}


def space_out(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one session in order, with timestamps moved forward until no two are equal."""
    last = -math.inf
    for row in rows:
        row["timestamp"] = last = max(row.pop("ts"), last + 1)
    return rows
