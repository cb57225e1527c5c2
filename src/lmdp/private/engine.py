"""`PrivacyEngine`: make an ordinary PyTorch training loop private, and say what that promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmdp.accounting import AccountantName, Ledger, Mechanism, PrivacyStatement, calibrate_noise
from lmdp.gradients.capture import Tape
from lmdp.gradients.describe import PrivatePlan, describe
from lmdp.guards.modules import check_model, check_optimizer
from lmdp.layers import LayerMap
from lmdp.private import weights as w
from lmdp.private.clipping import clipping
from lmdp.private.diagnostics import Diagnostics
from lmdp.private.noise import Chance, Entropy, Seeded
from lmdp.private.optimizer import Door
from lmdp.private.public import PublicProbe
from lmdp.private.risk import error_rates_for
from lmdp.private.sampling import PoissonLoader, poisson_loader, sample_rate_of
from lmdp.private.secure import Secure
from lmdp.private.statement import (
    SPENT,
    Run,
    all_reasons,
    earlier_trainings,
    fingerprints,
    identity,
    standing_reasons,
    unnoised_state,
)
from lmdp.private.step import PrivateStep

Criterion = Callable[[Any, Any], Tensor]


class PrivacyEngine:
    """One engine makes one training private.

        engine = lmdp.PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, method="lm", risk=profile,
            target_epsilon=8, target_delta=1e-5, epochs=20, max_grad_norm=1.0)

    The three come back as they were, except the loader, which is now Poisson-sampled; the training loop is unchanged.

    accountant   rdp, or pld, which gives less noise for the same epsilon and takes longer
    secure_mode  noise with a countermeasure to attacks on its last bits (floating point); cannot be seeded
    """

    def __init__(self, accountant: AccountantName = "rdp", secure_mode: bool = False) -> None:
        if accountant not in ("rdp", "pld"):
            raise ValueError(f"accountant is {accountant!r}; it must be 'rdp' or 'pld'")
        self._secure = Secure() if secure_mode else None
        self.accountant: AccountantName = accountant
        self.diagnostics: Diagnostics | None = None
        self._run: Run | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        method: str = "lm",
        risk: Any = None,
        weights: str = "private",
        emphasis: float = 1.0,
        public_data: Any = None,
        criterion: Criterion | None = None,
        public_every: int = 10,
        weight_budget: float = 0.01,
        poisson_sampling: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        max_physical_batch_size: int | None = None,
        memory_budget: int | None = None,
        generic: Iterable[str] = (),
        allow_unused: bool = False,
        check_mixing: bool = True,
        diagnostics: bool = False,
        seed: int | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """Attach to a model, its optimizer and its data; from the next `optimizer.step()` on, training is private.

        method           dpsgd, autos, psac, perlayer, naive-perlayer, lm, lm-optimal
        risk             per-layer error rates: a RiskProfile, a {layer: rate} mapping, or a sequence in layer order;
                         None treats all layers alike
        weights          where the layer weights of `lm` come from: private, public, fixed, or batch (not certified)
        emphasis         r: how strongly the risk counts
        public_data      (inputs, targets), a dataset or a data loader of public examples, for weights="public"
        criterion        the loss on public data; cross entropy unless given
        public_every     how many steps a set of public weights is used for
        weight_budget    share of the privacy budget spent on the statistic behind weights="private"
        loss_reduction   how the loss combines the examples of a batch. With class weights or ignore_index, a "mean"
                         divides by a number that depends on other examples: use "sum" there
        max_physical_batch_size
                         hand batches out in parts of at most this many examples; optimizer.step() waits for the last
        memory_budget    bytes that linear and convolutional layers may keep between backward and step. Layers move to
                         their lean rule, slower and as exact, until the sum fits; `engine.plan()` says what that costs
        generic          names of modules whose whole subtree gets the generic per-example rule
        allow_unused     parameters that a step does not reach count as zero (and get noise) instead of raising
        check_mixing     look whether examples meet in the model or the loss, and refuse if so
        diagnostics      keep un-noised numbers in `engine.diagnostics`: NOT PRIVATE
        seed             makes sampling and noise reproducible, and the run not certified
        """
        if self._run is not None:
            raise RuntimeError("this engine already made a training private. Use a new PrivacyEngine, or detach().")
        if Tape.is_attached_to(module):
            raise RuntimeError("this model is already attached to a PrivacyEngine. Call detach() on that engine first.")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}; it must be 'mean' or 'sum'")
        if max_physical_batch_size is not None and not poisson_sampling:
            raise ValueError("max_physical_batch_size splits Poisson batches; it needs poisson_sampling=True")
        if memory_budget is not None and memory_budget < 1:
            raise ValueError(f"memory_budget is {memory_budget}; it is a number of bytes and must be 1 or more")
        check_model(module)
        check_optimizer(module, optimizer)
        rate, size = sample_rate_of(data_loader)
        mechanism = Mechanism(float(noise_multiplier), rate)
        layers = LayerMap.of(module)
        method_clipping = clipping(method, clip_norm=float(max_grad_norm), layers=len(layers))
        rates = error_rates_for(risk, layers)
        _check_weights(method, weights, public_data, data_loader.dataset)
        chance = self._chance(seed)
        loader: DataLoader[Any] = data_loader
        if poisson_sampling:
            loader = poisson_loader(data_loader, coins=chance.coins, max_physical_batch_size=max_physical_batch_size)
        optimal = method == "lm-optimal"
        risk_factors = torch.ones(len(layers), dtype=torch.float64) if optimal else w.risk_factors(rates, emphasis)

        tape = Tape(
            module,
            layers,
            generic_modules=generic,
            memory_budget=memory_budget,
            check_mixing=check_mixing,
            mean_loss=loss_reduction == "mean",
        )
        try:
            probe = PublicProbe(tape, public_data, criterion, method_clipping, optimal) if weights == "public" else None
            source = _source(weights, risk_factors, optimal, probe, public_every, weight_budget)
            self.diagnostics = Diagnostics() if diagnostics else None
            step = PrivateStep(
                tape,
                method_clipping,
                source if method_clipping.reweighted else None,
                chance,
                noise_multiplier=mechanism.noise_multiplier,
                expected_batch_size=rate * size,
                mean_loss=loss_reduction == "mean",
                allow_unused=allow_unused,
                keep_raw=optimal and weights == "batch",
                diagnostics=self.diagnostics,
            )
        except BaseException:
            tape.detach()
            raise
        ledger = Ledger(mechanism, self.accountant)
        feed = None
        if isinstance(loader, PoissonLoader):
            feed = loader.feed
            loader.follow(lambda: ledger.steps)
        self._run = Run(
            tape=tape,
            step=step,
            door=Door(optimizer, step, ledger, feed),
            ledger=ledger,
            feed=feed,
            standing_reasons=standing_reasons(mechanism, step, poisson_sampling, seed),
            unnoised=unnoised_state(module),
            expected_batch_size=rate * size,
            dataset_size=size,
            inherited_reasons=earlier_trainings(module),
        )
        SPENT.setdefault(module, []).append(ledger)
        return module, optimizer, loader

    def _chance(self, seed: int | None) -> Chance:
        if seed is None:
            return self._secure or Entropy()
        if self._secure is not None:
            raise ValueError(f"seed is {seed}, but secure_mode=True draws noise that nobody can repeat. Choose one.")
        return Seeded(seed)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        max_grad_norm: float,
        **options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
        """`make_private` with the smallest noise that keeps `epochs` passes over the loader within the target.

        A step that would pass the target raises before it happens. `options` are those of `make_private`.
        """
        if "noise_multiplier" in options:
            raise TypeError("make_private_with_epsilon computes noise_multiplier; leave it out, or use make_private")
        rate, _ = sample_rate_of(data_loader)
        steps = math.ceil(epochs * math.ceil(1 / rate - 1e-9) - 1e-9)
        if steps < 1:
            raise ValueError(f"epochs is {epochs}; it must be above 0")
        sigma = calibrate_noise(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=rate,
            steps=steps,
            accountant=self.accountant,
        )
        three = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=sigma,
            max_grad_norm=max_grad_norm,
            **options,
        )
        ledger = self._attached.ledger
        ledger.target_epsilon, ledger.target_delta, ledger.planned_steps = target_epsilon, target_delta, steps
        return three

    def plan(self) -> PrivatePlan:
        """Which rule every module uses for its per-example gradients, and why. Print it after the first step."""
        return describe(self._attached.tape)

    def detach(self) -> None:
        """Make the model and the optimizer ordinary again. What was trained stays, and so does what it cost."""
        run = self._attached
        run.door.remove()
        run.tape.detach()
        run.parameters_at_detach = fingerprints(run.tape.canonical_parameters.items())

    @property
    def steps(self) -> int:
        """How many private steps have been made."""
        return self._attached.ledger.steps

    @property
    def noise_multiplier(self) -> float:
        return self._attached.ledger.mechanism.noise_multiplier

    @property
    def layers(self) -> LayerMap:
        return self._attached.tape.layers

    @property
    def layer_weights(self) -> tuple[float, ...] | None:
        """The newest layer weights that are released; None for methods without, and for `batch`, which are private."""
        source = self._attached.step.source
        return None if source is None or source.reads_private_batch else tuple(source.current().tolist())

    def get_epsilon(self, delta: float) -> float:
        """The epsilon spent so far."""
        return self._attached.ledger.epsilon(delta)

    def privacy_statement(self, delta: float) -> PrivacyStatement:
        """What the steps so far promise, whether that is certified, and what is not covered."""
        run = self._attached
        source = run.step.source
        return PrivacyStatement(
            epsilon=run.ledger.epsilon(delta),
            delta=delta,
            accountant=run.ledger.accountant,
            sampling="not Poisson (fixed batches)" if run.feed is None else "Poisson",
            noise_multiplier=run.ledger.mechanism.noise_multiplier,
            sample_rate=run.ledger.mechanism.sample_rate,
            expected_batch_size=run.expected_batch_size,
            steps=run.ledger.steps,
            clip_norm=run.step.clipping.clip_norm,
            sensitivity=run.step.clipping.sensitivity,
            method=run.step.clipping.name,
            weight_source="none" if source is None else source.name,
            noise_source=run.step.chance.source,
            reasons=all_reasons(run),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model and optimizer: steps paid for, and the released weight statistic."""
        run = self._attached
        source = run.step.source
        return {
            "identity": identity(run),
            "steps": run.ledger.steps,
            "source": source.state() if source else {},
            "reasons": list(all_reasons(run)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that `state` was taken from; refuses one with other privacy parameters."""
        run = self._attached
        mine, theirs = identity(run), dict(state["identity"])
        if mine != theirs:
            differing = {k: (theirs.get(k), mine.get(k)) for k in {*mine, *theirs} if theirs.get(k) != mine.get(k)}
            raise ValueError(f"this state belongs to another run; saved and current values differ: {differing}")
        if run.ledger.steps:
            raise ValueError(
                f"this engine has made {run.ledger.steps} steps of its own, which going over to another state would "
                "forget. Load a state into a new engine, before its first step."
            )
        run.ledger.steps = int(state["steps"])
        run.inherited_reasons = tuple(dict.fromkeys([*run.inherited_reasons, *state["reasons"]]))
        run.unnoised = unnoised_state(run.tape.model)
        if run.step.source is not None:
            run.step.source.restore(dict(state["source"]))

    @property
    def _attached(self) -> Run:
        if self._run is None:
            raise RuntimeError("this engine is not attached to a training yet. Call make_private first.")
        return self._run


def _check_weights(method: str, weights: str, public_data: Any, private: Any) -> None:
    if weights not in w.SOURCES:
        raise ValueError(f"weights is {weights!r}; it must be one of {', '.join(w.SOURCES)}")
    if method == "lm-optimal" and weights not in ("public", "batch"):
        raise ValueError(
            f"method 'lm-optimal' with weights={weights!r}: bias-optimal weights are computed from gradients. Use "
            "weights='public' with public_data (certified) or weights='batch' (the paper's, not certified)."
        )
    if weights == "public" and public_data is None:
        raise ValueError("weights='public' needs public_data: (inputs, targets), a dataset or a data loader")
    if public_data is not None and getattr(public_data, "dataset", public_data) is private:
        raise ValueError("public_data is the private dataset itself. Pass examples that are public and not in it.")


def _source(
    name: str, risk: Tensor, optimal: bool, probe: PublicProbe | None, every: int, share: float
) -> w.WeightSource:
    base: w.Base = w.optimal_base if optimal else w.mean_ratio
    if probe is not None:
        return w.Public(risk, base=base, measure=probe, every=every)
    if name == "private":
        return w.Private(risk, share=share)
    return w.Batch(risk, base=base) if name == "batch" else w.Fixed(risk)
