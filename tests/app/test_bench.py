"""The bench measures what it says, names what is missing, and writes what it promises. Times are not tested."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lmdp.app import cli
from lmdp.app.bench import contenders, growth, growth_text, measure, plans, run, table
from lmdp.app.bench.cases import CASES, Case, case_name, out_of_place
from lmdp.app.bench.growth import Sizes
from lmdp.app.bench.language import Classifier, Encoder, LanguageModel, Recurrent, Siamese, low_rank
from lmdp.app.bench.watch import WATCHED
from lmdp.methods import METHODS
from lmdp.models import VGG16, ResNet18


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Case("a small model, batch 6", lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), (6, 3, 2, 2))
    monkeypatch.setitem(CASES, "scnn", small)


def test_the_bench_times_all_contenders_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    lines: list[str] = []
    measured = run(models=["scnn"], steps=2, memory=False, out=tmp_path, say=lines.append)
    model = measured["models"]["scnn"]
    rows = model["rows"]
    assert rows["non-private SGD"]["time"] == pytest.approx(1.0)
    private = [method for method in METHODS.values() if method.private]
    timed = [method for method in private if method.name not in contenders.SAME_STEP]
    assert {f"lmdp {method.name}" for method in timed if not method.reweighted} <= set(rows)
    assert {f"lmdp {method.name} ({source})" for method in timed for source in method.sources} <= set(rows)
    assert {method.name for method in private if method not in timed} == set(contenders.SAME_STEP)
    assert "naive torch.func lm" in rows
    assert all(set(row) == {"time", "low", "high", "memory"} for row in rows.values())
    assert all(row["low"] <= row["time"] <= row["high"] for row in rows.values())
    assert {len(seconds) for seconds in model["seconds"].values()} == {2}
    assert model["failed"] == {}
    assert model["error"].keys() == {"double", "single", "sgd"}
    assert model["error"]["double"] < 1e-12
    assert model["error"]["single"] < 1e-5
    assert json.loads((tmp_path / "bench.json").read_text()) == measured
    drawn = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert set(rows) <= {t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert lines[0] == "a small model, batch 6, contiguous"
    assert "  warm-up: lmdp dpsgd" in lines


def test_a_missing_peer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    lines: list[str] = []
    measured = run(models=["scnn"], steps=2, only=["dpsgd"], memory=False, say=lines.append)
    assert any("opacus is not installed" in line for line in lines)
    assert "opacus is not installed" in table(measured)
    assert set(measured["models"]["scnn"]["rows"]) == {"non-private SGD", "lmdp dpsgd"}
    with pytest.raises(ValueError, match=r"hooks.*opacus is not installed"):
        run(models=["scnn"], only=["hooks"])


def test_a_contender_that_cannot_run_is_a_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such kernel")

    monkeypatch.setattr(contenders, "naive", broken)
    lines: list[str] = []
    measured = run(models=["scnn"], steps=2, only=["naive"], memory=False, say=lines.append)
    model = measured["models"]["scnn"]
    assert set(model["rows"]) == {"non-private SGD"}
    assert model["failed"] == {"naive torch.func lm": "'no such kernel'"}
    assert any("no such kernel" in line for line in lines)
    cells = next(line for line in table(measured).splitlines() if line.startswith("naive"))
    assert cells.split() == ["naive", "torch.func", "lm", "fails"]
    assert "naive torch.func lm fails on a small model, batch 6: 'no such kernel'" in table(measured)


def test_a_contender_that_fails_alone_in_its_process_keeps_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(case: str, contender: str, *, channels_last: bool) -> int:
        if "lmdp" in contender:
            raise RuntimeError("peak memory: killed")
        return 2**20

    monkeypatch.setattr(sys.modules["lmdp.app.bench.run"], "peak_memory", peak)
    measured = run(models=["scnn"], steps=2, only=["dpsgd"])
    model = measured["models"]["scnn"]
    assert model["rows"]["non-private SGD"]["memory"] == 1.0
    assert model["rows"]["lmdp dpsgd"]["memory"] is None
    assert model["failed"] == {"lmdp dpsgd": "peak memory: killed"}
    times, memories = table(measured).split("peak memory above")
    assert "fails" not in times
    assert "fails" in memories


def test_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = measure.peak_memory("scnn", "lmdp dpsgd", channels_last=True)
    assert 2**20 < peak < 2**31
    died = subprocess.CompletedProcess([], 1, "", "Traceback …\nRuntimeError: no such kernel\n")
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: died)
    with pytest.raises(RuntimeError, match="peak memory: RuntimeError: no such kernel"):
        measure.peak_memory("scnn", "lmdp dpsgd")


def test_channels_last_holds_for_images_in_time_memory_and_error(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        sys.modules["lmdp.app.bench.run"], "peak_memory", lambda *_, **layout: asked.update(layout) or 1
    )
    conv = Case("one convolution", lambda: nn.Sequential(nn.Conv2d(3, 10, 2), nn.Flatten()), (6, 3, 2, 2))
    monkeypatch.setitem(CASES, "scnn", conv)
    measured = run(models=["scnn"], steps=2, only=["dpsgd"], channels_last=True)
    assert asked == {"channels_last": True}
    assert measured["models"]["scnn"]["memory_format"] == "channels last"
    assert "channels last" in table(measured)
    last = conv.laid_out(channels_last=True)
    tensors = [last.batch()[0], next(last.model().parameters())]
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    assert CASES["transformer"].laid_out(channels_last=True).memory_format == "contiguous"


@pytest.mark.parametrize("small", [ResNet18(classes=10, width=4), VGG16(classes=10, width=4)], ids=["resnet", "vgg"])
def test_peers_get_the_same_model_without_writing_in_place(small: nn.Module) -> None:
    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        F.cross_entropy(model(x), torch.tensor([1, 2])).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = gradients(small, x)
    plain = out_of_place(small)
    assert not any(word in plain.code for word in ("relu_(", "+=", "iadd"))  # type: ignore[operator]
    after = gradients(plain, x)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", ["resnet18", "vgg16"])
def test_every_mode_of_opacus_runs_on_models_that_work_in_place(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    make = {"resnet18": lambda: ResNet18(classes=10, width=4), "vgg16": lambda: VGG16(classes=10, width=4)}[case]
    monkeypatch.setitem(CASES, case, Case("narrow", make, (3, 3, 32, 32), in_place=CASES[case].in_place))
    model = run(models=[case], steps=2, only=["opacus"], memory=False)["models"][case]
    assert model["failed"] == {}
    assert {f"opacus {mode}" for mode in ("hooks", "ghost", "functorch", "per-layer")} <= set(model["rows"])


def test_names_and_numbers_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="nosuch"):
        run(models=["nosuch"])
    with pytest.raises(ValueError, match="steps is 1"):
        run(models=["scnn"], steps=1)
    with pytest.raises(ValueError, match="steps is 1"):
        growth(steps=1)
    for wrong, said in {
        "--only=dpsgd,sorcery": "no contender is called sorcery: they are non-private SGD, lmdp dpsgd",
        "--growth --models=dcnn": "--growth measures models of its own",
        "--growth --plan": "not allowed with",
        "--plan --out=x": "--plan writes no files",
    }.items():
        try:
            code: object = cli.main(["bench", *wrong.split()])
        except SystemExit as stopped:
            code = stopped.code
        error = capsys.readouterr().err
        assert code == 2
        assert said in error
        assert error.count("\n") == 1


def test_the_rows_of_the_default_table_and_their_order_are_kept() -> None:
    assert contenders.chosen(())[: 1 + 9] == [
        "non-private SGD", "lmdp dpsgd", "lmdp autos", "lmdp psac", "lmdp lm (private)", "lmdp lm (public)",
        "lmdp lm (fixed)", "lmdp lm (batch)", "lmdp lm-optimal (public)", "lmdp lm-optimal (batch)",
    ]  # fmt: skip


def test_the_help_names_the_models_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    named = words.partition("comma-separated, of ")[2].partition(" (default: all)")[0]
    assert [case_name(name) for name in named.split(", ")] == list(CASES)


@pytest.mark.parametrize("place", [place for places in WATCHED.values() for place in places])
def test_what_the_stopwatch_watches_is_there(place: str) -> None:
    assert callable(pkgutil.resolve_name(place))


@pytest.mark.parametrize("written", ["scnn", "s-cnn", "S-CNN", "dcnn", "d-cnn", "resnet18", "resnet-18", "vgg-16"])
def test_models_are_known_with_and_without_hyphens(written: str) -> None:
    assert case_name(written) == written.lower().replace("-", "")


def test_the_table_fits_a_wide_terminal() -> None:
    row = {"time": 10.0, "low": 9.5, "high": 10.5, "memory": 1.5}
    rows = dict.fromkeys(contenders.contenders()[0], row)
    models = {
        name: {
            "title": case.title,
            "memory_format": "channels last",
            "seconds": {contenders.SGD: [1.0, 2.0]},
            "peak_bytes": {contenders.SGD: 2**30},
            "rows": rows,
            "failed": {},
            "error": {"double": 1e-15, "single": 1e-7, "sgd": 1e-7},
        }
        for name, case in (CASES | {"scnn": Case("S-CNN, batch 600", nn.Identity, (1,))}).items()
    }
    text = table({"threads": 2, "steps": 9, "loops": "compiled", "missing": [], "models": models})
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.slow
def test_growth_in_miniature(tmp_path: Path) -> None:
    sizes = Sizes(batches=(2, 3), layers=3, blocks=2, lengths=(4, 5), examples=20, batch=10, launches=2)
    measured = growth(steps=2, sizes=sizes, out=tmp_path)
    assert json.loads((tmp_path / "growth.json").read_text()) == measured
    assert [row["batch"] for row in measured["batch"]["ratio"]] == [2, 3]
    assert all(flatness >= 1 for flatness in measured["batch"]["flatness"].values())
    assert [row["layers"] for row in measured["depth"]] == [3, 13, 13]
    assert ["added_per_block" in row for row in measured["depth"]] == [False, True, True]
    assert [row["tokens"] for row in measured["length"]["ratio"]] == [4, 5]
    loop = measured["loop"]
    assert loop["steps"] == 2
    assert all(0 <= seconds < loop["seconds_per_step"] for seconds in loop["seconds"].values())
    assert loop["share"] == pytest.approx(sum(loop["shares"].values()))
    assert set(measured["start"]) == {"lmdp --help", "import torch", "import lmdp", "lmdp.PrivacyEngine"}
    text = growth_text(measured)
    assert max(map(len, text.splitlines())) <= 130
    for part in ("per example", "per layer", "tokens", "rest of the loop", "start-up"):
        assert part in text


def test_plans_name_every_module_and_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert "either" in plans(["s-cnn"])["scnn"]
    assert cli.main(["bench", "--plan", "--models", "s-cnn", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"scnn"}


def tiny() -> Encoder:
    return Encoder(vocabulary=50, width=12, depth=1, heads=2)


TEXTS = {
    "minilm": Case("", lambda: Classifier(width=12, encoder=tiny()), (3, 5), vocabulary=50),
    "siamese": Case("", lambda: Siamese(tiny()), (3, 2, 5), classes=2, vocabulary=50),
    "lora": Case("", lambda: Classifier(width=12, encoder=low_rank(tiny(), 2)), (3, 5), vocabulary=50),
    "gpt2": Case("", lambda: LanguageModel(50, 12, 1, 2), (3, 5), classes=50, vocabulary=50, next_word=True),
    "lstm": Case("", lambda: Recurrent(50, 6, 4), (3, 5), vocabulary=50),
}


@pytest.mark.parametrize("name", TEXTS)
def test_models_of_text_are_private_as_they_stand_and_have_the_batches_of_the_bench(name: str) -> None:
    error = measure.exactness(TEXTS[name], examples=3)
    assert error["double"] < 1e-12
    assert error["single"] < 1e-4
    full, small = CASES[name], TEXTS[name]
    assert (len(full.shape), full.next_word) == (len(small.shape), small.next_word)
    x, y = full.batch(2)
    assert int(x.max()) < (full.vocabulary or 0)
    assert y.shape == (x.shape if full.next_word else (2,))


def test_a_low_rank_model_trains_changes_of_queries_and_values_and_its_head() -> None:
    model = TEXTS["lora"].model()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"0.blocks.0.{at}.{side}.weight" for at in ("query", "value") for side in "ab"} | {
        "1.weight",
        "1.bias",
    }


@pytest.mark.parametrize("name", TEXTS)
def test_every_contender_runs_on_models_of_text_or_says_why_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, name, TEXTS[name])
    only = ["lmdp dpsgd", "naive", *(["hooks", "ghost"] if importlib.util.find_spec("opacus") else [])]
    model = run(models=[name], steps=2, only=only, memory=False)["models"][name]
    assert {"non-private SGD", "lmdp dpsgd"} <= set(model["rows"])
    assert all(model["failed"].values())


def test_the_transformer_of_the_bench_is_private_as_it_stands() -> None:
    with torch.random.fork_rng():
        error = measure.exactness(CASES["transformer"], examples=2)
    assert error["double"] < 1e-12
    assert error["single"] < 1e-4
