"""Optimizers that are fused, gradients that are clipped together, and none that are filled."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from backspot.live.torch_internals.process import is_rescheduled
from backspot.live.trials.trial import AS_IT_IS, CALLS, Piece, Request, Trial, remedy
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
def optimizer(request: Request) -> Trial | None:
    """Try the other forms of the optimizers, on copies of parameters, gradients and states."""
    optimizers = [optim for optim in request.live.optimizers if [*_params(optim)]]
    for optim in optimizers:
        _check(optim)
    if not optimizers or request.finding.path == "(clipping)":
        return None
    twins = [
        _Twin(request, optim, free_bytes(next(_params(optim)).device) // len(optimizers))
        for optim in optimizers
    ]
    variants = {AS_IT_IS: [copy.piece({}) for copy in twins]}
    for form in _FORMS:
        if all(form in copy.options and not copy.is_so(form) for copy in twins):
            chosen = {other: other == form for other in _FORMS}
            variants[f"{form}=True"] = [copy.piece(chosen) for copy in twins]
    if len(variants) == 1:
        return None
    named = " and ".join(dict.fromkeys(type(optim).__name__ for optim in optimizers))
    count, parameters = (
        sum(copy.count for copy in twins),
        sum(len([*_params(optim)]) for optim in optimizers),
    )
    tried = f"{count} of {parameters}" if twins[0].share > 1 else f"{count}"
    title = f"{named}.step() on copies of {tried} parameters"
    return Trial(title, variants, cold=True, known_ns=request.known_ns)


def _check(optim: torch.optim.Optimizer) -> None:
    name, step = type(optim).__name__, vars(optim).get("step")
    if not type(optim).__module__.startswith("torch.optim"):
        raise Refused(f"{name} is no optimizer of PyTorch")
    if isinstance(optim, torch.optim.LBFGS):
        raise Refused("a step of LBFGS runs the model")
    if step is not None and not is_rescheduled(step):
        raise Refused(f"the step of {name} was replaced")


def _params(optim: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optim.param_groups for parameter in group["params"])


def _with_gradients(
    request: Request, params: Sequence[torch.Tensor], most: int
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
    total_bytes = sum(map(size_of, used))
    stride = 1 + max(4 * total_bytes // max(most, 1), CALLS * request.known_ns // 10**9)
    rows = {
        parameter: math.ceil(
            len(parameter) * min(1.0, total_bytes / stride / max(1, size_of(parameter)))
        )
        if parameter.dim()
        else 1
        for parameter in used[::stride]
    }
    slices = [_part(parameter, parameter, count) for parameter, count in rows.items()]
    check_fits(slices, 2)
    return rows, total_bytes / max(1, sum(map(size_of, slices)))


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

    def __init__(self, request: Request, optimizer: torch.optim.Optimizer, most: int) -> None:
        chosen, self.share = _with_gradients(request, [*_params(optimizer)], most)
        first = optimizer.param_groups[0]
        self.count, self._device = len(chosen), next(iter(chosen)).device
        self.options = {form: first[form] for form in _FORMS if form in first}
        groups, states = [], {}
        for group in optimizer.param_groups:
            copies = []
            for parameter in (p for p in group["params"] if p in chosen):
                first_rows = partial(_part, of=parameter, rows=chosen[parameter])
                copy = torch.nn.Parameter(twin(first_rows(parameter.detach())))
                copy.grad = _gradient_of(parameter, chosen[parameter])
                copies.append(copy)
                # Not load_state_dict: that takes tensors over, and a step writes into them.
                states[copy] = _copied(dict(optimizer.state.get(parameter, {})), first_rows)
            if copies:
                options = _copied({key: value for key, value in group.items() if key != "params"})
                groups.append({**options, "params": copies})
        cls: Any = type(optimizer)
        has_rate = "lr" in inspect.signature(cls.__init__).parameters
        self._one = cls(groups, **({"lr": _copied(first["lr"])} if has_rate else {}))
        self._one.state.update({parameter: state for parameter, state in states.items() if state})
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


def _copied(
    value: Any, first_rows: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> Any:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        check_plain(tensor)
        return twin(first_rows(tensor))

    return copied(value, copy)


def _gradients(request: Request) -> tuple[list[torch.Tensor], float]:
    params = [parameter for optim in request.live.optimizers for parameter in _params(optim)]
    if not params:
        raise Refused("no optimizer of PyTorch took a step")
    chosen, share = _with_gradients(request, params, free_bytes(params[0].device))
    return [_gradient_of(*item) for item in chosen.items()], share


@remedy("optimizer-kernels", "clipping")
def clipping(request: Request) -> Trial | None:
    """Try the norm and the factor of all gradients together."""
    if request.finding.path == "(optimizer)":
        return None
    gradients, share = _gradients(request)
    parameters = [torch.nn.Parameter(torch.empty_like(grad)) for grad in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # A norm that is never above it: the gradients keep their size from round to round.
    clip = partial(torch.nn.utils.clip_grad_norm_, parameters, 1e30)
    forms = {AS_IT_IS: False, "foreach=True": True}
    variants = {name: [Piece(partial(clip, foreach=on), share)] for name, on in forms.items()}
    title = f"clip_grad_norm_ on copies of {len(parameters)} gradients"
    return Trial(title, variants, cold=True, known_ns=request.known_ns)


@remedy("zero-grad-fill", "gradients-kept")
def zero_grad(request: Request) -> Trial | None:
    """Try no gradients in place of zeros, to which the backward adds."""
    gradients, share = _gradients(request)
    fresh = [torch.ones_like(gradient) for gradient in gradients]

    def filled() -> None:
        for gradient in gradients:
            gradient.zero_()
        for gradient, new in zip(gradients, fresh, strict=True):
            gradient.add_(new)

    variants = {
        AS_IT_IS: [Piece(filled, share)],
        "set_to_none=True": [Piece(lambda: None, share)],
    }
    title = f"the fill, and an addition to each of {len(gradients)} gradients, on copies"
    return Trial(title, variants, cold=True)
