"""What would break the account is refused by name, and the remedy works when it is followed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers import EarlyStoppingCallback, TrainingArguments

from lmdp.integrations import DPTrainer, Privacy
from lmdp.integrations.arguments import REFUSALS, adapted
from tests.certified.hub import transformer
from tests.certified.parts import Texts
from tests.integrations.parts import arguments, privacy, trainer

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **EVALUATED}
PUBLIC = {"private": privacy(public_evaluation=True)}


class TwoProcesses(TrainingArguments):  # type: ignore[misc]
    world_size = 2


class TwoGPUs(TrainingArguments):  # type: ignore[misc]
    n_gpu = 2


class OfOld(TrainingArguments):  # type: ignore[misc]
    group_by_length = True


class Sharded(TrainingArguments):  # type: ignore[misc]
    def __post_init__(self) -> None:
        super().__post_init__()
        self.fsdp = "full_shard"


class Sped(TrainingArguments):  # type: ignore[misc]
    def __post_init__(self) -> None:
        super().__post_init__()
        self.deepspeed = {"zero_optimization": {}}


class Halved(TrainingArguments):  # type: ignore[misc]
    """As where there is a device for it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.fp16 = True


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_grad_norm": ({"max_grad_norm": 0.3}, {"private": privacy(max_grad_norm=0.3)}),
    "fp16": ({"kind": Halved}, {"bf16": True}),
    "group_by_length": ({"kind": OfOld}, {}),
    "train_sampling_strategy": ({"train_sampling_strategy": "group_by_length"}, {}),
    "batch_sampler": ({"kind": SentenceTransformerTrainingArguments, "batch_sampler": "no_duplicates"}, {}),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {"private": privacy(max_physical_batch_size=8)}),
    "include_num_input_tokens_seen": ({"include_num_input_tokens_seen": "all"}, {}),
    "lr_scheduler_type": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVALUATED},
        {"lr_scheduler_type": "cosine"},
    ),
    "load_best_model_at_end": (BEST, {**BEST, **PUBLIC}),
    "save_strategy": (
        {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss"},
        {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "loss", **PUBLIC},
    ),
    "optim": ({"optim": "lomo"}, {"optim": "adamw_torch"}),
    "torch_compile": ({"torch_compile": True}, {}),
    "deepspeed": ({"kind": Sped}, {}),
    "fsdp": ({"kind": Sharded}, {}),
    "world_size": ({"kind": TwoProcesses}, {}),
    "n_gpu": ({"kind": TwoGPUs}, {}),
}


def test_every_refusal_is_tried() -> None:
    assert {refusal.setting for refusal in REFUSALS} == set(BROKEN)


@pytest.mark.parametrize("setting", BROKEN)
def test_a_setting_that_breaks_the_account_is_refused_by_name_and_its_remedy_trains(
    tmp_path: Path, setting: str
) -> None:
    broken, remedied = BROKEN[setting]
    with pytest.raises(ValueError, match=rf"TrainingArguments\({setting}=") as refused:
        adapted(arguments(tmp_path, **broken), privacy())
    assert str(refused.value).count(". ") >= 1
    if not remedied:
        return  # it is left out, as in all other trainings of these tests
    given = {"given": {"eval_dataset": Texts(8)}} if "eval_strategy" in remedied else {}
    training = trainer(tmp_path, max_steps=2, **remedied, **given)
    training.train()
    assert training.privacy_statement.steps == 2


def test_the_trainer_itself_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TrainingArguments\(auto_find_batch_size=True\)"):
        trainer(tmp_path, auto_find_batch_size=True)


def test_the_arguments_of_the_caller_stay_as_they_are(tmp_path: Path) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=4, per_device_train_batch_size=4)
    new, changed = adapted(args, privacy())
    assert (args.gradient_accumulation_steps, args.per_device_train_batch_size, args.max_grad_norm) == (4, 4, 1.0)
    assert (new.gradient_accumulation_steps, new.per_device_train_batch_size) == (1, 16)
    assert changed.max_physical_batch_size == 4


def test_stopping_by_a_measurement_is_refused_unless_it_is_public(tmp_path: Path) -> None:
    def training(**changes: Any) -> Any:
        settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", "max_steps": 2}
        given = {"eval_dataset": Texts(8)}
        return trainer(tmp_path, callbacks=[EarlyStoppingCallback(3)], given=given, **settings, **changes)

    with pytest.raises(ValueError, match=r"EarlyStoppingCallback.*public_evaluation=True"):
        training().train()
    training(**PUBLIC, save_strategy="steps", save_steps=1, load_best_model_at_end=True).train()


def test_a_schedule_of_ones_own_that_follows_a_measurement_is_refused(tmp_path: Path) -> None:
    model = transformer("BertForSequenceClassification")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau.*lr_scheduler_type='cosine'"):
        trainer(tmp_path, model=model, given={"optimizers": (optimizer, plateau)}).train()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    trainer(tmp_path, model=model, given={"optimizers": (optimizer, cosine)}, max_steps=2).train()


class OwnLoader(DPTrainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([Texts(8)[0]])


def test_a_loader_of_ones_own_and_a_stream_are_refused_with_what_to_pass(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": transformer("BertForSequenceClassification"), "privacy": privacy()}
    given["args"] = arguments(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"OwnLoader\.get_train_dataloader returns a DataLoader.*pass train_dataset="):
        OwnLoader(train_dataset=Texts(), **given).train()
    with pytest.raises(ValueError, match=r"train_dataset is a Stream.*with __len__ and __getitem__"):
        trainer(tmp_path, data=Stream(), max_steps=2).train()


def test_a_search_for_hyperparameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spends more than any of the trainings"):
        trainer(tmp_path).hyperparameter_search()
    with pytest.raises(ValueError, match="spends more than any of the trainings"):
        trainer(tmp_path).train(trial={"learning_rate": 1.0})


def test_privacy_without_a_target_or_with_options_that_are_not_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="neither target_epsilon nor noise_multiplier"):
        Privacy(target_delta=1e-5, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"options=.*'method'.*beside options"):
        privacy(options={"method": "dpsgd"})
    with pytest.raises(ValueError, match=r"options=.*'poisson_sampling'.*Leave it out"):
        privacy(options={"poisson_sampling": False})
    with pytest.raises(TypeError, match="privacy"):
        DPTrainer(model=transformer("BertForSequenceClassification"))


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_libraries_of_others_are_opened_only_when_they_are_asked_for() -> None:
    code = (
        "import sys, lmdp; lmdp.integrations.Privacy; "
        "assert not {'transformers', 'sentence_transformers', 'lightning', 'accelerate'} & set(sys.modules)"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name, package", [("DPTrainer", "transformers"), ("DPSentenceTransformerTrainer", "sentence_transformers")]
)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(name: str, package: str) -> None:
    done = run(f"import sys; sys.modules['{package}'] = None; import lmdp; lmdp.integrations.{name}")
    assert f"lmdp.integrations.{name} needs" in done.stderr
    assert f"pip install '{package.replace('_', '-')}" in done.stderr
