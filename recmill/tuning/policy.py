"""Policies on disk: weights and optimiser state as safetensors, hyper-parameters as JSON in the file's header.

stable-baselines3's own archives hold pickles. Here the networks are built from the known spaces and the checked
hyper-parameters, and then filled with tensors, so nothing in a file is code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.artifacts import InputError, explain_write_errors, hash_file, read_record, record_json

if TYPE_CHECKING:
    from stable_baselines3 import PPO
    from torch import Tensor

SHIPPED_POLICY = Path(__file__).parent / "policy.safetensors"
SHIPPED_HASH = "sha256:ca5e039f3aee0b1e4d9b3faa374863c1cc27fac4a272ade124a773ea2f2c2e94"
SUFFIX = ".safetensors"
FORMAT_VERSION = 1
KIND = "recmill.policy"  # the entry of the file's metadata
MAX_LAYERS, MAX_WIDTH = 8, 4096
MAX_STEPS = 65_536  # of a rollout; its buffer is allocated with the policy
WEIGHTS, OPTIMISER = "policy.", "optimiser."


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What PPO is built with, in stable-baselines3's names, and how far it has learnt."""

    net_arch: tuple[int, ...]
    gamma: float
    gae_lambda: float
    learning_rate: float
    clip_range: float
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    n_steps: int
    batch_size: int
    n_epochs: int
    seed: int | None = None
    num_timesteps: int = 0
    num_updates: int = 0
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise InputError(f"format_version is {self.format_version}, this recmill reads {FORMAT_VERSION}")
        if len(self.net_arch) > MAX_LAYERS or not all(1 <= width <= MAX_WIDTH for width in self.net_arch):
            expected = f"at most {MAX_LAYERS} layers of 1 to {MAX_WIDTH} units"
            raise InputError(f"net_arch is {list(self.net_arch)[: MAX_LAYERS + 1]}, expected {expected}")
        if not 1 < self.n_steps <= MAX_STEPS:
            raise InputError(f"n_steps is {self.n_steps}, expected 2 to {MAX_STEPS}")
        if self.batch_size < 2 or self.n_epochs < 1:
            raise InputError("batch_size and n_epochs must be at least 2 and 1")
        if self.seed is not None and self.seed >= 2**32:
            raise InputError(f"seed is {self.seed}, expected less than 2**32")


def load_policy(path: str | Path = SHIPPED_POLICY) -> PPO:
    """A saved policy; by default the one that ships with the package."""
    source = Path(path)
    if not source.is_file():
        raise InputError(f"{path}: no such file, expected a policy written by `recmill tune`")
    refuse_archive(source)
    if source == SHIPPED_POLICY and hash_file(source) != SHIPPED_HASH:
        raise InputError(f"{path}: is not the policy of this version of recmill; install it again")
    return read_policy(source)


def refuse_archive(path: str | Path) -> None:
    """Older versions wrote stable-baselines3's archives, which hold pickles."""
    if Path(path).suffix != ".zip":
        return
    old, new = (Path(path).parent, "NEW") if Path(path).name == "agent.zip" else (path, f"NEW{SUFFIX}")
    raise InputError(f"{path}: an older recmill wrote it; convert it: recmill convert-checkpoint {old} --out {new}")


def read_policy(path: Path) -> PPO:
    from recmill.artifacts.tensors import read_tensors

    tensors, metadata = read_tensors(path)
    if KIND not in metadata:
        raise InputError(f"{path}: is not a readable policy (its metadata has no entry {KIND!r})")
    try:
        loaded = json.loads(metadata[KIND])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not a readable policy ({error})") from None
    return make_policy(read_record(PolicySettings, loaded, where=str(path)), tensors, where=str(path))


def make_policy(settings: PolicySettings, tensors: Mapping[str, Tensor], *, where: str) -> PPO:
    """PPO for the spaces of recmill/tuning/env.py with these settings, weights and optimiser state."""
    from stable_baselines3 import PPO

    from recmill.tuning.env import spaces

    built: Any = PPO(
        "MlpPolicy",
        None,  # type: ignore[arg-type]  # as PPO.load does: a policy needs an environment only to learn from it
        gamma=settings.gamma,
        gae_lambda=settings.gae_lambda,
        learning_rate=settings.learning_rate,
        clip_range=settings.clip_range,
        ent_coef=settings.ent_coef,
        vf_coef=settings.vf_coef,
        max_grad_norm=settings.max_grad_norm,
        n_steps=settings.n_steps,
        batch_size=settings.batch_size,
        n_epochs=settings.n_epochs,
        seed=settings.seed,
        policy_kwargs={"net_arch": list(settings.net_arch)},
        device="cpu",
        _init_setup_model=False,
    )
    built.observation_space, built.action_space = spaces()
    built.n_envs = 1
    built._setup_model()
    built.num_timesteps, built._n_updates = settings.num_timesteps, settings.num_updates
    weights, state = _split(tensors, where)
    try:
        built.policy.load_state_dict(weights)
    except RuntimeError as error:  # names or shapes
        raise InputError(f"{where}: is not a policy for these observations ({' '.join(str(error).split())})") from None
    parameters = list(built.policy.parameters())
    for number, own in state.items():
        if number >= len(parameters) or {name: tuple(found.shape) for name, found in own.items()} != {
            "step": (),
            "exp_avg": tuple(parameters[number].shape),
            "exp_avg_sq": tuple(parameters[number].shape),
        }:
            raise InputError(f"{where}: the optimiser's state of parameter {number} does not fit the policy")
    optimiser = built.policy.optimizer
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
    return built  # type: ignore[no-any-return]


def save_policy(policy: PPO, path: Path) -> None:
    """Write weights, optimiser state and hyper-parameters; `load_policy` reads them."""
    write_policy(path, settings_of(policy), tensors_of(policy))


def write_policy(path: Path, settings: PolicySettings, tensors: Mapping[str, Tensor]) -> None:
    from recmill.artifacts.tensors import StoredTensor, write_tensors

    stored = [
        StoredTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda own=tensor: own)  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]
    with explain_write_errors(path):
        write_tensors(path, stored, metadata={KIND: json.dumps(record_json(settings), sort_keys=True)})


def settings_of(policy: PPO) -> PolicySettings:
    return PolicySettings(
        net_arch=tuple(policy.policy_kwargs["net_arch"]),
        gamma=float(policy.gamma),
        gae_lambda=float(policy.gae_lambda),
        learning_rate=float(policy.learning_rate),  # type: ignore[arg-type]  # a number, never a schedule
        clip_range=float(policy.clip_range(1.0)),  # type: ignore[operator]
        ent_coef=float(policy.ent_coef),
        vf_coef=float(policy.vf_coef),
        max_grad_norm=float(policy.max_grad_norm),
        n_steps=policy.n_steps,
        batch_size=policy.batch_size,
        n_epochs=policy.n_epochs,
        seed=policy.seed,
        num_timesteps=policy.num_timesteps,
        num_updates=policy._n_updates,
    )


def tensors_of(policy: PPO) -> dict[str, Tensor]:
    weights, state = policy.policy.state_dict(), policy.policy.optimizer.state_dict()["state"]
    return name_tensors(weights, state)


def name_tensors(weights: Mapping[str, Tensor], state: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Weights and the optimiser's state (parameter -> name -> tensor) under the names of the file."""
    named = {WEIGHTS + name: tensor for name, tensor in weights.items()}
    named |= {f"{OPTIMISER}{number}.{name}": own for number, entry in state.items() for name, own in entry.items()}
    return named


def _split(tensors: Mapping[str, Tensor], where: str) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """(weights, optimiser state), the inverse of `name_tensors`."""
    weights, state = dict[str, "Tensor"](), dict[int, dict[str, "Tensor"]]()
    for name, tensor in tensors.items():
        number, _, rest = name.removeprefix(OPTIMISER).partition(".")
        if name.startswith(WEIGHTS):
            weights[name.removeprefix(WEIGHTS)] = tensor
        elif name.startswith(OPTIMISER) and number.isdecimal() and len(number) < 6:
            state.setdefault(int(number), {})[rest] = tensor
        else:
            raise InputError(f"{where}: holds {name!r}, which is no part of a policy")
    return weights, state
