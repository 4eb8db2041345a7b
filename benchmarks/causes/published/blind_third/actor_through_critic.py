"""A discrete actor whose loss is differentiated through the critics as well."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="vwxyzjn/cleanrl#270",
    because="The actor's loss leaves gradients in both critics, and nobody reads them.",
    cause=(
        "gradient nobody", "gradient unused", "unused", "no_grad", "never read", "not read",
        "dropped", "requires_grad", "detach", "overwritten", "thrown away",
    ),
    half=("backward", "gradient"),
    place=("update_actor()", "q1", "q2", "q1.**", "q2.**", "actor_loss()"),
    fix="Values for the actor without a graph: torch.no_grad()",
    gain="about 77 to 94 steps a second, environment included",
)  # fmt: skip


class Network(nn.Module):
    def __init__(self, width: int, actions: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, width, 8, stride=4), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(98 * width, 512), nn.ReLU(), nn.Linear(512, actions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    width, batch, actions = sized(context, 64, 16, 2), sized(context, 512, 16, 2), 6
    models = {
        name: made(context, lambda: Network(width, actions)) for name in ("actor", "q1", "q2")
    }
    actor, q1, q2 = models.values()
    both = nn.ModuleList((q1, q2))
    critics, policy = adamw(both.parameters()), adamw(actor.parameters())
    images = context.randn(batch, 4, 84, 84)
    actions_taken, targets = context.randint(actions, batch, 1), context.randn(batch, 1)

    def update_critics() -> torch.Tensor:
        values = (q(images).gather(1, actions_taken) for q in (q1, q2))
        loss = sum(functional.mse_loss(value, targets) for value in values)
        critics.zero_grad(set_to_none=True)
        loss.backward()
        critics.step()
        return loss

    def actor_loss() -> torch.Tensor:
        logs = actor(images).log_softmax(-1)
        with torch.set_grad_enabled(not fixed):
            best = torch.minimum(q1(images), q2(images))
        return (logs.exp() * (0.2 * logs - best)).sum(-1).mean()

    def update_actor() -> torch.Tensor:
        loss = actor_loss()
        policy.zero_grad(set_to_none=True)
        loss.backward()
        policy.step()
        return loss

    def step() -> torch.Tensor:
        return update_critics().detach() + update_actor().detach()

    return step, models
