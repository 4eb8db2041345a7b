"""loss.item() in each step, though a line is logged only now and then."""

import torch

from benchmarks.causes.published.parts import Models, Published, Step, TokenLoss, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="meta-pytorch/torchtune#522",
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
    model, tokens, _ = gpt(context, (1024, 8, 512, 16, 8192), (64, 3, 64, 4, 512))
    words = {f"word{number}": number for number in range(model.vocabulary)}
    spelled, (batch, length) = [*words], tokens.shape
    texts = [
        [spelled[(7 * number + row) % len(spelled)] for number in range(4 * length)]
        for row in range(batch)
    ]
    criterion, kept = TokenLoss(), []

    def loss() -> torch.Tensor:
        tokens = collated(texts, words, length).to(context.device, non_blocking=True)
        return criterion(model(tokens[:, :-1]), tokens[:, 1:])

    after = (lambda _: None) if fixed else (lambda value: log(value, kept))
    return stepping(model, loss, after=after), {"": model, "loss": criterion}
