"""A conditional random field that reads the score of the right tags word by word."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="mead-ml/mead-baseline#225",
    because="The score of the right tags indexes two tables in a loop over the words.",
    cause=("loop", "one by one", "launch", "small kernels", "index gather"),
    half=("index", "python"),
    place=("crf", "score()", "crf.*"),
    fix="Gather the scores of all words at once; pairs of tags by unfold",
    gain="34.6 to 21.0 s an epoch",
    remains=True,
)


class Crf(nn.Module):
    def __init__(self, tags: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.transitions = nn.Parameter(0.1 * torch.randn(tags, tags))

    def score(self, x: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            words = x.gather(2, tags[..., None])[..., 0]
            pairs = tags.unfold(0, 2, 1)
            steps = self.transitions[pairs[..., 1], pairs[..., 0]]
            return (words * mask).sum(0) + (steps * mask[1:]).sum(0)
        rows = torch.arange(x.shape[1], device=x.device)
        total = x[0, rows, tags[0]] * mask[0]
        for word in range(1, len(x)):
            step = self.transitions[tags[word], tags[word - 1]]
            total = total + (step + x[word, rows, tags[word]]) * mask[word]
        return total

    def partition(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        alpha = x[0]
        for word in range(1, len(x)):
            following = (alpha[:, None] + self.transitions).logsumexp(2) + x[word]
            alpha = torch.where(mask[word, :, None] > 0, following, alpha)
        return alpha.logsumexp(1)

    def forward(self, x: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.partition(x, mask) - self.score(x, tags, mask)).mean()


class Tagger(nn.Module):
    def __init__(self, words: int, width: int, tags: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width // 2, num_layers=2, bidirectional=True)
        self.head = nn.Linear(width, tags)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.words(words))[0])


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, words, tags = sized(context, 512, 128, 16), sized(context, 20000, 2000, 50), 20
    length, batch = sized(context, 64, 40, 6), sized(context, 64, 16, 3)
    model, crf = (
        made(context, lambda: Tagger(words, width, tags)),
        made(context, lambda: Crf(tags, fixed)),
    )
    text, right = context.randint(words, length, batch), context.randint(tags, length, batch)
    lengths = context.randint(length // 2, batch) + length // 2
    mask = (torch.arange(length, device=context.device)[:, None] < lengths).float()
    both = nn.ModuleDict({"tagger": model, "crf": crf})

    def loss() -> torch.Tensor:
        value: torch.Tensor = crf(model(text), right, mask)
        return value

    return stepping(both, loss), {"tagger": model, "crf": crf}
