"""What ``backspot.compare`` says of a real change, and of the same thing recorded twice.

    python -m benchmarks.accuracy.compare_runs

Each model is recorded several times in one process, in turn, eight steps at a time. Two recordings
of the same model must not be told apart; the published remedy (PatchDropout by indexing in place of
gather) must be, in the module where it was made. Results state every claim.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accuracy.published_case import _build, _step, index_drop
from benchmarks.common import RESULTS, machine, print_table, synchronize, write_json

_STEPS = 8


def _record(model: Any, step: Callable[[], None], device: str, path: Path) -> None:  # noqa: ANN401 - a module
    from torch.profiler import ProfilerActivity, profile, schedule

    import backspot

    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    synchronize(device)
    with (
        backspot.instrument(model),
        profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=3, active=_STEPS, repeat=1),
            on_trace_ready=lambda prof: prof.export_chrome_trace(str(path)),
        ) as prof,
    ):
        for _ in range(3 + _STEPS):
            step()
            synchronize(device)
            prof.step()


def _models(device: str, small: bool) -> dict[str, tuple[Any, Callable[[], None]]]:
    import timm
    import torch

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    gather = _build(device, small)
    index = copy.deepcopy(gather)
    index.patch_drop = index_drop(0.5)
    side, batch = (32, 4) if small else (224, 128)
    images = torch.randn(batch, 3, side, side, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    name = "resnet10t" if small else "resnet50"
    resnet = timm.create_model(name, num_classes=1000).to(device).train()
    return {
        kind: (model, _step(model, images, labels, device, bf16=device == "cuda"))
        for kind, model in {"gather": gather, "index": index, name: resnet}.items()
    }


def _compared(before: Path, after: Path) -> dict[str, Any]:
    import backspot

    comparison = backspot.compare(backspot.locate(before), backspot.locate(after))
    whole = comparison.whole
    claims = [c for c in comparison.changes if c.verdict in ("slower", "faster")]
    return {
        "before_ms": whole.before_ms,
        "after_ms": whole.after_ms,
        "interval_ms": (whole.low_ms, whole.high_ms),
        "whole": whole.verdict,
        "modules": len(comparison.changes),
        "claims": [(c.path, c.verdict, c.before_ms, c.after_ms) for c in claims],
        "first": comparison.changes[0].path,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--repeats", type=int, default=3, help="recordings of each model")
    parser.add_argument("--keep", type=Path, help="keep the recordings in this folder")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_runs.json")
    arguments = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        models = _models(device, arguments.small)
        recorded: dict[str, list[Path]] = {name: [] for name in models}
        for number in range(arguments.repeats):
            for name, (model, step) in models.items():
                path = folder / f"{name}.{number}.json.gz"
                _record(model, step, device, path)
                recorded[name].append(path)
        pairs = [
            (f"{name}, twice", *pair)
            for name, paths in recorded.items()
            for pair in itertools.combinations(paths, 2)
        ]
        pairs += [
            ("gather → index", *pair)
            for pair in zip(recorded["gather"], recorded["index"], strict=True)
        ]
        results = [{"pair": what, **_compared(before, after)} for what, before, after in pairs]
    print_table(
        ("pair", "before ms", "after ms", "interval ms", "whole", "modules claimed", "first"),
        [
            (
                r["pair"], r["before_ms"], r["after_ms"],
                " to ".join(f"{x:.2f}" for x in r["interval_ms"]), r["whole"],
                f"{len(r['claims'])} of {r['modules']}", r["first"],
            )
            for r in results
        ],
    )  # fmt: skip
    write_json(arguments.out, {"hardware": machine(device), "steps": _STEPS, "pairs": results})


if __name__ == "__main__":
    main()
