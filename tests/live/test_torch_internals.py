"""Private names of PyTorch are in one folder; those with a fallback can be missing."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.torch_version import TorchVersion  # noqa: E402

from backspot.live import torch_internals  # noqa: E402
from support import preloaded  # noqa: E402

FOLDER = Path(torch_internals.__file__).parent
FILES = sorted(FOLDER.glob("*.py"))
OTHERS = sorted({*FOLDER.parent.rglob("*.py")} - {*FILES})
PRIVATE = re.compile(r"_[A-Za-z]\w*")
WITHOUT_HOOKS = True
NOT_OF_TORCH = {
    "_communicate": "subprocess",
    "_current_exceptions": "sys",
    "_current_frames": "sys",
    "_exit": "os",
    "_getframe": "sys",
    "_try_wait": "subprocess",
    "_filename_map": "IPython's compiler",
}


def private_names_of_torch() -> set[str]:
    """What is private on the objects of PyTorch that the live half meets."""
    out = torch.ones(1, requires_grad=True) * 2
    holders = (
        torch,
        torch._C,
        torch._C._autograd,
        torch._C._profiler,
        torch.autograd,
        torch.autograd.profiler,
        torch.compiler,
        torch.nn.Module(),
        torch.optim.SGD([torch.ones(1)]),
        torch.profiler.profile(),
        out,
        out.grad_fn,
    )
    return {name for holder in holders for name in dir(holder) if PRIVATE.fullmatch(name)}


def defined_in(tree: ast.AST) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables, fields and slots."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def used_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The private names that a file uses of any object, imports, or has as text for ``getattr``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((name, node.lineno) for name in names)
        elif isinstance(node, ast.Import):
            yield from (
                (name, node.lineno) for alias in node.names for name in alias.name.split(".")
            )


def foreign(source: str) -> list[str]:
    """The private names in this code that are PyTorch's, or that nothing here defines."""
    tree = ast.parse(source)
    own = set(defined_in(tree)) - private_names_of_torch()
    return [
        f"line {line}: {name}"
        for name, line in used_in(tree)
        if PRIVATE.fullmatch(name) and name not in own and name not in NOT_OF_TORCH
    ]


# An accessor in the folder would cost each recorded call of a module.
ON_EVERY_CALL = {"call_wrapper.py": ("_call_impl", "_compiled_call_impl")}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_private_names_of_pytorch_are_in_one_folder(path):
    found = foreign(path.read_text(encoding="utf-8"))
    assert not [name for name in found if not name.endswith(ON_EVERY_CALL.get(path.name, "?"))]


@pytest.mark.parametrize(
    "source",
    [
        "module._forward_hooks[0] = hook",
        "getattr(module, '_forward_hooks')",
        "torch._C._get_privateuse1_backend_name()",
        "from torch.autograd.profiler import _is_profiler_enabled",
        "import torch._dynamo",
        "from torch._C import _autograd as autograd",
        "node._sequence_nr()",
        "class Own:\n    _parameters = ()\n\ndef f(module):\n    return module._parameters",
    ],
)
def test_a_private_name_elsewhere_is_found(source):
    assert foreign(source)


def optional_names() -> list[tuple[str, ...]]:
    """What ``torch_internals`` looks up with ``find``: every name that has a fallback."""
    return [
        tuple(argument.value for argument in node.args)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "find"
        and all(isinstance(argument, ast.Constant) for argument in node.args)
    ]


@pytest.mark.skipif(
    not (2, 14) <= TorchVersion(torch.__version__) < (2, 15),
    reason="the version that has all of the names",
)
@pytest.mark.parametrize("name", optional_names(), ids=".".join)
def test_a_name_that_has_a_fallback_is_spelled_as_pytorch_spells_it(name):
    holder = torch
    for part in name:
        if "_cuda" in part and torch.version.cuda is None:
            pytest.skip("needs a build of PyTorch for CUDA")
        assert hasattr(holder, part)
        holder = getattr(holder, part)


WITHOUT = """
import ast, sys, torch
taken = []
for *path, name in [*ast.literal_eval(sys.argv[1]), ("compiler", "_is_compiling_flag")]:
    holder = torch
    for part in path:
        holder = getattr(holder, part, None)
    if hasattr(holder, name):
        taken.append((holder, name, getattr(holder, name)))
        delattr(holder, name)
import backspot.live
for holder, name, value in reversed(taken):  # PyTorch itself needs them
    setattr(holder, name, value)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
report = backspot.profile(lambda: model(torch.ones(2, 4)).sum().backward(), model, steps=2)
assert len(taken) > 5
print(report["0"].row.recorded_calls, report["1"].row.recorded_calls, report["0"].row.wall_ns > 0)
"""


@pytest.mark.slow
def test_backspot_works_without_the_names_that_have_a_fallback():
    names = optional_names()
    assert ("_C", "_autograd", "_get_sequence_nr") in names
    run = subprocess.run(
        [*preloaded.python(), "-W", "ignore", "-c", WITHOUT, repr(names)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-3:] == ["2", "2", "True"]
