"""Find the slow module in a model's backward, then fix it.

Profiles a model that has a slow module, ranks the modules by backward time,
replaces the slow one, and compares both. On a GPU, the model is timm's ViT-Base
with a patch dropout that gathers under deterministic algorithms; on a CPU,
where gathering is cheap, it is a text classifier with a large vocabulary.

Example:
  backspot demo
  backspot demo --device cpu --output my-demo
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.errors import MissingDependencyError, OutputExistsError, UsageError
from backspot.formatting import counted
from backspot.progress import Progress

if TYPE_CHECKING:
    from backspot.results.report import Report
    from backspot.styled import Console

EXIT_CODES = (6, 7)

_WARM_UP, _PROFILED = 3, 5
_VOCABULARY = 250_000  # as multilingual models have
_FILES = ("trace.json.gz", "report.html", "report.json", "report.csv", "report.md")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the trace and the reports (default: backspot-demo, or the next free name)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite files in --output")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="the device to train on (default: auto)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from backspot.styled import Console

    torch = _import("torch")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; omit --device")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    timm = _import("timm") if on_gpu else None
    folder = _folder(args.output, args.force)
    console = Console(highlight=False)
    if on_gpu:
        # cuBLAS reads this when it starts; without it deterministic algorithms refuse to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        with _deterministic(torch):
            _story(_OnGpu(torch, timm), folder, args.force, console)
    else:
        _story(_OnCpu(torch), folder, args.force, console)
    return 0


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(
            f"the demo needs torch and timm ({error}): pip install 'backspot[demo]'"
        ) from None


def _folder(wanted: str | None, force: bool) -> Path:
    folder = Path(wanted or "backspot-demo")
    if wanted is None:
        number = 2
        while folder.exists():
            folder, number = Path(f"backspot-demo-{number}"), number + 1
    for name in _FILES:
        if (folder / name).exists() and not force:
            raise OutputExistsError(f"{folder / name} exists: use --force or another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}") from None
    return folder


@contextmanager
def _deterministic(torch: Any) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Case:
    """A model with a slow module, and a fast replacement for that module.

    Attributes:
        slow: path of the slow module.
        remedy: the replacement, as a sentence that introduces the comparison.
        rounds: number of timed steps of each variant.
    """

    slow: str
    about: str
    remedy: str
    rounds: int

    def __init__(self, torch: Any, model: Any, fixed: Any, inputs: Any) -> None:
        self.torch, self.model, self.inputs = torch, model.train(), inputs
        self.variants = {"before": model.get_submodule(self.slow), "after": fixed.train()}
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.labels = torch.randint(0, 10, (len(inputs),), device=inputs.device)

    def step(self) -> None:
        """Forward, loss, backward, SGD."""
        torch = self.torch
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.inputs.is_cuda):
            loss = self.loss(self.model(self.inputs), self.labels)
        loss.backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.inputs.is_cuda:
            self.torch.cuda.synchronize()

    def use(self, variant: str) -> None:
        """Put the slow module or its replacement into the model."""
        setattr(self.model, self.slow, self.variants[variant])

    def profile(self, variant: str, trace: Path | None, force: bool) -> Report:
        """Profile a few labelled steps after a warm-up."""
        import backspot

        self.use(variant)
        models = {"": self.model, "loss": self.loss}
        return backspot.profile(
            self.step, models, steps=_PROFILED, warmup=_WARM_UP, trace=trace, force=force
        )

    def time(self, tick: Callable[[], None]) -> dict[str, list[float]]:
        """Milliseconds of steps without profiler, in turns, so that drift affects both variants.

        Of two steps of a variant the second counts: it begins with the gradients of its own, which
        ``zero_grad`` frees, and not with those of the other variant.
        """
        times: dict[str, list[float]] = {variant: [] for variant in self.variants}
        for _ in range(self.rounds):
            for variant, times_of_variant in times.items():
                self.use(variant)
                self.step()
                self.synchronize()
                start = time.perf_counter()
                self.step()
                self.synchronize()
                times_of_variant.append((time.perf_counter() - start) * 1e3)
                tick()
        return times


class _OnGpu(_Case):
    """The published case: patch dropout that gathers under deterministic algorithms, in a ViT."""

    slow = "patch_drop"
    remedy = (
        "timm's PatchDropout gathers, with one index per number. This replacement indexes, with "
        "one index per patch:"
    )
    rounds = 16

    def __init__(self, torch: Any, timm: Any) -> None:
        torch.manual_seed(0)
        model = timm.models.vision_transformer.VisionTransformer(patch_drop_rate=0.5).cuda()
        images = torch.randn(128, 3, 224, 224, device="cuda")
        super().__init__(torch, model, _index_variant(torch, model.patch_drop), images)
        self.about = (
            f"VisionTransformer(patch_drop_rate=0.5), batch {len(images)}, bf16 autocast, "
            f"deterministic algorithms, on {torch.cuda.get_device_name()}"
        )


class _OnCpu(_Case):
    """A large embedding: a step looks up few rows, but backward fills a gradient for all."""

    slow = "tokens"
    remedy = (
        f"A step looks up about 500 rows, but backward fills a gradient for all {_VOCABULARY:,}. "
        "nn.Embedding(sparse=True) only has gradients for rows that were looked up:"
    )
    rounds = 12

    def __init__(self, torch: Any) -> None:
        torch.manual_seed(0)
        model = _classifier(torch, rows=_VOCABULARY, width=192)
        sparse = torch.nn.Embedding(1, 1, sparse=True)
        sparse.weight = model.tokens.weight
        sentences = torch.randint(0, _VOCABULARY, (8, 64))
        super().__init__(torch, model, sparse, sentences)
        self.about = (
            f"a text classifier with {_VOCABULARY:,} tokens, batch {len(sentences)}, fp32, on the "
            f"CPU ({counted(torch.get_num_threads(), 'thread')})"
        )


def _classifier(torch: Any, rows: int, width: int) -> Any:
    class TextClassifier(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(rows, width)
            layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(layer, num_layers=4)
            self.head = torch.nn.Linear(width, 10)

        def forward(self, sentences: Any) -> Any:
            embedded = self.tokens(sentences)
            return self.head(self.encoder(embedded).mean(dim=1))

    return TextClassifier()


def _index_variant(torch: Any, gather: Any) -> Any:
    """A PatchDropout like timm's, with one index per patch instead of one per number."""

    class PatchDropout(type(gather)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            if not self.training or self.prob == 0.0:
                return x
            prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
            batch, count = patches.shape[:2]
            keep = max(1, int(count * (1.0 - self.prob)))
            chosen = torch.rand(batch, count, device=x.device).argsort(dim=-1)[:, :keep]
            rows = torch.arange(batch, device=x.device)[:, None]
            return torch.cat((prefix, patches[rows, chosen]), dim=1)

    return PatchDropout(prob=gather.prob, num_prefix_tokens=gather.num_prefix_tokens).train()


def _story(case: _Case, folder: Path, force: bool, console: Console) -> None:
    from backspot.render.text import render_text

    console.print(f"[bold]1.[/] Training {case.about}")
    before = case.profile("before", folder / _FILES[0], force)
    colored = console.color_system is not None
    more = f"backspot show {folder / _FILES[0]} --full"
    text = render_text(before, width=console.width, color=colored, more=more)
    console.file.write(f"\n{text}\n\n")
    for name in _FILES[1:]:
        before.save(folder / name, force=force)
    console.print(
        f"[bold]2.[/] Wrote {', '.join(_FILES)} into {folder}{os.sep}: open report.html, or the "
        f'trace at https://ui.perfetto.dev and search for "backward: {case.slow}".'
    )
    console.print(f"[bold]3.[/] {case.remedy}\n")
    after = case.profile("after", None, force)
    with Progress("timing both", "steps", total=2 * case.rounds) as progress:
        times = case.time(progress.advance)
    _compare(case, before, after, times, console)


def _compare(
    case: _Case, before: Report, after: Report, times: dict[str, list[float]], console: Console
) -> None:
    import statistics  # not needed for the help, which loads this file

    from backspot.styled import Table

    table = Table(box=None, pad_edge=False)
    for column in ("ms per step", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "ms per step" else "right")

    def add(name: str, was: float, now: float) -> None:
        table.add_row(name, f"{was:.2f}", f"{now:.2f}", f"{(now - was) / was:+.0%}" if was else "")

    slow, fast = before[case.slow].row, after[case.slow].row
    add(f"{case.slow}, backward wall", slow.wall_ms, fast.wall_ms)
    if before.has_gpu:
        add(f"{case.slow}, backward GPU", slow.gpu_ns / 1e6, fast.gpu_ns / 1e6)
    add(f"{case.slow}, forward", slow.forward_ns / 1e6, fast.forward_ns / 1e6)
    add("whole backward", before.wall_ms, after.wall_ms)
    steps = [statistics.median(times_of_variant) for times_of_variant in times.values()]
    add("whole step, without profiler", *steps)
    console.print(table)
    quarters = [statistics.quantiles(times_of_variant, n=4) for times_of_variant in times.values()]
    spread = max(last - first for first, _, last in quarters)
    console.print(
        f"\nWhole steps are medians: they were timed in turns, {case.rounds} of each, "
        f"with {spread:.2f} ms between quartiles."
    )
    if abs(steps[0] - steps[1]) < spread:
        console.print("The whole steps differ by less than that, so no difference is claimed.")
