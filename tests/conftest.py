"""One thread per test process, as the processes share the cores; and no instructions that the machine only claims."""

import os
import subprocess
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

ISA = "ONEDNN_MAX_CPU_ISA"
SHORT_PRODUCTS = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a; torch.nn.functional.linear(a, a)"


def _claims_tiles() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()


# Some virtual machines announce Intel's AMX and stop a process that uses it, as torch does for products in bfloat16.
if ISA not in os.environ and _claims_tiles():
    tried = subprocess.run([sys.executable, "-c", SHORT_PRODUCTS], stderr=subprocess.DEVNULL, check=False)
    os.environ[ISA] = "ALL" if tried.returncode == 0 else "AVX512_CORE_FP16"
