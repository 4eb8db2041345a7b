"""An LSTM over a packed sequence, where the padded one is several times faster."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.causes.published.parts import Models, Published, Step, sized, stepping
from benchmarks.models import Context, made

CASE = Published(
    source="pytorch/pytorch#149194",
    because="A packed sequence goes through the LSTM with a batch of another size at each step.",
    cause=("packed", "packedsequence", "pad batch", "variable length", "different lengths"),
    half=("lstm", "small kernels", "launch", "each time step"),
    place=("lstm", "encode()"),
    fix="Run the padded batch; one direction needs no packing, the loss leaves the padding out",
    gain="forward 15, backward 4 times slower packed than padded at 100 words",
)


class Tagger(nn.Module):
    def __init__(self, words: int, width: int, tags: int, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.words = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, tags))

    def encode(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            return self.lstm(x)[0]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found = pad_packed_sequence(self.lstm(packed)[0], True, total_length=x.shape[1])
        return found[0]

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.mix(self.encode(self.words(words), lengths))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, words, tags = sized(context, 512, 96, 16), sized(context, 20000, 2000, 50), 30
    length, batch = sized(context, 200, 60, 6), sized(context, 64, 16, 3)
    model = made(context, lambda: Tagger(words, width, tags, fixed))
    text, right = context.randint(words, batch, length), context.randint(tags, batch, length)
    lengths = torch.linspace(length // 3, length, batch).long()[torch.randperm(batch)]
    outside = torch.arange(length) >= lengths[:, None]
    right[outside.to(context.device)] = -100

    def loss() -> torch.Tensor:
        logits = model(text, lengths)
        return functional.cross_entropy(logits.flatten(0, 1), right.flatten())

    return stepping(model, loss), {"": model}
