"""`DPTrainer`: the Trainer of transformers, private."""

from __future__ import annotations

from transformers import Trainer

from lmdp.integrations.training import PrivateTraining


class DPTrainer(PrivateTraining, Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains privately, keeps the account, and stops at the target epsilon.

        trainer = DPTrainer(
            model=model, args=args, train_dataset=data,
            privacy=Privacy(target_epsilon=8, target_delta=1e-5, max_grad_norm=1.0, method="lm", layers="block"))
        trainer.train()
        print(trainer.privacy_statement)

    Its steps are the engine's steps, in `max_steps`, schedules, logs and checkpoints. Batches are Poisson draws of
    `per_device_train_batch_size` x `gradient_accumulation_steps` examples on average.
    """
