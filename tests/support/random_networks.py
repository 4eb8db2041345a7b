"""Random networks made of what autograd numbers in different ways, with and without an operator."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.modules import Cube

WIDTH = 6

# No more headers than it needs, and methods in place of operators, whose header has all of
# ATen's functions: with torch/extension.h, the compiler takes twice as long.
_SOURCE = """
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Half : public Function<Half> {
  static at::Tensor forward(AutogradContext*, at::Tensor x) { return x.mul(0.5); }
  static variable_list backward(AutogradContext*, variable_list g) { return {g[0].mul(0.5)}; }
};

struct Mixed : public Function<Mixed> {
  static variable_list forward(AutogradContext*, at::Tensor x, at::Tensor y) {
    return {x.add(y), x.sub(y)};
  }
  static variable_list backward(AutogradContext*, variable_list g) {
    return {g[0].add(g[1]), g[0].sub(g[1])};
  }
};

at::Tensor half(at::Tensor x) { return Half::apply(x); }
at::Tensor halves(at::Tensor x) { return Half::apply(Half::apply(x)); }
at::Tensor mixed(at::Tensor x, at::Tensor y) { return Mixed::apply(x, y)[1]; }
at::Tensor told(at::Tensor x) { return Half::apply(x.contiguous()); }

TORCH_LIBRARY(backspot_random, m) { m.def("half(Tensor x) -> Tensor", told); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("half", half);
  m.def("halves", halves);
  m.def("mixed", mixed);
}
"""


def lacks_compiler() -> str:
    """Why C++ functions cannot be built here; empty where they can."""
    missing = [tool for tool in ("ninja", "c++") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} to build a C++ function with" if missing else ""


def build_functions(folder: Path) -> Any:
    """Build the C++ functions; takes some tens of seconds."""
    from torch.utils.cpp_extension import load

    source = folder / "functions.cpp"
    source.write_text(_SOURCE)
    return load(
        "backspot_random_functions",
        [str(source)],
        extra_cflags=["-O0"],
        build_directory=str(folder),
    )


@cache
def scripted() -> Callable[..., torch.Tensor]:
    """A scripted function, warm: at first it runs as plain operators."""

    @torch.jit.script
    def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w) * torch.sigmoid(x) + x

    def warm_up() -> None:
        x = torch.randn(2, WIDTH, requires_grad=True)
        gated(x, torch.eye(WIDTH)).sum().backward()

    for _ in range(4):
        warm_up()
    return gated


_Values = list[torch.Tensor]
_Act = Callable[["Part", _Values], None]


class Part(nn.Module):
    """A module that does this and that with a list of tensors, and calls its children between."""

    def __init__(self, acts: list[tuple[str, int]], children: list[nn.Module], cpp: Any) -> None:
        super().__init__()
        self.acts = acts
        self.parts = nn.ModuleList(children)
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.cpp = cpp
        self.kept: torch.Tensor | None = None

    def __deepcopy__(self, _: object) -> Part:
        raise TypeError("it holds a built extension")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, at in self.acts:
            if name == "call":
                values.append(self.parts[at](values[-1]))
            elif name == "skip":
                values.append(values[at % len(values)] + values[-1])
            else:
                _ACTS[name](self, values)
        return values[-1]


def _new(make: Callable[[Part, torch.Tensor], torch.Tensor]) -> _Act:
    def act(part: Part, values: _Values) -> None:
        values.append(make(part, values[-1]))

    return act


def _aside(look: Callable[[torch.Tensor], object]) -> _Act:
    def act(_: Part, values: _Values) -> None:
        look(values[-1])

    return act


def _without_gradient(x: torch.Tensor) -> object:
    with torch.no_grad():
        return (x * 2).sum()


def _written(_: Part, x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, :2] = x[:, 2:4].tanh()
    return y


def _joined(_: Part, x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=1)
    return torch.cat([right, left], dim=1)


_ACTS: dict[str, _Act] = {
    "matmul": _new(lambda part, x: x @ part.weight),
    "tanh": _new(lambda _, x: x.tanh()),
    "in place": _new(lambda _, x: (x * 1).add_(1)),
    "written": _new(_written),
    "joined": _new(_joined),
    "view": _new(lambda _, x: x.t().contiguous().view(-1).reshape(WIDTH, -1).t()),
    "foreach": _new(lambda _, x: sum(torch._foreach_mul([x, x, x], 0.5))),
    "custom": _new(lambda _, x: Cube.apply(x.tanh())),
    "custom alone": _new(lambda _, x: Cube.apply(x)),
    "scripted": _new(lambda part, x: scripted()(x, part.weight)),
    "c++": _new(lambda part, x: part.cpp.half(x)),
    "c++ twice": _new(lambda part, x: part.cpp.halves(x)),
    "c++ of two": _new(lambda part, x: part.cpp.mixed(x, x.detach())),
    "c++ operator": _new(lambda _, x: torch.ops.backspot_random.half(x)),
    "mask": _aside(lambda x: (x.detach() > 0).float()),
    "compare": _aside(lambda x: x > 0),
    "detach": _aside(lambda x: x.detach()),
    "factory": _aside(lambda _: torch.arange(3)),
    "no grad": _aside(_without_gradient),
    "item": _aside(lambda x: x.detach().sum().item()),
}
_OF_CPP = ("c++", "c++ twice", "c++ of two", "c++ operator")


def random_network(seed: int, cpp: Any = None) -> nn.Module:
    """A tree of modules; the same for the same seed.

    Args:
        seed: of what it does.
        cpp: what ``build_functions`` gave; without it there are no C++ functions in it.
    """
    chance = random.Random(seed)
    names = [name for name in _ACTS if cpp is not None or name not in _OF_CPP]

    def part(depth: int) -> nn.Module:
        kinds: list[nn.Module] = []
        acts: list[tuple[str, int]] = []
        for _ in range(chance.randint(1, 6)):
            if chance.random() < 0.4 and depth < 3:
                acts.append(("call", len(kinds)))
                kinds.append(part(depth + 1) if chance.random() < 0.7 else _leaf(chance))
            elif chance.random() < 0.15:
                acts.append(("skip", chance.randrange(8)))
            else:
                acts.append((chance.choice(names), 0))
        return Part(acts, kinds, cpp)

    return part(0)


def _leaf(chance: random.Random) -> nn.Module:
    makers = (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.LayerNorm(WIDTH),
        nn.Identity,
        lambda: nn.ReLU(inplace=False),
    )
    return chance.choice(makers)()


class Again(nn.Module):
    """Runs a network again in the backward."""

    def __init__(self, inner: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant)
        return y.tanh()


def step_of(network: nn.Module) -> Callable[[], None]:
    """A training step without a loss module."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    return lambda: network(x).square().sum().backward()
