"""Data in: SPEC strings → images in memory (`load`), and Poisson sampling of private examples."""

from lmdp.data.epochs import EpochOrder
from lmdp.data.images import Images, Source
from lmdp.data.load import load
from lmdp.data.poisson import Feed, Handout, PoissonLoader, poisson_loader, sample_rate_of
from lmdp.data.request import SPECS

__all__ = [
    "SPECS",
    "EpochOrder",
    "Feed",
    "Handout",
    "Images",
    "PoissonLoader",
    "Source",
    "load",
    "poisson_loader",
    "sample_rate_of",
]
