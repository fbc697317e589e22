"""From log.yaml and opened sources to the query over the events and the plan of their samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ibis
import numpy as np

from recmill.data.dense_values import DenseValues
from recmill.data.preparation.queries.codes import (
    MapVersion,
    PreviousTable,
    check_previous,
    make_vocabulary,
    number_values,
    rows_of,
    sum_counts,
)
from recmill.data.preparation.queries.events import EventTable, is_key, make_events
from recmill.data.preparation.queries.joins import SideTable, join_side
from recmill.data.preparation.queries.lists import ListColumns, ValueLists
from recmill.data.preparation.queries.moments import weighted_moments
from recmill.data.preparation.queries.tables import ColumnOrigin, SourceTables
from recmill.data.preparation.samples.attributes import KeyTable
from recmill.data.preparation.samples.blocks import ITEM_COLUMNS, FeaturePlan, SamplePlan, ValuePlan, WindowPlan
from recmill.data.preparation.samples.negatives import Drawing
from recmill.data.preparation.spec import DEFAULT_DIM, TIME_ROWS, FeatureSpec, RowsSpec
from recmill.data.schema import Feature, Schema
from recmill.data.sources.lists import numbers_of


@dataclass(kw_only=True)
class Recipe:
    """What an engine needs: the query, the plan, and the vocabularies to write."""

    query: Any  # one row per event: codes, rows and numbers
    plan: SamplePlan
    vocabularies: Mapping[str, Any]  # by table; a number of rows for hashed ones
    rare_rows: Mapping[str, int]
    events: EventTable
    num_users: int


def make_recipe(
    tables: SourceTables,
    *,
    previous: Mapping[str, PreviousTable] | None = None,
    known: Mapping[str, DenseValues] | None = None,
    version: int = 1,
) -> Recipe:
    """`previous` holds the vocabularies that those of this `version` extend, `known` the dense features before."""
    return _Builder(tables, previous or {}, known or {}, version).build()


@dataclass
class _Builder:
    tables: SourceTables
    previous: Mapping[str, PreviousTable]
    known: Mapping[str, DenseValues]
    version: int
    vocabularies: dict[str, Any] = field(default_factory=dict)  # by table; a number of rows for hashed ones
    num_rows: dict[str, int] = field(default_factory=dict)
    rare_rows: dict[str, int] = field(default_factory=dict)
    num_keys: dict[str, int] = field(default_factory=dict)  # distinct users, items, ...

    def build(self) -> Recipe:
        spec, engine = self.tables.spec, self.tables.engine
        self.events = make_events(self.tables)
        rows = self.events.rows
        is_positive = rows.label_0.cast("int64")
        if spec.samples.where:
            is_positive *= rows.is_sample.cast("int64")
        self.keys = {
            "user": number_values(rows.select(value=rows.user), engine),
            "item": number_values(rows.select(value=rows.item, positives=is_positive), engine),
        }
        self.join_keys: list[str] = []
        for number, join in enumerate(spec.joins):
            key = is_key(self.tables, ColumnOrigin(column=join.column)) or f"key_{self.events.raw[join.column]}"
            if key not in self.keys:
                column = self.tables.id_of(rows, self.events.raw[join.column], f"joins[{number}].column")
                self.keys[key] = number_values(rows.select(value=column), engine)
            self.join_keys.append(key)
        self.sides: list[SideTable] = [
            join_side(self.tables, number, self.keys[key], self._columns_of_join(number))
            for number, key in enumerate(self.join_keys)
        ]
        self.lists = ListColumns(self.tables, self.events, self.sides)
        self._make_vocabularies()
        values = {feature.name: self._value_of(feature) for feature in spec.features if not feature.time}
        features = tuple(self._plan_feature(feature, values.get(feature.name)) for feature in spec.features)
        plan = SamplePlan(
            schema=self._schema(),
            gap_ms=spec.events.session.gap_ms if spec.events.session.gap else 0,
            has_request=bool(spec.events.request),
            has_filter=bool(spec.samples.where),
            negatives=spec.negatives.kind,
            per_positive=spec.negatives.per_positive,
            seed=spec.negatives.seed,
            num_items=self._count("item"),
            features=features,
            windows=self._windows(),
            tables=self._key_tables(values),
            drawing=self._drawing(),
        )
        return Recipe(
            query=self._query(values),
            plan=plan,
            vocabularies=self.vocabularies,
            rare_rows=self.rare_rows,
            events=self.events,
            num_users=self._count("user"),
        )

    def _count(self, key: str) -> int:
        if key not in self.num_keys:
            table = self.keys[key]
            self.num_keys[key] = int(self.tables.engine.fetch(table.aggregate(n=table.count()))["n"][0].as_py())
        return self.num_keys[key]

    def _origin(self, feature: FeatureSpec) -> ColumnOrigin:
        return self.tables.resolve(feature.column or (feature.history.of if feature.history else ""), feature.name)

    def _columns_of_join(self, number: int) -> list[str]:
        origins = [self._origin(feature) for feature in self.tables.spec.features if not feature.time]
        return list(dict.fromkeys(origin.column for origin in origins if origin.join == number))

    def _list_of(self, feature: FeatureSpec) -> ValueLists | None:
        """The lists of a feature's column; None if it has one value per row."""
        is_plain = feature.time or feature.kind_or_default == "dense"
        return None if is_plain else self.lists.of(feature, self._origin(feature))

    def _make_vocabularies(self) -> None:
        """One per table, counted over the distinct columns of its features."""
        engine = self.tables.engine
        origins: dict[str, dict[tuple[ColumnOrigin, str], FeatureSpec]] = {}
        rows: dict[str, RowsSpec] = {}
        for feature in self.tables.spec.features:
            if feature.kind_or_default == "dense" or feature.time:
                continue
            origins.setdefault(feature.table_or_default, {})[self._origin(feature), feature.separator] = feature
            rows.setdefault(feature.table_or_default, feature.rows or RowsSpec())
        for name, columns in origins.items():
            if (hashed := rows[name].hash) is not None:
                self.vocabularies[name], self.num_rows[name] = hashed, hashed
                continue
            counted, old = sum_counts([self._counts_of(own) for own in columns.values()]), self.previous.get(name)
            if old:
                check_previous(old, counted, rows[name])
            version = MapVersion(number=self.version, last_ms=self.events.last_ms)
            found = make_vocabulary(counted, rows[name], engine, version=version, previous=old)
            self.vocabularies[name], self.rare_rows[name] = found, rows[name].rare_rows
            last_row = int(engine.fetch(found.aggregate(n=found.row.max()))["n"][0].as_py() or 0)
            self.num_rows[name] = max(1 + last_row, 1 + rows[name].rare_rows, old.num_rows if old else 0)

    def _counts_of(self, feature: FeatureSpec) -> Any:
        """A table `value`, `count` of a feature's column, counted over the events."""
        if lists := self._list_of(feature):
            return lists.counts()
        origin = self._origin(feature)
        if key := is_key(self.tables, origin):
            return self.keys[key].select("value", "count")
        if origin.join is not None:
            return self.sides[origin.join].counts_of(origin.column)
        rows = self.events.rows
        found = rows.select(value=self.tables.id_of(rows, self.events.raw[origin.column], origin.column))
        return found.group_by("value").aggregate(count=found.count())

    def _value_of(self, feature: FeatureSpec) -> ValuePlan:
        origin, table = self._origin(feature), feature.table_or_default
        is_dense = feature.kind_or_default == "dense"
        suffix = "as a number" if is_dense else f"in {table}"
        if self._list_of(feature):
            suffix = f"as lists {feature.separator}"
        if (key := is_key(self.tables, origin)) and not is_dense:
            return ValuePlan(column=suffix, table=f"own {key}", key=key)
        if origin.join is not None:
            key = self.join_keys[origin.join]
            return ValuePlan(column=f"{origin.column} {suffix}", table=f"join {origin.join}", key=key)
        is_of_item = origin.column in self.tables.spec.events.item_columns
        return ValuePlan(column=f"{origin.column} {suffix}", is_of_item=is_of_item)

    def _windows(self) -> dict[str, WindowPlan]:
        found = {}
        for feature in self.tables.spec.features:
            if feature.history:
                column = self.events.filters.get(feature.history.where, "")
                found[f"{column} {feature.history.last}"] = WindowPlan(column=column, last=feature.history.last)
        return found

    def _plan_feature(self, feature: FeatureSpec, value: ValuePlan | None) -> FeaturePlan:
        if feature.history:
            window = f"{self.events.filters.get(feature.history.where, '')} {feature.history.last}"
            return FeaturePlan(name=feature.name, kind=feature.kind_or_default, value=value, window=window)
        if lists := self._list_of(feature):
            table, kind = feature.table_or_default, feature.kind_or_default
            known, rare = self.vocabularies[table], self.rare_rows.get(table, 0)
            rows = lists.fetch(known, rare, self.tables.engine, is_sequence=kind == "sequence")
            return FeaturePlan(name=feature.name, kind=kind, value=value, lists=rows)
        if feature.kind_or_default != "dense":
            return FeaturePlan(name=feature.name, kind="sparse", value=value, time=feature.time or "")
        dense = self._dense_values(feature)
        return FeaturePlan(name=feature.name, kind="dense", value=value, time=feature.time or "", dense=dense)

    def _dense_values(self, feature: FeatureSpec) -> DenseValues:
        null_value = 0.0 if feature.time and feature.null_value is None else feature.null_value
        rules = DenseValues(null_value=null_value, transform=tuple(feature.transform))
        before = self.known.get(feature.name)
        if before and before.has_rules_of(rules):  # a model that goes on must see the numbers that it knows
            return before
        if feature.time or ("standardise" not in feature.transform and feature.null_value is not None):
            return rules
        mean, scale = self._moments(feature)
        if "standardise" in feature.transform:
            return replace(rules, mean=mean, scale=scale or 1.0)
        return replace(rules, fill=mean)

    def _moments(self, feature: FeatureSpec) -> tuple[float, float]:
        """Mean and standard deviation over the events, after log1p if the feature has it."""
        origin, engine = self._origin(feature), self.tables.engine
        if origin.join is not None:
            side = self.sides[origin.join]
            weight = side.rows["count"].cast("float64")
            table = side.rows.select(x=self._number(side.number_of(origin.column), feature), weight=weight)
        else:
            rows, key = self.events.rows, is_key(self.tables, origin)
            column = rows[key] if key else rows[self.events.raw[origin.column]]
            table = rows.select(x=self._number(column, feature), weight=ibis.literal(1).cast("float64"))
        return weighted_moments(table, feature, engine)

    def _columns_of(self, values: Mapping[str, ValuePlan], table: str) -> dict[str, FeatureSpec]:
        """The columns that features read from a table of the plan ("" means the events), each with such a feature."""
        by_name = {feature.name: feature for feature in self.tables.spec.features}
        return {value.column: by_name[name] for name, value in values.items() if value.table == table}

    def _encoded(self, table: Any, wanted: Mapping[str, tuple[FeatureSpec, Any]]) -> Any:
        """`table` with the wanted columns as rows or numbers, from expressions of its values."""
        rows: dict[str, tuple[str, Any, int]] = {}
        for name, (feature, value) in wanted.items():
            if feature.kind_or_default == "dense":
                table = table.mutate(**{name: self._number(value, feature)})
            elif lists := self._list_of(feature):
                table = lists.add_code(table.mutate(**{f"{name} id": value}), name)
            else:
                table = table.mutate(**{f"{name} id": value})
                own = feature.table_or_default
                rows[name] = (f"{name} id", self.vocabularies[own], self.rare_rows.get(own, 0))
        return rows_of(table, rows, self.tables.engine)

    def _number(self, value: Any, feature: FeatureSpec) -> Any:
        if not (value.type().is_numeric() or value.type().is_boolean()):
            place = f"features: {feature.name!r}"
            raise self.tables.error(f"{place}: column {feature.column!r} is {value.type()}, expected numbers")
        return value.cast("float64")

    def _key_tables(self, values: Mapping[str, ValuePlan]) -> dict[str, KeyTable]:
        found = {}
        for key in ("user", "item"):
            columns, table = self._columns_of(values, f"own {key}"), self.keys[key]
            if columns:
                wanted = {name: (feature, table.value) for name, feature in columns.items()}
                found[f"own {key}"] = self._fetch_table(self._encoded(table, wanted), list(columns), key)
        for number, side in enumerate(self.sides):
            columns = self._columns_of(values, f"join {number}")
            wanted = {
                name: (feature, side.value_of(self._origin(feature).column, feature))
                for name, feature in columns.items()
            }
            if columns:
                encoded = self._encoded(side.rows, wanted)
                found[f"join {number}"] = self._fetch_table(encoded, list(columns), self.join_keys[number])
        of_items = [value for value in values.values() if value.is_of_item]
        if of_items and self.tables.spec.negatives.are_drawn:
            found[ITEM_COLUMNS] = self._item_columns({value.column for value in of_items}, values)
        return found

    def _item_columns(self, names: set[str], values: Mapping[str, ValuePlan]) -> KeyTable:
        """The newest value of each column per item; among several at the same time the largest."""
        columns = {name: feature for name, feature in self._columns_of(values, "").items() if name in names}
        encoded = self._coded_events(columns)
        newest = ibis.window(
            group_by="item", order_by=[encoded.time.desc(), *(encoded[name].desc() for name in columns)]
        )
        encoded = encoded.mutate(place=ibis.row_number().over(newest))
        encoded = encoded.filter(encoded.place == 0)
        return self._fetch_table(
            encoded.select(code=encoded.item, **{n: encoded[n] for n in columns}), list(columns), "item"
        )

    def _fetch_table(self, table: Any, columns: list[str], key: str) -> KeyTable:
        times = ["valid_from"] if "valid_from" in table.columns else []
        fetched = self.tables.engine.fetch(table.select("code", *times, *columns))
        arrays = {name: numbers_of(fetched[name]) for name in fetched.column_names}
        order = np.lexsort([arrays[name] for name in (*times, "code")])
        return KeyTable(
            num_codes=self._count(key),
            codes=arrays["code"][order],
            valid_from=arrays["valid_from"][order] if times else None,
            columns={name: arrays[name][order] for name in columns},
        )

    def _drawing(self) -> Drawing | None:
        if not self.tables.spec.negatives.are_drawn:
            return None
        table = self.keys["item"]
        fetched = self.tables.engine.fetch(table.select("code", "positives"))
        weights = np.zeros(len(fetched), dtype=np.int64)
        positives = numbers_of(fetched["positives"].cast("int64"))  # DuckDB adds up to 128 bits
        weights[numbers_of(fetched["code"])] = 1 if self.tables.spec.negatives.kind == "uniform" else positives
        if not positives.any():
            raise self.tables.error(f"labels[0]: no event is a positive of {self.tables.spec.labels[0].name!r}")
        return Drawing(ends=np.cumsum(weights))

    def _coded_events(self, columns: Mapping[str, FeatureSpec]) -> Any:
        """The events with codes for users, items and join keys, and these columns as rows or numbers."""
        rows = self.events.rows
        for key in dict.fromkeys(("user", "item", *self.join_keys)):
            code = self.keys[key].select(**{f"{key} value": self.keys[key].value, f"{key} code": self.keys[key].code})
            source = key if key in ("user", "item") else key.removeprefix("key_")
            value = rows[key] if key in ("user", "item") else self.tables.id_of(rows, source, key)
            join = rows.inner_join if key in ("user", "item") else rows.left_join
            rows = join(code, value == code[f"{key} value"])
            rows = rows.mutate(**{key: rows[f"{key} code"].fill_null(-1)}).drop(f"{key} code", f"{key} value")
        wanted = {}
        for name, feature in columns.items():
            raw = self.events.raw.get(self._origin(feature).column)
            is_dense = feature.kind_or_default == "dense"
            if raw is None:  # a user's or item's own id as a number
                raise self.tables.error(
                    f"features: {feature.name!r}: {feature.column!r} is an id, expected kind sparse"
                )
            wanted[name] = (feature, rows[raw] if is_dense else self.tables.id_of(rows, raw, feature.name))
        return self._encoded(rows, wanted)

    def _query(self, values: Mapping[str, ValuePlan]) -> Any:
        columns = self._columns_of(values, "")
        rows = self._coded_events(columns)
        kept = ["user", "time", "item", *(f"label_{n}" for n in range(len(self.tables.spec.labels)))]
        kept += [name for name in ("is_sample",) if name in rows.columns]
        kept += [
            *self.events.filters.values(),
            *(key for key in dict.fromkeys(self.join_keys) if key.startswith("key_")),
        ]
        for name in ("session", "request"):
            if name in rows.columns:
                if not rows[name].type().is_integer():
                    coded = number_values(rows.select(value=rows[name]), self.tables.engine)
                    coded = coded.select(**{f"{name} value": coded.value, f"{name} code": coded.code})
                    rows = rows.inner_join(coded, rows[name] == coded[f"{name} value"])
                    rows = rows.mutate(**{name: rows[f"{name} code"]}).drop(f"{name} value", f"{name} code")
                kept.append(name)
        return rows.select(*kept, *columns)

    def _schema(self) -> Schema:
        spec = self.tables.spec
        dims = {f.table_or_default: f.dim for f in reversed(spec.features) if f.dim and f.kind_or_default != "dense"}
        features = []
        for own in spec.features:
            if own.kind_or_default == "dense":
                features.append(Feature(name=own.name, kind="dense", group=own.group))
                continue
            table = own.table_or_default
            features.append(
                Feature(
                    name=own.name,
                    kind=own.kind_or_default,
                    table=table,
                    num_rows=TIME_ROWS[own.time] if own.time else self.num_rows[table],
                    dim=dims.get(table, DEFAULT_DIM),
                    pooling=own.pooling,
                    group=own.group,
                    shift=own.history is not None,
                    target=own.target,
                )
            )
        roles: dict[str, str] = {}
        for feature in spec.features:
            if feature.column and feature.kind_or_default == "sparse":
                key = is_key(self.tables, self._origin(feature))
                if key:
                    roles.setdefault(key, feature.name)
        labels = tuple(label.name for label in spec.labels)
        return Schema(features=tuple(features), labels=labels, user=roles.get("user", ""), item=roles.get("item", ""))
