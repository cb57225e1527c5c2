"""Per-example gradients of any PyTorch model, at about the price of the summed one.

    capture = Capture(model, LayerMap.of(model))
    loss(model(x)).backward()
    gradients = capture.take()          norms [B, L], and sums under any scales [B, L]

Read in this order:

    attach     what is done to torch, optimizer, parameters and process, and how it is undone
    leaving    weights that are read in the middle of a training
    contract   what a rule takes and gives
    call       one call of a module, until its output gradients arrive
    capture    one forward and one backward pass: each module's input and output gradient
    leading    whose rows are the examples: found out, not guessed
    hosts      what to take as a whole where rows are not examples
    shared     tensors that are the same for every example, such as a table of positions
    shards     modules that have their parameters whole only while they run
    plan       which rule a module gets, and why
    linear     linear layers
    transposed linear layers with their weight the other way round
    conv       convolutions
    standardised  convolutions with standardised filters
    norm       layer, group, instance and RMS norms
    embedding  embedding tables
    tied       a table that embeddings and linear layers share
    bag        sums, means and maxima of rows of an embedding table
    recurrent  LSTM, GRU and RNN, on padded and packed batches
    cells      one direction of a recurrent layer, forward and backward in time
    generic    any other module, by `torch.func`
    precision  products in full precision, for as long as a block lasts
    randomness what was drawn is drawn again, on any device
    fetching   numbers on a device, fetched together
    rows       norms and sums of the rows that rules form
    compiled   inner loops in C, where there is a compiler
    units      several rows of a batch that are one unit
    repeated   parameters that are used more than once
    batch      the gradients of a batch: squared_norms, weighted_sums, without
"""

from lmdp.gradients.batch import PerExampleGradients
from lmdp.gradients.capture import Capture
from lmdp.gradients.plan import Plan

__all__ = ["Capture", "PerExampleGradients", "Plan"]
