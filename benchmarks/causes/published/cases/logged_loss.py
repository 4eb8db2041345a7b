"""A loss that is read for the log at the end of each step, while the next batch could be made."""

from __future__ import annotations

import torch

from benchmarks.causes.published import Models, Published, Step
from benchmarks.causes.published.parts import TokenLoss, adamw, half, sized
from benchmarks.models import Context, Gpt, made

CASE = Published(
    source="meta-pytorch/torchtune#522",
    title="loss.item() in each step, though a line is logged only now and then",
    cause=("synchron", "waits for", "wait for", ".item()"),
    place=("log()",),
    fix="Read the loss only when it is logged",
    gain="a wait of 40 to 50 ms a step (LoRA on Llama 2 7B)",
    device="cuda",
)


def log(value: torch.Tensor, kept: list[float]) -> None:
    kept.append(value.item())


def collated(texts: list[list[str]], words: dict[str, int], length: int) -> torch.Tensor:
    """Tokens of texts, cut off at a length, as the trainer's own process makes them."""
    rows = [[words[word] for word in text][:length] for text in texts]
    tokens = torch.tensor(rows)
    return tokens.pin_memory() if torch.cuda.is_available() else tokens


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, depth = sized(context, 1024, 64, 32), sized(context, 8, 3, 1)
    length, batch = sized(context, 512, 64, 8), sized(context, 16, 4, 2)
    words = {f"word{number}": number for number in range(sized(context, 8192, 512, 64))}
    model = made(context, lambda: Gpt(width, depth, length, len(words))).to(half(context))
    spelled = [*words]
    texts = [
        [spelled[(7 * number + row) % len(spelled)] for number in range(4 * length)]
        for row in range(batch)
    ]
    criterion, optimizer = TokenLoss(), adamw(model.parameters())
    kept: list[float] = []

    def step() -> torch.Tensor:
        tokens = collated(texts, words, length).to(context.device, non_blocking=True)
        optimizer.zero_grad()
        loss = criterion(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        if not fixed:
            log(loss, kept)
        return loss.detach()

    return step, {"": model, "loss": criterion}
