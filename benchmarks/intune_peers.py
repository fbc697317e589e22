"""The same row groups and the same work through other loaders. Each yields Batches; missing loaders are skipped.

Every peer maps `load_group` (read, decode, transform, cut into batches: the functions our own stages call) over the row
groups of all epochs in one go, so that workers start once; only the loader and its number of workers differ. Parquet is
decoded by Arrow, as their users do; with `decodes_pages` by our pipeline's kernel, to separate loader from decoder.

On both sides a batch has 4,096 rows, ids are compared with the sizes of their tables, and nothing is hashed,
deduplicated or transformed. Ours does more: it permutes row groups, cuts each batch from eight of up to 32 that it
holds, charges their memory, measures its stages and can resume at every batch. Peers read in stored order and cut a row
group into two batches while it is in the cache. One function differs: rows that Arrow decoded are copied into 4 bytes
per id where they are held, which would only cost a peer time. Memory is recycled on both sides (kernels/recycled).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.util import find_spec

import torch
from intune_data import late_rate
from torchrec import KeyedJaggedTensor

from recmill.artifacts import Dataset
from recmill.data.ikjt.batch import Batch, assemble_batch, decode_block
from recmill.data.ingest.parts import PartFile
from recmill.data.schema import Schema

Loader = Callable[
    [Dataset, int, int, int, bool], Iterable[Batch]
]  # dataset, batch size, workers, epochs, decodes_pages


@cache
def _open(path: str, decodes_pages: bool) -> tuple[PartFile, Schema]:
    schema = Schema.load(path)
    columns = ["label", *(feature.name for feature in schema.features)]
    bounds = {feature.name: feature.num_rows for feature in schema.id_features}  # as in our own reader
    part = PartFile(f"{path}/part-00000.parquet", columns=columns, decodes_pages=decodes_pages, bounds=bounds)
    return part, schema


def load_group(index: int, *, path: str, batch_size: int, decodes_pages: bool) -> list[Batch]:
    """The batches of one row group."""
    part, schema = _open(path, decodes_pages)
    block = decode_block(part.decode(index, part.read(index)), schema)
    return [
        assemble_batch([(block, start, min(len(block), start + batch_size))], schema, num_global=batch_size)
        for start in range(0, len(block), batch_size)
    ]


def _groups(dataset: Dataset, epochs: int) -> list[int]:
    return list(range(len(dataset.parts[0].row_group_rows))) * epochs


def plain_loop(dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool) -> Iterator[Batch]:
    for index in _groups(dataset, epochs):
        yield from load_group(index, path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)


class _Groups(torch.utils.data.Dataset[list[Batch]]):
    def __init__(self, dataset: Dataset, batch_size: int, epochs: int, decodes_pages: bool) -> None:
        self._groups = _groups(dataset, epochs)
        self._work = partial(load_group, path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> list[Batch]:
        return self._work(self._groups[index])


def torch_dataloader(
    dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool
) -> Iterator[Batch]:
    loader = torch.utils.data.DataLoader(
        _Groups(dataset, batch_size, epochs, decodes_pages),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
    )
    for batches in loader:
        yield from batches


def torchdata_nodes(
    dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool
) -> Iterator[Batch]:
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    work = partial(load_group, path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)
    node = ParallelMapper(
        IterableWrapper(_groups(dataset, epochs)), work, num_workers=workers, method="thread", prebatch=None
    )
    for batches in Loader(node):
        yield from batches


def spdl(dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool) -> Iterator[Batch]:
    from spdl.pipeline import PipelineBuilder

    work = partial(load_group, path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)
    pipeline = (
        PipelineBuilder()
        .add_source(_groups(dataset, epochs))
        .pipe(work, concurrency=workers)
        .add_sink(4)
        .build(num_threads=workers)
    )
    with pipeline.auto_stop():
        for batches in pipeline.get_iterator():
            yield from batches


def grain(dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool) -> Iterator[Batch]:
    import grain.python as pygrain

    work = partial(load_group, path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)
    options = pygrain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    source = pygrain.MapDataset.source(_groups(dataset, epochs)).map(work)
    for batches in source.to_iter_dataset(options):
        yield from batches


def tf_data(dataset: Dataset, batch_size: int, workers: int, epochs: int, decodes_pages: bool) -> Iterator[Batch]:
    """`workers` 0 lets AUTOTUNE decide."""
    import tensorflow as tf

    def work(index: tf.Tensor) -> list[object]:
        batches = load_group(int(index), path=dataset.path, batch_size=batch_size, decodes_pages=decodes_pages)
        return [
            array
            for batch in batches[:1] + batches[1:]
            for array in (
                batch.dense_BF.numpy(),
                batch.label_B.numpy(),
                batch.ids.values().numpy(),
                batch.ids.lengths().numpy(),
            )
        ]

    rows = dataset.parts[0].row_group_rows[0]
    kinds = [tf.float32, tf.float32, tf.int64, tf.int32] * -(-rows // batch_size)
    calls = workers or tf.data.AUTOTUNE
    source = tf.data.Dataset.from_tensor_slices(_groups(dataset, epochs)).map(
        lambda index: tf.py_function(work, [index], kinds), num_parallel_calls=calls
    )
    keys = [feature.name for feature in Schema.load(dataset.path).id_features]
    for arrays in source.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
        for start in range(0, len(arrays), 4):
            dense, label, values, lengths = (torch.from_numpy(array) for array in arrays[start : start + 4])
            ids = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
            yield Batch(dense_BF=dense, ids=ids, label_BT=label[:, None], num_global=batch_size)


def has_autotune() -> bool:
    return find_spec("tensorflow") is not None


def autotuned_rate(dataset: Dataset, *, delay_s: float, seconds: float) -> float:
    """Rows per second of tf.data with AUTOTUNE in the last third of the time, when each read takes `delay_s` longer."""
    import tensorflow as tf

    rows = dataset.parts[0].row_group_rows

    def work(index: tf.Tensor) -> int:
        time.sleep(delay_s)
        loaded = load_group(int(index), path=dataset.path, batch_size=512, decodes_pages=True)
        return sum(map(len, loaded))

    source = tf.data.Dataset.range(len(rows)).repeat()
    source = source.map(lambda index: tf.py_function(work, [index], tf.int64), num_parallel_calls=tf.data.AUTOTUNE)
    return late_rate(map(int, source.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()), seconds=seconds)


# Loader, the module it needs, and the worker counts that are tried.
PEERS: dict[str, tuple[Loader, str, tuple[int, ...]]] = {
    "plain loop": (plain_loop, "torch", (0,)),
    "torch DataLoader": (torch_dataloader, "torch", (1, 2)),
    "torchdata nodes": (torchdata_nodes, "torchdata", (2, 4)),
    "SPDL": (spdl, "spdl", (2, 4)),
    "Grain": (grain, "grain", (2, 4)),
    "tf.data": (tf_data, "tensorflow", (0,)),
}


def installed_peers() -> tuple[dict[str, tuple[Loader, tuple[int, ...]]], dict[str, str]]:
    """The loaders that can be measured here, and why the others cannot."""
    found, skipped = {}, {}
    for name, (loader, module, workers) in PEERS.items():
        if find_spec(module) is None:
            skipped[name] = f"{module} is not installed (pip install 'recmill[peers]')"
        else:
            found[name] = (loader, workers)
    return found, skipped
