"""What is said of examples that may meet, and of steps that an account may miss: in refusals, and in statements."""

LOOK_AGAIN = (
    "Run the loop once more inside `with engine.looking():`, which makes no step and spends nothing (with "
    "poisson_sampling=False nothing is looked at)"
)
OPEN = "some steps were made in a way that was not looked at yet: {why}. " + LOOK_AGAIN
MORE_STEPS = (
    "More steps are looked at: train again with more --epochs, or a smaller --batch-size. This run stays uncertified"
)
"""What takes the place of `LOOK_AGAIN` where nobody has the loop in his hands."""
NO_LOOKS = (
    "engine.looking(): with poisson_sampling=False nothing is handed out to be looked at: the loop would make steps "
    "and spend. Leave it out, and the run is not certified; or pass poisson_sampling=True to make_private"
)
SEEDED = (
    "random numbers were seeded anew within a step: what an example draws then follows from its place in the batch, "
    "which others decide. Seed them once, before the training"
)
HALVED = (
    "the loss is a mean in 16 bits, which round what every example is divided by: compute it in 32 (logits.float()), "
    "or use a sum and loss_reduction='sum'"
)
AS_IT_IS = "the model could not be run again on the same examples with the same result"
BESIDE = "beside others (mixed or weighted by the batch, sorted, scaled by what labels decide)"
WITHOUT = (
    "without the others (something follows from how many they are, from their places in the batch, from the length "
    "that all are padded to, or from random numbers of the others, as a mean of all of them does)"
)
PAD = "Pad to one public length instead of the longest of the batch, or let the model ignore the padding."
UNSTEADY = (
    "gradients changed from call to call in a way that could not be repeated (a schedule, losses that take turns: hold "
    "them still while looking)"
)
UNSIZED = (
    "whether the number of examples matters, or their places in the batch, could not be told: random numbers are drawn "
    "in the loop (draw them inside `with engine.still():`, or in the dataset), or by numpy or Python in the model or "
    "in collating (draw them by torch)"
)
IN_MODEL = (
    "the model lets the examples of a batch meet: run again with other examples beside half of the batch, it gave that "
    "half other gradients (a statistic of the batch, attention or normalisation across it, rows that are sorted, "
    "dropout between layers that read packed sequences, a loss of its own that compares or averages over examples)."
)
IN_LOSS = (
    "the loss lets the examples of a batch meet: the gradient at one example's output depends on another example's "
    "output (a contrastive loss, a statistic of the batch)."
)
COLLATED = (
    "collate_fn lets the examples of a batch meet: the same examples came out of it different beside others (mixed, "
    "standardised, packed; or drawn by a random generator of its own)."
)
EARLIER_STEPS = (
    "this model made {steps} private steps before, under another engine, which this statement does not count"
)
LATER_STEPS = "the weights were released after {steps} steps of this run, and its state is of an earlier one"
OTHER_WEIGHTS = (
    "the run was continued with other weights than those its state was saved with; save both at the same step"
)
MEASURED = (
    "the learning rate follows a number that was measured (ReduceLROnPlateau), and nobody knows on what: a training "
    "loss is private. Use a schedule that follows the steps"
)
