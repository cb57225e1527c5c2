"""`PrivacyEngine`: make an ordinary PyTorch training loop private, and say what that promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmdp.accounting import DEFAULT, Ledger, Mechanism, accountant_named, calibrate_noise, check_delta
from lmdp.diagnostics import Diagnostics
from lmdp.gradients import Capture, Plan
from lmdp.gradients.attach import keep_freed_memory
from lmdp.guards import Independence, Judgement, Watch, check_setup, common_examples, make_compatible
from lmdp.guards.looks import steps_left
from lmdp.layers import LayerMap, error_rates_for
from lmdp.lineage import Lineage
from lmdp.methods import check_source
from lmdp.opacus import Account, familiar, is_compatible, load_checkpoint, save_checkpoint, validate
from lmdp.private.clipping import Clipping
from lmdp.private.keystream import fresh_key
from lmdp.private.noise import Entropy, Randomness, Secure, Seeded, Shared
from lmdp.private.optimizer import PrivateOptimizer
from lmdp.private.public import PublicProbe
from lmdp.private.run import Run
from lmdp.private.sampling import PoissonLoader, poisson_loader
from lmdp.private.step import Observer, PrivateStep, StepOptions
from lmdp.private.weights import LayerWeights, refutation, source_for
from lmdp.processes import Population, agree, held_by, on_all, steps_per_pass
from lmdp.rescaling import Rescaling
from lmdp.statement import PrivacyStatement
from lmdp.units import Unit

Criterion = Callable[[Any, Any], Tensor]
Three = tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]


class PrivacyEngine:
    """One engine makes one training private.

        engine = lmdp.PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, method="lm", risk=profile,
            target_epsilon=8, target_delta=1e-5, epochs=20, max_grad_norm=1.0)

    The three come back as they were, except the loader, which is now Poisson-sampled; the training loop is unchanged.

    accountant   pld, or rdp, which is faster and needs some 5 % more noise for the same epsilon
    lineage      what is known of the weights that training begins with; looked up unless set before make_private
    secure_mode  the key of the noise cannot be copied; cannot be seeded
    """

    def __init__(self, accountant: str = DEFAULT, secure_mode: bool = False) -> None:
        self._secure = Secure() if secure_mode else None
        self.accountant = Account(self, accountant_named(accountant).name)
        self.diagnostics: Diagnostics | None = None
        self.lineage: Lineage | None = None
        self._observer = Observer()
        self._run: Run | None = None
        self._loader: PoissonLoader | None = None

    @on_all
    @familiar
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
        layers: str | LayerMap = "module",
        weights: str = "private",
        emphasis: float = 1.0,
        public_data: Any = None,
        criterion: Criterion | None = None,
        public_every: int = 10,
        weight_budget: float = 0.01,
        unit_clip: bool = False,
        unit_gain: bool = False,
        poisson_sampling: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        unit: Unit | None = None,
        max_physical_batch_size: int | None = None,
        memory_budget: int | None = None,
        generic: Iterable[str] = (),
        allow_unused: bool = False,
        check_mixing: bool = True,
        looks_besides: bool = False,
        allow_large_delta: bool = False,
        diagnostics: bool = False,
        seed: int | None = None,
        group: Any = None,
        sharded: bool = False,
    ) -> Three:
        """Attach to a model, its optimizer and its data; from the next `optimizer.step()` on, training is private.

        method           dpsgd (in doubt, and without a risk), autos, psac, perlayer, naive-perlayer, lm, lm-optimal
        risk             error rates of layers: a RiskProfile, {layer: rate}, or a sequence; None: all count alike
        layers           "module" or "block", as in `LayerMap.of`, or a LayerMap; as the risk was estimated
        weights          where the layer weights of `lm` come from: private, public, fixed, or batch (not certified)
        emphasis         r: how strongly the risk counts
        public_data      (inputs, targets), a dataset or a data loader of public examples, for weights="public"
        criterion        the loss of the training, where public data need it; cross entropy unless given
        public_every     how many steps a set of public weights is used for
        weight_budget    share of the privacy budget spent on the statistic behind weights="private"
        unit_clip        divide the released gradient by max_grad_norm: one learning rate then suits every max_grad_norm
        unit_gain        divide it by sqrt(L) times the layer weights of `lm`: layers keep their step, not their noise
        loss_reduction   "mean" or "sum" of examples. With class weights or ignore_index, only a sum is of each alone
        unit             lmdp.Unit(name, rows): rows that are averaged and clipped as one; the dataset's unless given
        max_physical_batch_size  hand batches out in parts of so many units; optimizer.step() waits for the last
        memory_budget    bytes that layers may keep between backward and step: they move to lean rules until it fits
        generic          names of modules whose whole subtree gets the generic per-example rule
        allow_unused     parameters that a step does not reach count as zero (and get noise) instead of raising
        check_mixing     look whether examples meet in model or loss, and refuse if so; without, not certified
        looks_besides    now and then four batches are handed out to be looked at only, in place of others; or besides
        allow_large_delta  let statements have a delta of 1 / examples or more; they are then not certified
        diagnostics      keep un-noised numbers in `engine.diagnostics`: NOT PRIVATE
        seed             makes sampling and noise reproducible, and the run not certified
        group            processes of torch.distributed that train together; all, unless given. Every one of them calls
                         this, with the whole data and the batch size of all together (docs/scaling.md)
        sharded          each process has a part of the data of its own instead
        """
        observer, observed = self._observer, type(self._observer) is not Observer
        if self._run is not None:
            raise RuntimeError("this engine already made a training private. Use a new PrivacyEngine, or detach().")
        check_setup(module, optimizer, loss_reduction, poisson=poisson_sampling, parts_of=max_physical_batch_size)
        population = Population.of(data_loader, group, sharded=sharded, unit=unit)
        layers, mean_loss = LayerMap.chosen(module, layers), loss_reduction == "mean"
        clipping = Clipping.of(method, clip_norm=float(max_grad_norm), layers=len(layers))
        rates, judgement = error_rates_for(risk, layers), Judgement()
        check_source(weights, clipping.method, public_data, common_examples(public_data, data_loader.dataset))
        randomness, loader, log = observer.randomness(self._randomness(seed, population)), data_loader, None
        if poisson_sampling:
            loader = poisson_loader(data_loader, randomness.uniforms, max_physical_batch_size, population)
            log = loader.log
        keep_freed_memory()
        independence = Independence(judgement, mean_loss=mean_loss) if check_mixing else None
        capture = Capture(module, layers, generic, memory_budget, watcher=independence, rows_each=population.unit.rows)
        try:
            probe = partial(PublicProbe, capture, public_data, criterion, clipping, group)
            source = source_for(
                weights, clipping.method, rates, emphasis, probe, public_every, weight_budget, capture.device
            )
            mechanism = self._mechanism(clipping, source, float(noise_multiplier), population)
            kept = self.diagnostics = Diagnostics() if diagnostics else None
            watch = Watch(capture, judgement, independence, group.size)
            rescaling = Rescaling.of(clipping.method, weights, max_grad_norm, unit_clip=unit_clip, unit_gain=unit_gain)
            agree(capture, optimizer, group, mechanism, rates=rates, emphasis=emphasis, every=public_every, seed=seed)
            options = StepOptions(held_by(capture, group, kept), mean_loss, allow_unused, kept, observer, rescaling)
            step, ledger = PrivateStep(capture, clipping, source, randomness, mechanism, options), Ledger(mechanism)
            private = PrivateOptimizer(optimizer, step, ledger, log, watch)
            sigma, refuted = mechanism.noise_multiplier, refutation(source)
            judgement.note_setup(refuted=refuted, poisson=poisson_sampling, noise=sigma, seed=seed, observed=observed)
            self._run = Run(capture, step, private, ledger, log, watch, population, self.lineage, allow_large_delta)
        except BaseException:
            capture.detach()
            raise
        if isinstance(loader, PoissonLoader):
            loader.follow(lambda: ledger.steps, watch, besides=looks_besides or group.several)
            self._loader = loader
        return module, optimizer, loader

    is_compatible, save_checkpoint, load_checkpoint = is_compatible, save_checkpoint, load_checkpoint
    validate, get_compatible_module = validate, staticmethod(make_compatible)

    def _mechanism(
        self, clipping: Clipping, source: LayerWeights, noise_multiplier: float, population: Population
    ) -> Mechanism:
        return Mechanism(
            method=clipping.method.name,
            weight_source=source.name,
            clip_norm=clipping.clip_norm,
            sensitivity=clipping.sensitivity,
            noise_multiplier=noise_multiplier,
            accountant=self.accountant.name,
            statistic_share=source.share,
            neighbouring_relation=population.unit.relation(clipping.method.relation),
            **population.stated,
        )

    def _randomness(self, seed: int | None, population: Population) -> Randomness:
        """Of several processes, the same for all, but for draws among examples of their own."""
        group, rank = population.group, population.group.rank if population.sharded else None
        if seed is None and group.several:
            return Shared(group.secret(fresh_key(), copied=self._secure is None), rank)
        if seed is None:
            return self._secure or Entropy()
        if self._secure is not None:
            raise ValueError(f"seed is {seed}, but secure_mode=True draws noise that nobody can repeat. Choose one.")
        return Seeded(seed, rank)

    @on_all
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
    ) -> Three:
        """`make_private` with the smallest noise that keeps `epochs` passes over the loader within the target.

        A step that would pass the target raises before it happens. `options` are those of `make_private`.
        """
        if "noise_multiplier" in options:
            raise TypeError("make_private_with_epsilon computes noise_multiplier; leave it out, or use make_private")
        population = Population.of(data_loader, options["group"], sharded=bool(options.get("sharded")), compare=False)
        iterations = math.ceil(epochs * steps_per_pass(population.rate) - 1e-9)
        if iterations < 1:
            raise ValueError(f"epochs is {epochs}; it must be above 0")
        steps = steps_left(iterations, options | ({"looks_besides": True} if population.group.several else {}))
        check_delta(target_delta, population.size, allowed=bool(options.get("allow_large_delta")))
        target = {"target_epsilon": target_epsilon, "target_delta": target_delta}
        sigma = calibrate_noise(**target, sample_rate=population.rate, steps=steps, accountant=self.accountant.name)
        given: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": data_loader}
        three = self.make_private(**given, noise_multiplier=sigma, max_grad_norm=max_grad_norm, **options)
        ledger = self._attached.ledger
        ledger.target_epsilon, ledger.target_delta, ledger.planned_steps = target_epsilon, target_delta, steps
        return three

    def looking(self) -> AbstractContextManager[None]:
        """Inside, the loader hands out only what has not been looked at yet: run the loop as it is. No step is made."""
        return self._attached.watch.alone(None if self._loader is None else self._loader.looks)

    def still(self) -> AbstractContextManager[None]:
        """Where the loop draws random numbers: looks hold those inside still, and can compare. Else it does nothing."""
        return self._attached.watch.still()

    def plan(self, *, numbers: bool = False) -> Plan:
        """Which rule every module uses, and why. With `numbers` of the last batch, which are not private."""
        return self._attached.capture.plan(numbers=numbers)

    def detach(self) -> None:
        """Make the model and the optimizer ordinary again. What was trained stays, and so does what it cost."""
        run = self._attached
        run.capture.detach()
        run.watch.content.leave()
        run.record()
        run.held.leave()

    @property
    def observer(self) -> Observer:
        """Sees what is drawn and released, and may replace it; set one of your own before `make_private`."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        if self._run is not None:
            raise RuntimeError("this engine already made a training private; set the observer of a new one before that")
        self._observer = observer

    @property
    def attached(self) -> bool:
        """Whether `make_private` has been called."""
        return self._run is not None

    @property
    def steps(self) -> int:
        """How many private steps have been made."""
        return self._attached.ledger.steps

    @property
    def noise_multiplier(self) -> float:
        return self._attached.mechanism.noise_multiplier

    @property
    def mechanism(self) -> Mechanism:
        """One step as the accountant is told of it; `mechanism.event(steps)` can be composed with other events."""
        return self._attached.mechanism

    @property
    def layers(self) -> LayerMap:
        return self._attached.capture.layers

    @property
    def layer_weights(self) -> tuple[float, ...] | None:
        """The newest layer weights that are released; None for methods without, and for `batch`, which are private."""
        step = self._attached.step
        secret = step.source.reads_batch or not step.clipping.method.reweighted
        return None if secret else tuple(step.source.current().tolist())

    def get_epsilon(self, delta: float, *, quiet: bool = False) -> float:
        """The epsilon spent so far, and for the weights that training began with. Warns once, unless `quiet`, where
        that is not certified and no look that is due may tell: `lmdp.NotCertifiedWarning`."""
        return self._attached.epsilon(delta) if quiet else self._attached.told_epsilon(delta)

    def privacy_statement(self, delta: float) -> PrivacyStatement:
        """What the steps so far promise, whether that is certified, and what is not covered."""
        return self._attached.statement(delta)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model and optimizer: steps paid for, and the released weight statistic."""
        return self._attached.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that `state` was taken from; refuses one with other privacy parameters."""
        mine, theirs = (run := self._attached).identity, dict(state["identity"])
        if mine != theirs:
            differing = {k: (theirs.get(k), mine.get(k)) for k in {*mine, *theirs} if theirs.get(k) != mine.get(k)}
            raise ValueError(f"this state belongs to another run; saved and current values differ: {differing}")
        if run.ledger.steps:
            raise ValueError(f"this engine has made {run.ledger.steps} steps of its own. Load the state into a new one")
        run.go_on(state)

    @property
    def _attached(self) -> Run:
        if self._run is None:
            raise RuntimeError("this engine is not attached to a training yet. Call make_private first.")
        return self._run
