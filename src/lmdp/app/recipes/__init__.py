"""One small file per experiment.

mnist.toml, cifar10.toml, cifar100.toml, celeba.toml   the four of the paper
demo.toml                                              the whole flow in two minutes
"""
