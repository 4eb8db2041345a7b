"""Floating point operations of modules, against ``torch.utils.flop_counter``, exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import backspot
from backspot.analysis.accounting.formulas import Inputs, flops_formulas
from backspot.analysis.accounting.work import find_work
from backspot.analysis.attribution.ownership import attribute
from backspot.trace import read_events
from benchmarks.operations import operations_counter

Step = Callable[[], torch.Tensor]


class Attention(torch.nn.Module):
    """Attention by the fused operator, or written out."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Biased(torch.nn.Module):
    """``baddbmm``, and a product of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 16, 24))
        self.bias = torch.nn.Parameter(torch.randn(3, 1, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class Checkpointed(torch.nn.Module):
    """A block that runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
        self.head = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(4, 8, 3, stride=2, padding=1),
        torch.nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2, bias=False),
        torch.nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1),
        torch.nn.Conv2d(6, 2, (1, 3)),
    )


class Recurrent(torch.nn.Module):
    """An LSTM or GRU whose first hidden state is learned, by the fused layer or written out."""

    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__()
        self.rnn = getattr(torch.nn, kind)(16, 24, **kwargs)
        self.written_out = False
        count = self.rnn.num_layers * (1 + self.rnn.bidirectional)
        self.state = torch.nn.ParameterList(torch.zeros(count, 2, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, cell = self.state
        if not self.written_out:
            is_lstm = isinstance(self.rnn, torch.nn.LSTM)
            return self.rnn(x, (hidden, cell) if is_lstm else hidden)[0]
        at = 0
        for layer in range(self.rnn.num_layers):
            found = []
            for direction in range(1 + self.rnn.bidirectional):
                name = f"l{layer}{'_reverse' * direction}"
                from_input, from_hidden = (
                    getattr(self.rnn, f"weight_{part}_{name}") for part in ("ih", "hh")
                )
                gates = (x.flatten(0, 1) @ from_input.T).unflatten(0, x.shape[:2])
                h, outputs = hidden[at], []
                for one in gates.unbind():
                    mixed = (one + h @ from_hidden.T).unflatten(-1, (-1, 24)).tanh()
                    h = mixed.sum(1) + cell[at]
                    outputs.append(h)
                found.append(torch.stack(outputs))
                at += 1
            x = torch.cat(found, -1)
        return x


CASES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "linear": (
        lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)),
        (5, 32),
    ),
    "convolutions": (convolutions, (2, 4, 17, 19)),
    "convolution in one dimension": (lambda: torch.nn.Conv1d(4, 6, 5, padding=2), (3, 4, 21)),
    "fused attention": (lambda: Attention(fused=True), (2, 10, 32)),
    "attention written out": (lambda: Attention(fused=False), (2, 10, 32)),
    "baddbmm": (Biased, (3, 7, 16)),
    "checkpointed": (Checkpointed, (6, 32)),
    "gru": (lambda: torch.nn.GRU(16, 24, batch_first=True), (2, 5, 16)),
}


def step_of(model: torch.nn.Module, shape: tuple[int, ...]) -> Step:
    batch = torch.randn(shape, requires_grad=True)

    def step() -> torch.Tensor:
        result = model(batch)
        loss = (result[0] if isinstance(result, tuple) else result).square().mean()
        loss.backward()
        return loss

    return step


def recorded(model: torch.nn.Module, step: Step, path: Path) -> Path:
    step()
    with backspot.instrument(model), torch.profiler.profile(record_shapes=True) as prof:
        step()
    prof.export_chrome_trace(str(path))
    return path


def counted(step: Step) -> int:
    with operations_counter() as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_all_operations_are_those_that_pytorch_counts(name: str, tmp_path: Path) -> None:
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if name == "fused attention" and on_cpu not in flop_registry:
        pytest.skip("this PyTorch does not count attention on a CPU")
    make, shape = CASES[name]
    model = make()
    step = step_of(model, shape)
    events = read_events(recorded(model, step, tmp_path / "t.json"))
    found = find_work(events, attribute(events))
    assert found is not None
    assert sum(
        (one.forward_flops or 0) + (one.recompute_flops or 0) + (one.flops or 0) for one in found
    ) == counted(step)


def test_a_depthwise_convolution_has_twice_the_forward_in_the_backward(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 16, 7, padding=3, groups=16))
    row = backspot.locate(recorded(model, step_of(model, (2, 16, 9, 9)), tmp_path / "t"))["0"].row
    forward = 2 * 2 * 16 * 9 * 9 * 7 * 7
    assert (row.work.forward_flops, row.work.flops) == (forward, 2 * forward)


def test_what_selective_checkpointing_has_saved_is_not_computed_again(tmp_path: Path) -> None:
    selective = getattr(checkpointing, "create_selective_checkpoint_contexts", None)
    if selective is None:
        pytest.skip("this PyTorch has no selective checkpointing")
    contexts = partial(selective, [torch.ops.aten.mm.default])
    block = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.Sigmoid())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)
            return checkpoint(self.block, x, use_reentrant=False)

    model = Model()
    row = backspot.locate(recorded(model, step_of(model, (6, 32)), tmp_path / "t"))["block.0"].row
    one = 2 * 6 * 32 * 32
    # The second call computes its product again, and the first one does not.
    assert (row.work.forward_flops, row.work.recompute_flops, row.work.flops) == (
        2 * one,
        one,
        4 * one,
    )


def test_the_products_of_an_optimizer_are_no_forward(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))

    class Rotating(torch.optim.SGD):
        """It multiplies matrices, as Muon and Shampoo do, after a closure with the pass."""

        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            with torch.no_grad():
                model[0].weight.grad @ model[0].weight.grad
            return loss

    optimizer = Rotating(model.parameters(), 0.1)
    train = step_of(model, (4, 16))

    def step() -> torch.Tensor:
        train()
        optimizer.step()
        optimizer.step(train)
        return train()

    report = backspot.locate(recorded(model, step, tmp_path / "t"))
    one = 2 * 4 * 16 * 16
    known = {
        row.path: row.work.forward_flops
        for row in report.modules
        if row.work and row.work.forward_flops
    }
    assert known == {"0": one}
    assert report["0"].row.work.flops == 2 * one


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_layer_has_the_operations_of_the_one_that_is_written_out(
    kind: str, bidirectional: bool, tmp_path: Path
) -> None:
    model = Recurrent(kind, num_layers=2, bidirectional=bidirectional)
    step = step_of(model, (7, 2, 16))
    row = backspot.locate(recorded(model, step, tmp_path / "t.json"))["rnn"].row
    model.written_out = True
    assert (row.work.forward_flops, 3 * row.work.forward_flops) == (
        row.work.flops // 2,
        counted(step),
    )


def test_the_recurrent_layers_of_cudnn_count_as_if_they_were_written_out() -> None:
    for kind, reverse in (("LSTM", False), ("LSTM", True), ("GRU", True)):
        model = Recurrent(kind, num_layers=3, bidirectional=reverse)
        weights = [list(weight.shape) for weight in model.rnn._flat_weights]
        model.written_out = True
        whole = counted(step_of(model, (7, 2, 16)))
        forward, backward = (
            flops_formulas()[f"aten::_cudnn_rnn{name}"] for name in ("", "_backward")
        )
        for rows in ([7, 2, 16], [14, 16]):  # padded, or packed
            mask = "[True, True, True, True]"
            inputs = Inputs([rows, weights, []], ["float", "TensorList", ""], [], ["", "", mask])
            assert (3 * forward(inputs), 1.5 * backward(inputs)) == (whole, whole)


def test_each_module_has_its_own_and_what_has_no_formula_is_unknown(tmp_path: Path) -> None:
    model = Checkpointed()
    step = step_of(model, (6, 32))
    report = backspot.locate(recorded(model, step, tmp_path / "t.json"))
    first, second, head = (report[p].row for p in ("block.0", "block.1", "head"))
    one = 2 * 6 * 32 * 64
    assert (first.work.forward_flops, first.work.recompute_flops, first.work.flops) == (
        one,
        one,
        2 * one,
    )
    # Checkpointing stops when the last layer has saved its inputs again, so it does not run.
    assert (second.work.forward_flops, second.work.recompute_flops, second.work.flops) == (
        one,
        None,
        2 * one,
    )
    assert (head.work.forward_flops, head.work.recompute_flops) == (2 * 6 * 32 * 8, None)
    assert report[""].row.work.flops is None  # the root has no product of its own
    assert 0 <= first.work.unknown_share <= 1


def test_products_have_the_type_that_autocast_casts_to(tmp_path: Path) -> None:
    class Direct(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(32, 16))
            self.bias = torch.nn.Parameter(torch.randn(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model = Direct()
    batch = torch.randn(8, 32)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        return loss

    work = backspot.locate(recorded(model, step, tmp_path / "t.json"))[""].row.work
    assert work.forward_flops_by_type == {"bf16": 2 * 8 * 32 * 16}
    assert set(work.flops_by_type) == {"bf16"}


def test_what_the_profiler_has_in_memory_gives_the_same() -> None:
    model = Checkpointed()
    step = step_of(model, (6, 32))
    step()
    with backspot.instrument(model), torch.profiler.profile(record_shapes=True) as prof:
        step()
    assert backspot.locate(prof)["block.0"].row.work.flops == 4 * 6 * 32 * 64


def test_a_report_without_shapes_has_no_work_in_any_form(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    step = step_of(model, (2, 4))
    report = backspot.profile(step, model, steps=1, warmup=1, unprofiled=0)
    assert report[""].row.work is None
    assert b'"work"' not in report.save(tmp_path / "r.json").read_bytes()
    again = backspot.profile(step, model, steps=1, warmup=1, unprofiled=0, shapes=True)
    assert again[""].row.work.forward_flops == 2 * 2 * 4 * 4
    assert backspot.Report.load(again.save(tmp_path / "s.json")) == again
