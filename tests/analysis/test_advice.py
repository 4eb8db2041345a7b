"""Advice must help where it is given: what looks alike and is not, on models recorded here."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import backspot  # noqa: E402
from backspot import Report  # noqa: E402
from backspot.results.findings import Finding  # noqa: E402
from support.synthetic import Trace  # noqa: E402

DATA = Path(__file__).parents[1] / "data" / "findings"


def found_in(model: nn.Module, *inputs: Tensor, shapes: bool = True) -> dict[str, Finding]:
    """The findings about a few recorded steps of a model: a busy machine interrupts some."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(*inputs).square().mean().backward()
        optimizer.step()

    with backspot.instrument(model):
        step()
        with torch.profiler.profile(record_shapes=shapes) as profiler:
            for _ in range(5):
                step()
    return {finding.rule: finding for finding in backspot.locate(profiler).findings}


class Entropy(nn.Module):
    """The entropy of a softmax, or the score of a label."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 4000), kind
        self.labels = torch.randint(4000, (256, 1))

    def forward(self, x: Tensor) -> Tensor:
        p = self.layer(x).softmax(-1)
        logarithm = (p + 1e-8).log()
        if self.kind == "entropy":
            return (logarithm * p).sum(-1)
        return logarithm.gather(1, self.labels)


@pytest.mark.parametrize("kind", ["entropy", "label"])
def test_a_softmax_that_is_used_beside_its_logarithm_is_said_to_stay(kind):
    found = found_in(Entropy(kind), torch.randn(256, 16))["loss-passes"]
    assert found.remedy.startswith("Use ")
    assert ("The softmax is used again" in found.remedy) is (kind == "entropy")
    assert ("cross_entropy" in found.remedy) is (kind == "label")
    assert (found.saves is None) is (kind == "entropy")


@pytest.mark.parametrize("logarithm", ["log_softmax", "softmax and log"])
def test_a_loss_of_a_few_scores_is_no_finding_though_the_step_is_little_more(logarithm):
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.actions = nn.Linear(8, 6), torch.randint(6, (16, 1))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.layer(x)
            logs = scores.softmax(-1).log() if " " in logarithm else scores.log_softmax(-1)
            return logs.gather(1, self.actions)

    assert "loss-passes" not in found_in(Policy(), torch.randn(16, 8))


class Attention(nn.Module):
    """Attention over 128 tokens, written out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.softmax = nn.Linear(64, 192), nn.Softmax(-1)
        self.bias = nn.Parameter(torch.zeros(300, 2))
        self.index = torch.randint(300, (128, 128))
        self.mask = torch.ones(128, 128, dtype=torch.bool).triu(1)
        self.dropout = nn.Dropout(0.1)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 128, 3, 2, 32).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(32)
        if self.kind == "bias":
            scores = scores + self.bias[self.index].permute(2, 0, 1)
        if self.kind == "mask":
            scores = scores.masked_fill(self.mask, -math.inf)
        if self.kind == "function":
            scores = torch.tanh(scores)
        weights = self.softmax(scores)
        if self.kind == "dropout":
            weights = self.dropout(weights)
        return (weights @ v).transpose(1, 2).flatten(2)


class GraphAttention(nn.Module):
    """Additive attention over the nodes of a graph, whose scores are sums of two columns."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 128) / 8)
        self.one, self.other = (nn.Parameter(torch.randn(8, 16, 1)) for _ in range(2))
        self.function = function

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        z = (x @ self.weight).view(len(x), 8, 16).permute(1, 0, 2)
        scores = z @ self.one + (z @ self.other).mT
        if self.function:
            scores = functional.leaky_relu(scores, 0.2)
        weights = scores.masked_fill(edges, -9e15).softmax(-1)
        return weights @ z


class Experts(nn.Module):
    """Four experts as batched products, weighted by a router's softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, *shape) / 8) for shape in ((64, 128), (128, 64))
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        each = torch.relu(x.expand(4, -1, -1) @ self.up) @ self.down
        return (each * weights.T[..., None]).sum(0)


@pytest.mark.parametrize("kind", ["plain", "mask", "dropout"])
def test_attention_that_is_written_out_is_found_with_its_softmax_in_a_module_of_its_own(kind):
    found = found_in(nn.Sequential(Attention(kind)), torch.randn(8, 128, 64))
    attention = found["attention-math"]
    assert ("has no dropout" in attention.remedy) is (kind == "dropout")
    assert attention.seen.startswith("1 softmax per step")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", "function"])
def test_fused_attention_is_not_advised_for_scores_that_it_does_not_take_on_a_cpu(kind):
    found = found_in(nn.Sequential(Attention(kind)), torch.randn(8, 128, 64))
    assert "attention-math" not in found


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("function", [True, False])
def test_fused_attention_is_not_advised_for_the_additive_attention_of_a_graph(function, shapes):
    edges = torch.rand(400, 400) > 0.02
    found = found_in(GraphAttention(function), torch.randn(400, 64), edges, shapes=shapes)
    assert "attention-math" not in found


class Routed(nn.Module):
    """Sixteen experts, of which a batched product with the router's softmax takes the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Parameter(torch.randn(*shape) / 20) for shape in ((512, 16), (16, 512))
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.bmm(x, self.router.expand(len(x), -1, -1))
        return torch.bmm(scores.softmax(-1), self.experts.expand(len(x), -1, -1))


def test_fused_attention_is_not_advised_for_scores_of_all_channels_of_a_model():
    found = found_in(nn.Sequential(Routed(), Routed()), torch.randn(8, 128, 512))
    assert "attention-math" not in found


@pytest.mark.slow
def test_fused_attention_is_not_advised_for_the_router_of_experts():
    found = found_in(nn.Sequential(Experts(), Experts()), torch.randn(256, 64))
    assert "attention-math" not in found


@pytest.mark.parametrize(
    ("ticks", "says"), [(3, None), (20, "whole batches"), (60, "num_workers=…")]
)
def test_workers_are_advised_for_waits_that_are_longer_than_a_worker_costs(tmp_path, ticks, says):
    tick, trace = 100_000, Trace()
    trace.annotation("ProfilerStep#1", 0, 100 * tick)
    trace.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, ticks * tick)
    trace.forward("", "Model", 61 * tick, 70 * tick)
    trace.operator("aten::mul", 62 * tick, 63 * tick, seq=0)
    trace.node("MulBackward0", 70 * tick, 90 * tick, seq=0)
    findings = backspot.locate(trace.save(tmp_path / "trace.json")).findings
    remedies = [one.remedy for one in findings if one.rule == "waiting-for-data"]
    assert len(remedies) == (says is not None)
    assert all(says in remedy for remedy in remedies)


def test_foreach_is_never_advised_on_a_cpu():
    (found,) = backspot.locate(DATA / "adamw_foreach.trace.json.gz").findings
    assert "Pass fused=True" in found.remedy
    assert "foreach=True does not help" in found.remedy


def edited(
    recording: str, folder: Path, change: dict[str, str], more: dict[str, str] | None = None
) -> Report:
    """The report of a recording in which some words are replaced, with one more event."""
    text = gzip.decompress((DATA / f"{recording}.trace.json.gz").read_bytes()).decode()
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    trace = json.loads(text)
    if more:
        first = next(one for one in trace["traceEvents"] if one.get("cat") == "cpu_op")
        trace["traceEvents"].append({**first, "args": {}, **more})
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    return backspot.locate(folder / "trace.json")


@pytest.mark.parametrize(
    ("change", "asked"),
    [
        ({}, True),
        ({"cuda_runtime": "hip_runtime", '"cudaLaunchKernel': '"hipLaunchKernel'}, True),
        ({"cuda_runtime": "xpu_runtime", '"cuda': '"ur'}, False),
        ({"cuda_runtime": "mtia_runtime", "cuda_driver": "mtia_driver"}, False),
    ],
    ids=["cuda", "hip", "xpu", "mtia"],
)
def test_advice_for_cuda_is_given_on_the_gpus_that_it_is_for(tmp_path, change, asked):
    report = edited("fp32_recommender", tmp_path, change)
    assert report.has_gpu
    assert ("no-tensor-cores" in {one.rule for one in report.findings}) is asked
    assert ("needs CUDA or ROCm" in report.rules.values()) is not asked


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({}, True),
        ({"name": "aten::_mps_convolution"}, False),
        ({"name": "matmul", "cat": "mtia_ccp_events"}, False),
    ],
    ids=["cpu", "mps", "mtia"],
)
def test_advice_for_a_cpu_is_not_given_where_an_accelerator_may_do_the_work(tmp_path, more, asked):
    report = edited("gelu_pow", tmp_path, {}, more)
    assert not report.has_gpu
    assert ("pointwise-chain" in {one.rule for one in report.findings}) is asked


@pytest.mark.parametrize(("name", "says"), [("SGD", "foreach=True"), ("Muon", "torch._foreach_")])
def test_an_optimizer_is_asked_for_no_option_that_it_does_not_have(tmp_path, name, says):
    change = {"Optimizer.step#SGD": f"Optimizer.step#{name}"}
    found = {one.rule: one for one in edited("optimizer_loop_resnet", tmp_path, change).findings}
    remedy = found["optimizer-kernels"].remedy
    assert says in remedy
    assert ("fused=True" in remedy) is (name == "SGD")
