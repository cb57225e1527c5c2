"""Whatever is done to torch, the optimizer and the parameters is undone; engines do not disturb each other."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.gradients import Capture, attach
from lmdp.gradients.attach import REGISTRY
from lmdp.layers import LayerMap

TRAINED = ("state", "param_groups", "_opt_called")
"""What steps change in an optimizer, private or not; the last by torch's schedulers."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2


def attached(module: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[lmdp.PrivacyEngine, Any]:
    engine = lmdp.PrivacyEngine()
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "seed": 0, "looks_besides": True}
    loader = DataLoader(TensorDataset(*data()), batch_size=4)
    loader = engine.make_private(module=module, optimizer=optimizer, data_loader=loader, **(settings | options))[2]
    return engine, loader


def train(module: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()


def everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that could be changed by attaching."""
    hooks = {
        name: dict(value)
        for name, value in vars(torch_hooks).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    return {
        "torch": hooks,
        "backward": torch.autograd.backward,
        "precision": [torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()],
        "threads": [torch.get_num_threads(), threading.active_count()],
        "modules": [
            {key: dict(value) if isinstance(value, dict) else value for key, value in vars(m).items()}
            for m in module.modules()
        ],
        "parameters": [
            (id(p), p.requires_grad, p._backward_hooks, dict(p._post_accumulate_grad_hooks or {}), sorted(vars(p)))
            for p in module.parameters()
        ],
        "optimizer": {name: value for name, value in vars(optimizer).items() if name not in TRAINED},
        "environment": dict(os.environ),
        "listeners": len(REGISTRY._listeners),
        "watchers": len(REGISTRY._watchers),
        "looks": set(REGISTRY.looks),
    }


@pytest.fixture(autouse=True)
def _nobody_else_is_attached() -> None:
    gc.collect()  # engines of other tests
    for watcher in list(REGISTRY._watchers):
        REGISTRY.remove_watcher(watcher)
    REGISTRY.remove_listener(list(REGISTRY._listeners))


@pytest.mark.parametrize("stepped", [False, True], ids=["at once", "after training"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["plain", "under a scheduler"])
def test_detach_leaves_everything_as_it_was(stepped: bool, scheduled: bool) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = everything(module, optimizer)
    engine, loader = attached(module, optimizer)
    during = everything(module, optimizer)
    for changed in ("torch", "backward", "parameters", "optimizer", "listeners", "watchers"):
        assert during[changed] != before[changed], changed
    assert all(during["modules"][at].pop("_state_dict_pre_hooks") for at in range(len(during["modules"])))
    assert during["modules"] == [
        {k: v for k, v in m.items() if k != "_state_dict_pre_hooks"} for m in before["modules"]
    ]
    if stepped:
        train(module, optimizer, loader)
    optimizer.zero_grad()
    engine.detach()
    after = everything(module, optimizer)
    after["parameters"] = [(*rest, [name for name in names if name != "grad"]) for *rest, names in after["parameters"]]
    for part in before:
        assert after[part] == before[part], part


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": -1.0},
        {"weight_budget": 2.0},
        {"generic": ["nothing"]},
        {"public_data": 3, "weights": "public"},
    ],
    ids=str,
)
def test_a_make_private_that_raises_leaves_everything_as_it_was(options: dict[str, Any]) -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = everything(module, optimizer)
    with pytest.raises((ValueError, TypeError)):
        attached(module, optimizer, **options)
    gc.collect()
    assert everything(module, optimizer) == before


def test_a_training_that_is_forgotten_takes_everything_back() -> None:
    plain, hooks = torch.autograd.backward, len(torch_hooks._global_forward_hooks)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, loader = attached(module, optimizer)
    train(module, optimizer, loader)
    forgotten = [weakref.ref(engine), weakref.ref(module)]
    del engine, loader, module, optimizer
    gc.collect()
    assert [reference() for reference in forgotten] == [None, None]
    assert torch.autograd.backward is plain
    assert len(torch_hooks._global_forward_hooks) == hooks


def test_a_copy_of_an_attached_model_is_an_ordinary_model() -> None:
    module = model()
    engine, _ = attached(module, torch.optim.SGD(module.parameters(), lr=0.1))
    twin = copy.deepcopy(module)
    x, y = data()
    F.cross_entropy(twin(x), y).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert not attach.is_attached(twin)
    assert attach.is_attached(module)
    engine.detach()
    assert not attach.is_attached(module)


def test_one_attachment_outlives_another_that_detaches_first() -> None:
    first, second = model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    (one, _), (two, loader) = attached(first, optimizers[0]), attached(second, optimizers[1])
    one.detach()
    train(second, optimizers[1], loader)
    assert two.steps == len(loader)
    assert all(p.grad is not None for p in second.parameters())


def test_a_look_of_one_engine_does_not_swallow_gradients_of_another_in_another_thread() -> None:
    """While one thread differentiates for a look, gradients that arrive in another are delivered all the same."""
    module, inside, go_on = model(), threading.Event(), threading.Event()
    x, y = data()
    capture = Capture(module, LayerMap.of(module))
    try:
        inputs = torch.ones(3, requires_grad=True)
        other = (inputs * 2).sum()

        def look() -> None:
            with attach.look(other):
                torch.autograd.grad(other, [inputs], retain_graph=True)
                inside.set()
                go_on.wait(20)

        thread = threading.Thread(target=look)
        thread.start()
        assert inside.wait(20)
        assert REGISTRY.looks
        F.cross_entropy(module(x), y).backward()
        go_on.set()
        thread.join()
        assert capture.take().batch_size == len(x)
        assert not REGISTRY.looks
    finally:
        go_on.set()
        capture.detach()


def test_what_a_look_differentiates_is_not_delivered() -> None:
    module = model()
    x, y = data()
    capture = Capture(module, LayerMap.of(module))
    try:
        loss = F.cross_entropy(module(x), y)
        with attach.look(loss):
            torch.autograd.grad(loss, [capture._anchor], retain_graph=True, allow_unused=True)
        assert not capture._pass.arrived.complete
        loss.backward()
        assert capture._pass.arrived.complete
    finally:
        capture.detach()


def test_notes_on_a_model_outlast_its_attachment() -> None:
    module = model()
    for _ in range(2):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine, loader = attached(module, optimizer)
        train(module, optimizer, loader)
        engine.detach()
    assert any("3 private steps before" in reason for reason in engine.privacy_statement(1e-5).reasons)


LARGE = 2**20
"""Numbers, of 4 bytes: more than what is given back one by one."""
ALLOCATOR = """
from lmdp.gradients import attach
import torch

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10

attach.keep_freed_memory()
told = getattr(attach, "{name}")()
kept = [torch.ones({size}) for _ in range(10**8 // {size})]
before = resident()
kept = kept[-1:]  # what was allocated last stays, so that no end of the heap can be cut off
print(told, before - resident() > 300)
"""


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        *((attach.SWITCH, "0", name) for name in ("keep_freed_memory", "give_freed_memory_back")),
        *(("MALLOC_ARENA_MAX", "2", name) for name in ("keep_freed_memory", "give_freed_memory_back")),
        *(("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", name) for name in ("keep_freed_memory",)),
        (attach.SWITCH, "1", "give_freed_memory_back"),
    ],
)
def test_the_allocator_is_left_alone_by_switch_or_where_somebody_has_set_it_up(
    variable: str, value: str, name: str
) -> None:
    assert _allocator(name, {variable: value})[0] == "False"


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library here has no mallopt")
@pytest.mark.parametrize(
    ("name", "size", "given_back"),
    [
        ("keep_freed_memory", LARGE, False),
        ("give_freed_memory_back", LARGE, True),
        ("give_freed_memory_back", LARGE // 8, False),
    ],
)
def test_freed_memory_is_kept_or_given_back_as_asked(name: str, size: int, given_back: bool) -> None:
    assert _allocator(name, {}, size) == ["True", str(given_back)]


def _allocator(name: str, variables: dict[str, str], size: int = LARGE) -> list[str]:
    """What the function says, and whether the system has most of what was freed: 400 MB in tensors of this size."""
    code = ALLOCATOR.format(name=name, size=size)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LMDP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_hooks_are_there_even_if_another_training_is_forgotten_while_they_are_put_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collecting the last training takes the hooks off; one that has just found them there must not go without."""
    old = model()
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    held = [attached(old, optimizer)]
    dropped = [weakref.ref(old)]
    del old, optimizer
    reference = weakref.ref

    def forgetting(*args: Any) -> Any:
        if isinstance(args[0], Capture):  # it is about to listen
            held.clear()
            gc.collect()
        return reference(*args)

    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(attach.weakref, "ref", forgetting)
        engine, loader = attached(module, optimizer)
    assert dropped[0]() is None
    train(module, optimizer, loader)
    assert engine.steps == len(loader)


def test_an_interrupted_public_pass_leaves_parameters_trainable() -> None:
    x, y = data()

    class Interrupted(nn.Linear):
        interrupt = False

        def forward(self, batch: Tensor) -> Tensor:
            if Interrupted.interrupt and len(batch) == len(x):
                raise KeyboardInterrupt
            return super().forward(batch)

    module = nn.Sequential(nn.Flatten(), Interrupted(36, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, loader = attached(module, optimizer, weights="public", public_data=(x, y), public_every=1)
    F.cross_entropy(module(x[:5]), y[:5]).backward()
    Interrupted.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    Interrupted.interrupt = False
    assert all(p.requires_grad for p in module.parameters())
    train(module, optimizer, loader)
    engine.detach()
    assert all(p.requires_grad for p in module.parameters())


def test_a_copy_of_an_engine_does_not_detach_the_original() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine, loader = attached(module, optimizer)
    copy.deepcopy(engine).detach()
    train(module, optimizer, loader)
    assert engine.steps == len(loader)


def test_an_optimizer_whose_step_was_wrapped_before_is_forgotten_too() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.step = partial(optimizer.step)  # type: ignore[method-assign]
    engine, loader = attached(module, optimizer)
    train(module, optimizer, loader)
    forgotten = [weakref.ref(engine), weakref.ref(module), weakref.ref(optimizer)]
    del engine, loader, module, optimizer
    gc.collect()
    assert [reference() for reference in forgotten] == [None, None, None]


def test_hooks_of_others_for_the_whole_process_come_after_ours() -> None:
    """A hook that changes outputs belongs to what follows the module, whenever it was registered."""
    x, y = data()
    released = []
    for doubled in (False, True):
        module = model()
        hook = torch_hooks.register_module_forward_hook(lambda m, args, output: output * 2) if doubled else None
        capture = Capture(module, LayerMap.of(module))
        try:
            F.cross_entropy(module(x), y, reduction="sum").backward()
            gradients = capture.take()
        finally:
            capture.detach()
            if hook is not None:
                hook.remove()
        plain = model()
        hook = torch_hooks.register_module_forward_hook(lambda m, args, output: output * 2) if doubled else None
        F.cross_entropy(plain(x), y, reduction="sum").backward()
        if hook is not None:
            hook.remove()
        scales = torch.ones(len(x), len(capture.layers))
        sums = gradients.weighted_sums([scales], capture.layers)[0]
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-4, atol=1e-4)
        released.append(sums)
    assert not torch.allclose(released[0]["4.weight"], released[1]["4.weight"])


def test_a_pass_aside_puts_an_end_to_forward_passes_made_before() -> None:
    """They belong to parameters that a step may have changed by then."""
    module = model()
    x, y = data()
    capture = Capture(module, LayerMap.of(module))
    try:
        loss = F.cross_entropy(module(x), y)
        with capture.aside():
            F.cross_entropy(module(x), y).backward()
            capture.take()
        with pytest.raises(RuntimeError, match=r"made before the last optimizer\.step"):
            loss.backward()
    finally:
        capture.detach()
