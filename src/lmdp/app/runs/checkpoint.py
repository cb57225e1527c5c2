"""Checkpoints and models as safetensors: nothing in them is executed, and damage is noticed."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from lmdp.app.runs.files import write
from lmdp.data.records import MAY_BE_MISSING, Amount, Count, decoded
from lmdp.lineage import Spending, from_metadata, metadata

FORMAT = 1
WRAPPED = ("state_dict", "model_state_dict", "module_state_dict", "model", "module")
"""Under which names checkpoints of others hold their weights."""


@dataclass(frozen=True)
class Checkpoint:
    """A moment between two steps. `step` counts every step that has been charged to the budget."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    engine: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    average: Mapping[str, Tensor] = field(default_factory=dict)  # the state of a `WeightAverage`, where there is one


@dataclass(frozen=True)
class _Rest:
    """What a checkpoint holds beside tensors."""

    format: int
    step: Count
    optimizer: Mapping[str, Any]
    engine: Mapping[str, Any]
    metrics: tuple[Any, ...]


@dataclass(frozen=True)
class _Row:
    """What every row of metrics must have, whatever else it has."""

    step: Count
    seconds: Annotated[Amount, MAY_BE_MISSING] = 0.0


def encode(checkpoint: Checkpoint) -> bytes:
    """One safetensors file; its header carries the rest as JSON, and a digest of everything."""
    from safetensors.torch import save

    slots, state = _optimizer_tensors(checkpoint.optimizer)
    averages = {f"average/{name}": tensor for name, tensor in checkpoint.average.items()}
    tensors = _copied({f"model/{name}": tensor for name, tensor in checkpoint.model.items()} | slots | averages)
    rest = json.dumps(vars(_Rest(FORMAT, checkpoint.step, state, checkpoint.engine, tuple(checkpoint.metrics))))
    return save(tensors, metadata={"state": rest, "digest": _digest(tensors, rest)})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each with memory of its own, in the usual layout: safetensors refuses shared and strided ones."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def decode(raw: bytes, origin: str) -> Checkpoint:
    """Refuses, with a ValueError, anything that is not byte for byte what `encode` made."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        (length,) = struct.unpack("<Q", raw[:8])
        metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
        tensors = load(raw)
        rest, digest = metadata["state"], metadata["digest"]
        intact = digest == _digest(tensors, rest)
    except (SafetensorError, ValueError, KeyError, TypeError, struct.error, RecursionError) as error:
        raise ValueError(f"{origin} is not a readable checkpoint ({type(error).__name__}: {error})") from None
    if not intact:
        raise ValueError(f"{origin} is damaged: its content does not match its digest")
    try:
        held = decoded(_Rest, json.loads(rest), origin, version=FORMAT)
        for row in held.metrics:
            decoded(_Row, row, f"{origin}: a row of metrics")
        optimizer = _optimizer_state(held.optimizer, _under("optimizer/", tensors))
        model, average = _under("model/", tensors), _under("average/", tensors)
        return Checkpoint(held.step, model, optimizer, held.engine, list(map(dict, held.metrics)), average)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{origin} is not a readable checkpoint ({type(error).__name__}: {error})") from None


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _optimizer_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state dict as named tensors, and what else there is of it as JSON values."""
    tensors, plain = {}, {}
    for index, slots in state["state"].items():
        for key, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{key}"] = value
            else:
                plain[f"{index}/{key}"] = value
    return tensors, {"plain": plain, "param_groups": state["param_groups"]}


def _optimizer_state(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **saved["plain"]}.items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": saved["param_groups"]}


def _digest(tensors: Mapping[str, Tensor], rest: str) -> str:
    digest = hashlib.sha256(rest.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def packed(model: torch.nn.Module, spent: Sequence[Spending] = ()) -> bytes:
    """The weights, and in the header what was spent for them."""
    from safetensors.torch import save

    return save(_copied(model.state_dict()), metadata=metadata(spent) or None)


def save_model(path: Path, model: torch.nn.Module, spent: Sequence[Spending] = ()) -> None:
    """In a file of their own."""
    write(path, packed(model, spent))


def spent_for(path: Path) -> tuple[Spending, ...]:
    """What the header of a model says; nothing of a model by an earlier version."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return from_metadata(file.metadata() or {}, str(path))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable model ({error})") from None


def add_spent(path: Path, spent: Sequence[Spending]) -> None:
    """Into the header of a model that others have written; all else of it stays."""
    from safetensors import safe_open
    from safetensors.torch import load, save

    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
    write(path, save(load(path.read_bytes()), metadata={**header, **metadata(spent)}))


def read_weights(path: Path, say: Callable[[str], None] = lambda _: None) -> dict[str, Tensor]:
    """Of a safetensors file, or one by `torch.save`, of which nothing is executed either.

    Checkpoints that hold the weights beside other things, under a usual name, are opened, and that is said.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        if path.suffix == ".safetensors":
            return load(path.read_bytes())
        held = torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise _no_weights(path, str(error)) from None
    except OSError:
        raise
    except Exception as error:  # torch's unpickler stumbles over whatever an arbitrary file makes it find
        raise _no_weights(path, f"{type(error).__name__}: {error}") from None
    if _all_tensors(held):
        return dict(held)
    inside = [name for name in WRAPPED if isinstance(held, Mapping) and _all_tensors(held.get(name))]
    if not inside:
        raise _no_weights(path, f"it is no mapping of names to tensors, and has none under {', '.join(WRAPPED)}")
    say(f"note: {path} is a checkpoint; what it holds under {inside[0]!r} are taken as the weights")
    return dict(held[inside[0]])


def _all_tensors(held: Any) -> bool:
    return isinstance(held, Mapping) and bool(held) and all(isinstance(value, Tensor) for value in held.values())


def _no_weights(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} is not a readable model ({' '.join(why.split())[:200]}); name a .safetensors file, or one that "
        "torch.save made of model.state_dict()"
    )


def load_model(path: Path, model: torch.nn.Module) -> None:
    """Fill the model from a safetensors file of the same architecture; nothing in the file is executed."""
    tensors = read_weights(path)
    mine = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mine != theirs:
        wrong = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        first = wrong[0]
        raise ValueError(
            f"{path} is a model of another architecture: {len(wrong)} tensors differ, {first!r} is "
            f"{theirs.get(first, 'absent')} there and {mine.get(first, 'absent')} here"
        )
    model.load_state_dict(tensors)
