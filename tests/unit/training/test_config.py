import pytest
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts import Checkpoint, InputError
from recmill.training.config import TrainConfig, settings_from_flags
from recmill.training.switches import Switch
from recmill.training.trainer import settings_of_checkpoint


def test_overrides_are_parsed_by_the_type_of_the_setting():
    config = TrainConfig.from_overrides({"epochs": "3", "dense_lr": "1e-2", "shuffle": "false", "top_layers": "8,4"})
    assert (config.epochs, config.dense_lr, config.shuffle, config.top_layers) == (3, 0.01, False, (8, 4))
    assert TrainConfig.from_overrides({"task_weights": "1,0.5"}).task_weights == (1.0, 0.5)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"epoch": "3"}, "unknown setting 'epoch'"),
        ({"epochs": "three"}, "expected a whole number"),
        ({"epochs": "0"}, "epochs is 0"),
        ({"dropout": "1"}, "dropout is 1.0"),
        ({"model": "gpt"}, "expected one of dlrm, dcn"),
        ({"shuffle": "maybe"}, "expected true or false"),
        ({"top_layers": "8,-4"}, "whole numbers of 1 or more"),
        ({"dense_lr": "nan"}, "dense_lr is nan"),
        ({"task_weights": "1,x"}, "expected numbers separated by commas"),
        ({"task_weights": "1,-1"}, "expected numbers of 0 or more"),
        ({"task_weights": "0,0"}, "not all 0"),
        ({"multi_task": "esmm"}, "expected one of shared, mmoe, ple"),
        ({"num_experts": "0"}, "num_experts is 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(overrides, words):
    with pytest.raises(InputError, match=words):
        TrainConfig.from_overrides(overrides)


def test_the_five_switches_have_the_same_states_and_one_name():
    for switch in Switch:
        for state in ("auto", "true", "false"):
            assert getattr(TrainConfig.from_overrides({switch: state}), switch) == state
        with pytest.raises(InputError, match=f"{switch} is 'on', expected one of auto, true, false"):
            TrainConfig.from_overrides({switch: "on"})


@pytest.mark.parametrize(("old", "new"), [("online", "true"), ("fixed", "false")])
def test_the_old_name_of_tuning_still_works_and_says_what_to_write(old, new, capsys):
    assert TrainConfig.from_overrides({"tune": old}).tuning == new
    assert capsys.readouterr().err == f"recmill: setting tune={old} is deprecated: use tuning={new}\n"


@given(st.integers(1, 10**6), st.floats(1e-9, 10), st.lists(st.integers(1, 4096), max_size=4))
def test_config_survives_json(batch_size, table_lr, top_layers):
    config = TrainConfig(batch_size=batch_size, table_lr=table_lr, top_layers=tuple(top_layers))
    assert TrainConfig.from_json(config.to_json()) == config


def test_set_flags_need_a_name_and_a_value():
    assert settings_from_flags(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
    with pytest.raises(InputError, match="name=value"):
        settings_from_flags(["epochs"])


@pytest.mark.parametrize(
    ("name", "value"), [("max_sequence_length", "x"), ("dropout", None), ("top_layers", ["8"]), ("trial", 1)]
)
def test_made_up_settings_of_a_checkpoint_are_named(tmp_path, name, value):
    body = {"step": 1, "config": {"batch_size": 8, name: value}, "schema": {}, "world_size": 1}
    Checkpoint.of_json(body).seal(tmp_path)
    with pytest.raises(InputError, match=rf"checkpoint\.json: config\.{name} is"):
        settings_of_checkpoint(tmp_path)


def test_whole_numbers_pass_where_settings_are_fractions(tmp_path):
    body = {"step": 1, "config": {"dropout": 0, "top_layers": [4]}, "schema": {}, "world_size": 1}
    Checkpoint.of_json(body).seal(tmp_path)
    assert settings_of_checkpoint(tmp_path).top_layers == (4,)
