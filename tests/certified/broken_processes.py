"""Several processes: what one of them promises is not what all of them release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset

import lmdp
from tests.certified.case import BATCH, CERTIFIED, EXAMPLES, Outcome, Table, Training, private
from tests.certified.hub import positions, transformer
from tests.certified.parts import Texts, classify, perceptron, vectors
from tests.certified.ranks import forked, ranks

broken = Table()


@broken("Two ranks average the gradients that each releases.", moves="each prints 3.59, truth 4.10", taints=False)
def ranks_average_released_gradients(tmp: Path) -> Outcome:
    def work(rank: int) -> lmdp.PrivacyEngine:
        alone = [dist.new_group([each]) for each in range(2)]
        training = private(perceptron(), vectors(), group=alone[rank])

        def average(*_: Any) -> None:
            for p in training.model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()  # type: ignore[operator]

        training.optimizer.register_step_pre_hook(average)
        return training.run(classify)

    return ranks(work, tmp)


@broken("DistributedDataParallel is put around a private model.", taints=False)
def ddp_after_make_private(tmp: Path) -> Outcome:
    def work(rank: int) -> lmdp.PrivacyEngine:
        training = private(perceptron(), vectors())
        training.model = DistributedDataParallel(training.model)
        return training.run(classify)

    return ranks(work, tmp)


@broken("A model in DistributedDataParallel is made private.", taints=False)
def ddp_before_make_private(tmp: Path) -> Outcome:
    return ranks(lambda rank: private(DistributedDataParallel(perceptron()), vectors()).run(classify), tmp)


@broken("Accelerate prepares a private training for two processes.", taints=False)
def accelerate_on_two_ranks(tmp: Path) -> Outcome:
    from accelerate import Accelerator

    def work(rank: int) -> lmdp.PrivacyEngine:
        training = private(perceptron(), vectors())
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        training.model = accelerator.prepare(training.model)
        for batch in training.loader:
            training.optimizer.zero_grad()
            accelerator.backward(classify(training.model, batch))
            training.optimizer.step()
        return training.engine

    return ranks(work, tmp, grouped=False)


@broken("Lightning trains a private model on two ranks.", taints=False)
def lightning_on_two_ranks(tmp: Path) -> Outcome:
    import lightning as L
    from lightning.fabric.plugins.environments import LightningEnvironment

    def work(rank: int) -> lmdp.PrivacyEngine:
        class Lit(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = perceptron()

            def forward(self, x: Tensor) -> Tensor:
                output: Tensor = self.model(x)
                return output

            def training_step(self, batch: Any, _: int) -> Tensor:
                return classify(self, batch)

            def configure_optimizers(self) -> Any:
                return training.optimizer

        lit = Lit()
        training = private(lit, vectors())
        quiet = {"logger": False, "enable_checkpointing": False}
        quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
        spread = {"accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
        strategy = L.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
        plugins = [LightningEnvironment()]
        trainer = L.Trainer(max_epochs=1, strategy=strategy, plugins=plugins, default_root_dir=tmp, **quiet, **spread)
        trainer.fit(lit, training.loader)
        return training.engine

    return ranks(work, tmp, grouped=False)


@broken("The Trainer of transformers trains a private model on two ranks.", taints=False)
def trainer_on_two_ranks(tmp: Path) -> Outcome:
    from transformers import Trainer, TrainingArguments

    def work(rank: int) -> lmdp.PrivacyEngine:
        class Positioned(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = transformer("BertForSequenceClassification")

            def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
                told = {"attention_mask": attention_mask, "position_ids": positions(input_ids)}
                return {"loss": self.model(input_ids, labels=labels, **told).loss}

        class Private(Trainer):
            def get_train_dataloader(self) -> Any:
                return training.loader

        training = private(Positioned(), Texts())
        given = {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 3, "disable_tqdm": True}
        args = TrainingArguments(output_dir=str(tmp / str(rank)), max_grad_norm=0.0, **given)
        Private(training.model, args, optimizers=(training.optimizer, None)).train()
        return training.engine

    return ranks(work, tmp, grouped=False)


@broken("Two ranks have the same data in another order, so that somebody is drawn twice.", taints=False)
def other_order_on_each_rank(tmp: Path) -> Outcome:
    def work(rank: int) -> lmdp.PrivacyEngine:
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(rank)).tolist()
        return private(perceptron(), Subset(vectors(), order)).run(classify)

    return ranks(work, tmp)


@broken("Two ranks are told that their data are parts, and have the whole.", taints=False)
def whole_data_as_parts(tmp: Path) -> Outcome:
    return ranks(lambda rank: private(perceptron(), vectors(), sharded=True).run(classify), tmp)


def sharded(tmp: Path, world: int) -> Outcome:
    def work(rank: int) -> lmdp.PrivacyEngine:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        training = private(perceptron(), vectors())
        fully_shard(training.model, mesh=init_device_mesh("cpu", (world,)))
        return training.run(classify)

    return ranks(work, tmp, world=world)


@broken("fully_shard after make_private, on one rank: the model stays untrained.", taints=False)
def fully_shard_on_one_rank(tmp: Path) -> Outcome:
    return sharded(tmp, 1)


@broken("fully_shard after make_private, on two ranks: the model stays untrained.", taints=False)
def fully_shard_on_two_ranks(tmp: Path) -> Outcome:
    return sharded(tmp, 2)


def train_plainly(rank: int, state: dict[str, Tensor], data: Any) -> None:
    """What a worker of Hogwild does: steps of its own on the shared parameters."""
    torch.set_num_threads(1)
    model = perceptron()
    model.load_state_dict(state, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(3):
        optimizer.zero_grad()
        classify(model, data[:BATCH]).backward()
        optimizer.step()


def shared() -> tuple[Training, dict[str, Tensor], list[Tensor]]:
    """A private training in shared memory, its state, and a copy of what that was."""
    training = private(perceptron(), vectors())
    state = training.model.share_memory().state_dict()
    return training, state, [tensor.clone() for tensor in state.values()]


def all_changed(state: dict[str, Tensor], before: list[Tensor]) -> bool:
    return not any(torch.equal(a, b) for a, b in zip(state.values(), before))


@broken("Hogwild: processes train the shared model after make_private, and the parent says 0 steps.", taints=False)
def hogwild(_: Path) -> lmdp.PrivacyEngine:
    training, state, before = shared()
    workers = [mp.get_context("fork").Process(target=train_plainly, args=(i, state, vectors())) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert all_changed(state, before)
    return training.engine


@broken("Hogwild with the private optimizer: forks step it on the shared model.", taints=False)
def hogwild_with_the_private_optimizer(tmp: Path) -> lmdp.PrivacyEngine | Outcome:
    training, state, before = shared()
    outcome = forked([lambda: training.run(classify)] * 2, tmp)
    if outcome.kind != CERTIFIED:
        return outcome
    assert all_changed(state, before)
    return training.engine


@broken(
    "mp.spawn after make_private: the children train the shared model without any privacy.", taints=False, slow=True
)
def spawned(_: Path) -> lmdp.PrivacyEngine:
    training, state, before = shared()
    mp.spawn(train_plainly, args=(state, vectors()), nprocs=2)
    assert all_changed(state, before)
    return training.engine


@broken("After a fork, parent and child go on with the same training, and each counts its own steps.", taints=False)
def fork_in_the_middle(tmp: Path) -> Outcome:
    training = private(perceptron(), vectors())
    training.run(classify, passes=2)
    return forked([lambda: go_on(training)], tmp)


def go_on(training: Training) -> lmdp.PrivacyEngine:
    return training.run(classify, passes=2)
