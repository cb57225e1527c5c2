"""A plugin of pytest: every test has several threads, so that there is something to race."""

from __future__ import annotations

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    torch.set_num_threads(3)
