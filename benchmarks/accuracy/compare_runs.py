"""Does ``backspot.compare`` tell a real change from the same thing recorded twice?

    python -m benchmarks.accuracy.compare_runs

Each model is recorded several times in one process, in turn, eight steps at a time. Between two
recordings of the same model no difference may be claimed. The published remedy (PatchDropout by
indexing in place of gather) must be claimed, in the module that was changed. The results list every
claim.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, parse, print_table, record_trace, script, write_results


def _models(device: str, small: bool) -> dict[str, tuple[Any, Callable[[], None]]]:
    import torch
    from torch.nn.functional import cross_entropy

    from benchmarks.models import (
        Context,
        IndexPatchDropout,
        patch_drop_vit,
        timm_model,
        training_step,
    )

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    context = Context(device, small)
    gather = patch_drop_vit(context, depth=context.pick(12, 2))
    index = copy.deepcopy(gather)
    index.patch_drop = IndexPatchDropout()
    side, batch = context.pick(224, 32), context.pick(128, 4)
    images = context.randn(batch, 3, side, side)
    labels = context.randint(1000, batch)
    name = "resnet10t" if small else "resnet50"
    models = {"gather": gather, "index": index, name: timm_model(context, name)}

    def step_of(model: torch.nn.Module) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return training_step(
            model,
            lambda: cross_entropy(model(images), labels),
            optimizer,
            around=lambda: context.bf16(device == "cuda"),
        )

    return {kind: (model, step_of(model)) for kind, model in models.items()}


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


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__, out="compare_runs.json", cases=False)
    parser.add_argument("--repeats", type=int, help="recordings of each model (default: 3)")
    parser.add_argument("--keep", type=Path, help="keep the recordings in this folder")
    arguments = parse(parser, argv)
    import backspot

    repeats = arguments.repeats or (2 if arguments.small else 3)
    steps = 3 if arguments.small else 8
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        models = _models(arguments.device, arguments.small)
        recorded: dict[str, list[Path]] = {name: [] for name in models}
        for number in range(repeats):
            for name, (model, step) in models.items():
                path = folder / f"{name}.{number}.json.gz"
                with backspot.instrument(model):
                    record_trace(
                        step, arguments.device, path, steps=steps, warmup=3, settled=3 + steps
                    )
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
    write_results(arguments, {"steps": steps, "pairs": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
