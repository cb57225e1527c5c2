"""A pretend second device, for laws that must hold wherever a model lives.

device.cpp   PyTorch's PrivateUse1 backend over ordinary memory: allocator, guard, generators, kernels by the host's
device       builds and loads it; counts what crosses between it and the host
module       `torch.pretend`, what PyTorch asks of a device in Python
plugin       the fixture `pretend`
"""
