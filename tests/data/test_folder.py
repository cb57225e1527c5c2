"""folder:PATH and celeba: class folders, fixed splits, faces brought into place, unreadable files named."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lmdp.data import load
from lmdp.data.faces import TEMPLATE
from tests.data.files import random_images, save


def class_folders(root: Path, counts: dict[str, int], *shape: int) -> str:
    for number, (name, count) in enumerate(counts.items()):
        for i in range(count):
            save(root / name / f"{i:03}.png", random_images(*(shape or (6, 5)), seed=100 * number + i))
    return f"folder:{root}"


def identities(pixels: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in pixels}


def test_about_a_fifth_is_held_out_always_the_same(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"cat": 40, "ant": 60, "bee": 4})
    source, again = load(spec), load(spec)
    assert source.classes == ("ant", "bee", "cat")
    assert 8 <= len(source.test) <= 34  # binomial(104, 1/5): within 3.2 deviations
    assert torch.equal(source.train.pixels, again.train.pixels)
    everything = identities(source.train.pixels) | identities(source.test.pixels)
    assert len(everything) == 104
    assert source.train.shape == (1, 6, 5)


@pytest.mark.parametrize("options", ["", "?half=1", "?half=2", "?limit=30", "?half=1&limit=10"])
def test_removing_one_image_moves_one_image(tmp_path: Path, options: str) -> None:
    spec = class_folders(tmp_path, {"a": 30, "b": 30}) + options
    before = load(spec)
    for path in sorted(tmp_path.rglob("*.png"))[::7]:
        raw = path.read_bytes()
        path.unlink()
        after = load(spec)
        for one, other in ((before.train, after.train), (before.test, after.test)):
            old, new = identities(one.pixels), identities(other.pixels)
            assert len(old - new) <= 1
            assert len(new - old) <= ("limit" in options and len(old - new))
        path.write_bytes(raw)


def test_classes_are_declared_by_a_list_and_keep_their_numbers_when_one_is_empty(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"a": 12, "b": 1, "c": 12})
    assert [fact.fact for fact in load(spec).inferred] == ["there are these 3 classes", "images are grey"]
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    assert load(spec, channels=1).inferred == ()
    (tmp_path / "b" / "000.png").unlink()
    source = load(spec, channels=1)
    assert source.classes == ("a", "b", "c")
    assert set(source.train.labels.tolist()) == {0, 2}
    (tmp_path / "classes.txt").unlink()
    (tmp_path / "b").rmdir()
    assert load(spec, classes=("a", "b", "c"), channels=1).classes == source.classes
    with pytest.raises(ValueError, match="has 2 classes; classes declares 3"):
        load(spec, classes=3)
    assert load(spec, classes=2, channels=1).inferred == ()


def test_which_classes_are_the_largest_is_read_off_the_images(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"a": 5, "b": 7, "c": 6})
    (fact,) = load(f"{spec}?classes=2", channels=1, classes=2).inferred
    assert 'add classes = "b,c"' in str(fact)
    assert load(spec, channels=1, classes=("b", "c")).inferred == ()


@pytest.mark.parametrize("text", ["", "a\na\n", "\ufeff\udcff"])
def test_a_list_of_classes_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    spec = class_folders(tmp_path, {"a": 3, "b": 3})
    (tmp_path / "classes.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"classes\.txt"):
        load(spec)


@pytest.mark.parametrize("test", ["test", "val"])
def test_train_and_test_folders_are_used_as_they_are(tmp_path: Path, test: str) -> None:
    class_folders(tmp_path / "train", {"a": 2, "b": 3})
    class_folders(tmp_path / test, {"b": 2})
    source = load(f"folder:{tmp_path}")
    assert source.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert source.test.labels.tolist() == [1, 1]
    class_folders(tmp_path / test, {"c": 1})
    with pytest.raises(ValueError, match=r"has class 'c', which .*train lacks"):
        load(f"folder:{tmp_path}")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    assert load(class_folders(tmp_path, {"train": 5, "car": 5})).classes == ("car", "train")


def test_images_of_all_kinds_become_bytes_of_one_size(tmp_path: Path) -> None:
    save(tmp_path / "a" / "grey.png", random_images(6, 6))
    save(tmp_path / "a" / "deep" / "colour.JPG", random_images(9, 7, 3))
    Image.fromarray(random_images(8, 8, 4)).save(tmp_path / "a" / "alpha.png")
    Image.fromarray(random_images(8, 8, 3)).quantize(4).save(tmp_path / "a" / "palette.gif")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / "a" / "._grey.png").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    with pytest.raises(ValueError, match=r"add \?size="):
        load(f"folder:{tmp_path}")
    assert load(f"folder:{tmp_path}?size=8").train.shape == (3, 8, 8)
    assert load(f"folder:{tmp_path}", size=4, channels=1).train.shape == (1, 4, 4)


def test_a_limit_takes_a_fixed_random_part(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"a": 20, "b": 20})
    few, whole = load(f"{spec}?limit=10"), load(spec)
    assert len(few.train) == 10
    assert identities(few.train.pixels) < identities(whole.train.pixels)
    assert torch.equal(few.test.pixels, whole.test.pixels)
    assert torch.equal(few.train.pixels, load(f"{spec}?limit=10").train.pixels)


def test_the_largest_classes_are_chosen_and_ties_go_by_name(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"d": 7, "c": 6, "b": 6, "a": 5, "e": 6})
    assert load(f"{spec}?classes=3").classes == ("b", "c", "d")
    assert load(f"{spec}?classes=1").classes == ("d",)
    with pytest.raises(ValueError, match="classes is '6'; it must be a whole number from 1 to 5"):
        load(f"{spec}?classes=6")


def bomb() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 12000, 12000, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "cannot be read as an image"),
        (b"no image at all", "cannot be read as an image"),
        (None, "cannot be read as an image: .*truncated"),
        (bomb(), "decompression bomb"),
    ],
    ids=["empty", "text", "truncated", "bomb"],
)
def test_an_unreadable_image_is_named(tmp_path: Path, data: bytes | None, reason: str) -> None:
    spec = class_folders(tmp_path, {"a": 5}, 40, 40)
    whole = (tmp_path / "a" / "000.png").read_bytes()
    (tmp_path / "a" / "broken.png").write_bytes(whole[: len(whole) // 2] if data is None else data)
    with pytest.raises(ValueError, match=reason) as caught:
        load(spec)
    assert str(tmp_path / "a" / "broken.png") in str(caught.value)


def test_all_unreadable_images_are_named_at_once(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"a": 3}, 8, 8)
    for number in range(8):
        (tmp_path / "a" / f"broken{number}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"broken0.png cannot.*The same holds of .*broken1.png, .*, and 2 more"):
        load(f"{spec}?channels=1")


def test_folders_that_nobody_declared_are_told_and_a_name_written_otherwise_is_refused(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"cat": 4, "dog": 4, "cup": 4}, 8, 8)
    said: list[str] = []
    load(spec, classes=("cat", "dog", "eel"), say=said.append)
    assert (
        "note: folders that are not among the classes are left out: cup; declared classes without a folder: eel" in said
    )
    with pytest.raises(ValueError, match=r"class 'Cat' is declared, but .* calls it 'cat'; declare it so"):
        load(spec, classes=("Cat", "dog"))
    with pytest.raises(ValueError, match=r"none of the classes a, b is a folder of .*, which has cat, cup, dog"):
        load(spec, classes=("a", "b"))
    (tmp_path / "deeper").mkdir()
    with pytest.raises(ValueError, match=r"write folder:.*"):
        load(f"folder:{tmp_path.parent}", classes=("cat", "dog"))


def test_sixteen_bit_images_are_not_silently_cut_to_eight(tmp_path: Path) -> None:
    save(tmp_path / "a" / "deep.png", random_images(5, 5).astype(np.uint16) * 200)
    with pytest.raises(ValueError, match=r"deep\.png .*8 bits per channel"):
        load(f"folder:{tmp_path}")


def test_folders_that_are_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load(f"folder:{tmp_path / 'none'}")
    with pytest.raises(ValueError, match="has no class folders"):
        load(f"folder:{tmp_path}")
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*a holds no images"):
        load(f"folder:{tmp_path}")


def test_faces_are_aligned_by_their_landmarks(tmp_path: Path) -> None:
    """An image whose landmarks lie where the template puts them comes back as it was, margin aside."""
    spec = class_folders(tmp_path / "faces", {"x": 6, "y": 5, "z": 4}, 56, 56, 3)
    points = ",".join(str(value) for value in (TEMPLATE * 56).reshape(-1))
    lines = [f"{name}/{i:03}.png,{points}" for name in "xy" for i in range(6)]
    landmarks = tmp_path / "points.csv"
    landmarks.write_text("NAME_ID,P1X\n" + "\n".join(lines))
    source = load(f"{spec}?landmarks={landmarks}&classes=2", size=84)
    assert source.classes == ("x", "y")
    assert source.train.shape == (3, 84, 84)
    assert load(f"{spec}?landmarks={landmarks}&classes=2").train.shape == (3, 112, 112)
    border = source.train.pixels[:, :, :6].float()
    assert border.max() == 0
    with pytest.raises(ValueError, match=r"has no landmarks for z/00\d\.png"):
        load(f"{spec}?landmarks={landmarks}", size=84)


def celeba(root: Path, attributes: str = "Male Smiling") -> None:
    for i in range(6):
        save(root / "celeba" / "img_align_celeba" / f"{i:06}.jpg", random_images(218, 178, 3, seed=i))
    values = ["-1  1", " 1 -1", "-1 -1", " 1  1", "-1  1", " 1 -1"]
    rows = [f"{i:06}.jpg {value}" for i, value in enumerate(values)]
    folder = root / "celeba"
    (folder / "list_attr_celeba.txt").write_text("\n".join(["6", attributes, *rows, ""]))
    parts = [0, 0, 0, 1, 2, 2]
    (folder / "list_eval_partition.txt").write_text("\n".join(f"{i:06}.jpg {p}" for i, p in enumerate(parts)))
    points = "69 109 106 113 77 142 73 152 108 154"
    lines = ["6", "lefteye_x lefteye_y", *[f"{i:06}.jpg  {points}" for i in range(6)]]
    (folder / "list_landmarks_align_celeba.txt").write_text("\n".join(lines))


def test_celeba_gives_an_attribute_of_the_official_parts(tmp_path: Path) -> None:
    celeba(tmp_path)
    source = load("celeba?attribute=Male", cache=tmp_path)
    assert source.classes == ("not Male", "Male")
    assert source.train.labels.tolist() == [0, 1, 0]
    assert source.test.labels.tolist() == [0, 1]
    assert source.train.shape == (3, 64, 64)
    smiling = load("celeba?landmarks=list_landmarks_align_celeba.txt&limit=2", size=32, channels=1, cache=tmp_path)
    assert smiling.classes == ("not Smiling", "Smiling")
    assert (len(smiling.train), smiling.train.shape) == (2, (1, 32, 32))


def test_celeba_says_what_is_lacking(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="celeba lacks img_align_celeba, list_attr_celeba") as caught:
        load("celeba", cache=tmp_path)
    assert str(tmp_path / "celeba") in str(caught.value)
    celeba(tmp_path)
    with pytest.raises(ValueError, match="no attribute 'Smilling'; did you mean 'Smiling'"):
        load("celeba?attribute=Smilling", cache=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"landmarks file .*no\.txt does not exist"):
        load("celeba?landmarks=no.txt", cache=tmp_path)
    (tmp_path / "celeba" / "img_align_celeba" / "000001.jpg").unlink()
    with pytest.raises(ValueError, match=r"000001\.jpg cannot be read"):
        load("celeba", cache=tmp_path)
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text("000000.jpg 7")
    with pytest.raises(ValueError, match="line 1: must be an image name and 0, 1 or 2"):
        load("celeba", cache=tmp_path)
    celeba(tmp_path, attributes="Male Smiling Young")
    with pytest.raises(ValueError, match="line 3: must be an image name and 3 values"):
        load("celeba", cache=tmp_path)


TURNED = ["", "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]
"""How a camera stores what it sees, by EXIF orientation less 1."""


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_the_camera_was_held(tmp_path: Path, orientation: int) -> None:
    seen, how, exif = Image.fromarray(random_images(8, 6, 3)), TURNED[orientation - 1], Image.Exif()
    exif[0x0112] = orientation
    stored = seen.transpose(Image.Transpose[how]) if how else seen
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        stored.save(tmp_path / name / "photo.png", exif=exif)
    source = load(f"folder:{tmp_path}", channels=3, splits="position")
    assert torch.equal(source.train.pixels[0].permute(1, 2, 0), torch.tensor(np.asarray(seen)))


def test_a_class_that_holds_folders_is_told_to_be_one_class(tmp_path: Path) -> None:
    class_folders(tmp_path / "animals", {"cat": 3, "dog": 3})
    class_folders(tmp_path, {"other": 3})
    class_folders(tmp_path / "other", {"old": 3})
    said: list[str] = []
    assert load(f"folder:{tmp_path}", say=said.append).classes == ("animals", "other")
    assert said == ["note: class animals holds folders cat, dog; counted as one"]


def test_skipped_files_are_told_of_with_what_to_do_about_photos(tmp_path: Path) -> None:
    spec, said = class_folders(tmp_path, {"a": 3, "b": 3}), []
    load(spec, say=said.append)
    assert said == []
    for name in ("one.HEIC", "two.heic", "notes.txt", ".hidden"):
        (tmp_path / "a" / name).write_bytes(b"x")
    load(spec, say=said.append)
    assert len(said) == 1
    assert (
        "3 files that cannot be read as images (2 .heic, 1 .txt); they are skipped. .heic photos are not read"
        in said[0]
    )


def test_crop_takes_the_central_square_before_resizing(tmp_path: Path) -> None:
    spec = class_folders(tmp_path, {"a": 4, "b": 4}, 6, 10)
    squeezed, cropped = (load(f"{spec}?size=6{option}", channels=1).train.pixels for option in ("", "&crop=1"))
    whole = load(spec, channels=1).train.pixels
    assert torch.equal(cropped, whole[..., 2:8])
    assert not torch.equal(squeezed, cropped)


def test_class_folders_of_photos_that_are_not_read_are_refused_with_how_many_these_are(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "IMG_1.HEIC").write_bytes(b"x")
    with pytest.raises(
        ValueError, match=r"holds no images .* 2 files that cannot be read as images .2 \.heic.*save them as \.jpg"
    ):
        load(f"folder:{tmp_path}", classes=2)
