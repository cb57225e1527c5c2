"""What cannot be trained privately, said by name before training starts, and the swap that makes it possible."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from lmdp.gradients.attach import is_attached
from lmdp.gradients.plan import RULES, rule_for
from lmdp.gradients.randomness import undrawn

MOST_GROUPS = 32
WITHOUT_DOUBLE = frozenset({"mps"})
"""Kinds of devices that cannot compute in float64."""

AFTER_NORM = ("drop", "act")
"""Children of a norm layer that it runs after the norm, in this order: timm's convention."""

OF_BATCH_NORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
POSITIONS = ((5, 3), (5, 3, 2), (5,), ())
"""Shapes of the positions on which a layer may be tried: images, volumes, sequences, none."""

BY_HAND = "Replace it by hand, by a norm over one example (nn.GroupNorm, nn.LayerNorm), with what it does besides."


class Stated(float):
    """A number of the mechanism, put on the optimizer to be read."""


STATED = ("noise_multiplier", "max_grad_norm", "expected_batch_size")


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that somebody else has a hand in: a gradient scaler, or numbers that were changed by hand.

    A scaler lets a fused optimizer know of itself by attributes that it takes back after the step.
    """
    for name in STATED:
        if not isinstance(vars(optimizer).get(name, Stated()), Stated):
            raise RuntimeError(
                f"optimizer.{name} was changed to {vars(optimizer)[name]!r} after make_private: it only tells what was "
                f"agreed. Call engine.detach(), and make_private of a new engine with another {name}."
            )
    if "found_inf" in vars(optimizer):
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)
        raise RuntimeError(
            "optimizer.step() was called by a GradScaler, which leaves a step out, and changes its scale, whenever the "
            "gradient of an example overflows: what it does tells of the data, and no noise covers it. Use "
            "torch.autocast with bfloat16, which needs no scaler, and call loss.backward() and optimizer.step() "
            "(or construct GradScaler(enabled=False))."
        )


def make_compatible(model: nn.Module) -> nn.Module:
    """A copy of the model that can be trained privately.

    BatchNorm becomes GroupNorm (at most 32 groups, of two channels or more; scale, shift and eps kept). A dropout and
    an activation that the layer runs after its norm (`drop` and `act`, as in timm's BatchNormAct2d) follow the
    GroupNorm. A layer of which it cannot be seen that it does no more than that is refused by name. InstanceNorm stops
    tracking running statistics. A BatchNorm that is frozen and in evaluation mode stays as it is, and so do layers that
    normalise each example for itself. Create the optimizer from the copy.
    """
    model = copy.deepcopy(model)
    swapped: dict[nn.Module, nn.Module] = {}  # a layer in two places stays one layer
    for name, module in model.named_modules():
        if refusal := _not_replaceable(module):
            where = f"module '{name}' ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(f"{where} cannot be made compatible: {refusal} {BY_HAND}")
        if isinstance(module, _BatchNorm | _InstanceNorm):
            swapped[module] = _compatible(module)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(model, model)


def check_setup(
    module: nn.Module, optimizer: torch.optim.Optimizer, reduction: str, *, poisson: bool, parts_of: int | None
) -> None:
    """Refuse what cannot be attached to, before anything is done. `parts_of`: most examples of a part of a batch."""
    if is_attached(module):
        raise RuntimeError("this model is already attached to a PrivacyEngine. Call detach() on that engine first.")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss_reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if parts_of is not None and not poisson:
        raise ValueError(
            f"max_physical_batch_size is {parts_of}; it needs poisson_sampling=True, because only Poisson batches are "
            "split. Leave it out, or poisson_sampling=False"
        )
    check_model(module)
    check_optimizer(module, optimizer)


def check_model(model: nn.Module) -> None:
    """Raise, naming every module that cannot be trained privately and what to do about it."""
    if hasattr(model, "_orig_mod"):
        raise ValueError("this is the result of torch.compile(model). Pass the model itself; model.compile() is fine.")
    complaints = [f"  '{name}': {why}" for name, module in model.named_modules() for why in _complaints(module)]
    if complaints:
        raise ValueError("this model cannot be trained privately as it is:\n" + "\n".join(complaints))
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter '{name}' has no shape yet. Run the model on one dummy batch first.")
        if parameter.device.type in WITHOUT_DOUBLE:
            raise ValueError(
                f"parameter '{name}' is on {parameter.device.type}, which has no float64: norms would not bound what "
                "an example contributes, nor would noise be exact. Train on another device, such as model.to('cpu')."
            )
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"parameter '{name}' is {parameter.dtype}; private training needs float32 or float64.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter; nothing would be trained")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer would train something unprotected, or leave a trainable parameter untrained."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times per step, which would cost several steps of privacy.")
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__} around another one. Give make_private the optimizer "
            "itself, and wrap what it returns."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if foreign:
        raise ValueError(
            f"the optimizer holds {len(foreign)} parameters that are not in the module (shapes {foreign[:3]}): they "
            "would be trained without noise. Pass a module that contains them, or an optimizer without them. (After "
            "make_compatible or loading a copy, create the optimizer from the new model.)"
        )
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"parameters {missing} are trainable but not in the optimizer: they would use up clip norm and never be "
            "trained. Freeze them with requires_grad_(False), or give them to the optimizer."
        )


def _complaints(module: nn.Module) -> Iterator[str]:
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and not _frozen(module):
        yield f"{kind} mixes the examples of a batch. Use lmdp.make_compatible(model), which puts GroupNorm there."
    if _gathers_statistics(module):
        yield f"{kind} normalises by statistics of the batch, and stores them. {BY_HAND}"
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        yield f"{kind} stores running statistics of private data. Use lmdp.make_compatible(model)."
    batch_second = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first
    if batch_second and rule_for(module) is RULES["generic"]:
        yield f"{kind} takes the batch second. Construct it with batch_first=True."
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        yield f"{kind} with max_norm changes its weights while it reads private data. Construct it without max_norm."
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        yield f"{kind} with scale_grad_by_freq mixes examples. Construct it without."


def _frozen(module: nn.Module) -> bool:
    return not module.training and not any(p.requires_grad for p in module.parameters())


def _compatible(module: nn.Module) -> nn.Module:
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    assert isinstance(module, _BatchNorm)
    if _frozen(module):
        return module
    channels = module.num_features
    norm = nn.GroupNorm(_groups(channels), channels, eps=module.eps, affine=module.affine)
    if module.affine:
        norm.weight, norm.bias = module.weight, module.bias
    after = _after_norm(module)
    swapped = nn.Sequential(OrderedDict(norm=norm, **after)) if after else norm
    swapped.training = norm.training = module.training
    return swapped


def _groups(channels: int) -> int:
    """A group of one channel would be normalised to a constant where there is but one position."""
    groups = math.gcd(MOST_GROUPS, channels)
    return groups if groups < channels else max(1, channels // 2)


def _after_norm(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name in AFTER_NORM if (child := module._modules.get(name)) is not None}


def _not_replaceable(module: nn.Module) -> str:
    """Why a layer that meets examples cannot be replaced by a GroupNorm; empty if it can, or need not be."""
    if _gathers_statistics(module):
        return "it normalises by statistics of the batch, stores them, and is no BatchNorm of torch's."
    if not isinstance(module, _BatchNorm) or _frozen(module):
        return ""
    if others := {name for name, child in module.named_children() if name not in AFTER_NORM}:
        return f"it has children {sorted(others)}, which a GroupNorm would leave out."
    stored = {name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]}
    if others := stored - OF_BATCH_NORM:
        return f"it stores {sorted(others)}, which a GroupNorm would leave out."
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "hooks are registered on it, which would not be called any more. Register them on the compatible model."
    if not _is_norm_and_what_follows(module):
        return "its forward does something else than normalise the batch and run its own 'drop' and 'act'."
    return ""


def _is_norm_and_what_follows(module: _BatchNorm) -> bool:
    """Whether its forward is that of torch, followed by its `drop` and `act`: by what it does to made-up inputs."""
    if type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and "forward" not in vars(module):
        return not _after_norm(module)
    for shape in POSITIONS:
        try:
            return all(_same_forward(module, shape, training) for training in (False, True))
        except Exception:  # a layer may refuse made-up inputs, for any reason
            continue
    return False


def _same_forward(module: _BatchNorm, shape: tuple[int, ...], training: bool) -> bool:
    mine = _with_made_up_values(module).train(training)
    plain = copy.deepcopy(mine)
    assert isinstance(plain, _BatchNorm)
    x = _made_up(module.num_features, shape, next(mine.parameters(), None))
    with torch.no_grad(), undrawn():
        torch.manual_seed(0)
        output = mine(x.clone())
        torch.manual_seed(0)
        by_batch = training or plain.running_mean is None
        statistics = (plain.running_mean, plain.running_var)
        expected = F.batch_norm(x, *statistics, plain.weight, plain.bias, by_batch, plain.momentum or 0.0, plain.eps)
        for following in _after_norm(plain).values():
            expected = following(expected)
    return isinstance(output, Tensor) and output.shape == expected.shape and torch.allclose(output, expected, 1e-4)


def _with_made_up_values(module: _BatchNorm) -> _BatchNorm:
    """A copy without zeros: a scale of zero would hide whatever else a layer does."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(1)
    for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
        if tensor is not None:
            tensor.data.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return module


def _gathers_statistics(module: nn.Module) -> bool:
    """Whether a layer that is none of torch's changes running statistics of its own, tried on made-up inputs.

    One that cannot be tried is believed to if it looks like a norm layer: a scale for every statistic.
    """
    if isinstance(module, _BatchNorm | _InstanceNorm) or _frozen(module):
        return False
    running = {name: b for name, b in module.named_buffers(recurse=False) if name.startswith("running_") and b.dim()}
    for shape in POSITIONS if running else ():
        try:
            tried = copy.deepcopy(module).train()
            with torch.no_grad(), undrawn():
                tried(_made_up(max(map(len, running.values())), shape, next(iter(running.values()))))
        except Exception:  # as above
            continue
        now = dict(tried.named_buffers(recurse=False))
        return any(not torch.equal(before, now[name]) for name, before in running.items())
    scales = dict(module.named_parameters(recurse=False))
    return "weight" in scales and any(b.shape == scales["weight"].shape for b in running.values())


def _made_up(channels: int, shape: tuple[int, ...], like: Tensor | None) -> Tensor:
    """Four examples with values of every size."""
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.randn(4, channels, *shape, generator=generator) ** 3
    return x if like is None else x.to(like)
