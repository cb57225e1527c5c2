"""One thread per test process: the processes share the machine's cores among themselves."""

import torch

torch.set_num_threads(1)
