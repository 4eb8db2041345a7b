"""The whole way on the published case: a ViT with patch dropout under deterministic algorithms."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import backspot
from backspot import Report
from backspot.trace.labels import parse_label
from support.tracks import added_of, assert_nested, padded, slices_of, text_of

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.xdist_group("timm")  # one worker imports it, which takes seconds

EVALUATE = "autograd::engine::evaluate_function: "


def training():
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, patch_drop_rate=0.5
    )
    loss = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))

    def step() -> None:
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()

    return model, loss, step


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory):
    return profile_of(tmp_path_factory.mktemp("main"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory):
    """The same with backward labels written while the profiler records."""
    return profile_of(tmp_path_factory.mktemp("marked"), markers=True)


def profile_of(folder: Path, **options: bool):
    model, loss, step = training()
    torch.use_deterministic_algorithms(True)
    try:
        with (
            backspot.instrument(model, **options),
            backspot.instrument(loss, name="loss", **options),
        ):
            step()
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profiler:
                for _ in range(3):
                    step()
    finally:
        torch.use_deterministic_algorithms(False)
    before = backspot.locate(profiler)
    path = folder / "trace.json.gz"
    profiler.export_chrome_trace(str(path))
    return profiler, path, before


def nanoseconds(microseconds: float) -> int:
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def alike(one: Report, other: Report) -> bool:
    return replace(one, trace="") == replace(other, trace="")


@pytest.mark.slow
def test_almost_all_of_the_backward_has_an_owner(profiled) -> None:
    report = profiled[2]
    assert report.coverage.cpu >= 0.99
    # How even the steps are is the machine's affair, not this test's.
    assert [w for w in report.warnings if "warm up" not in w] == []
    assert report.steps == 3
    assert report["loss"].row.wall_ns > 0


def test_the_gather_belongs_to_the_patch_dropout(profiled) -> None:
    report = profiled[2]
    owners = {
        row.path for row in report.modules for node in row.nodes if node.name == "GatherBackward0"
    }
    assert owners == {"patch_drop"}
    assert {n.name: n.count for n in report["patch_drop"].row.nodes}["GatherBackward0"] == 1


@pytest.mark.slow
def test_a_live_profile_reads_like_its_export_before_and_after_it(profiled) -> None:
    profiler, path, before = profiled
    assert alike(before, backspot.locate(path))
    assert alike(before, backspot.locate(profiler))


def spans_of(path: Path) -> list[tuple[int, int, str]]:
    """(start, end, name) in nanoseconds, in the order in which the thread entered them."""
    import gzip

    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [
        (nanoseconds(e["ts"]), nanoseconds(e["ts"]) + nanoseconds(e["dur"]), e["name"])
        for e in events
        if e["ph"] == "X" and "cat" in e
    ]
    return sorted(spans, key=lambda span: (span[0], -span[1]))


def test_the_innermost_span_around_the_gather_is_that_of_the_patch_dropout(profiled) -> None:
    text = text_of(profiled[1])
    (track,) = slices_of(added_of(text), padded).values()
    gathers = [s for s in spans_of(profiled[1]) if s[2] == "GatherBackward0"]
    assert len(gathers) == 3
    for start, end, _ in gathers:
        # A float has no room for the last nanosecond.
        around = [one for one in track if one.start <= start + 2 and end <= one.end + 2]
        assert around[-1].name == "backward: patch_drop (PatchDropout)"


def test_the_last_marker_before_the_gather_names_the_patch_dropout(marked) -> None:
    marker = ""
    seen = []
    for _, _, name in spans_of(marked[1]):
        if name.startswith("backward: "):
            marker = name
        elif name == "GatherBackward0":
            seen.append(marker)
    assert seen == ["backward: patch_drop (PatchDropout)"] * 3


def test_a_marker_stands_within_the_engines_event_before_the_node(marked) -> None:
    spans = spans_of(marked[1])
    markers = [s for s in spans if s[2] == "backward: patch_drop (PatchDropout)"]
    engines = [s for s in spans if s[2] == f"{EVALUATE}GatherBackward0"]
    nodes = [s for s in spans if s[2] == "GatherBackward0"]
    assert len(engines) == len(nodes) == 3
    for engine, node in zip(engines, nodes, strict=True):
        assert any(engine[0] <= m[0] and m[1] <= node[0] for m in markers)
        assert engine[0] <= node[0]
        assert node[1] <= engine[1]


@pytest.mark.parametrize("kind", ["profiled", "marked"])
def test_perfetto_drops_none_of_our_labels(kind, request: pytest.FixtureRequest) -> None:
    """Its rule: on one track no slice overlaps another without lying within it."""
    path = request.getfixturevalue(kind)[1]
    stack: list[int] = []
    labels = 0
    for start, end, name in spans_of(path):  # on the CPU all is on one thread
        while stack and stack[-1] <= start:
            stack.pop()
        if parse_label(name) is not None:
            labels += 1
            assert not stack or end <= stack[-1], name
        stack.append(end)
    assert labels > {"profiled": 100, "marked": 200}[kind]
    if kind == "profiled":
        assert_nested(text_of(path))
        assert len(added_of(text_of(path))) > 200


def test_a_schedule_and_its_handlers_work(tmp_path: Path) -> None:
    model, loss, step = training()
    reports = []
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path))

    def ready(profiler) -> None:
        reports.append(backspot.locate(profiler))
        handler(profiler)

    with (
        backspot.instrument(model, depth=1),
        backspot.instrument(loss, name="loss"),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1),
            on_trace_ready=ready,
        ) as profiler,
    ):
        for _ in range(5):
            step()
            profiler.step()
    assert len(reports) == 1
    assert reports[0].step_unit == "profiler step"
    assert reports[0].steps == 2
    assert all("." not in row.path for row in reports[0].modules)
    assert alike(reports[0], backspot.locate(tmp_path))


def test_a_profiler_that_cannot_be_read_says_why() -> None:
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU])
    with pytest.raises(backspot.BackspotError, match="never started"):
        backspot.locate(profiler)
    with profiler, pytest.raises(backspot.BackspotError, match="still running"):
        backspot.locate(profiler)
    with pytest.raises(backspot.BackspotError, match="has no"):
        backspot.locate(profiler)
    with profile(activities=[ProfilerActivity.CPU]) as forward_only:
        torch.ones(3) + 1
    with pytest.raises(backspot.BackspotError, match="no backward pass"):
        backspot.locate(forward_only)


def test_the_old_profiler_of_autograd_is_read_too() -> None:
    model, _, step = training()
    with (
        backspot.instrument(model),
        torch.autograd.profiler.profile(use_kineto=True) as profiler,
    ):
        step()
    assert backspot.locate(profiler)["patch_drop"].row.wall_ns > 0
