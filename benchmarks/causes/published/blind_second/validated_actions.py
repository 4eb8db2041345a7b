"""Distributions that check their arguments, and wait for the GPU to hear what came of it."""

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from benchmarks.causes.published.parts import Models, Published, Step, adamw, sized
from benchmarks.models import Context, made

CASE = Published(
    source="Toni-SM/skrl#233",
    cause=("validat", "synchron", "waits for", ".all()", "distribution"),
    place=("surrogate()",),
    fix="validate_args=False",
    gain="no figures; 17 s of a test of Monte Carlo chains in pyro-ppl/pyro#922",
    device="cuda",
)


def surrogate(
    mean: torch.Tensor,
    old: torch.Tensor,
    deviation: torch.Tensor,
    action: torch.Tensor,
    checks: bool,
) -> torch.Tensor:
    """PPO's clipped objective, with a penalty for going far and a reward for trying things."""
    now = Normal(mean, deviation.exp().expand_as(mean), validate_args=checks)
    before = Normal(old, torch.ones_like(old), validate_args=checks)
    logs = now.log_prob(action).sum(-1) - before.log_prob(action).sum(-1)
    ratio, advantage = logs.clamp(-5, 5).exp(), action.mean(-1)
    gained = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    penalty = kl_divergence(before, now).sum(-1).mean()
    return 0.1 * penalty - gained - 0.01 * now.entropy().sum(-1).mean()


def network(inputs: int, width: int, outputs: int) -> nn.Sequential:
    inner = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ELU())]
    return nn.Sequential(nn.Linear(inputs, width), nn.ELU(), *inner, nn.Linear(width, outputs))


def build(fixed: bool, context: Context) -> tuple[Step, Models]:
    seen, actions = sized(context, 96, 48, 6), sized(context, 24, 12, 2)
    width, batch = sized(context, 512, 64, 8), sized(context, 4096, 128, 4)
    parts = sized(context, 8, 4, 2)
    policy = made(context, lambda: network(seen, width, actions))
    critic = made(context, lambda: network(seen, width, 1))
    deviation = nn.Parameter(torch.zeros(actions, device=context.device))
    optimizer = adamw([*policy.parameters(), *critic.parameters(), deviation])
    states, taken = context.randn(parts, batch, seen), context.randn(parts, batch, actions)
    old, returns = context.randn(parts, batch, actions) / 4, context.randn(parts, batch)

    def step() -> torch.Tensor:
        for part in range(parts):
            optimizer.zero_grad()
            value = critic(states[part]).squeeze(-1)
            mean = policy(states[part])
            loss = surrogate(mean, old[part], deviation, taken[part], not fixed)
            loss = loss + (value - returns[part]).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        return loss.detach()

    return step, {"policy": policy, "critic": critic}
