"""Per-example gradients of any PyTorch model, at about the price of the summed one.

    capture = Capture(model, LayerMap.of(model))
    loss(model(x)).backward()
    gradients = capture.take()          norms [B, L], and sums under any scales [B, L]

Read in this order:

    attach     what is done to torch, optimizer, parameters and process, and how it is undone
    contract   what a rule takes and gives
    capture    one forward and one backward pass: each module's input and output gradient
    leading    whose rows are the examples: found out, not guessed
    shared     tensors that are the same for every example, such as a table of positions
    plan       which rule a module gets, and why
    linear     linear layers
    conv       convolutions
    norm       layer, group, instance and RMS norms
    embedding  embedding tables
    generic    any other module, by `torch.func`
    rows       norms and sums of the rows that rules form
    compiled   inner loops in C, where there is a compiler
    batch      the gradients of a batch: squared_norms, weighted_sums, without
"""

from lmdp.gradients.batch import PerExampleGradients
from lmdp.gradients.capture import Capture
from lmdp.gradients.plan import Plan

__all__ = ["Capture", "PerExampleGradients", "Plan"]
