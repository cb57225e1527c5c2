"""`estimate_risk`: from public data and an architecture to a risk profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lmdp.layers import MODULE, LayerMap
from lmdp.membership.attacks.output import scaled_confidence
from lmdp.membership.attacks.probe import fit_mlp
from lmdp.membership.calibration import averaged, calibrated
from lmdp.membership.compaction import require_pooling
from lmdp.membership.crossfit import Result, in_sample, require_enough
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples, content_keys, count, each_tensor, gather, refuse_overlap, take
from lmdp.membership.instrument import (
    OUTPUT,
    Part,
    Progress,
    attack_controls,
    attack_layers,
    attack_output,
    collect,
    unheard,
)
from lmdp.membership.leak import Leak, leak_of
from lmdp.membership.representations import MEMORY_LIMIT, only, record
from lmdp.membership.workers import Share
from lmdp.models import Inputs, evaluation, fresh, run
from lmdp.risk.profile import PROTOCOLS, LayerRisk, RiskProfile, ShadowSummary
from lmdp.risk.shadow import Schedule, Shadow, halves, train_shadow

Read = dict[str, Any]
"""Which layers are read, and how: the same of every model."""
PAPER_WIDTH, PAPER_HIDDEN, PAPER_EPOCHS = 4096, 256, 30


def estimate_risk(
    model_factory: Callable[[], nn.Module],
    shadow_dataset: Any,
    *,
    models: int = 1,
    protocol: str = "heldout",
    private_dataset: Any = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    views: bool = True,
    layers: str | LayerMap = MODULE,
    pooling: str | None = None,
    memory_limit: int = MEMORY_LIMIT,
    progress: Progress | None = None,
    part: Part | None = None,
    share: Share | None = None,
) -> RiskProfile:
    """Estimate, on public data, how much each layer of an architecture gives away about membership.

    model_factory    makes an untrained model of the private model's architecture, on the device where it is to run
    shadow_dataset   public, labelled, disjoint from the private data (checked against `private_dataset` if given).
                     Inputs are tensors, or mappings of tensors by name, which become keyword arguments of the model
    models           how many shadow models; with 2 or more, scores are calibrated per example
    protocol         "heldout": adversaries are scored on examples they never saw. "paper": also in-sample, beside the
                     same adversary on permuted labels, and the in-sample error rates are what training uses
    schedule         how shadow models are trained
    layers           "module" or "block", as in `LayerMap.of`, or a LayerMap: as the training is going to have them
    pooling          what is kept of a sequence: "mean" over the attention mask, "cls" (its first position) or "last"
                     (of the mask); None: averages over a coarse grid, padding and all
    progress, part   told lines of text, and the share of the work that is done
    share            does pieces of work that do not depend on each other, and gives their results in their order: one
                     shadow model each, and then one attack on it. Several processes may share them
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is {protocol!r}; it must be one of {', '.join(PROTOCOLS)}")
    if models < 1:
        raise ValueError(f"models is {models}; it must be 1 or more")
    say, part = progress or (lambda _: None), part or unheard
    rounds = 2 * models + 1
    require_pooling(pooling)
    inputs, labels = _in_content_order(shadow_dataset, seed)
    if private_dataset is not None:
        refuse_overlap(inputs, gather(private_dataset)[0])
    member = halves(count(inputs), models, seed)
    require_enough(member[0])
    untrained = fresh(model_factory, seed + models)
    inputs = _as_taken(untrained, inputs)
    chosen = LayerMap.chosen(untrained, layers)
    read: Read = {"layers": chosen, "pooling": pooling}
    schedule = schedule or Schedule()

    def trained(k: int) -> Shadow:
        tell = partial(_say_of, say, f"shadow {k + 1}/{models}: ")
        model = fresh(model_factory, seed + k)
        with torch.random.fork_rng(devices=[]):  # dropout follows from the seed too
            torch.manual_seed(seed + k)
            return train_shadow(model, inputs, labels, member[k], schedule, seed + k, tell, _share_of(part, k, rounds))

    share = share or in_turn
    shadows = list(share([partial(trained, k) for k in range(models)]))
    start = time.perf_counter()
    leaks, reference = _attack(shadows, inputs, labels, seed, views, memory_limit, read, say, part, share)
    first = Examples(inputs, labels, member[0], 0)
    extra = in_sample_accuracies(shadows[0].model, first, seed, read, say) if protocol == "paper" else {}
    peak = max(leaks, key=lambda leak: leak.auc).name
    controls = attack_controls(untrained, first, peak, seed, say, **read)
    return RiskProfile(
        layers=tuple(LayerRisk.of(leak, *extra.get(leak.name, ())) for leak in leaks),
        protocol=protocol,
        controls=tuple(LayerRisk.of(result.leak(name)) for name, result in controls.items()),
        reference=None if reference is None else LayerRisk.of(reference),
        shadow=ShadowSummary(
            models=models,
            examples=count(inputs),
            train_accuracy=float(np.mean([s.train_accuracy for s in shadows])),
            test_accuracy=float(np.mean([s.test_accuracy for s in shadows])),
            epochs=max(s.epochs for s in shadows),
            train_seconds=sum(s.seconds for s in shadows),
            attack_seconds=time.perf_counter() - start,
            enough=schedule.enough,
        ),
        seed=seed,
        by=chosen.by,
        pooling=pooling,
    )


def _attack(
    shadows: list[Shadow],
    inputs: Inputs,
    labels: Tensor,
    seed: int,
    views: bool,
    memory_limit: int,
    read: Read,
    say: Progress,
    part: Part,
    share: Share,
) -> tuple[list[Leak], Leak | None]:
    """Every layer of every shadow model; with several models, each attacked with the others as references."""

    def attacked(k: int) -> tuple[dict[str, Result], tuple[Result, NDArray[np.float64]] | None]:
        shadow, done = shadows[k], _share_of(part, len(shadows) + k, 2 * len(shadows) + 1)
        examples = Examples(inputs, labels, shadow.member, 0)
        collected = collect(shadow.model, examples, seed=seed, views=views, memory_limit=memory_limit, **read)
        result = attack_layers(collected, shadow.member, seed, say, done)
        output = attack_output(collected, shadow.member, seed)
        return result, None if output is None else (output, scaled_confidence(next(iter(collected.values()))))

    every = list(share([partial(attacked, k) for k in range(len(shadows))]))
    results, outputs = [result for result, _ in every], [output for _, output in every if output is not None]
    if len(shadows) == 1:
        leaks = [result.leak(name) for name, result in results[0].items()]
        return leaks, outputs[0][0].leak(OUTPUT) if outputs else None
    member = np.stack([shadow.member for shadow in shadows])
    leaks = [_calibrated_attack(name, [r[name] for r in results], member, seed) for name in results[0]]
    if len(outputs) < len(shadows):
        return leaks, None
    lira = _calibrated(OUTPUT, "confidence", np.stack([confidence for _, confidence in outputs]), member, seed)
    fitted = _calibrated_attack(OUTPUT, [result for result, _ in outputs], member, seed)
    return leaks, max(lira, fitted, key=lambda leak: leak.auc)  # the stronger: a reference may be flattered


def _calibrated_attack(name: str, results: list[Result], member: NDArray[np.bool_], seed: int) -> Leak:
    """Each model's adversary has a scale of its own, which is taken out before models are compared."""
    scores = np.stack([(r.scores - r.scores.mean()) / (r.scores.std() + 1e-12) for r in results])
    return _calibrated(name, results[0].attack, scores, member, seed)


def _calibrated(name: str, attack: str, scores: NDArray[np.float64], member: NDArray[np.bool_], seed: int) -> Leak:
    models = calibrated(scores, member, seed)
    metrics = averaged([model.metrics for model in models])
    return leak_of(name, metrics, f"{attack} + {models[0].calibration}", models[0].folds)


def in_sample_accuracies(
    model: nn.Module, examples: Examples, seed: int, read: Read, say: Progress
) -> dict[str, tuple[float, float]]:
    """Layer → (in-sample accuracy, the same on permuted membership), on whole representations as in the paper."""
    say("the paper's protocol: adversaries on their own training set, and on permuted labels")
    attack = partial(fit_mlp, hidden=PAPER_HIDDEN, epochs=PAPER_EPOCHS, decay=0.0)
    permuted = np.random.default_rng(seed).permutation(examples.member)
    accuracies = {}
    for name in read["layers"].names:
        one = read | {"layers": only(name, model, read["layers"])}
        rows = record(model, examples.inputs, width=PAPER_WIDTH, seed=seed, pool=False, **one).layers[name]
        evidence = Evidence(rows)
        of_members, of_permuted = (in_sample(evidence, m, attack, seed) for m in (examples.member, permuted))
        accuracies[name] = (of_members, of_permuted)
    return accuracies


def in_turn(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    return [task() for task in tasks]


def _say_of(say: Progress, whom: str, text: str) -> None:
    say(whom + text)


def _share_of(part: Part, index: int, rounds: int) -> Part:
    """The progress of one of several equal rounds of work, as progress of the whole."""
    return lambda done: part((index + done) / rounds)


def _in_content_order(dataset: Any, seed: int) -> tuple[Inputs, Tensor]:
    """Distinct examples, ordered by content, so that the estimate does not depend on how they were given."""
    inputs, labels = gather(dataset)
    if labels is None:
        raise ValueError("the shadow data has no labels; a shadow model is trained on (input, label) examples")
    keys = content_keys(inputs, str(seed))
    order = sorted({key: i for i, key in enumerate(keys)}.items())
    index = torch.tensor([i for _, i in order])
    return take(inputs, index), labels[index].long()


def _as_taken(model: nn.Module, inputs: Inputs) -> Inputs:
    """Real numbers in single precision; whole numbers as they are if the model takes them so (words), else likewise."""
    inputs = each_tensor(inputs, lambda rows: rows.float() if rows.is_floating_point() else rows)
    if not isinstance(inputs, Tensor) or inputs.is_floating_point():
        return inputs
    try:
        with evaluation(model), torch.no_grad():
            run(model, inputs[:2])
    except (RuntimeError, TypeError, ValueError):  # pixels that are bytes, say: convolutions take none
        return inputs.float()
    return inputs
