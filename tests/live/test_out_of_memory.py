"""How a training died of memory: where, who held what, and what is no such death."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._C._profiler import gather_traceback, symbolize_tracebacks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from backspot.live.memory_history import NamedModules, allocated_by  # noqa: E402
from backspot.live.out_of_memory import OutOfMemoryWatch, error_of_memory  # noqa: E402
from backspot.live.torch_internals import allocator  # noqa: E402
from backspot.live.torch_internals.allocator import node_at_work, read_snapshot  # noqa: E402
from backspot.results import OutOfMemory  # noqa: E402

WITHOUT_HOOKS = True

ABSURD = 1 << 47
"""No machine has so much memory."""


def ask() -> None:
    torch.empty(ABSURD, dtype=torch.uint8)


class Asking(nn.Module):
    """Calls a function in its forward."""

    def __init__(self, asks: Callable[[], None] = ask) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.asks()
        return x


class AskingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        ask()
        return gradient


class AskingOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        ask()


class Network(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), middle])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def death(model: nn.Module, act: Callable[[], object], step: int = 3) -> OutOfMemory | None:
    try:
        act()
    except Exception as error:
        return OutOfMemoryWatch(history=False).died(error, {"": model}, step)
    raise AssertionError("it has not died")


@pytest.mark.posix  # the sizes are from /proc
def test_a_death_in_a_forward_names_the_module_and_what_it_asked_for() -> None:
    model = Network(Asking())
    found = death(model, lambda: model(torch.ones(2, 4)))
    assert found is not None
    assert (found.phase, found.path, found.class_name) == ("forward", "layers.1", "Asking")
    assert (found.asked_bytes, found.step, found.source) == (ABSURD, 3, "process")
    assert 0 < found.free_bytes < found.total_bytes
    assert found.in_use_bytes > 1_000_000


def test_a_death_in_evaluation_mode_is_one_of_an_evaluation() -> None:
    model = Network(Asking()).eval()
    found = death(model, lambda: model(torch.ones(2, 4)))
    assert found is not None
    assert (found.phase, found.path) == ("evaluation", "layers.1")


def test_a_death_in_a_backward_names_its_function_and_the_module_beside_it() -> None:
    model = Network(nn.Linear(4, 4))
    loss = AskingBackward.apply(model(torch.ones(2, 4))).sum()
    found = death(model, loss.backward)
    assert found is not None
    assert (found.phase, found.node) == ("backward", "AskingBackwardBackward")
    assert (found.path, found.is_nearby) == ("layers.1", True)


def test_a_module_that_runs_again_in_a_backward_is_named_as_such() -> None:
    calls = iter([lambda: None, ask])
    model = Network(nn.Sequential(Asking(lambda: next(calls)()), nn.Tanh()))
    x = torch.ones(2, 4, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=False).sum()
    found = death(model, loss.backward)
    assert found is not None
    assert (found.phase, found.path) == ("backward", "layers.1.0")


def test_a_death_in_an_optimizer_is_of_no_module() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    found = death(model, AskingOptimizer(model.parameters(), lr=0.1).step)
    assert found is not None
    assert (found.phase, found.path, found.class_name) == ("optimizer", "", "")


def test_a_death_elsewhere_is_of_no_module() -> None:
    found = death(nn.Linear(4, 4), ask)
    assert found is not None
    assert (found.phase, found.class_name) == ("other", "")


def test_parameters_gradients_and_states_are_known_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    found = death(model, ask)
    del optimizer
    assert found is not None
    parameters = 4 * (64 * 64 + 3 * 64)
    held = {one.kind: one.bytes for one in found.held}
    assert held["parameter"] >= parameters  # optimizers of other tests may live
    assert held["gradient"] >= parameters
    assert held["optimizer"] >= 2 * parameters
    assert held["buffer"] == 2 * 4 * 64 + 8


def test_the_models_of_optimizers_are_found_where_none_is_known() -> None:
    model = Network(Asking())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        found = OutOfMemoryWatch(history=False).died(error, {}, None)
    assert found is not None
    assert found.path.endswith("layers.1")
    assert optimizer.param_groups


def test_a_death_keeps_nothing_alive() -> None:
    model, batch = Network(Asking()), torch.ones(2, 4)
    kept = weakref.ref(model), weakref.ref(batch)
    watch = OutOfMemoryWatch(history=True)
    watch.begin()
    try:
        model(batch)
    except RuntimeError as error:
        found = watch.died(error, {"": model}, 1)
    del model, batch
    gc.collect()
    assert found is not None
    assert [one() for one in kept] == [None, None]


# What is an error of memory ----------------------------------------------------------------------


def raised(act: Callable[[], object]) -> BaseException:
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def from_cause(error: Exception) -> None:
    try:
        ask()
    except RuntimeError as cause:
        raise error from cause


def while_handled(error: Exception) -> None:
    try:
        ask()
    except RuntimeError:
        raise error  # noqa: B904 - what a training may raise long after it has survived


def of_a_gpu() -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    "act",
    [ask, lambda: bytearray(1 << 60), of_a_gpu, lambda: from_cause(ValueError("no batch"))],
    ids=["of PyTorch", "of Python", "of a GPU", "as a cause"],
)
def test_errors_of_memory_are_known(act: Callable[[], object]) -> None:
    assert error_of_memory(raised(act)) is not None


@pytest.mark.parametrize(
    "act",
    [
        lambda: torch.empty(1 << 62),
        lambda: torch.ones(2, 3) @ torch.ones(2, 3),
        lambda: while_handled(ValueError("another")),
        lambda: exec("raise RuntimeError('the replay memory is out of samples')"),
        lambda: exec("raise SystemExit(1)"),
    ],
    ids=["a size that overflows", "shapes", "another while handled", "a text", "an exit"],
)
def test_other_errors_are_no_death_of_memory(act: Callable[[], object]) -> None:
    error = raised(act)
    assert error_of_memory(error) is None
    assert OutOfMemoryWatch(history=False).died(error, {}, 1) is None


@pytest.mark.skipif(torch.cuda.is_initialized(), reason="it is about a GPU that is not in use")
@pytest.mark.parametrize(
    "error", [torch.cuda.OutOfMemoryError("it"), RuntimeError("CUDA error: out of memory")]
)
def test_of_a_gpu_that_is_not_in_use_nothing_is_said(error: Exception) -> None:
    assert error_of_memory(error) is error
    assert OutOfMemoryWatch(history=False).died(error, {}, 1) is None


def test_no_error_is_no_death() -> None:
    assert OutOfMemoryWatch(history=False).died(None, {}, 1) is None


# The node of a backward --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "name", "is_nearby"),
    [(0, "AddmmBackward0", False), (1, "GeluBackward0", True), (2, "AddmmBackward0", False)],
)
def test_the_node_at_work_tells_its_module(at: int, name: str, is_nearby: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    seen = []
    x = torch.ones(2, 4)
    for number, layer in enumerate(model):
        x = layer(x)
        if number == at:
            x.grad_fn.register_prehook(lambda _: seen.append(node_at_work()))
    x.sum().backward()
    (node,) = seen
    assert node is not None
    assert (node.name, node.is_nearby) == (name, is_nearby)
    assert node.parameter is not None
    owner = NamedModules({"": model}).with_parameter(node.parameter())
    assert owner == (("2" if at == 2 else "0"), "Linear")


def test_outside_of_a_backward_no_node_is_at_work() -> None:
    assert node_at_work() is None


# The allocator's history -------------------------------------------------------------------------


class Allocating(nn.Module):
    """Notes its stack as the allocator of a GPU does."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.note = note

    def forward(self) -> None:
        (lambda: self.note())()


class Layer(nn.Module):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self.mlp = Allocating(note)
        self.note = note

    def forward(self) -> None:
        self.note()
        self.mlp()


class Layers(nn.Module):
    def __init__(self, note: Callable[[], None], *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(Layer(note) for _ in range(3))
        self.head = Allocating(note)

    def forward(self) -> None:
        for block in self.blocks:
            if self.again:
                checkpoint(block, use_reentrant=False)
            else:
                block()
        self.head()


def segments(stacks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """As ``torch.cuda.memory_snapshot`` returns them: blocks of 512 bytes and a free one each."""
    blocks: list[dict[str, Any]] = []
    for frames in stacks:
        blocks += [{"size": 512, "state": "active_allocated", "frames": frames}]
        blocks += [{"size": 1536, "state": "inactive", "frames": []}]
    size = sum(block["size"] for block in blocks)
    here = {"device": 0, "address": 4096, "total_size": size, "blocks": blocks}
    return [here, {**here, "device": 1}, {**here, "address": 1 << 30, "is_expandable": True}]


def test_a_snapshot_has_the_blocks_and_the_pieces_of_one_device() -> None:
    found = read_snapshot(segments([[], []]), 0)
    assert [block.address for block in found.blocks[:2]] == [4096, 4096 + 2048]
    assert {block.stack for block in found.blocks} == {()}
    assert (found.reserved, sum(block.bytes for block in found.blocks)) == (8192, 4 * 512)
    assert found.in_use == 4 * 512
    assert (found.pieces, found.largest_piece) == (2 * 1536, 1536)  # not of what can grow


def test_what_is_free_in_the_pool_of_a_cuda_graph_is_no_piece() -> None:
    private, shared = ({**segments([[]])[0], "segment_pool_id": one} for one in ((0, 1), (0, 0)))
    assert read_snapshot([private], 0).pieces == 0
    assert read_snapshot([shared], 0).pieces == 1536


def test_the_stacks_of_blocks_tell_the_modules_and_equal_layers_are_one() -> None:
    stacks: list[Any] = []
    model = Layers(lambda: stacks.append(gather_traceback(True, False, False)))
    model()
    stacks.append(gather_traceback(True, False, False))
    frames = [*symbolize_tracebacks(stacks), []]
    names = NamedModules({"": model})
    held, layers = allocated_by(read_snapshot(segments(frames)[:1], 0).blocks, names)
    assert {(one.kind, one.path, one.class_name, one.members): one.bytes for one in held} == {
        ("activation", "blocks.*", "Layer", 3): 3 * 512,
        ("activation", "blocks.*.mlp", "Allocating", 3): 3 * 512,
        ("activation", "head", "Allocating", 1): 512,
        ("other", "", "", 0): 512,  # no forward was at work
        ("no_stack", "", "", 0): 512,  # no Python was
    }
    assert [(one.path, one.members, one.bytes) for one in layers] == [("blocks.*", 3, 6 * 512)]


@pytest.mark.parametrize("again", [True, False], ids=["checkpointed", "plain"])
def test_layers_are_not_told_where_a_checkpoint_runs_already(again: bool) -> None:
    stacks: list[Any] = []
    model = Layers(lambda: stacks.append(gather_traceback(True, False, False)), again=again)
    model()
    frames = symbolize_tracebacks(stacks)
    blocks = read_snapshot(segments(frames)[:1], 0).blocks
    held, layers = allocated_by(blocks, NamedModules({"": model}))
    assert {one.path for one in held} == {"blocks.*", "blocks.*.mlp", "head"}
    assert bool(layers) is not again


class NoMemoryError(MemoryError):
    """As NumPy's error, it cannot be made of one text."""

    def __init__(self, shape: tuple[int, ...], kind: type) -> None:
        super().__init__(f"Unable to allocate {shape} of {kind.__name__}")


class NotEnoughError(Exception):
    """An error of another kind, that cannot be made of one text either."""

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(f"{found} of {wanted}\nMemoryError: Unable to allocate")


def with_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    numpy.ones(1 << 50)


def with_an_error_of_its_own() -> None:
    raise NoMemoryError((1, 2), float)


def with_another_error() -> None:
    raise NotEnoughError(1, 2)


class Failing(torch.utils.data.Dataset[int]):
    def __init__(self, fails: Callable[[], None]) -> None:
        self.fails = fails

    def __len__(self) -> int:
        return 2

    def __getitem__(self, _: int) -> int:
        self.fails()
        return 0


@pytest.mark.posix  # the worker is a fork
@pytest.mark.usefixtures("workers_end_soon")
@pytest.mark.parametrize(
    ("fails", "name"),
    [
        (with_numpy, "MemoryError"),  # which is the name that NumPy gives its own class
        (with_an_error_of_its_own, "NoMemoryError"),
        (with_another_error, None),
    ],
)
def test_an_error_of_memory_in_a_loaders_worker_is_known_by_its_class(
    fails: Callable[[], None], name: str | None
) -> None:
    loader = torch.utils.data.DataLoader(Failing(fails), num_workers=1)
    error = raised(lambda: next(iter(loader)))
    assert type(error) is RuntimeError  # PyTorch cannot make the original
    found = OutOfMemoryWatch(history=False).died(error, {"": nn.Linear(4, 4)}, 1)
    assert (found and found.error) == name
    assert found is None or (found.is_host and not found.in_use_bytes)


@pytest.mark.posix  # the sizes are from /proc
def test_an_error_of_a_loaders_worker_has_no_sizes_of_this_process() -> None:
    said = "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback …"
    watch = OutOfMemoryWatch(history=False)
    for error, is_here in ((MemoryError(said), False), (MemoryError("Unable to allocate"), True)):
        found = watch.died(error, {"": nn.Linear(4, 4)}, 1)
        assert found is not None
        assert bool(found.in_use_bytes) is bool(found.total_bytes) is bool(found.held) is is_here


# The moment at which a GPU has no memory left -----------------------------------------------------

GIB = 1 << 30


class Gpu:
    """What PyTorch's allocator says and does on a GPU that is not here, with 4 GiB."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.segments: list[dict[str, Any]] = segments([[], []])
        self.observe: Callable[..., None] = lambda *_: None
        self.free, self.errors, self.histories = GIB, 0, 0
        self.keeps_history = False
        self.counts: dict[str, int] = {}
        patch.setattr(allocator, "_began_history", False)
        patch.setattr(allocator, "_once_initialized", lambda begin: begin())
        patch.setattr(allocator, "_attach", lambda observe: setattr(self, "observe", observe))
        patch.setattr(allocator, "_record_history", self._record)
        patch.setattr(allocator, "_keeps_history", lambda: self.keeps_history)
        patch.setattr(torch.cuda, "memory_snapshot", lambda include_traces=True: self.segments)
        patch.setattr(torch.cuda, "memory_stats", self._stats)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free, 4 * GIB))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)

    def _stats(self, _: int) -> dict[str, int]:
        return {"num_ooms": self.errors, **self.counts}

    def _record(self, *_: object, **__: object) -> None:
        self.histories += 1

    def ask(self, size: int = 2 * GIB) -> None:
        self.observe(0, size, 4 * GIB, self.free)
        self.errors += 1
        raise torch.cuda.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size / GIB:.2f} GiB. GPU 0 has a total …"
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def gpu_death(gpu: Gpu, model: nn.Module, act: Callable[[], object]) -> OutOfMemory:
    watch = OutOfMemoryWatch(history=True)
    watch.begin()
    found = watch.died(raised(act), {"": model}, 3)
    assert found is not None
    return found


def test_blocks_without_a_stack_are_no_history(gpu: Gpu) -> None:
    model = Network(Asking(gpu.ask))
    found = gpu_death(gpu, model, lambda: model(torch.ones(2, 4)))
    assert (found.source, found.path, found.asked_bytes) == ("snapshot", "layers.1", 2 * GIB)
    assert {one.kind: one.bytes for one in found.held} == {"other": 4 * 512}


def test_one_stack_is_a_history_and_blocks_without_one_are_told_as_such(gpu: Gpu) -> None:
    gpu.segments = segments([[{"filename": "train.py", "name": "train", "line": 3}], []])[:1]
    found = gpu_death(gpu, nn.Linear(4, 4), gpu.ask)
    assert found.source == "history"
    assert {one.kind: one.bytes for one in found.held} == {"other": 512, "no_stack": 512}


@pytest.mark.parametrize("keeps", [True, False], ids=["of the script", "none"])
def test_a_history_of_the_script_is_not_replaced(keeps: bool, gpu: Gpu) -> None:
    gpu.keeps_history = keeps
    watch = OutOfMemoryWatch(history=True)
    watch.begin()
    assert gpu.histories == (0 if keeps else 1)


def test_an_earlier_moment_is_not_told_as_this_death(gpu: Gpu) -> None:
    model = Network(Asking(gpu.ask))
    watch = OutOfMemoryWatch(history=False)
    watch.begin()
    raised(lambda: model(torch.ones(2, 4)))
    found = watch.died(torch.cuda.OutOfMemoryError("Tried to allocate 3.00 GiB."), {"": model}, 1)
    assert found is not None
    assert (found.source, found.asked_bytes, found.phase) == ("process", None, "other")


def test_of_an_allocator_without_blocks_its_sums_are_told(gpu: Gpu) -> None:
    gpu.segments = [{}]  # cannot be read
    gpu.counts = {"allocated_bytes.all.current": GIB, "reserved_bytes.all.current": 2 * GIB}
    found = gpu_death(gpu, nn.Linear(4, 4), gpu.ask)
    assert (found.asked_bytes, found.in_use_bytes, found.reserved_bytes) == (
        2 * GIB,
        GIB,
        2 * GIB,
    )
    assert [(one.kind, one.bytes) for one in found.held] == [("other", GIB)]


def test_what_no_block_tells_is_held_by_the_model_all_the_same(gpu: Gpu) -> None:
    gpu.segments = []
    model = nn.Linear(64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backspot.live.out_of_memory.HOST", 0)  # its parameters are "on the GPU"
        found = gpu_death(gpu, model, gpu.ask)
    held = {one.kind: one.bytes for one in found.held}
    assert held["parameter"] >= 4 * (64 * 64 + 64)  # optimizers of other tests may live
    assert found.in_use_bytes == sum(held.values())


@pytest.mark.parametrize("traces", [True, False], ids=["can be left out", "always come"])
def test_a_long_history_of_the_script_is_not_read_at_each_error(
    traces: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.keeps_history = True
    if not traces:
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: gpu.segments)
    found = gpu_death(gpu, nn.Linear(4, 4), gpu.ask)
    assert found.in_use_bytes == (4 * 512 if traces else 0)


def test_only_errors_before_this_one_are_counted(gpu: Gpu) -> None:
    gpu.errors = 2
    assert gpu_death(gpu, nn.Linear(4, 4), gpu.ask).earlier == 2
    of_a_library = gpu_death(
        gpu, nn.Linear(4, 4), lambda: exec("raise RuntimeError('CUDA error: out of memory')")
    )
    assert of_a_library.earlier == 3
    assert of_a_library.source == "process"


def test_an_optimizer_that_steps_within_a_backward_is_one(gpu: Gpu) -> None:
    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            gpu.ask()

    model = nn.Linear(4, 4)
    optimizer = Asks(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    found = gpu_death(gpu, model, model(torch.ones(2, 4)).sum().backward)
    assert (found.phase, found.node) == ("optimizer", "")


def test_a_hook_that_asks_within_a_backward_is_of_its_node(gpu: Gpu) -> None:
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda _: gpu.ask())
    found = gpu_death(gpu, model, model(torch.ones(2, 4)).sum().backward)
    assert (found.phase, found.class_name) == ("backward", "Linear")
