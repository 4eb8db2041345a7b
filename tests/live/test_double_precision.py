"""Parameters and inputs in double precision: what a recording says of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import backspot  # noqa: E402

LABEL = "float64: "


def trained(model, *, dtype=torch.float32, shapes=False, tmp_path=None):
    """The labels that a recorded step of a model has, and the finding about its number format."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(256, 256).to(dtype)
    with (
        backspot.instrument(model),
        profile(activities=[ProfilerActivity.CPU], record_shapes=shapes) as prof,
    ):
        for _ in range(4):
            sgd.zero_grad()
            model(x).square().mean().backward()
            sgd.step()
            prof.step()
    path = tmp_path / "trace.json"
    prof.export_chrome_trace(str(path))
    labels = {event.name for event in prof.events() if event.name.startswith(LABEL)}
    found = [one for one in backspot.locate(path).findings if one.rule == "double-precision"]
    return labels, found


class Doubling(nn.Module):
    """A layer in fp32 whose outputs are normed in fp64."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x):
        wide = self.layer(x).double()
        for _ in range(8):
            wide = (wide - wide.mean(1, keepdim=True)) / wide.std(1, keepdim=True)
        return wide.float()


class Scaled(nn.Module):
    """A layer with a number in fp64, which leaves all else in fp32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) * self.scale


def test_each_module_with_parameters_in_double_precision_has_a_label_and_is_found(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).double()
    labels, (found,) = trained(model, dtype=torch.float64, tmp_path=tmp_path)
    assert labels == {"float64: 0 (Linear)", "float64: 2 (Linear)"}
    assert {place.path for place in found.places} == {"0", "2"}
    assert (found.tier, found.saves) == ("preview", None)


def test_a_model_in_single_precision_has_no_label_and_no_finding(tmp_path):
    plain = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    assert trained(plain, tmp_path=tmp_path) == (set(), [])


@pytest.mark.parametrize("shapes", [False, True])
def test_a_single_number_in_double_precision_says_nothing(tmp_path, shapes):
    assert trained(Scaled(), shapes=shapes, tmp_path=tmp_path) == (set(), [])


def test_tensors_that_a_forward_makes_double_are_found_where_shapes_are_recorded(tmp_path):
    labels, (found,) = trained(Doubling(), shapes=True, tmp_path=tmp_path)
    assert labels == set()
    assert found.places[0].class_name == "Doubling"
    assert trained(Doubling(), tmp_path=tmp_path) == (set(), [])


class Tempered(nn.Module):
    """A layer in fp32 beside a few numbers in fp64."""

    def __init__(self, numbers):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))
        self.temperature = nn.Parameter(torch.ones(numbers, dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight * self.temperature.float().mean()


@pytest.mark.parametrize("numbers", [1, 8])
def test_a_few_numbers_in_double_precision_say_nothing_of_what_is_beside_them(numbers, tmp_path):
    assert trained(Tempered(numbers), tmp_path=tmp_path) == (set(), [])
