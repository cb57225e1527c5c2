"""TrainingArguments of transformers that would break the account: refused by name, or translated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lmdp.integrations.privacy import Privacy


@dataclass(frozen=True)
class Refusal:
    """A setting that a private training cannot have.

    broken  whether these arguments, or this trainer, have it
    why     what it would do
    remedy  what to do instead
    unless  the field of Privacy with which it is allowed
    """

    setting: str
    broken: Callable[[Any], bool]
    why: str
    remedy: str
    unless: str = ""

    def applies(self, given: Any, privacy: Privacy) -> bool:
        return self.broken(given) and not (self.unless and getattr(privacy, self.unless))


def _word(value: Any) -> str:
    """Of an enumeration or a string."""
    return str(getattr(value, "value", value)).lower()


def _is(setting: str, *words: str) -> Callable[[Any], bool]:
    return lambda args: _word(getattr(args, setting, "")) in words


def _on(setting: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, setting, None))


BY_EVALUATION = "evaluation data are private as long as nobody says otherwise, and nothing may follow from them"
PUBLIC = "or, if the evaluation data are public, pass Privacy(public_evaluation=True)."

REFUSALS = (
    Refusal(
        "max_grad_norm",
        lambda args: args.max_grad_norm not in (0, 0.0, 1.0, None),
        "it would clip the sum of a batch, which protects nobody; what is clipped is each example's gradient",
        "Leave it out, and pass Privacy(max_grad_norm=...).",
    ),
    Refusal(
        "fp16",
        _on("fp16"),
        "a GradScaler scales by what it sees in private gradients, and leaves out steps",
        "Set bf16=True, or neither.",
    ),
    Refusal(
        "group_by_length",
        _on("group_by_length"),
        "batches would be made of examples of like lengths instead of being drawn independently",
        "Leave it out.",
    ),
    Refusal(
        "train_sampling_strategy",
        _is("train_sampling_strategy", "group_by_length", "batch_rebalance"),
        "batches would be made of examples of chosen lengths instead of being drawn independently",
        "Leave it out.",
    ),
    Refusal(
        "batch_sampler",  # of sentence-transformers
        lambda args: _word(getattr(args, "batch_sampler", "batch_sampler")) != "batch_sampler",
        "who is in a batch would follow from who else is, instead of being drawn independently",
        "Leave it out.",
    ),
    Refusal(
        "auto_find_batch_size",
        _on("auto_find_batch_size"),
        "another batch size is another sampling rate, for which epsilon was not computed",
        "Leave it out; for batches that do not fit into memory pass Privacy(max_physical_batch_size=...).",
    ),
    Refusal(
        "include_num_input_tokens_seen",
        lambda args: _word(getattr(args, "include_num_input_tokens_seen", "no")) not in ("no", "false"),
        "how many tokens were seen tells of who was drawn",
        "Leave it out.",
    ),
    Refusal(
        "lr_scheduler_type",
        _is("lr_scheduler_type", "reduce_lr_on_plateau", "greedy"),
        "the learning rate would follow a number that was measured",
        "Use one that follows the steps, such as 'cosine' or 'linear'.",
    ),
    Refusal(
        "load_best_model_at_end",
        _on("load_best_model_at_end"),
        f"which weights are the best would follow from a measurement: {BY_EVALUATION}",
        f"Leave it out, {PUBLIC}",
        unless="public_evaluation",
    ),
    Refusal(
        "save_strategy",
        _is("save_strategy", "best"),
        f"which checkpoints are saved would follow from a measurement: {BY_EVALUATION}",
        f"Use 'steps' or 'epoch', {PUBLIC}",
        unless="public_evaluation",
    ),
    Refusal(
        "optim",
        lambda args: _word(args.optim) in ("lomo", "adalomo") or _word(args.optim).endswith("_layerwise"),
        "it steps inside the backward pass, past the private step",
        "Use 'adamw_torch', for instance.",
    ),
    Refusal(
        "torch_compile",
        _on("torch_compile"),
        "gradients of single examples cannot be told inside a compiled model",
        "Leave it out.",
    ),
    Refusal("deepspeed", _on("deepspeed"), "nothing is added up over several processes", "Train in one process."),
    Refusal("fsdp", _on("fsdp"), "nothing is added up over several processes", "Train in one process."),
    Refusal(
        "world_size",
        lambda args: args.world_size > 1,
        "each process would state its own epsilon, and together they spend more",
        "Train in one process.",
    ),
    Refusal(
        "n_gpu",
        lambda args: args.n_gpu > 1,
        "the model would be copied to every one of them, past the private step",
        "Let the process see one of them: CUDA_VISIBLE_DEVICES=0.",
    ),
)


def adapted(args: Any, privacy: Privacy) -> tuple[Any, Privacy]:
    """A copy of the arguments with what a private training translates; raises for what it cannot have.

    Accumulation over k batches of b examples becomes Poisson batches of k·b that come in parts of at most b.
    """
    for refusal in (each for each in REFUSALS if each.applies(args, privacy)):
        setting = f"TrainingArguments({refusal.setting}={getattr(args, refusal.setting, None)!r})"
        raise ValueError(f"{setting}: {refusal.why}. {refusal.remedy}")
    args, several = copy.copy(args), args.gradient_accumulation_steps
    if several > 1:
        part = args.per_device_train_batch_size
        privacy = replace(privacy, max_physical_batch_size=min(part, privacy.max_physical_batch_size or part))
        args.per_device_train_batch_size, args.gradient_accumulation_steps = part * several, 1
    args.max_grad_norm = 0.0  # gradients appear inside the step, and are clipped there
    args.ignore_data_skip = True  # draws go on where the account is, and skipping one would spend it
    args.dataloader_drop_last = False
    return args, privacy


def refuse_followers(callbacks: Iterable[Any], scheduler: Any, privacy: Privacy) -> None:
    """Raise for callbacks and schedules that follow a measurement."""
    names = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
    if "EarlyStoppingCallback" in names and not privacy.public_evaluation:
        raise ValueError(
            f"EarlyStoppingCallback: when the training ends would follow from a measurement: {BY_EVALUATION}. Leave it "
            f"out, {PUBLIC}"
        )
    if {"ReduceLROnPlateau", "GreedyLR"} & {kind.__name__ for kind in type(scheduler).__mro__}:
        raise ValueError(
            f"the learning rate follows a number that is measured ({type(scheduler).__name__}). Use a schedule that "
            "follows the steps, such as lr_scheduler_type='cosine'."
        )
