"""Hugging Face's ``Trainer``, with an evaluation in between."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + 64) % 500
        return {"input_ids": ids, "labels": ids}


class Clocked(TrainerCallback):
    """Notes the end of each optimizer step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.clock.step()


def train() -> None:
    width = sized(64, 256)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=width, n_layer=2, n_head=2)
    clock = Clock(400, period=100)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            max_steps=clock.steps + 1,
            per_device_train_batch_size=8,
            eval_strategy="steps",
            eval_steps=100,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            use_cpu=DEVICE == "cpu",
            disable_tqdm=True,
        )
        Trainer(
            GPT2LMHeadModel(config),
            options,
            train_dataset=Texts(),
            eval_dataset=torch.utils.data.Subset(Texts(), range(400)),
            callbacks=[Clocked(clock)],
        ).train()


if __name__ == "__main__":
    train()
