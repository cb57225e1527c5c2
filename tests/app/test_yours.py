"""An error in code of the user's own is told as theirs: type, file and line, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmdp.app import cli
from lmdp.models.yours import place
from tests.app.test_cli import SMALL, make_npz

NET = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.last, self.calls = nn.Linear(196, classes), 0
    def forward(self, x):
        self.calls += 1
        {late}
        return self.last(x.flatten(1))
"""


@pytest.mark.parametrize(
    "name, late, said",
    [
        ("keyed", "{}['x'] if self.calls > 3 else 0", "keyed.py:9: KeyError: 'x'"),
        ("shaped", "self.last(x) if self.calls > 3 else 0", "shaped.py:9: RuntimeError: mat1 and mat2 shapes"),
    ],
)
def test_a_forward_that_fails_in_mid_training_is_told_with_its_place_and_type(
    name: str,
    late: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.py").write_text(NET.replace("{late}", late))
    words = [*SMALL, "--data", make_npz(tmp_path / "private.npz"), "--method", "dpsgd", "--model", f"{name}:Net"]
    assert cli.main(["train", *words, "--out", "run", "--quiet"]) == 1
    told = capsys.readouterr().err
    assert "your code failed at " in told
    assert said in told
    assert "Traceback" not in told
    assert told.count("\n") == 1


def test_an_error_of_the_library_is_not_told_as_that_of_its_caller() -> None:
    from lmdp.models import build

    with pytest.raises(ValueError, match="at least 1 class") as raised:
        build("s-cnn", (1, 28, 28), 0)
    assert place(raised.value) == ""
