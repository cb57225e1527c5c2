"""What cannot be trained privately, said by name before training starts, and the swap that makes it possible."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

MOST_GROUPS = 32


def make_compatible(model: nn.Module) -> nn.Module:
    """A copy of the model that can be trained privately.

    BatchNorm becomes GroupNorm (at most 32 groups, scale and shift kept); InstanceNorm stops tracking running
    statistics. Create the optimizer from the copy. A model that needs no change is returned as a plain copy.
    """
    model = copy.deepcopy(model)
    if isinstance(model, _BatchNorm | _InstanceNorm):
        return _compatible(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm | _InstanceNorm):
                setattr(parent, name, _compatible(child))
    return model


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
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"parameter '{name}' is {parameter.dtype}; private training needs float32 or float64.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameter; nothing would be trained")


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer would train something unprotected, or leave a trainable parameter untrained."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times per step, which would cost several steps of privacy.")
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
    if isinstance(module, _BatchNorm):
        frozen = not module.training and not any(p.requires_grad for p in module.parameters())
        if not frozen:
            yield f"{kind} mixes the examples of a batch. Use lmdp.make_compatible(model), which puts GroupNorm there."
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        yield f"{kind} stores running statistics of private data. Use lmdp.make_compatible(model)."
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first:
        yield f"{kind} takes the batch second. Construct it with batch_first=True."
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        yield f"{kind} with max_norm changes its weights while it reads private data. Construct it without max_norm."
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
        yield f"{kind} with scale_grad_by_freq mixes examples. Construct it without."


def _compatible(module: nn.Module) -> nn.Module:
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    assert isinstance(module, _BatchNorm)
    swapped = nn.GroupNorm(
        math.gcd(MOST_GROUPS, module.num_features), module.num_features, eps=module.eps, affine=module.affine
    )
    if module.affine:
        swapped.weight, swapped.bias = module.weight, module.bias
    return swapped.train(module.training)
