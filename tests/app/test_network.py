"""Weights to begin with: what of them is taken is said, and what holds none is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmdp.app.config import Config
from lmdp.app.network import Network
from lmdp.app.runs import read_weights


def begun(init: Path, say: Any = lambda _: None) -> torch.nn.Module:
    return Network(Config(model="s-cnn", init=str(init)), (1, 14, 14), 2).untrained(say)


def test_it_is_said_which_weights_are_taken_and_which_begin_as_without_them(tmp_path: Path) -> None:
    weights = Network(Config(model="s-cnn"), (1, 14, 14), 2).fresh().state_dict()
    head = [name for name in weights if name.startswith("fc2.")]
    save_file({name: weights[name].contiguous() for name in weights if name not in head}, tmp_path / "part.safetensors")
    said: list[str] = []
    model = begun(tmp_path / "part.safetensors", said.append)
    assert torch.equal(model.state_dict()["conv1.weight"], weights["conv1.weight"])
    assert said == [
        f"init: {len(weights) - 2} of {len(weights)} tensors of the model are taken from "
        f"{tmp_path / 'part.safetensors'}; begun as without it: {', '.join(head)}"
    ]
    save_file({"other": torch.zeros(3)}, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match="none of its 1 tensors fits the model"):
        begun(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["state_dict", "model", "module_state_dict"])
def test_weights_inside_a_checkpoint_of_others_are_found_and_that_is_said(name: str, tmp_path: Path) -> None:
    path, weights = tmp_path / "checkpoint.pt", {"fc.weight": torch.ones(2, 3)}
    torch.save({name: weights, "epoch": 3, "optimizer": {"lr": 0.1}}, path)
    said: list[str] = []
    assert torch.equal(read_weights(path, said.append)["fc.weight"], weights["fc.weight"])
    assert f"what it holds under {name!r}" in said[0]


@pytest.mark.parametrize("content", [b"text,label\nhello,1\n", b"a note\n", b"I1\n.", b"", b"PK\x03\x04junk"])
@pytest.mark.parametrize("name", ["letters.csv", "junk.pt", "junk.safetensors"])
def test_a_file_without_weights_is_refused_in_a_sentence(content: bytes, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a readable model .*; name a \.safetensors file"):
        begun(tmp_path / name)


def test_a_checkpoint_without_weights_is_refused_with_where_they_were_looked_for(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {"epoch": 3}}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="has none under state_dict, model_state_dict"):
        read_weights(tmp_path / "c.pt")
