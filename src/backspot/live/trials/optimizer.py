"""Optimizers that are fused, gradients that are clipped together, and none that are filled."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from backspot.live.torch_internals.process import is_rescheduled
from backspot.live.trials.trial import AS_IT_IS, Asked, Piece, Trial, remedy
from backspot.live.trials.twins import Refused, check_fits, check_plain, free_bytes, size_of, twin

_FORMS: dict[str, dict[str, bool]] = {
    "foreach=True": {"foreach": True, "fused": False},
    "fused=True": {"foreach": False, "fused": True},
}


@remedy("optimizer-kernels")
def optimizer(asked: Asked) -> Trial | None:
    """Try the other forms of the optimizers, on copies of parameters, gradients and states."""
    optimizers = [one for one in asked.live.optimizers if [*_params(one)]]
    for one in optimizers:
        _check(one)
    if not optimizers or asked.finding.path == "(clipping)":
        return None
    twins = [
        _Twin(one, free_bytes(next(_params(one)).device) // len(optimizers)) for one in optimizers
    ]
    variants = {AS_IT_IS: [one.piece({}) for one in twins]}
    for name, form in _FORMS.items():
        if not any(one.is_so(name) for one in twins) and all(one.has(name) for one in twins):
            variants[name] = [one.piece(form) for one in twins]
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


def _with_gradients(params: Sequence[torch.Tensor], most: int) -> tuple[list[torch.Tensor], float]:
    """Return the parameters that have gradients, or an even choice of them; and one of how many.

    Where a step ends with ``zero_grad``, all that require a gradient count.

    Raises:
        Refused: If there are none, or not even one fits into ``most`` bytes.
    """
    used = [p for p in params if p.grad is not None] or [p for p in params if p.requires_grad]
    check_plain(*used, *(p.grad for p in used if p.grad is not None))
    if not used:
        raise Refused("no parameter has a gradient")
    needed = 4 * sum(map(size_of, used))
    every = -(-needed // max(most, 1))
    chosen = used[:: max(every, 1)]
    check_fits(chosen, 2)
    return chosen, sum(map(size_of, used)) / max(1, sum(map(size_of, chosen)))


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the gradient; where it is gone, numbers in its place."""
    grad = parameter.grad
    return torch.full_like(parameter, 1e-3).detach() if grad is None else twin(grad)


class _Twin:
    """An optimizer of the same class, with copies of parameters, gradients and state.

    One set of copies serves all forms: the options are set before each call.

    Args:
        most: how many bytes the copies may take.

    Attributes:
        count: how many parameters it has.
        share: how many times as many bytes the optimizer of the training has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, most: int) -> None:
        chosen, self.share = _with_gradients([*_params(optimizer)], most)
        first = optimizer.param_groups[0]
        self.count, self._device = len(chosen), chosen[0].device
        self._as_it_is = {key: first[key] for key in ("foreach", "fused") if key in first}
        wanted, groups, states = set(map(id, chosen)), [], {}
        for group in optimizer.param_groups:
            mine = []
            for parameter in (p for p in group["params"] if id(p) in wanted):
                one = torch.nn.Parameter(twin(parameter.detach()))
                one.grad = _gradient_of(parameter)
                mine.append(one)
                # Not load_state_dict: that takes tensors over, and a step writes into them.
                states[one] = _copied(optimizer.state.get(parameter, {}))
            if mine:
                groups.append(
                    {**_copied({k: v for k, v in group.items() if k != "params"}), "params": mine}
                )
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

    def has(self, name: str) -> bool:
        """Return whether the class has such a form."""
        return name.partition("=")[0] in self._as_it_is

    def is_so(self, name: str) -> bool:
        """Return whether it is of this form already; on a GPU ``foreach`` is the default."""
        key = name.partition("=")[0]
        default = self._device.type == "cuda" and set(self._as_it_is.values()) == {None}
        return bool(self._as_it_is.get(key)) or (key == "foreach" and default)

    def piece(self, form: dict[str, bool]) -> Piece:
        """Return the step in this form, or as it is."""
        options = {key: form.get(key, value) for key, value in self._as_it_is.items()}

        def before() -> None:
            for group in self._one.param_groups:
                group.update(options)
            capturable = any(group.get("capturable") for group in self._one.param_groups)
            on_device = bool(options.get("fused")) or capturable
            for state, on_host, there in self._counts:
                state["step"] = there if on_device else on_host

        return Piece(self._one.step, self.share, before)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        check_plain(value)
        return twin(value)
    return copy.deepcopy(value)


def _gradients(asked: Asked) -> tuple[list[torch.Tensor], float]:
    params = [parameter for one in asked.live.optimizers for parameter in _params(one)]
    if not params:
        raise Refused("no optimizer of PyTorch took a step")
    chosen, share = _with_gradients(params, free_bytes(params[0].device))
    return [_gradient_of(one) for one in chosen], share


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
