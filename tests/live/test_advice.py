"""Advice fits what is known of the object: the kind of a layer, the class of an optimizer."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import backspot
from backspot.analysis.findings.observations import at_once

BATCH, STEPS, WIDTH = 16, 40, 32


class Sequences(nn.Module):
    """A recurrent layer over sequences, which may be packed."""

    def __init__(self, *, packed=False, **options):
        super().__init__()
        self.packed = packed
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x):
        if not self.packed:
            return self.rnn(x)[0]
        lengths = torch.arange(STEPS - BATCH, STEPS) + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]


def advice(model, x, rule, **options):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    few = {"steps": 4, "warmup": 1, "unprofiled": 4, "trials": "none"}
    report = backspot.profile(step, model, **few, **options)
    return [one.remedy for one in report.findings if one.rule == rule]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        (Sequences(packed=True), torch.float32, "no kernel for a PackedSequence"),
        (Sequences(proj_size=8), torch.float32, "no kernel for LSTM(proj_size=…)"),
        (Sequences(proj_size=8, bias=False), torch.float32, "no kernel for LSTM(proj_size=…)"),
        (Sequences(bias=False), torch.float64, "what the fast kernel takes"),
        (Sequences(), torch.float32, None),
    ],
)
def test_a_recurrent_layer_on_a_general_way_is_told_its_own_reason(model, dtype, said):
    found = advice(model.to(dtype), torch.randn(BATCH, STEPS, WIDTH, dtype=dtype), "slow-path")
    assert [said in one for one in found] == ([] if said is None else [True])


@pytest.mark.parametrize(
    ("forms", "said"),
    [
        (["RMSprop"], "Pass foreach=True to RMSprop, which updates many parameters in one kernel."),
        (["Adam", "Adam"], "Pass foreach=True to Adam, which"),
        (["Adam", "RMSprop"], "or fused=True of Adam, which"),
        (["Adam", ""], ""),
        ([], ""),
    ],
)
def test_an_optimizer_is_told_of_the_forms_that_its_class_has(forms, said):
    found = at_once(forms)
    assert said in found
    assert bool(found) is bool(said)
    assert ("fused=True" in found) is ("Adam" in forms and "" not in forms)
    fused = {name for name in forms if name and "fused" in options_of(name)}
    assert ("fused=True" in found) is bool(fused and found)


def options_of(name):
    return torch.optim.__dict__[name].__init__.__code__.co_varnames


class Attention(nn.Module):
    """Attention that is written out, whose weights may scale its output too."""

    def __init__(self, *, used_again):
        super().__init__()
        self.qkv, self.used_again = nn.Linear(WIDTH, 3 * WIDTH), used_again

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / 4).softmax(-1)
        out = weights @ v
        return out * weights.amax(-1, keepdim=True) if self.used_again else out


@pytest.mark.slow
@pytest.mark.parametrize("used_again", [True, False])
def test_attention_whose_weights_are_used_again_is_not_told_to_fuse(used_again):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(used_again=used_again))
    found = advice(model, torch.randn(8, 128, WIDTH), "attention-math")
    assert bool(found) is not used_again
