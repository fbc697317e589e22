"""Policies on disk: no code in them, the same actions and the same learning as from stable-baselines3's archives."""

from __future__ import annotations

import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from stable_baselines3 import PPO

from recmill.artifacts import InputError, WorkerAllocation, write_folder
from recmill.artifacts.allocation import Throughput
from recmill.artifacts.tensors import read_tensors
from recmill.cli import main
from recmill.tuning import policy as policies
from recmill.tuning.online.learning import OnlineLearner
from recmill.tuning.online.tuner import OnlineTuner
from recmill.tuning.policy import SHIPPED_POLICY, load_policy, save_policy

OBSERVATIONS = np.random.default_rng(0).uniform(-5, 5, (8, 108)).astype(np.float32)
# Of the archive that the shipped policy was converted from.
ACTIONS = [
    *([3, 2, 3, 2, 1], [2, 1, 2, 2, 1], [2, 2, 2, 2, 4], [2, 2, 2, 2, 1]),
    *([3, 2, 2, 2, 1], [3, 2, 3, 3, 1], [3, 2, 2, 2, 1], [2, 2, 2, 2, 4]),
]


def actions(policy: PPO) -> list[list[int]]:
    return policy.predict(OBSERVATIONS, deterministic=True)[0].tolist()


def learn(policy: PPO) -> dict[str, torch.Tensor]:
    """The weights after one update from rewards that depend on the actions."""
    torch.manual_seed(3)
    np.random.seed(3)
    learner = OnlineLearner(policy)
    for step in range(9):
        chosen = learner.choose(OBSERVATIONS[step % 8][None])
        learner.note(float(chosen.sum()), OBSERVATIONS[(step + 1) % 8][None])
    assert learner.num_updates == 1
    return policy.policy.state_dict()


def convert(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["convert-checkpoint", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_shipped_policy_acts_as_its_archive_did():
    assert actions(load_policy()) == ACTIONS


def test_archives_convert_to_the_same_actions_and_the_same_learning(tmp_path, capsys):
    policy = load_policy()
    learn(policy)
    policy.save(tmp_path / "old.zip")
    with pytest.raises(InputError, match="recmill convert-checkpoint"):
        load_policy(tmp_path / "old.zip")
    out = tmp_path / "new.safetensors"
    assert convert(capsys, tmp_path / "old.zip", "--out", out)[0] == 0
    old, new = PPO.load(tmp_path / "old.zip", device="cpu"), load_policy(out)
    assert actions(old) == actions(new) == actions(policy)
    assert_same(learn(old), learn(new))
    save_policy(new, tmp_path / "again.safetensors")
    assert_same(load_policy(tmp_path / "again.safetensors").policy.state_dict(), new.policy.state_dict())


def test_allocations_with_an_archive_convert_and_are_refused_until_then(tmp_path, capsys):
    rates = {"stages": {"read": 1}, "rows_per_s": 1.0, "memory_bytes": 1}
    with write_folder(tmp_path / "old", manifest_name=WorkerAllocation.manifest_name) as folder:
        load_policy().save(folder / "agent.zip")
        WorkerAllocation(**rates, baseline=Throughput(**rates), agent="agent.zip", cores=2).seal(folder)
    with pytest.raises(InputError, match=r"convert it: recmill convert-checkpoint \S+/old --out NEW"):
        OnlineTuner(None, allocation=WorkerAllocation.load(tmp_path / "old"))
    code, out, _ = convert(capsys, tmp_path / "old", "--out", tmp_path / "new", "--json")
    assert (code, json.loads(out)["files"]) == (0, ["agent.safetensors"])
    new = WorkerAllocation.load(tmp_path / "new", verify=True)
    assert (new.cores, new.agent) == (2, "agent.safetensors")
    assert actions(load_policy(tmp_path / "new" / new.agent)) == ACTIONS


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


@pytest.mark.parametrize("member", ["data", "policy.pth", "policy.optimizer.pth"])
def test_no_code_of_an_archive_runs(tmp_path, capsys, member):
    load_policy().save(tmp_path / "good.zip")
    torch.save(Hostile(), tmp_path / "hostile")
    with zipfile.ZipFile(tmp_path / "good.zip") as good, zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
        for name in good.namelist():
            bad.writestr(name, (tmp_path / "hostile").read_bytes() if name == member else good.read(name))
    code, _, error = convert(capsys, tmp_path / "bad.zip", "--out", tmp_path / "out.safetensors")
    assert (code, error.count("\n")) == (2, 1)
    assert "is not a readable policy" in error
    assert not (tmp_path / "out.safetensors").exists()


def test_a_changed_shipped_policy_is_refused(tmp_path, monkeypatch):
    changed = tmp_path / SHIPPED_POLICY.name
    data = bytearray(SHIPPED_POLICY.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    monkeypatch.setattr(policies, "SHIPPED_POLICY", changed)
    with pytest.raises(InputError, match="is not the policy of this version"):
        load_policy(changed)


def damage(header: dict, how: str) -> dict:
    settings = json.loads(header["__metadata__"]["recmill.policy"])
    changes = {
        "wide": {"net_arch": [10**9]},
        "long": {"n_steps": 10**12},
        "text": {"gamma": "0.9"},
        "new": {"format_version": 9},
    }
    settings |= changes.get(how, {})
    header["__metadata__"]["recmill.policy"] = json.dumps(settings)
    first = next(name for name in header if name.startswith("policy."))
    if how == "outside":
        header[first]["data_offsets"] = [10**9, 10**9 + 16]
    if how == "shape":
        header[first]["shape"] = [2**40, 2**40]
    if how == "missing":
        del header[first]
    if how == "foreign":
        header["other"] = header[first]
    return header


@pytest.mark.parametrize("how", ["wide", "long", "text", "new", "outside", "shape", "missing", "foreign"])
def test_hostile_headers_are_one_sentence(tmp_path, how):
    data = SHIPPED_POLICY.read_bytes()
    body = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(damage(json.loads(data[8:body]), how)).encode()
    (tmp_path / "bad.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[body:])
    with pytest.raises(InputError, match=r"bad\.safetensors: "):
        load_policy(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"])
def test_other_files_are_one_sentence(tmp_path, data):
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=r"bad\.safetensors: is not a"):
        load_policy(tmp_path / "bad.safetensors")


def test_the_file_is_plain_safetensors(tmp_path):
    shutil.copy(SHIPPED_POLICY, tmp_path / "own.safetensors")
    tensors, metadata = read_tensors(tmp_path / "own.safetensors")
    assert list(metadata) == ["recmill.policy"]
    assert tensors["policy.action_net.bias"].shape == (25,)
