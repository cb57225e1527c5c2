"""A finished run on images: photos in, embeddings out, without the photos that it was trained on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lmdp
from lmdp.app import cli
from lmdp.app.runs import Members, RunFolder
from tests.app.test_cli import SMALL, make_npz
from tests.data.files import random_images, save

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of photos in two classes, not square, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(("cat", "dog")):
        for i in range(60):
            save(folder / "photos" / name / f"{i}.png", random_images(14, 20, 3, seed=100 * number + i))
    (folder / "photos" / "cat" / "new.heic").write_bytes(b"x")
    words = ["--data", f"folder:{folder / 'photos'}?crop=1", "--size", "14", "--channels", "3", "--classes", "cat,dog"]
    words += ["--model", "s-cnn", "--batch-size", "40", "--epochs", "1", "--delta", "1e-3", "--method", "dpsgd"]
    assert cli.main(["train", *words, "--out", str(folder / "run")]) == 0
    return folder


def test_classes_and_counts_are_told_before_training_and_stand_in_no_file(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data", f"folder:{photos / 'photos'}", "--size", "14", "--channels", "3", "--classes", "cat,dog"]
    assert cli.main(["train", *words, "--method", "sgd", "--epochs", "0.1", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err
    assert "2 classes: cat (" in said
    assert "1 files that cannot be read as images (1 .heic)" in said
    written = [p.read_text(errors="replace") for p in (tmp_path / "run").rglob("*") if p.suffix in (".json", ".toml")]
    assert not any("classes: cat" in text for text in written)


def test_photos_become_embeddings_by_the_preprocessing_of_the_training(photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(photos / "run", tmp_path / "run")
    loaded = lmdp.load(run)
    assert (loaded.classes, loaded.layers) == (("cat", "dog"), ("conv1", "conv2", "fc1", "fc2"))
    paths = sorted((photos / "photos" / "dog").glob("*.png"))[:5]
    by_path, by_image = loaded.preprocess(paths), loaded.preprocess([Image.open(path) for path in paths])
    assert isinstance(by_path, torch.Tensor)
    assert torch.equal(by_path, by_image)  # type: ignore[arg-type]
    trained_on = lmdp.data.load(f"folder:{photos / 'photos'}?crop=1", size=14, channels=3, classes=["cat", "dog"])
    every = torch.cat([part.tensors()[0] for part in (trained_on.train, trained_on.test) if part is not None])  # type: ignore[misc]
    assert all(any(torch.equal(row, other) for other in every) for row in by_path)
    words = ["embed", str(run), "--layer", "fc1", "--data", f"folder:{photos / 'photos'}?crop=1"]
    assert cli.main([*words, "--out", str(tmp_path / "e.npz")]) == 0
    arrays = np.load(tmp_path / "e.npz")
    assert arrays["embeddings"].shape == (120, 32)
    vectors = loaded.embed(paths, "fc1")
    assert all(np.abs(arrays["embeddings"] - vector).max(1).min() < 1e-4 for vector in vectors)
    assert loaded.embed(paths, "conv1").shape == (5, 16)


def test_embeddings_carry_classes_and_on_request_the_names_of_their_photos(photos: Path, tmp_path: Path) -> None:
    run, folder = str(photos / "run"), photos / "photos"
    for name, words in {"named": ["--names"], "nameless": []}.items():
        assert cli.main(["embed", run, *words, "--out", str(tmp_path / f"{name}.npz")]) == 0
    named, nameless = (np.load(tmp_path / f"{name}.npz") for name in ("named", "nameless"))
    assert "names" not in nameless
    assert sorted(named["names"]) == sorted(f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(60))
    assert [f"{named['classes'][label]}" for label in named["labels"]] == [n.split("/")[0] for n in named["names"]]
    vectors = lmdp.load(run).embed([folder / name for name in named["names"]])
    np.testing.assert_allclose(named["embeddings"], vectors, atol=1e-5)


def test_embeddings_are_said_to_be_as_private_as_the_data(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is kept out of these 120: `part` is membership."""
    assert cli.main(["embed", str(photos / "run"), "--out", str(tmp_path / "e.npz")]) == 0
    assert "e.npz is as private as the data" in capsys.readouterr().out
    arrays, members = np.load(tmp_path / "e.npz"), Members.read(RunFolder(photos / "run"))
    assert members is not None
    trained = np.isin(arrays["digests"], members.train)
    assert (trained == (arrays["part"] == "train")).all()


def test_photos_elsewhere_are_cut_as_those_of_the_training(photos: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(photos / "photos", tmp_path / "elsewhere")
    words = ["embed", str(photos / "run"), "--names"]
    for name, spec in (("plain", f"folder:{elsewhere}"), ("cut", f"folder:{elsewhere}?crop=1")):
        assert cli.main([*words, "--data", spec, "--out", str(tmp_path / f"{name}.npz")]) == 0
    plain, cut = (np.load(tmp_path / f"{name}.npz") for name in ("plain", "cut"))
    np.testing.assert_array_equal(plain["embeddings"], cut["embeddings"])


def test_photos_without_class_folders_are_embedded_without_labels(photos: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in sorted((photos / "photos" / "dog").glob("*.png"))[:5]:
        shutil.copy(path, flat)
    words = ["embed", str(photos / "run"), "--names", "--data", f"folder:{flat}", "--out", str(tmp_path / "e.npz")]
    assert cli.main(words) == 0
    arrays = np.load(tmp_path / "e.npz")
    assert not {"labels", "classes", "digests"} & set(arrays)
    vectors = lmdp.load(photos / "run").embed([flat / name for name in arrays["names"]])
    np.testing.assert_allclose(arrays["embeddings"], vectors, atol=1e-5)
    with pytest.raises(ValueError, match="has no class folders"):
        lmdp.data.load(f"folder:{flat}", size=14)


def test_labels_are_numbered_as_in_the_training_wherever_its_folder_is_named_from(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--size", "14", "--channels", "3", "--classes", "dog,cat", "--model", "s-cnn", "--method", "sgd"]
    monkeypatch.chdir(photos)
    out = str(tmp_path / "run")
    assert cli.main(["train", *words, "--epochs", "0.1", "--data", "folder:photos", "--out", out]) == 0
    assert cli.main(["embed", out, "--names", "--data", "folder:photos", "--out", str(tmp_path / "e.npz")]) == 0
    arrays = np.load(tmp_path / "e.npz")
    assert arrays["classes"].tolist() == ["dog", "cat"] == list(lmdp.load(out).classes)
    assert [n.split("/")[0] == "cat" for n in arrays["names"]] == [label == 1 for label in arrays["labels"]]


def test_what_is_no_photo_is_refused_with_what_to_do(photos: Path) -> None:
    loaded = lmdp.load(photos / "run")
    for raw, said in [
        ([], "there are 0 inputs to embed; give at least 1"),
        ([photos / "none.png"], r"image 0 cannot be read as an image: there is no file .*none\.png$"),
        ([photos / "photos" / "cat" / "new.heic"], r"\.heic photos are not read here: save it as \.jpg"),
        (b"junk", "Repair or remove it"),
    ]:
        with pytest.raises(ValueError, match=said):
            loaded.embed(raw)


def test_an_image_of_pillow_is_read_as_its_file_is(photos: Path, tmp_path: Path) -> None:
    preprocess = lmdp.load(photos / "run").preprocess
    note = Image.Exif()
    note[0x0112] = 6
    image = Image.fromarray(random_images(14, 20, 3, seed=9))
    for number, mode in enumerate(("RGB", "CMYK", "YCbCr", "L")):
        path = tmp_path / f"{number}.jpg"
        image.convert(mode).save(path, exif=note)
        assert torch.equal(preprocess([path]), preprocess([Image.open(path)]))  # type: ignore[arg-type]
    assert preprocess(image.convert("HSV")).shape == (1, 3, 14, 14)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="image 0 has pixels of kind 'F'; convert it"):
        preprocess(image.convert("F"))
    with pytest.raises(TypeError, match="image 0 is of type int; give a path"):
        preprocess(5)


def test_a_run_is_exported_without_what_is_private(photos: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(photos / "run"), "--to", str(tmp_path / "out")]) == 0
    written = {"model.json", "model.safetensors", "privacy.json", "privacy-card.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    path = next((photos / "photos" / "cat").glob("*.png"))
    both = [lmdp.load(where).embed([path]) for where in (photos / "run", tmp_path / "out")]
    np.testing.assert_array_equal(*both)


def test_a_run_of_an_earlier_version_is_loaded_with_its_data() -> None:
    loaded = lmdp.load(HERE / "record" / "old" / "lm")
    assert loaded.classes == tuple("0123456789")
    assert loaded.preprocess(np.zeros((2, 1, 8, 8), np.uint8)).shape == (2, 1, 8, 8)  # type: ignore[union-attr]


def test_what_cannot_be_used_is_refused(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "e.npz")
    for words, said in [
        (["embed", str(tmp_path), "--out", out], "holds no finished run"),
        (["embed", str(photos / "run"), "--layer", "fc9", "--out", out], "['fc9'] are not layers of the model"),
        (["embed", str(photos / "run"), "--out", "e.txt"], "it must end in .npz"),
        (["embed", str(photos / "run"), "--data", "digits?limit=9", "--out", out], ""),
        (
            ["embed", str(photos / "run"), "--data", "digits?limit=9", "--names", "--out", f"{out}.npz"],
            "leave --names out",
        ),
        (["export", str(photos / "run"), "--to", str(photos)], "exists; choose another name"),
        (
            ["export", str(photos / "run"), "--to", str(tmp_path / "x"), "--form", "sentence-transformers"],
            "export it with --form safetensors",
        ),
    ]:
        assert cli.main(words) == (2 if said else 0)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_no_run_is_refused_with_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, bare = tmp_path / "served", tmp_path / "bare"
    for folder in (served, bare):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    (served / "modules.json").write_text("[]")
    for folder, said in ((served, "Read it with SentenceTransformer("), (bare, "neither model.json nor config.toml")):
        with pytest.raises(ValueError, match=re.escape(said)):
            lmdp.load(folder)
        for words in (["embed", "--out", str(tmp_path / "e.npz")], ["export", "--to", str(tmp_path / "x")]):
            assert cli.main([words[0], str(folder), *words[1:]]) == 2
            assert said in capsys.readouterr().err


def test_arrays_of_numbers_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_npz(tmp_path / "bytes.npz")
    arrays = dict(np.load("bytes.npz"))
    floats = {name: a[:, None].astype(np.float32) / 255 if name.startswith("x") else a for name, a in arrays.items()}
    np.savez("floats.npz", **floats)
    assert (
        cli.main(["train", *SMALL[:2], *SMALL[4:], "--data", "npz:floats.npz", "--method", "sgd", "--out", "run"]) == 0
    )
    card = json.loads(Path("run/model.json").read_text())
    assert (card["kind"], card["shape"]) == ("numbers", [1, 14, 14])
    loaded = lmdp.load("run")
    inputs = loaded.preprocess(floats["x_test"])
    assert torch.equal(inputs, torch.from_numpy(floats["x_test"]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model takes"):
        loaded.preprocess(np.zeros((2, 3)))
