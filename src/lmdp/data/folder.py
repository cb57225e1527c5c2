"""`folder:PATH`: a folder of images for each class, under train/ and test/ or under PATH itself.

Which classes there are, and in which order, is declared (`classes`, or PATH/classes.txt with a name in each line): a
class then keeps its number when its last image goes, and other folders are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from lmdp.data.classes import UNLABELLED, seen_channels, seen_names
from lmdp.data.decode import PHOTOS, Picture, decode
from lmdp.data.faces import landmarks_for, read_landmarks
from lmdp.data.images import Images, Source
from lmdp.data.request import Request
from lmdp.data.splits import at_most, hold_out

SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
TRAIN, TEST = "train", ("test", "val", "validation", "valid")
LIST = "classes.txt"
FACE_SIZE = 112  # of aligned faces, where no size is asked for: the template's own

Labelled = list[tuple[Path, int]]


def read_folder(request: Request) -> Source:
    root = Path(request.path).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder; folder:PATH needs one with a folder of images for each class")
    if not request.labelled and (photos := _photos(root)) and not any(map(_photos, _folders(root))):
        request.say(f"note: {root} has no class folders; its {len(photos)} images are taken without labels")
        return Source(request.spec, _read([(path, 0) for path in photos], root, request), None, UNLABELLED)
    train_at, test_at = _parts(root)
    declared = _declared(root, request)
    listing = _listing(train_at, declared)
    if declared and (told := _undeclared(train_at, declared)):
        request.say(told)
    held_out = _listing(test_at, declared) if test_at else {}
    if skipped := _skipped(root):
        request.say(f"note: {skipped}")
    for told in _merged(train_at, listing):
        request.say(told)
    strangers = sorted(set(held_out) - set(listing))
    if strangers:
        raise ValueError(f"{test_at} has class {strangers[0]!r}, which {train_at} lacks; add it there or remove it")
    classes = declared or _largest(listing, request.number("classes", len(listing)))
    inferred = () if declared or _counted(classes, request) else (seen_names(classes, str(root / LIST)),)
    train, test = _labelled(listing, classes), _labelled(held_out, classes)
    if test_at is None:
        keep, hold = hold_out(_contents(train), [label for _, label in train], request.splits)
        train, test = [train[i] for i in keep], [train[i] for i in hold]
    if request.limit is not None and request.limit < len(train):
        train = [train[i] for i in at_most(request.limit, _contents(train), len(train), request.splits)]
    images = _read(train + test, root, request)
    learnt, held = images.cut(len(train))
    if request.channels is None:
        inferred = (*inferred, seen_channels(images.shape[0]))
    return Source(request.spec, learnt, held if test else None, classes, inferred, by_position=test_at is None)


def _declared(root: Path, request: Request) -> tuple[str, ...]:
    """The names that the request or the list beside the folders gives; none, if neither does."""
    if isinstance(request.classes, tuple):
        return request.classes
    if not (root / LIST).is_file():
        return ()
    try:
        names = [line.strip() for line in (root / LIST).read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{root / LIST} is not text ({error}); write the name of a class into each line") from None
    if len(set(names)) < len(names) or not names:
        raise ValueError(f"{root / LIST} has {len(names)} names; it needs at least 1, each once")
    return tuple(names)


def _counted(classes: tuple[str, ...], request: Request) -> bool:
    """Whether it is declared that there are as many classes as folders. Which ones are the largest is not."""
    return request.classes == len(classes) and "classes" not in request.options


def _contents(files: Labelled) -> Iterator[bytes]:
    return (path.read_bytes() for path, _ in files)


def _parts(root: Path) -> tuple[Path, Path | None]:
    """Where the class folders for training and for testing are; a class may itself be called train."""
    names = {folder.name for folder in _folders(root)}
    if TRAIN not in names or not names <= {TRAIN, *TEST}:
        return root, None
    return root / TRAIN, next((root / name for name in TEST if name in names), None)


def _folders(root: Path) -> list[Path]:
    return sorted((f for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")), key=lambda f: f.name)


def _listing(root: Path, declared: Sequence[str]) -> dict[str, list[Path]]:
    """Class → its images, both in alphabetical order. A declared class may have none."""
    folders = [folder for folder in _folders(root) if not declared or folder.name in declared]
    if not declared and len(folders) == 1 and (inner := _nested(folders[0])):
        raise ValueError(
            f"{root} holds one folder, {folders[0].name!r}, and that holds {len(inner)} more ({', '.join(inner[:3])}"
            f"{', …' if len(inner) > 3 else ''}). If these are the classes, write folder:{folders[0]}"
        )
    if not folders:
        raise ValueError(_no_class(root, declared))
    listing = {}
    for folder in folders:
        listing[folder.name] = sorted(_photos(folder, "**/*"), key=lambda f: f.relative_to(folder).as_posix())
        if not listing[folder.name] and not declared:
            unread = f". {skipped}" if (skipped := _skipped(root)) else ""
            raise ValueError(
                f"class folder {folder} holds no images ({', '.join(sorted(SUFFIXES))}); fill or remove it{unread}"
            )
    return listing


def _photos(folder: Path, pattern: str = "*") -> list[Path]:
    """The images in it, or also in those below."""
    return sorted(f for f in folder.glob(pattern) if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))


def _no_class(root: Path, declared: Sequence[str]) -> str:
    names = [folder.name for folder in _folders(root)]
    if not names:
        return f"{root} has no class folders; put the images of each class into a folder of its own"
    deeper = [folder for folder in _folders(root) if set(declared) & {inner.name for inner in _folders(folder)}]
    remedy = f"write folder:{deeper[0]}" if deeper else "declare them as the folders are called"
    return f"none of the classes {', '.join(declared)} is a folder of {root}, which has {_few(names)}; {remedy}"


def _undeclared(root: Path, declared: Sequence[str]) -> str:
    """What is left out because nobody declared it; refused where a name was merely written otherwise."""
    others = [folder.name for folder in _folders(root) if folder.name not in declared]
    for name in declared:
        same = [other for other in others if other.casefold() == name.casefold()]
        if same and not (root / name).is_dir():
            raise ValueError(f"class {name!r} is declared, but {root} calls it {same[0]!r}; declare it so")
    empty = [name for name in declared if not (root / name).is_dir()]
    said = [f"folders that are not among the classes are left out: {_few(others)}"] if others else []
    said += [f"declared classes without a folder: {_few(empty)}"] if empty else []
    return f"note: {'; '.join(said)}" if said else ""


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _nested(folder: Path) -> list[str]:
    """Names of the folders in it, where it has no images of its own."""
    images = any(f.suffix.lower() in SUFFIXES for f in folder.iterdir() if f.is_file())
    return [] if images else [inner.name for inner in _folders(folder)]


def _merged(root: Path, classes: Iterable[str]) -> Iterator[str]:
    """Of each class whose images lie in several folders, which would perhaps be classes themselves."""
    for name in classes:
        if len(inner := _nested(root / name)) > 1:
            yield f"note: class {name} holds folders {_few(inner)}; counted as one"


def class_folders(path: str) -> list[str]:
    """The names of the folders that could be classes."""
    return [folder.name for folder in _folders(_parts(Path(path).expanduser())[0])]


def _skipped(root: Path) -> str:
    """What lies among the images and is not read, by its ending; "" if nothing does."""
    files = (f for folder in _folders(root) for f in folder.rglob("*") if f.is_file() and not f.name.startswith("."))
    endings = Counter(f.suffix.lower() or "without ending" for f in files if f.suffix.lower() not in SUFFIXES)
    if not endings:
        return ""
    told = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
    photos = [ending for ending in endings if ending in PHOTOS]
    remedy = f" {' and '.join(photos)} photos are not read here: save them as .jpg to train on them" if photos else ""
    return f"{root} has {endings.total()} files that cannot be read as images ({told}); they are skipped.{remedy}"


def _largest(listing: dict[str, list[Path]], count: int | None) -> tuple[str, ...]:
    """The classes with most images, all of them without `count`; among equals the first in the alphabet."""
    ranked = sorted(listing, key=lambda name: (-len(listing[name]), name))
    return tuple(sorted(ranked[:count]))


def _labelled(listing: dict[str, list[Path]], classes: Sequence[str]) -> Labelled:
    return [(path, label) for label, name in enumerate(classes) for path in listing.get(name, [])]


def _read(files: Labelled, root: Path, request: Request) -> Images:
    names = [path.relative_to(root).as_posix() for path, _ in files]
    size = request.size
    pictures = [Picture(str(path), path) for path, _ in files]
    if "landmarks" in request.options:
        where = Path(request.options["landmarks"]).expanduser()
        points = read_landmarks(where)
        size = size or FACE_SIZE
        pictures = [
            Picture(str(path), path, landmarks_for(name, points, where)) for (path, _), name in zip(files, names)
        ]
    crop = request.number("crop", 1) is not None
    pixels = decode(pictures, size=size, channels=request.channels, crop=crop, say=request.say)
    return Images(pixels, torch.tensor([label for _, label in files], dtype=torch.int64), tuple(names))
