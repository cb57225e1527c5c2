"""Data in: Poisson sampling of private examples."""

from lmdp.data.poisson import Feed, Handout, PoissonLoader, poisson_loader, sample_rate_of

__all__ = ["Feed", "Handout", "PoissonLoader", "poisson_loader", "sample_rate_of"]
