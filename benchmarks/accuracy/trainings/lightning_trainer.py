"""Lightning's ``Trainer``, with a validation in between."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.accuracy.trainings.clock import DEVICE, Clock
from benchmarks.accuracy.trainings.parts import WIDTH, Files, perceptron


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = perceptron(WIDTH, inputs=256, outputs=10, layers=6)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("held out", functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Clocked(lightning.Callback):
    """Notes the end of each step."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.step()


def train() -> None:
    torch.manual_seed(0)
    clock = Clock(400, period=100)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="gpu" if DEVICE == "cuda" else "cpu",
            devices=1,
            max_steps=clock.steps,
            val_check_interval=100,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[Clocked(clock)],
        )
        trainer.fit(
            Classifier(),
            DataLoader(Files(12800, lambda _: 0.00005), 32),
            DataLoader(Files(1600, lambda _: 0.00005), 32),
        )


if __name__ == "__main__":
    train()
