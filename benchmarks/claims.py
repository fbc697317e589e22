"""The rows of the results tables: what is measured, against which rival, in which metric of which benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of the table. A metric is renamed when its rival changes, so that no old number gets a new rival."""

    text: str
    rival: str  # "" for a plain value without a baseline
    metric: str
    target: float | None = None
    is_below: bool = False  # the absolute value must not exceed the target
    is_value: bool = False  # a value, not a ratio
    is_headline: bool = False  # also in the README


def _ratio(text: str, rival: str, metric: str, target: float | None = None, *, is_headline: bool = False) -> Claim:
    return Claim(text=text, rival=rival, metric=metric, target=target, is_headline=is_headline)


def _value(text: str, rival: str, metric: str, target: float | None = None, *, is_headline: bool = False) -> Claim:
    return Claim(text=text, rival=rival, metric=metric, target=target, is_value=True, is_headline=is_headline)


def _at_most(text: str, rival: str, metric: str, target: float) -> Claim:
    return Claim(text=text, rival=rival, metric=metric, target=target, is_value=True, is_below=True)


PLAIN_TRAINING = "same model, time-ordered data, no deduplication"
ROW_WISE = "TorchRec row-wise sharding as shipped"
ROW_WISE_DEDUP = "row-wise sharding with id dedup, ids of the same width"
TABLE_WISE = "TorchRec table-wise sharding"
PARQUET = "best time-ordered Parquet, same writer and zstd levels"
SWITCHES_OFF = "the same training with all switches off"
SAME_TRANSFORMS = "same transforms on time-ordered data"
RANDOM_ORDER = "random order of the same samples"
INDEX_COPY = "torch.index_select and index_copy_"
FULL_FBGEMM = "FBGEMM, full table of 4,000,000 rows"
ORACLE = "oracle that knows the simulator"
OTHER_LOADERS = "best of Grain, torchdata, SPDL, DataLoader and, where installed, tf.data"
EXPORT = "exported program, user repeated for every candidate"
FLOAT32 = "float32 tables"
CONTROL = "training samples/s, one sample per session (control: no list repeats, same id lookups)"
REPEATED_LISTS = "kernel that finds repeated lists, GB/s, one core"

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "recd": (
        _ratio("bytes per row, session layout, `recd`", PARQUET, "storage_session_vs_best"),
        _ratio("bytes per row, deduplicated layout, `recd`", PARQUET, "storage_deduplicated_vs_best", 4.5),
        _ratio("bytes per row, deduplicated layout, globo", PARQUET, "storage_globo_vs_best", 3.5, is_headline=True),
        _ratio("preprocessing rows/s, `recd`", SAME_TRANSFORMS, "preprocess", 1.8),
        _ratio("preprocessing rows/s, globo", SAME_TRANSFORMS, "preprocess_globo", 1.3),
        _ratio("training samples/s, transformer, `recd`", PLAIN_TRAINING, "train_sequence", 2.5),
        _ratio("training samples/s, transformer, globo", PLAIN_TRAINING, "train_sequence_globo", 1.5, is_headline=True),
        _ratio("training samples/s, standard transformer, `recd`", PLAIN_TRAINING, "train_standard", 2.5),
        _ratio("training samples/s, standard transformer, globo", PLAIN_TRAINING, "train_standard_globo"),
        _ratio("training samples/s, pooled DLRM, `recd`", PLAIN_TRAINING, "train_pooled", 1.25),
        _ratio("training samples/s, pooled DLRM, globo", PLAIN_TRAINING, "train_pooled_globo", 1.0),
        _ratio(CONTROL, PLAIN_TRAINING, "train_control_same_lookups", 0.97),
        _ratio(REPEATED_LISTS, "torch.unique(dim=0)", "dedup_kernel", 30.0),
        _ratio(REPEATED_LISTS, "hash of each list, sort, unique_consecutive", "dedup_kernel_vs_consecutive", 1.0),
        _ratio(REPEATED_LISTS, "Arrow's hash table (dictionary_encode)", "dedup_kernel_vs_hash", 1.0),
    ),
    "flexshard": (
        _ratio("communication time per step, Zipf 0.8", ROW_WISE_DEDUP, "comm_time_zipf08_vs_dedup", 1.0),
        _ratio("communication time per step, Zipf 1.0", ROW_WISE_DEDUP, "comm_time_zipf10_vs_dedup", 1.0),
        _ratio("communication time per step, Zipf 1.2", ROW_WISE_DEDUP, "comm_time_zipf12_vs_dedup", 2.0),
        _ratio("communication time per step, globo", ROW_WISE_DEDUP, "comm_time_globo_vs_dedup", 1.6, is_headline=True),
        _ratio("bytes between nodes per step, Zipf 0.8", ROW_WISE_DEDUP, "inter_node_bytes_zipf08", 1.0),
        _ratio("bytes between nodes per step, Zipf 1.0", ROW_WISE_DEDUP, "inter_node_bytes_zipf10", 1.0),
        _ratio("bytes between nodes per step, Zipf 1.2", ROW_WISE_DEDUP, "inter_node_bytes_zipf12", 1.0),
        _ratio("bytes between nodes per step, globo", ROW_WISE_DEDUP, "inter_node_bytes_globo", 1.0),
        _ratio("all bytes per step, Zipf 0.8", ROW_WISE_DEDUP, "total_bytes_zipf08"),
        _ratio("all bytes per step, Zipf 1.0", ROW_WISE_DEDUP, "total_bytes_zipf10"),
        _ratio("all bytes per step, Zipf 1.2", ROW_WISE_DEDUP, "total_bytes_zipf12"),
        _ratio("all bytes per step, globo", ROW_WISE_DEDUP, "total_bytes_globo"),
        _ratio("communication time per step, Zipf 0.8", ROW_WISE, "comm_time_zipf08", 1.0),
        _ratio("communication time per step, Zipf 1.0", ROW_WISE, "comm_time_zipf10", 1.0),
        _ratio("communication time per step, Zipf 1.2", ROW_WISE, "comm_time_zipf12", 3.0),
        _ratio("communication time per step, globo", ROW_WISE, "comm_time_globo", 3.0),
        _ratio("all-to-all bytes per step, Zipf 0.8", ROW_WISE, "alltoall_bytes_zipf08"),
        _ratio("all-to-all bytes per step, Zipf 1.0", ROW_WISE, "alltoall_bytes_zipf10"),
        _ratio("all-to-all bytes per step, Zipf 1.2", ROW_WISE, "alltoall_bytes_zipf12", 1 / 0.15),
        _ratio("all-to-all bytes per step, globo", ROW_WISE, "alltoall_bytes_globo", 1 / 0.15),
        _at_most(
            "relative error of predicted bytes per step",
            "bytes counted at the interfaces",
            "predicted_bytes_error",
            0.1,
        ),
        _at_most("relative gap of the plan's objective", "its proven lower bound", "planner_gap", 0.01),
    ),
    "fae": (
        _ratio("embedding part of a hot batch, seconds", TABLE_WISE, "hot_batch_embedding", 2.0),
        _ratio(
            "training samples/s with hot batches, 200 Mbit/s, Zipf 1.2",
            TABLE_WISE,
            "train_shaped",
            2.3,
            is_headline=True,
        ),
        _ratio("training samples/s with hot batches, loopback", TABLE_WISE, "train_loopback", 1.2),
        _ratio("swapping 100,000 rows with optimiser state", INDEX_COPY, "swap_rows_vs_index", 1.0),
        *(
            _ratio(f"training samples/s with lookahead, {network}", rival, f"{metric}_{suffix}", target)
            for suffix, network in (("shaped", "200 Mbit/s, Zipf 1.2"), ("loopback", "loopback, Zipf 1.2"))
            for metric, rival, target in (
                ("ahead_vs_dedup", ROW_WISE_DEDUP, 1.0),
                ("ahead_vs_tables", TABLE_WISE, None),
                ("ahead_vs_hot", "hot batches", None),
            )
        ),
        _at_most("AUC difference of hot order, Zipf 1.2", RANDOM_ORDER, "auc_difference", 0.001),
        _value("AUC difference of the finest hot and cold turns, Zipf 1.2", RANDOM_ORDER, "auc_finest_turns"),
        _value("layout speed, ids per second and core", "", "layout_ids_per_s", 5e6),
        _ratio("training samples/s, low-skew data (hot batches disable themselves)", TABLE_WISE, "low_skew", 0.97),
        _value("training samples/s, 50 GB table with 12 GB of memory", "", "beyond_memory_samples_per_s"),
    ),
    "fae_order": (
        _at_most("AUC difference of hot order, globo", RANDOM_ORDER, "auc_difference_globo", 0.001),
        _value("AUC difference of the finest hot and cold turns, globo", RANDOM_ORDER, "auc_finest_turns_globo"),
    ),
    "pss": (
        *(
            _ratio(
                f"training step, 10x fewer bytes, {law} ids, pooling {pooling}, {count}",
                FULL_FBGEMM,
                f"step_{law.split()[0].lower()}_pool{pooling}_threads{count[0]}",
                1.0,
            )
            for pooling in (1, 20)
            for law in ("uniform", "Zipf 1.05")
            for count in ("1 thread", "2 threads")
        ),
        _ratio("training step of shared parameters", "the same lookup in plain torch", "step_vs_torch", 10.0),
        _ratio("training step of shared parameters", "ROBE's published hash in plain torch", "step_vs_robe", 1.0),
        _value("test AUC on frappe, full table", "", "frappe_auc_full"),
        _value(
            "difference of test AUC on frappe, 10x fewer bytes",
            "full table, same seeds",
            "frappe_auc_10x_difference",
            -0.002,
            is_headline=True,
        ),
        _value(
            "difference of test AUC on frappe, 10x fewer bytes",
            "better of int8 narrow and int8 hashed rows in the same bytes, same seeds",
            "frappe_auc_10x_vs_int8",
            0.0,
        ),
        _value(
            "difference of test AUC on frappe, 100x fewer bytes",
            "better of int8 narrow and int8 hashed rows in the same bytes, same seeds",
            "frappe_auc_100x_vs_int8",
            0.0,
        ),
        _value(
            "difference of test AUC on frappe, 100x fewer bytes, hot rows exact",
            "best of hashed, quotient-remainder and shared rows without exact ones in the same bytes, same seeds",
            "frappe_auc_100x_vs_peers",
            0.0,
        ),
        _at_most("peak resident memory, training 100 GB of logical tables", "", "resident_100gb", 2**30),
    ),
    "intune": (
        _value("simulated rows/s, share of the oracle's", ORACLE, "sim_oracle_share", 0.97),
        _value("the same after an event", ORACLE, "sim_after_event", 0.97),
        _ratio("simulated rows/s", "linear programme, profiled again every interval", "sim_vs_lp", 0.99),
        _ratio("simulated rows/s", "bounded linear programme alone", "sim_vs_bounded", 1.0),
        _ratio("simulated rows/s", "even split of workers", "sim_vs_even", 1.8),
        _at_most("simulated out-of-memory kills", "AUTOTUNE-like controller without a memory guard", "sim_oom", 0.0),
        _ratio(
            "rows/s from local Parquet, all with our decoder",
            OTHER_LOADERS,
            "local_vs_peers_pages",
            1.0,
            is_headline=True,
        ),
        _ratio("rows/s from local Parquet, all with Arrow's decoder", OTHER_LOADERS, "local_vs_peers_arrow", 1.0),
        _ratio("rows/s with 8 workers per stage on two cores", "the tuned numbers of workers", "crowded_vs_tuned", 0.9),
        _ratio("rows/s when a read takes 50 ms", "one worker per stage", "latency_speedup", 10.0),
        _ratio("rows/s when a read takes 50 ms", "tf.data with AUTOTUNE", "latency_vs_autotune", 1.0),
        _ratio("run time with two slow stages", "worker counts set by hand", "two_stage_vs_preset", 1 / 1.15),
    ),
    "together": (
        *(
            Claim(
                text=f"{what}, all five switches, globo, {encoder}, {speed}",
                rival=SWITCHES_OFF,
                metric=f"{metric}_{encoder}_{mbit}",
                target=target if mbit == 100 and encoder == "transformer" else None,
                is_headline=is_headline and mbit == 100 and encoder == "transformer",
            )
            for encoder in ("attention", "transformer")
            for mbit, speed in ((100, "0.1 Gbit/s"), (1_000, "1 Gbit/s"), (10_000, "10 Gbit/s"))
            for what, metric, target, is_headline in (
                ("training samples/s", "all", 3.0, True),
                ("time to the baseline's AUC with preparation", "time_to_auc", None, False),
                ("time to the baseline's AUC, preparation shared by 10 trainings", "time_to_auc10", 2.5, True),
            )
        ),
        *(
            _value(f"AUC difference, all five switches, globo, {encoder}", SWITCHES_OFF, metric, -0.002)
            for encoder in ("attention", "transformer")
            for metric in (f"auc_difference_{encoder}",)
        ),
        _ratio("training samples/s, best single switch, globo, 0.1 Gbit/s", SWITCHES_OFF, "best_single"),
        _ratio("training samples/s, all five switches, `recd`, 0.1 Gbit/s", SWITCHES_OFF, "recd_five", 5.0),
        _at_most("relative error of predicted bytes per step", "bytes counted on the wire", "prediction_error", 0.15),
    ),
    "serving": (
        *(
            _ratio(
                f"scored candidates/s per core, {count} per request, {model}, {log}",
                EXPORT,
                f"{log.strip('`')}_{name}_{count}",
                {1: 1.0, 100: at_100}.get(count),
            )
            for name, model, at_100 in (("transformer", "transformer", 7.0), ("pooled", "pooled DLRM", 2.0))
            for log in ("`recd`", "globo")
            for count in (1, 20, 100, 500)
        ),
        *(
            _ratio(
                f"p99 at the same rate of arrivals, 100 candidates per request, {model}, {log}",
                EXPORT,
                f"{log.strip('`')}_{name}_100_p99_open",
                1.0,
            )
            for name, model in (("transformer", "transformer"), ("pooled", "pooled DLRM"))
            for log in ("`recd`", "globo")
        ),
        *(
            _ratio(
                f"scored candidates/s per core, {count} per request, {model}, `recd`",
                f"{rival}, plain embeddings, user repeated",
                f"recd_{name}_{count}_vs_{rival.lower()}",
                1.0,
            )
            for name, model in (("transformer", "transformer"), ("pooled", "pooled DLRM"))
            for rival in ("TorchScript", "AOTInductor", "onnxruntime")
            for count in (1, 100)
        ),
        *(
            _ratio(f"{what}, {form} tables, 100 per request, pooled DLRM, `recd`", FLOAT32, f"recd_pooled_100_{metric}")
            for form, name in (("int8", "int8"), ("10x shared", "shared10x"))
            for what, metric in (("scored candidates/s", name), ("memory of the model", f"{name}_memory"))
        ),
        _at_most("largest difference of scores, 10,000 requests, float32", EXPORT, "score_difference", 1e-5),
        _at_most("AUC difference of int8 tables, globo", FLOAT32, "globo_auc_difference_int8", 0.0005),
        _at_most("resident memory, GB, serving 20 GB of tables", "", "large_table_resident", 2.0),
        _value("p99 in ms, 100 candidates, 20 GB of tables, uniform ids", "", "large_table_p99"),
        _value("scored candidates/s over HTTP, one core, 100 per request, transformer, `recd`", "", "loopback_100"),
    ),
}
BENCHMARKS = tuple(CLAIMS)
