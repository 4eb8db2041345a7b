"""Log-probabilities of the whole vocabulary in a policy loss that needs one a token."""

import torch
from torch import nn

from benchmarks.causes.published.parts import Models, Published, Step, gpt, stepping
from benchmarks.models import Context

CASE = Published(
    source="allenai/open-instruct#584",
    because="log_softmax makes a second tensor as large as the logits, and one in all is read.",
    cause=("log_softmax", "logsumexp", "logits vocabulary", "large logits", "vocabulary softmax"),
    half=("softmax", "kept", "cast", "logits"),
    place=("policy", "logprobs()", "policy.*"),
    fix="Gather the logits of the tokens and subtract logsumexp (there: the same, compiled)",
    gain="2.1 GB less for a batch of 16 texts of 1,024 tokens; the author's subject is memory",
)


class PolicyLoss(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.fixed:
            chosen = logits.gather(-1, tokens[..., None])[..., 0]
            return chosen - logits.logsumexp(-1)
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def forward(
        self, logits: torch.Tensor, tokens: torch.Tensor, old: torch.Tensor, gains: torch.Tensor
    ) -> torch.Tensor:
        ratio = (self.logprobs(logits.float(), tokens) - old).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * gains, clipped * gains).mean()


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    model, tokens, follow = gpt(context, (1024, 6, 512, 8, 32768), (96, 2, 64, 2, 4000))
    loss = PolicyLoss(fixed)
    gains = context.randn(len(tokens), 1)
    with torch.no_grad():
        old = PolicyLoss(True).logprobs(model(tokens).float(), follow)

    def improved() -> torch.Tensor:
        value: torch.Tensor = loss(model(tokens), follow, old, gains)
        return value

    return stepping(model, improved), {"": model, "policy": loss}
