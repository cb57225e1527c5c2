"""What carries no noise is trained, saved with the model, or decides what happens next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lmdp
from tests.certified.case import BATCH, Table, Training, private
from tests.certified.parts import CLASSES, FEATURES, WIDTH, classify, perceptron, vectors

broken = Table()


def rate(model: nn.Module, parameters: Any = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.01)


def run_with(training: Training, second: torch.optim.Optimizer) -> lmdp.PrivacyEngine:
    """Both optimizers step, as in a loop with two."""
    for batch in training.loader:
        training.optimizer.zero_grad()
        second.zero_grad()
        classify(training.model, batch).backward()
        training.optimizer.step()
        second.step()
    return training.engine


@broken("Layers frozen at make_private are unfrozen later, under a second optimizer.", taints=False)
def unfrozen_later_under_a_second_optimizer(_: Path) -> lmdp.PrivacyEngine:
    model = perceptron()
    backbone = next(iter(model.children()))
    backbone.requires_grad_(False)
    training = private(model, vectors())
    training.run(classify, passes=2)
    backbone.requires_grad_(True)
    return run_with(training, rate(backbone))


@broken("A second optimizer steps the same parameters, on gradients of a copy of the model.", taints=False)
def second_optimizer_on_the_same_parameters(_: Path) -> lmdp.PrivacyEngine:
    training, other = private(perceptron(), vectors()), perceptron()
    second = rate(training.model)
    for batch in training.loader:
        training.optimizer.zero_grad()
        classify(training.model, batch).backward()
        training.optimizer.step()
        other.load_state_dict(training.model.state_dict())
        other.zero_grad()
        classify(other, batch).backward()
        for p, q in zip(training.model.parameters(), other.parameters()):
            p.grad = q.grad
        second.step()
    return training.engine


@broken("An adapter of peft is added after make_private, and trained by a second optimizer.", taints=False)
def adapter_added_later(_: Path) -> lmdp.PrivacyEngine:
    import peft

    training = private(perceptron(), vectors())
    training.run(classify, passes=2)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["2"]), training.model)
    adapter = [p for name, p in training.model.named_parameters() if "lora" in name]
    training.model.requires_grad_(True)
    return run_with(training, rate(training.model, adapter))


@broken("A new head is put into the model after make_private, and trained by a second optimizer.", taints=False)
def head_replaced_later(_: Path) -> lmdp.PrivacyEngine:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    training = private(model, vectors(), allow_unused=True)
    training.run(classify, passes=2)
    model[2] = nn.Linear(WIDTH, CLASSES)
    return run_with(training, rate(model[2]))


class ActNorm(nn.Module):
    """Its first batch decides its shift, as in flows."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(FEATURES, FEATURES)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready and self.training:
            self.shift.bias.data.copy_(-x.mean(0))
            self.ready = True
        shifted: Tensor = self.shift(x)
        return shifted


@broken("A data-dependent initialisation (ActNorm) writes the first batch into a bias.", moves="0.02 to -5000")
def data_dependent_initialisation(_: Path) -> lmdp.PrivacyEngine:
    return private(nn.Sequential(ActNorm(), nn.Linear(FEATURES, CLASSES)), vectors()).run(classify)


class Codebook(nn.Module):
    """Codes that nothing chooses are restarted at encodings of the batch; a lookup that is trained besides."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = (
            nn.Linear(FEATURES, WIDTH),
            nn.Embedding(2 * CLASSES, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encode(x)
        chosen = torch.cdist(encoded.detach(), self.codes.weight.detach()).argmin(1)
        if self.training and len(x):
            unused = torch.ones(len(self.codes.weight), dtype=torch.bool).index_fill(0, chosen, False).nonzero()[:, 0]
            self.codes.weight.data[unused] = encoded.detach()[:1]
        code = self.codes(chosen)
        logits: Tensor = self.decode(encoded + code)
        return logits


@broken("Rows of a VQ codebook are restarted at private encodings.")
def vq_codebook(_: Path) -> lmdp.PrivacyEngine:
    return private(Codebook(), vectors()).run(classify)


@broken("A VQ codebook in a buffer follows the mean of the private encodings.")
def vq_codebook_in_a_buffer(_: Path) -> lmdp.PrivacyEngine:
    class Moving(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES))
            self.register_buffer("codes", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            encoded = self[0](x)
            if self.training and len(x):
                self.codes.mul_(0.9).add_(encoded.detach().mean(0), alpha=0.1)
            logits: Tensor = self[1](encoded)
            return logits

    return private(Moving(), vectors()).run(classify)


def loaded_back(tmp: Path) -> Training:
    training, other = private(perceptron(), vectors()), perceptron()
    training.run(classify, passes=2)
    optimizer = rate(other)
    for _step in range(3):
        optimizer.zero_grad()
        classify(other, vectors()[:BATCH]).backward()
        optimizer.step()
    torch.save(other.state_dict(), tmp / "elsewhere.pt")
    training.model.load_state_dict(torch.load(tmp / "elsewhere.pt"))
    return training


@broken("Weights trained elsewhere, without noise, are loaded back.", taints=False)
def weights_loaded_back(tmp: Path) -> lmdp.PrivacyEngine:
    return loaded_back(tmp).engine


@broken("Weights trained elsewhere, without noise, are loaded back, and private steps go on from there.", taints=False)
def weights_loaded_back_and_trained_on(tmp: Path) -> lmdp.PrivacyEngine:
    return loaded_back(tmp).run(classify, passes=2)


@broken("get_extra_state returns encodings of private examples, which state_dict() saves.")
def extra_state(_: Path) -> lmdp.PrivacyEngine:
    class Remembering(nn.Sequential):
        memory: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = super().forward(x)
            self.memory = output.detach()
            return output

        def get_extra_state(self) -> Any:
            return self.memory

        def set_extra_state(self, state: Any) -> None:
            self.memory = state

    return private(Remembering(*perceptron().children()), vectors()).run(classify)


@broken("A buffer changed during training is put back before the statement is made, and saved before that.")
def buffer_restored_before_the_statement(tmp: Path) -> lmdp.PrivacyEngine:
    class Counting(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*perceptron().children())
            self.register_buffer("mean", torch.zeros(FEATURES))

        def forward(self, x: Tensor) -> Tensor:
            if self.training and len(x):
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            output: Tensor = super().forward(x)
            return output

    training = private(Counting(), vectors())
    engine = training.run(classify)
    torch.save(training.model.state_dict(), tmp / "published.pt")
    training.model.get_buffer("mean").zero_()
    return engine


@broken("A parameter is written by hand after a step.", taints=False)
def parameter_written_after_a_step(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())

    def write(_: Tensor) -> None:
        with torch.no_grad():
            next(training.model.parameters())[0] = vectors()[0][0]

    return training.run(classify, after_step=write)


@broken("The released gradient is written over before the optimizer uses it.", taints=False)
def gradient_written_over(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())

    def put_back(optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in training.model.parameters():
            p.grad = torch.full_like(p, float(vectors()[0][0].mean()))

    training.optimizer.register_step_pre_hook(put_back)
    return training.run(classify)


@broken("A learning-rate scheduler is fed by the training loss.", taints=False)
def scheduler_fed_by_the_training_loss(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=0, threshold=0.5)
    return training.run(classify, after_step=lambda loss: scheduler.step(float(loss)))


@broken("The same model is made private a second time, under a new engine.", taints=False)
def the_same_model_again(_: Path) -> lmdp.PrivacyEngine:
    first = private(perceptron(), vectors())
    first.run(classify, passes=2).detach()
    return private(first.model, vectors()).run(classify, passes=2)


@broken("delta is 0.5 for a dataset of thousands of examples.", delta=0.5, taints=False)
def delta_of_one_half(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), vectors()).run(classify)


@broken("delta is larger than one in the number of examples.", delta=1 / 32, taints=False)
def delta_above_one_in_n(_: Path) -> lmdp.PrivacyEngine:
    return private(perceptron(), vectors()).run(classify)


@broken("A large buffer is put into the order of private losses.")
def buffer_reordered(_: Path) -> lmdp.PrivacyEngine:
    model = perceptron()
    model.register_buffer("order", torch.arange(9000))
    training = private(model, vectors())
    training.run(classify)
    model.get_buffer("order").copy_(torch.randperm(9000))
    return training.engine


@broken("The model begins to save what it keeps of private data, in the middle of training.")
def saved_later(_: Path) -> lmdp.PrivacyEngine:
    class Keeping(nn.Sequential):
        kept: Tensor | None = None

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            state = super().state_dict(*args, **kwargs)
            return state if self.kept is None else {**state, "kept": self.kept}

    model = Keeping(*perceptron().children())
    training = private(model, vectors())
    training.run(classify, after_step=lambda loss: setattr(model, "kept", loss))
    return training.engine


@broken("A hook of the optimizer writes the parameters before its step.")
def parameters_written_in_a_hook(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())

    @torch.no_grad()
    def write(*_: Any) -> None:
        for parameter in training.model.parameters():
            parameter.add_(0.01)

    training.optimizer.register_step_pre_hook(write)
    return training.run(classify)


@broken("The optimizer's momentum is written over between two steps.")
def momentum_written_over(_: Path) -> lmdp.PrivacyEngine:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    training = private(model, vectors(), optimizer=optimizer)

    def write(_: Tensor) -> None:
        for kept in optimizer.state.values():
            kept["momentum_buffer"].add_(1.0)

    return training.run(classify, after_step=write)


def continued(state: dict[str, Any], weights: dict[str, Tensor], **options: Any) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), **options)
    training.model.load_state_dict(weights)
    training.engine.load_state_dict(state)
    return training.run(classify)


@broken("A run that nobody looked at is saved, and goes on with looks.")
def unlooked_and_resumed(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors(), check_mixing=False)
    training.run(classify)
    return continued(training.engine.state_dict(), training.model.state_dict())


@broken("The state of a run is saved before the weights that it goes on with.")
def state_of_an_earlier_step(_: Path) -> lmdp.PrivacyEngine:
    training = private(perceptron(), vectors())
    training.run(classify)
    state = training.engine.state_dict()
    training.run(classify, passes=3)
    weights = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    return continued(state, weights)
