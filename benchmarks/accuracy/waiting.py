"""Trainings that make the host wait for a GPU in many places, and some that look so and do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks import models
from benchmarks.models import Around, Context, Layer, made

Step = Callable[[], object]
Case = Callable[[Context], tuple[nn.Module, Step]]
WIDTH, WORDS, LENGTH = 64, 200, 32


class Text(nn.Module):
    """A small language model with a layer of a case's own in its middle."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first, self.last = models.Block(WIDTH), models.Block(WIDTH)
        self.inner = inner or nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.inner(self.first(self.words(tokens)))))


class Training:
    """A model, its optimizer and a batch; cases replace what they are about."""

    def __init__(self, context: Context, inner: nn.Module | None = None) -> None:
        self.device = context.device
        # A layer that the case has made already is moved.
        self.model: nn.Module = made(context, lambda: Text(inner)).to(context.device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-4, fused=True)
        self.tokens = context.randint(WORDS, 8, LENGTH)

    def loss(self, found: torch.Tensor | None = None) -> torch.Tensor:
        found = self.model(self.tokens) if found is None else found
        return functional.cross_entropy(found.flatten(0, 1), self.tokens.flatten())

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def _inside(function: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """A case about a layer."""

    def case(context: Context) -> tuple[nn.Module, Step]:
        training = Training(context, Layer(function))
        return training.model, lambda: training.update(training.loss())

    return case


def _after(function: Callable[[Training, torch.Tensor], object]) -> Case:
    """A case about what follows the update."""

    def case(context: Context) -> tuple[nn.Module, Step]:
        training = Training(context)

        def step() -> None:
            loss = training.loss()
            training.update(loss)
            function(training, loss)

        return training.model, step

    return case


def _healthy(_: Training, loss: torch.Tensor) -> torch.Tensor:
    return loss.detach().mul(0.1)


# In the model ------------------------------------------------------------------------------------


def _masked(x: torch.Tensor) -> torch.Tensor:
    mask = x[..., 0] > 0
    y = x * 1.0
    if mask.any():
        y[mask] = x[mask] * 2
    return y


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    rows = (x.flatten(0, 1).sum(1) > 0).nonzero().squeeze(1)
    kept = torch.where(x.sum(-1, keepdim=True) > 0, x, -x)  # does not wait
    return kept.flatten(0, 1).index_add(0, rows, kept.flatten(0, 1)[rows]).view_as(x)


def _lengths(x: torch.Tensor) -> torch.Tensor:
    lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
    parts = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
    means = torch.stack([part.mean(0) for part in parts])
    return x + means[:, None]


def _sizes(x: torch.Tensor) -> torch.Tensor:
    groups = (x.flatten(0, 1)[:, 0] * 4).long().clamp(0, 7)
    counts = torch.bincount(groups, minlength=8)
    kinds = torch.unique(groups)
    repeated = torch.repeat_interleave(counts.float(), counts)
    known = torch.repeat_interleave(counts.float(), counts, output_size=len(groups))
    return x + (repeated.mean() + known.mean() + kinds.float().mean()) * 0


def _checked(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    torch.distributions.Categorical(logits=x)  # validates its arguments
    return x


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return out.view_as(x)


def _experts(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context, _Experts())
    return training.model, lambda: training.update(training.loss())


def _packed(context: Context) -> tuple[nn.Module, Step]:
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def run(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        lengths = (x[..., 0] > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        out, _ = inner(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return x + padded

    training = Training(context, Around(lstm, run))
    return training.model, lambda: training.update(training.loss())


def _detector(context: Context) -> tuple[nn.Module, Step]:
    def select(places: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return places.gather(1, chosen[..., None].expand(-1, -1, places.shape[-1]))

    model = made(context, lambda: models.Detector(32, 16, Layer(select)))
    images, goal = context.randn(4, 3, 64, 64), context.randn(4, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def matched(boxes: torch.Tensor) -> torch.Tensor:
        losses = []
        for one, other in zip(boxes, goal, strict=True):
            distance = torch.cdist(one, other, p=1)
            near = distance.min(1).values < distance.median()
            best = distance.argmin(1)[near]
            losses.append((one[near] - other[best]).abs().sum() / max(1, int(near.sum())))
        return torch.stack(losses).mean()

    def step() -> None:
        loss = matched(model(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


# In the loss, the backward, clipping and the optimizer -------------------------------------------


def _masked_loss(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)

    def loss() -> torch.Tensor:
        found = training.model(training.tokens)
        counted = training.tokens > 20
        chosen = found[counted]
        return functional.cross_entropy(chosen, torch.masked_select(training.tokens, counted))

    return training.model, lambda: training.update(loss())


def _gradient_hook(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)

    def check(gradient: torch.Tensor) -> None:
        if not torch.isfinite(gradient).all().item():
            raise ValueError("not finite")

    for parameter in training.parameters[::5]:
        parameter.register_hook(check)
    return training.model, lambda: training.update(training.loss())


def _clipping(read: Callable[[list[nn.Parameter]], object]) -> Case:
    def case(context: Context) -> tuple[nn.Module, Step]:
        training = Training(context)

        def step() -> None:
            training.optimizer.zero_grad()
            training.loss().backward()
            read(training.parameters)
            training.optimizer.step()

        return training.model, step

    return case


def _each_norm(parameters: list[nn.Parameter]) -> None:
    total = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            total += parameter.grad.norm().item() ** 2
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, 1.0 / (total**0.5 + 1e-6)))


def _scaler(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)
    scaler = torch.amp.GradScaler("cuda")

    def step() -> None:
        training.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = training.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        nn.utils.clip_grad_norm_(training.parameters, 1.0)
        scaler.step(training.optimizer)
        scaler.update()

    training.optimizer = torch.optim.SGD(training.parameters, 1e-4)  # type: ignore[assignment]
    return training.model, step


def _accumulation(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)

    def step() -> float:
        total = 0.0
        for _ in range(3):
            loss = training.loss() / 3
            total += loss.item()
            loss.backward()
        nn.utils.clip_grad_norm_(training.parameters, 1.0)
        training.optimizer.step()
        training.optimizer.zero_grad()
        return total

    return training.model, step


# Around the model --------------------------------------------------------------------------------


def _metrics(training: Training, loss: torch.Tensor) -> Any:
    with torch.no_grad():
        best = training.model.head.weight[:8].argmax(1)
    table = best.tolist()
    text = f"loss {loss:.3f}"
    return table, text, best.cpu().numpy(), float(loss.detach())


def _plateau(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer)

    def step() -> None:
        loss = training.loss()
        training.update(loss)
        schedule.step(loss.detach())

    return training.model, step


def _average(context: Context) -> tuple[nn.Module, Step]:
    model = made(context, lambda: models.DiffusionUnet(16))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    images = context.randn(2, 3, 32, 32)

    def step() -> float:
        when = torch.randint(1000, (2,), device=context.device)
        noise = torch.randn_like(images)
        loss = functional.mse_loss(model(images + noise, when), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for average, parameter in zip(averages, model.parameters(), strict=True):
            average.mul_(0.99).add_(parameter.detach(), alpha=0.01)
        return loss.item()

    return model, step


def _copies(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)
    pageable = training.tokens.cpu()
    pinned = pageable.pin_memory()
    back = torch.empty(1).pin_memory()

    def step() -> None:
        training.tokens = pinned.to(context.device, non_blocking=True)  # does not wait
        training.tokens = pageable.to(context.device)
        loss = training.loss()
        training.update(loss)
        back.copy_(loss.detach().view(1), non_blocking=True)  # does not wait

    return training.model, step


def _loader(context: Context) -> tuple[nn.Module, Step]:
    training = Training(context)
    data = torch.utils.data.DataLoader(
        training.tokens.cpu().repeat(4096, 1), batch_size=8, pin_memory=True
    )
    batches = iter(data)

    def step() -> None:
        training.tokens = next(batches).to(context.device, non_blocking=True)
        training.update(training.loss())

    return training.model, step


def _synchronize(_: Training, loss: torch.Tensor) -> float:
    torch.cuda.synchronize()  # of this and the event, PyTorch warns not
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return loss.item()


# Trainers ----------------------------------------------------------------------------------------


def _hugging_face(context: Context) -> tuple[nn.Module, Step]:
    import tempfile

    from transformers import Trainer, TrainingArguments

    model = models.gpt2(Context(context.device, small=True), layers=2)
    arguments = TrainingArguments(tempfile.mkdtemp(), report_to=[], disable_tqdm=True)
    trainer = Trainer(model, arguments)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(model, trainer.optimizer)
    tokens = torch.randint(200, (4, 32))

    def step() -> float:
        loss = trainer.training_step(trainer.model_wrapped, {"input_ids": tokens, "labels": tokens})
        trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return float(loss)

    return model, step


def _fabric(context: Context) -> tuple[nn.Module, Step]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="auto", devices=1)
    plain = Text()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), 1e-4))
    tokens = torch.randint(WORDS, (8, LENGTH))

    def step() -> float:
        batch = fabric.to_device(tokens)
        loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=True)
        optimizer.step()
        return loss.item()

    return plain, step


CASES: dict[str, Case] = {
    "healthy": _after(_healthy),
    "masked forward": _inside(_masked),
    "nonzero": _inside(_nonzero),
    "tolist of lengths": _inside(_lengths),
    "unique, bincount, repeat_interleave": _inside(_sizes),
    "checks in the forward": _inside(_checked),
    "mixture of experts": _experts,
    "packed sequences": _packed,
    "detector with a matcher": _detector,
    "masked loss": _masked_loss,
    "gradient hook": _gradient_hook,
    "norms one by one": _clipping(_each_norm),
    "clip_grad_norm_": _clipping(lambda some: nn.utils.clip_grad_norm_(some, 1.0)),
    "error_if_nonfinite": _clipping(
        lambda some: nn.utils.clip_grad_norm_(some, 1.0, error_if_nonfinite=True)
    ),
    "GradScaler": _scaler,
    "accumulation with a loss read": _accumulation,
    "metrics": _after(_metrics),
    "ReduceLROnPlateau": _plateau,
    "moving average and loss": _average,
    "copies": _copies,
    "loader with pinned memory": _loader,
    "synchronize": _after(_synchronize),
    "Trainer of transformers": _hugging_face,
    "Fabric of Lightning": _fabric,
}
