"""Where the official files are, and what they must hash to.

The addresses are the authors' own, or the mirrors in common use where the authors' are gone. Some speak only http: the
SHA-256 makes that safe. The hashes are those that other loaders check too: torchvision's for IDX files and SVHN,
MLDatasets.jl's for the CIFAR archives.
"""

from __future__ import annotations

from lmdp.data.download import Remote

_IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_FASHION = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)
_SVHN = ("http://ufldl.stanford.edu/housenumbers/",)


def _files(bases: tuple[str, ...], names: tuple[str, ...], hashes: tuple[str, ...]) -> tuple[Remote, ...]:
    return tuple(
        Remote(name, tuple(base + name for base in bases), digest) for name, digest in zip(names, hashes, strict=True)
    )


REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": _files(
        _MNIST,
        _IDX_NAMES,
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": _files(
        _FASHION,
        _IDX_NAMES,
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "cifar10": _files(
        _CIFAR,
        ("cifar-10-binary.tar.gz",),
        ("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
    ),
    "cifar100": _files(
        _CIFAR,
        ("cifar-100-binary.tar.gz",),
        ("58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",),
    ),
    "svhn": _files(
        _SVHN,
        ("train_32x32.mat", "test_32x32.mat"),
        (
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
    ),
}
