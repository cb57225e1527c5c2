"""The fixture `pretend`: the first of two pretend devices, or the reason why there are none.

A test that asks for it runs in a fork of the test process. So no other test ever meets an accelerator, and a test that
dies because the host followed an address of the device fails, and takes no other with it. Who asks while a test runs
(`request.getfixturevalue("pretend")`) says so beforehand, by a parameter "pretend":

    @pytest.mark.parametrize("where", ["cpu", "pretend"])
"""

from __future__ import annotations

import os
import pickle
import time
import warnings

import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.device import device

PARENT = os.getpid()


@pytest.fixture
def pretend() -> torch.device:
    if reason := device.missing():
        pytest.skip(reason)
    if os.getpid() == PARENT:
        pytest.fail('ask for `pretend` among the arguments, or have a parameter "pretend": the test must run in a fork')
    return device.load()


def _on_device(item: pytest.Item) -> bool:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return device.NAME in getattr(item, "fixturenames", ()) or any(
        isinstance(value, str) and value == device.NAME for value in parameters
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First of all: a process in which other tests have run may hold threads that no fork survives."""
    items.sort(key=lambda item: not _on_device(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _on_device(item) or device.missing():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what was set up before the fork
    return True


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    began, (reader, writer) = time.time(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: those of the runner are idle
        child = os.fork()
    if child == 0:
        try:
            # Only what belongs to this test is torn down there: the rest is the parent's.
            reports = runtestprotocol(item, nextitem=item.parent, log=False)  # type: ignore[arg-type]
            told = [item.config.hook.pytest_report_to_serializable(config=item.config, report=r) for r in reports]
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(told))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if answer:
        return [
            item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
            for data in pickle.loads(answer)
        ]
    code, now = os.waitstatus_to_exitcode(status), time.time()
    died = f"the test's process ended with {code}" + (" (the host read device memory?)" if code == -11 else "")
    return [
        pytest.TestReport(
            item.nodeid, item.location, {}, "failed", died, "call", duration=now - began, start=began, stop=now
        )
    ]
