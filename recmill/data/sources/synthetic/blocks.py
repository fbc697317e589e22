"""Makes the sessions of a synthetic log, block after block; a block stores every repeated list once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from scipy.special import expit, logit

from recmill.data.sources.lists import BoolArray, IntArray, Jagged, id_column, offsets_of, plain_column, window_column
from recmill.data.sources.synthetic.config import IdList, SyntheticConfig, schema_of
from recmill.data.sources.synthetic.draws import ZipfSampler, draw_gaps_ms, draw_session_sizes, name_sessions
from recmill.data.sources.synthetic.hidden_model import HiddenModel, Logits, sum_windows


@dataclass(frozen=True, kw_only=True)
class SampleBlock:
    """Samples, and the distinct user states they point to.

    samples["timestamp"]   = [t0, t1, t2]           one value per sample: keys, item ids, item dense values
    versions["interests"]  = [ 0,  0,  1]           the state of a user group that a sample sees
    lists["interests.0"]   = [[7, 9], [4]]          one list per state
    dense["interests.age"] = [.3, .5]               one value per state
    shifts["history"]      = [ 0,  1,  1]           a history is a window into its session's stream
    """

    samples: dict[str, npt.NDArray[Any]]
    versions: dict[str, IntArray]
    shifts: dict[str, IntArray]
    lists: dict[str, Jagged]
    dense: dict[str, npt.NDArray[np.float32]]
    owners: dict[str, str]  # list or dense feature -> the key in `versions`
    history_lengths: dict[str, int]

    @property
    def num_samples(self) -> int:
        return len(self.samples["timestamp"])

    @classmethod
    def concat(cls, blocks: Sequence[Self]) -> Self:
        first = blocks[0]
        if len(blocks) == 1:
            return first
        representatives = {owner: feature for feature, owner in first.owners.items()}
        versions: dict[str, IntArray] = {}
        for owner, feature in representatives.items():
            bases = offsets_of(np.array([block.num_states(feature) for block in blocks]))
            parts = [block.versions[owner] + base for block, base in zip(blocks, bases[:-1], strict=True)]
            versions[owner] = np.concatenate(parts)
        return cls(
            samples={name: np.concatenate([b.samples[name] for b in blocks]) for name in first.samples},
            versions=versions,
            shifts={name: np.concatenate([b.shifts[name] for b in blocks]) for name in first.shifts},
            lists={name: Jagged.concat([b.lists[name] for b in blocks]) for name in first.lists},
            dense={name: np.concatenate([b.dense[name] for b in blocks]) for name in first.dense},
            owners=first.owners,
            history_lengths=first.history_lengths,
        )

    def num_states(self, feature: str) -> int:
        return len(self.lists[feature].offsets) - 1 if feature in self.lists else len(self.dense[feature])

    def select(self, rows: IntArray) -> Self:
        """These samples, and only the states that they see."""
        versions: dict[str, IntArray] = {}
        kept: dict[str, IntArray] = {}
        for owner, column in self.versions.items():
            seen = np.zeros(int(column.max(initial=-1)) + 1, dtype=np.bool_)
            seen[column[rows]] = True
            kept[owner] = np.flatnonzero(seen)
            versions[owner] = (np.cumsum(seen) - 1)[column[rows]]
        return type(self)(
            samples={name: column[rows] for name, column in self.samples.items()},
            versions=versions,
            shifts={name: column[rows] for name, column in self.shifts.items()},
            lists={name: lists.select(kept[self.owners[name]]) for name, lists in self.lists.items()},
            dense={name: column[kept[self.owners[name]]] for name, column in self.dense.items()},
            owners=self.owners,
            history_lengths=self.history_lengths,
        )

    def windows(self, feature: str, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Start and length, in the feature's values, of the list that each of these samples sees."""
        lists = self.lists[feature]
        state = self.versions[self.owners[feature]][rows]
        if feature in self.history_lengths:
            starts = lists.offsets[state] + self.shifts[feature][rows]
            return starts, np.full(len(rows), self.history_lengths[feature])
        return lists.offsets[state], lists.lengths[state]

    def to_arrow(self, rows: IntArray, schema: pa.Schema) -> pa.RecordBatch:
        """These samples as rows of the log, every list written out."""
        columns = []
        for field in schema:
            if field.name in self.lists:
                starts, lengths = self.windows(field.name, rows)
                columns.append(window_column(self.lists[field.name].values, starts, lengths))
            elif field.name in self.dense:
                columns.append(plain_column(self.dense[field.name][self.versions[self.owners[field.name]][rows]]))
            elif pa.types.is_list(field.type):
                columns.append(id_column(self.samples[field.name][rows]))
            else:
                columns.append(plain_column(self.samples[field.name][rows]))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


FIRST_START_MS = 1_700_000_000_000
SAMPLES_PER_BLOCK = 32_768  # about; another number changes the log of a seed
SESSION = "session"  # the owner of histories: one stream of ids per session


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Samples of consecutive sessions: sample i is of session s = `session_of[i]`, which begins at `first[s]`."""

    numbers: IntArray  # of the sessions, in the whole log
    start_ms: npt.NDArray[np.float64]
    first: IntArray
    session_of: IntArray
    is_first: BoolArray
    is_request: BoolArray  # the first sample of a request

    @property
    def num_samples(self) -> int:
        return len(self.session_of)

    def running_sum(self, steps: IntArray) -> IntArray:
        """Sums of `steps` from the first sample of the session, whose own step does not count."""
        total = np.cumsum(steps)
        return total - total[self.first][self.session_of]


class BlockMaker:
    """Makes the blocks of a log in order; a block depends only on the config and on the end of the one before."""

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.arrow_schema = schema_of(config).arrow_schema()
        self.num_made = 0
        self.last_start_ms = float(FIRST_START_MS)
        self._num_blocks = 0
        self._sessions_per_block = max(1, round(SAMPLES_PER_BLOCK / config.samples_per_session))
        seeds = np.random.SeedSequence([config.seed, 0]).generate_state(len(config.id_lists))
        self.samplers = {
            entry.name: ZipfSampler(num_rows=entry.num_rows, exponent=config.zipf, seed=int(seed))
            for entry, seed in zip(config.id_lists, seeds, strict=True)
        }
        self.hidden = [self._hidden_model(number) for number in range(len(config.labels))]
        self._mean_lengths = {entry.name: entry.mean_length for entry in config.id_lists}
        self._mean_lengths |= {history.name: float(history.length) for history in config.histories}
        self._owners = {entry.name: group.name for group in config.user_groups for entry in group.lists}
        self._owners |= {name: group.name for group in config.user_groups for name in group.dense}
        self._owners |= {history.name: SESSION for history in config.histories}

    def _hidden_model(self, number: int) -> HiddenModel:
        config = self.config
        user_lists = [entry.name for group in config.user_groups for entry in group.lists]
        pairs = [(name, config.items[0].name) for name in user_lists[:2]]
        return HiddenModel(
            samplers=self.samplers | {history.name: self.samplers[history.item] for history in config.histories},
            item_terms=[item.name for item in config.items],
            user_terms=user_lists,
            dense_terms=[name for group in config.user_groups for name in group.dense] + list(config.item_dense),
            pairs=pairs + [(history.name, history.item) for history in config.histories],
            base_rate=config.next_rate if number else config.base_rate,
            logit_std=config.logit_std,
            popular_rows=config.popular_rows,
            seed=config.seed,
            number=number,
        )

    @property
    def is_done(self) -> bool:
        return self.num_made >= self.config.num_sessions

    def next_block(self) -> tuple[SampleBlock, dict[str, Logits]]:
        """The samples of the next sessions, and the true logit of every sample for each label."""
        config = self.config
        # SFC64 is numpy's fastest generator; the block's number in the seed makes blocks independent.
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence([config.seed, 2, self._num_blocks])))
        sessions = self._draw_sessions(rng)
        samples = self._draw_samples(rng, sessions)
        versions: dict[str, IntArray] = {}
        shifts: dict[str, IntArray] = {}
        lists: dict[str, Jagged] = {}
        dense: dict[str, npt.NDArray[np.float32]] = {}
        for group in config.user_groups:
            stay_prob = config.stay_prob if group.stay_prob is None else group.stay_prob
            is_changed = sessions.is_request & (rng.random(sessions.num_samples) >= stay_prob)
            is_new = sessions.is_first | is_changed
            versions[group.name] = np.cumsum(is_new) - 1
            num_versions = int(versions[group.name][-1]) + 1
            for entry in group.lists:
                lists[entry.name] = self._draw_lists(rng, entry, num_versions)
            for name in group.dense:
                dense[name] = rng.standard_normal(num_versions, dtype=np.float32)
        if config.histories:
            versions[SESSION] = sessions.session_of
        for history in config.histories:
            lists[history.name], shifts[history.name] = self._draw_history(
                rng, sessions, samples[history.item], length=history.length, sampler=self.samplers[history.item]
            )
        block = SampleBlock(
            samples=samples,
            versions=versions,
            shifts=shifts,
            lists=lists,
            dense=dense,
            owners=self._owners,
            history_lengths={history.name: history.length for history in config.histories},
        )
        first = config.labels[0]
        logits = {first: self._logits(block, self.hidden[0])}
        samples[first] = (rng.random(len(logits[first]), dtype=np.float32) < expit(logits[first])).astype(np.float32)
        self._draw_later_labels(block, logits)
        self._num_blocks += 1
        self.num_made += len(sessions.numbers)
        self.last_start_ms = float(sessions.start_ms[-1])
        return block, logits

    def _draw_sessions(self, rng: np.random.Generator) -> Sessions:
        config = self.config
        count = min(self._sessions_per_block, config.num_sessions - self.num_made)
        max_size = int(config.samples_per_session * config.max_size_factor)
        sizes = draw_session_sizes(rng, count, mean=config.samples_per_session, max_size=max_size)
        first = offsets_of(sizes)[:-1]
        is_first = np.zeros(int(sizes.sum()), dtype=np.bool_)
        is_first[first] = True
        is_request = np.ones_like(is_first)
        if config.samples_per_request > 1:  # drawn only then: the logs of other presets stay as they are
            is_request = is_first | (rng.random(len(is_first)) < 1 / config.samples_per_request)
        return Sessions(
            numbers=self.num_made + np.arange(count),
            start_ms=self.last_start_ms + np.cumsum(rng.exponential(1000 / config.sessions_per_s, count)),
            first=first,
            session_of=np.repeat(np.arange(count), sizes),
            is_first=is_first,
            is_request=is_request,
        )

    def _draw_samples(self, rng: np.random.Generator, sessions: Sessions) -> dict[str, npt.NDArray[Any]]:
        """What is new in every sample: its time, the item and its dense values."""
        config = self.config
        gaps = draw_gaps_ms(rng, sessions.num_samples, mean_s=config.mean_gap_s)
        gaps[~sessions.is_request] = 1
        names = name_sessions(sessions.numbers, seed=config.seed)
        samples: dict[str, npt.NDArray[Any]] = {
            "session_id": names[sessions.session_of],
            "timestamp": sessions.start_ms.astype(np.int64)[sessions.session_of] + sessions.running_sum(gaps),
        }
        for item in config.items:
            samples[item.name] = self.samplers[item.name].draw(rng, sessions.num_samples)
        for name in config.item_dense:
            samples[name] = rng.standard_normal(sessions.num_samples, dtype=np.float32)
        return samples

    def _draw_lists(self, rng: np.random.Generator, entry: IdList, count: int) -> Jagged:
        is_single = entry.mean_length == 1
        lengths = np.ones(count, dtype=np.int64) if is_single else rng.poisson(entry.mean_length, count)
        offsets = offsets_of(lengths)
        return Jagged(values=self.samplers[entry.name].draw(rng, int(offsets[-1])), offsets=offsets)

    def _draw_history(
        self, rng: np.random.Generator, sessions: Sessions, items: IntArray, *, length: int, sampler: ZipfSampler
    ) -> tuple[Jagged, IntArray]:
        """One stream of ids per session, and how far each sample's window of `length` has moved along it.

        A window that moves includes the item of the sample before.
        """
        is_shifted = rng.random(sessions.num_samples) < self.config.shift_prob
        is_shifted[sessions.is_first | ~sessions.is_request] = False
        shifts = sessions.running_sum(is_shifted.astype(np.int64))
        last = np.concatenate([sessions.first[1:], [sessions.num_samples]]) - 1
        offsets = offsets_of(length + shifts[last])
        values = sampler.draw(rng, int(offsets[-1]))
        moved = np.flatnonzero(is_shifted)
        values[offsets[sessions.session_of[moved]] + length + shifts[moved] - 1] = items[moved - 1]
        return Jagged(values=values, offsets=offsets), shifts

    def _draw_later_labels(self, block: SampleBlock, logits: dict[str, Logits]) -> None:
        """Add the labels after the first: each follows the one before with a probability that its own model gives.

        Half of that model's variance is the logit of the first label, so the labels are alike beyond the funnel.
        """
        labels, sure = self.config.labels, expit(logits[self.config.labels[0]].astype(np.float64))
        alike = logits[labels[0]] - np.float32(self.hidden[0].bias)
        for number, (before, name) in enumerate(pairwise(labels), start=1):
            rng = np.random.default_rng([self.config.seed, 3, self._num_blocks, number])
            own, bias = self._logits(block, self.hidden[number]), self.hidden[number].bias
            follows = expit(bias + np.sqrt(0.5) * (own - bias + alike).astype(np.float64))
            drawn = rng.random(len(follows)) < follows
            block.samples[name] = block.samples[before] * drawn.astype(np.float32)
            sure = sure * follows
            logits[name] = logit(sure).astype(np.float32)

    def _logits(self, block: SampleBlock, hidden: HiddenModel) -> Logits:
        """The true logit of every sample; sums over lists are computed once per distinct list."""
        scale = hidden.scale
        logits = np.full(block.num_samples, hidden.bias, dtype=np.float32)
        for name in self._mean_lengths:
            if name in block.samples:
                logits += scale["item"] * hidden.effects[name].take(block.samples[name])
            elif name not in block.history_lengths:
                logits += scale["user_list"] * self._list_sums(block, name, hidden.effects[name])
        for name, sign in hidden.dense_signs.items():
            is_user = name in block.dense
            values = block.dense[name][block.versions[self._owners[name]]] if is_user else block.samples[name]
            logits += np.float32(scale["dense"] * sign) * values
        for user, item in hidden.pairs:
            taste = self._list_sums(block, user, hidden.tastes[user])
            logits += scale["interaction"] * taste * hidden.tastes[item].take(block.samples[item])
        return logits

    def _list_sums(self, block: SampleBlock, name: str, effects: npt.NDArray[np.float32]) -> Logits:
        """The sum of effects over the list of every sample, scaled to variance 1."""
        lists = block.lists[name]
        normalise = np.float32(self._mean_lengths[name] ** -0.5)
        if name in block.history_lengths:
            starts, lengths = block.windows(name, np.arange(block.num_samples))
            return normalise * sum_windows(effects, lists.values, starts, lengths)
        sums = normalise * sum_windows(effects, lists.values, lists.offsets[:-1], lists.lengths)
        return sums[block.versions[self._owners[name]]]
