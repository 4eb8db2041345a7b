"""Optimizers that are fused, gradients that are clipped together, and none that are filled."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from backspot.live.torch_internals.process import is_rescheduled
from backspot.live.trials.trial import AS_IT_IS, CALLS, Asked, Piece, Trial, remedy
from backspot.live.trials.twins import (
    Refused,
    check_fits,
    check_plain,
    copied,
    free_bytes,
    size_of,
    twin,
)

_FORMS = ("fused", "foreach")


@remedy("optimizer-kernels")
def optimizer(asked: Asked) -> Trial | None:
    """Try the other forms of the optimizers, on copies of parameters, gradients and states."""
    optimizers = [one for one in asked.live.optimizers if [*_params(one)]]
    for one in optimizers:
        _check(one)
    if not optimizers or asked.finding.path == "(clipping)":
        return None
    twins = [
        _Twin(asked, one, free_bytes(next(_params(one)).device) // len(optimizers))
        for one in optimizers
    ]
    variants = {AS_IT_IS: [one.piece({}) for one in twins]}
    for form in _FORMS:
        if all(form in one.options and not one.is_so(form) for one in twins):
            chosen = {other: other == form for other in _FORMS}
            variants[f"{form}=True"] = [one.piece(chosen) for one in twins]
    if len(variants) == 1:
        return None
    named = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
    count, whole = sum(one.count for one in twins), sum(len([*_params(one)]) for one in optimizers)
    of = f"{count} of {whole}" if twins[0].share > 1 else f"{count}"
    what = f"{named}.step() on copies of {of} parameters"
    return Trial(what, variants, cold=True, known_ns=asked.known_ns)


def _check(one: torch.optim.Optimizer) -> None:
    name, step = type(one).__name__, vars(one).get("step")
    if not type(one).__module__.startswith("torch.optim"):
        raise Refused(f"{name} is no optimizer of PyTorch")
    if isinstance(one, torch.optim.LBFGS):
        raise Refused("a step of LBFGS runs the model")
    if step is not None and not is_rescheduled(step):
        raise Refused(f"the step of {name} was replaced")


def _params(one: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in one.param_groups for parameter in group["params"])


def _with_gradients(
    asked: Asked, params: Sequence[torch.Tensor], most: int
) -> tuple[dict[torch.Tensor, int], float]:
    """Return the parameters that have gradients, and one of how many bytes these are.

    Where all take too much memory or too long, it is an even choice of them, and of one that is
    larger than its share some rows; with each comes how many. Where a step ends with ``zero_grad``,
    all that require a gradient count.

    Raises:
        Refused: If there are none, or not even these fit.
    """
    used = [p for p in params if p.grad is not None] or [p for p in params if p.requires_grad]
    check_plain(*used, *(p.grad for p in used if p.grad is not None))
    if not used:
        raise Refused("no parameter has a gradient")
    whole = sum(map(size_of, used))
    every = 1 + max(4 * whole // max(most, 1), CALLS * asked.known_ns // 10**9)
    rows = {
        one: math.ceil(len(one) * min(1.0, whole / every / max(1, size_of(one))))
        if one.dim()
        else 1
        for one in used[::every]
    }
    parts = [_part(one, one, count) for one, count in rows.items()]
    check_fits(parts, 2)
    return rows, whole / max(1, sum(map(size_of, parts)))


def _part(tensor: torch.Tensor, of: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of what is as large as a parameter."""
    return tensor[:rows] if tensor.dim() and tensor.shape == of.shape else tensor


def _gradient_of(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a copy of the gradient; where it is gone, numbers in its place."""
    grad = torch.full_like(parameter, 1e-3) if parameter.grad is None else parameter.grad
    return twin(_part(grad.detach(), parameter, rows))


class _Twin:
    """An optimizer of the same class, with copies of parameters, gradients and state.

    One set of copies serves all forms: the options are set before each call.

    Args:
        most: how many bytes the copies may take.

    Attributes:
        count: how many parameters it has.
        share: how many times as many bytes the optimizer of the training has.
        options: arguments of the class, such as ``fused``, that choose a form.
    """

    def __init__(self, asked: Asked, optimizer: torch.optim.Optimizer, most: int) -> None:
        chosen, self.share = _with_gradients(asked, [*_params(optimizer)], most)
        first = optimizer.param_groups[0]
        self.count, self._device = len(chosen), next(iter(chosen)).device
        self.options = {form: first[form] for form in _FORMS if form in first}
        groups, states = [], {}
        for group in optimizer.param_groups:
            mine = []
            for parameter in (p for p in group["params"] if p in chosen):
                part = partial(_part, of=parameter, rows=chosen[parameter])
                one = torch.nn.Parameter(twin(part(parameter.detach())))
                one.grad = _gradient_of(parameter, chosen[parameter])
                mine.append(one)
                # Not load_state_dict: that takes tensors over, and a step writes into them.
                states[one] = _copied(dict(optimizer.state.get(parameter, {})), part)
            if mine:
                options = _copied({key: one for key, one in group.items() if key != "params"})
                groups.append({**options, "params": mine})
        cls: Any = type(optimizer)
        has_rate = "lr" in inspect.signature(cls.__init__).parameters
        self._one = cls(groups, **({"lr": _copied(first["lr"])} if has_rate else {}))
        self._one.state.update({one: state for one, state in states.items() if state})
        self._one.step()  # what it has not had so far is made here
        # Each count of steps on the host and on the device, where a fused one wants it.
        self._counts = [
            (state, count.cpu(), count.to(self._device))
            for state in self._one.state.values()
            if isinstance(count := state.get("step"), torch.Tensor)
        ]

    def is_so(self, form: str) -> bool:
        """Return whether it is of this form already; on a GPU ``foreach`` is the default."""
        default = self._device.type == "cuda" and set(self.options.values()) == {None}
        return bool(self.options[form]) or (form == "foreach" and default)

    def piece(self, form: dict[str, bool]) -> Piece:
        """Return the step in this form, or as it is."""
        options = {key: form.get(key, value) for key, value in self.options.items()}

        def before() -> None:
            for group in self._one.param_groups:
                group.update(options)
            capturable = any(group.get("capturable") for group in self._one.param_groups)
            on_device = bool(options.get("fused")) or capturable
            for state, on_host, there in self._counts:
                state["step"] = there if on_device else on_host

        return Piece(self._one.step, self.share, before)


def _copied(value: Any, part: Callable[[torch.Tensor], torch.Tensor] = lambda one: one) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        check_plain(tensor)
        return twin(part(tensor))

    return copied(value, copy)


def _gradients(asked: Asked) -> tuple[list[torch.Tensor], float]:
    params = [parameter for one in asked.live.optimizers for parameter in _params(one)]
    if not params:
        raise Refused("no optimizer of PyTorch took a step")
    chosen, share = _with_gradients(asked, params, free_bytes(params[0].device))
    return [_gradient_of(*one) for one in chosen.items()], share


@remedy("optimizer-kernels", "clipping")
def clipping(asked: Asked) -> Trial | None:
    """Try the norm and the factor of all gradients together."""
    if asked.finding.path == "(optimizer)":
        return None
    gradients, share = _gradients(asked)
    held = [torch.nn.Parameter(torch.empty_like(one)) for one in gradients]
    for parameter, gradient in zip(held, gradients, strict=True):
        parameter.grad = gradient
    # A norm that is never above it: the gradients keep their size from round to round.
    clip = partial(torch.nn.utils.clip_grad_norm_, held, 1e30)
    forms = {AS_IT_IS: False, "foreach=True": True}
    variants = {name: [Piece(partial(clip, foreach=on), share)] for name, on in forms.items()}
    what = f"clip_grad_norm_ on copies of {len(held)} gradients"
    return Trial(what, variants, cold=True, known_ns=asked.known_ns)


@remedy("zero-grad-fill", "gradients-kept")
def zero_grad(asked: Asked) -> Trial | None:
    """Try no gradients in place of zeros, to which the backward adds."""
    gradients, share = _gradients(asked)
    fresh = [torch.ones_like(one) for one in gradients]

    def filled() -> None:
        for gradient in gradients:
            gradient.zero_()
        for gradient, new in zip(gradients, fresh, strict=True):
            gradient.add_(new)

    variants = {
        AS_IT_IS: [Piece(filled, share)],
        "set_to_none=True": [Piece(lambda: None, share)],
    }
    what = f"the fill, and an addition to each of {len(gradients)} gradients, on copies"
    return Trial(what, variants, cold=True)
