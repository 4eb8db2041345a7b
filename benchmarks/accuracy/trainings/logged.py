"""Each 25 steps the norms of all weights and gradients are computed and written down."""

from __future__ import annotations

import torch
from torch.nn import functional

from benchmarks.accuracy.trainings.clock import DEVICE, Clock, sized
from benchmarks.accuracy.trainings.parts import Language


def train() -> None:
    torch.manual_seed(0)
    model = Language(sized(64, 256), layers=4).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    clock = Clock(500, period=25)
    for number in range(1, clock.steps + 1):
        ids = torch.randint(512, (8, 33), device=DEVICE)
        logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if number % 25 == 0:
            with clock.part("logging"):
                noted = {"loss": loss.item()}
                for name, weight in model.named_parameters():
                    noted[f"norm of {name}"] = weight.norm().item()
                    noted[f"histogram of {name}"] = float(weight.detach().cpu().histc().std())
                    assert weight.grad is not None
                    noted[f"gradient of {name}"] = weight.grad.norm().item()
        with clock.part("optimizer"):
            optimizer.step()
        clock.step()
        optimizer.zero_grad()
    print(f"loss {noted['loss']:.4f}")


if __name__ == "__main__":
    train()
