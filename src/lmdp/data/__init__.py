"""Data in: SPEC strings → images in memory (`load`); JSON files → values."""

from lmdp.data.epochs import EpochOrder
from lmdp.data.images import Images, Source
from lmdp.data.load import load
from lmdp.data.request import SPECS

__all__ = [
    "SPECS",
    "EpochOrder",
    "Images",
    "Source",
    "load",
]
