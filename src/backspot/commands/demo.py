"""Find a slow backward in a vision transformer, then mend it.

Profiles timm's VisionTransformer with patch dropout under deterministic
algorithms, ranks its modules by backward time, swaps in a patch dropout that
indexes instead of gathering, and compares the two. Full size on a GPU; a
smaller model, under a minute, on a CPU.

Example:
  backspot demo --output my-demo
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backspot.errors import MissingDependencyError, OutputExistsError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from backspot.report import Report

EXIT_CODES = (6, 7)

_PATCH_DROP = "patch_drop"
_WARM_UP, _PROFILED = 3, 5
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
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo."""
    from rich.console import Console

    torch, timm = _import()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device; leave --device out")
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    folder = _folder(args.output, args.force)
    # cuBLAS reads this when it starts; without it deterministic algorithms refuse to run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    console = Console(highlight=False)
    with _deterministic(torch):
        _story(_Case(torch, timm, "cuda" if on_gpu else "cpu"), folder, args.force, console)
    return 0


def _import() -> tuple[Any, Any]:
    try:
        import timm
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            f"the demo needs torch and timm ({error}): pip install 'backspot[demo]'"
        ) from None
    return torch, timm


def _folder(wanted: str | None, force: bool) -> Path:
    folder = Path(wanted or "backspot-demo")
    if wanted is None:
        number = 2
        while folder.exists():
            folder, number = Path(f"backspot-demo-{number}"), number + 1
    for name in _FILES:
        if (folder / name).exists() and not force:
            raise OutputExistsError(f"{folder / name} exists: give --force or another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {folder}: {error.strerror}") from None
    return folder


@contextmanager
def _deterministic(torch: Any) -> Iterator[None]:  # noqa: ANN401
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class _Case:
    """The published case: a ViT whose patch dropout gathers, under deterministic algorithms."""

    def __init__(self, torch: Any, timm: Any, device: str) -> None:  # noqa: ANN401
        self.torch, self.device = torch, device
        vit = timm.models.vision_transformer.VisionTransformer
        torch.manual_seed(0)
        if device == "cuda":
            self.batch, size = 128, {}  # ViT-Base, 16 x 16 patches of a 224 x 224 image
            self.name = torch.cuda.get_device_name()
            self.rounds = 20
        else:
            self.batch = 8
            size = {"embed_dim": 192, "depth": 6, "num_heads": 3}
            self.name = f"the CPU ({torch.get_num_threads()} threads)"
            self.rounds = 6
        self.model = vit(patch_drop_rate=0.5, **size).to(device).train()
        gather = self.model.patch_drop
        self.variants = {"gather": gather, "index": _index_variant(torch, gather)}
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.images = torch.randn(self.batch, 3, 224, 224, device=device)
        self.labels = torch.randint(0, 1000, (self.batch,), device=device)

    def describe(self) -> str:
        """One line for people."""
        parameters = sum(p.numel() for p in self.model.parameters()) / 1e6
        precision = "bf16 autocast" if self.device == "cuda" else "fp32"
        return (
            f"VisionTransformer(patch_drop_rate=0.5), {parameters:.0f} M parameters, batch "
            f"{self.batch}, {precision}, deterministic algorithms, on {self.name}"
        )

    def step(self) -> None:
        """Forward, loss, backward, SGD."""
        torch = self.torch
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.loss(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def use(self, variant: str) -> None:
        """Put one of the two patch dropouts in place."""
        self.model.patch_drop = self.variants[variant]

    def profile(self, variant: str, trace: Path | None, force: bool) -> Report:
        """Warm up, profile labelled steps and locate."""
        import backspot

        self.use(variant)
        models = {"": self.model, "loss": self.loss}
        return backspot.profile(
            self.step, models, steps=_PROFILED, warmup=_WARM_UP, trace=trace, force=force
        )

    def time(self, tick: Callable[[], None]) -> dict[str, list[float]]:
        """Milliseconds of plain steps of both variants, in turns, so that drift hits both."""
        times: dict[str, list[float]] = {variant: [] for variant in self.variants}
        for number in range(self.rounds + 1):
            for variant, found in times.items():
                self.use(variant)
                self.synchronize()
                start = time.perf_counter()
                self.step()
                self.synchronize()
                if number:  # the first round warms up
                    found.append((time.perf_counter() - start) * 1e3)
                tick()
        return times


def _index_variant(torch: Any, gather: Any) -> Any:  # noqa: ANN401
    """A PatchDropout like timm's with one index for each patch, not one for each number in it."""

    class PatchDropout(type(gather)):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:  # noqa: ANN401
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

    console.print(f"[bold]1.[/] Training {case.describe()}")
    before = case.profile("gather", folder / _FILES[0], force)
    colored = console.color_system is not None
    console.file.write(f"\n{render_text(before, width=console.width, color=colored)}\n\n")
    for name in _FILES[1:]:
        before.save(folder / name, force=force)
    if not before.has_gpu:
        row = before[_PATCH_DROP].row
        console.print(
            f"On a CPU gathering costs little: patch_drop takes {before.share(row):.1%} here. On a "
            "GPU deterministic gather sorts, and patch_drop heads the list.\n"
        )
    console.print(
        f"[bold]2.[/] Wrote {', '.join(_FILES)} into {folder}{os.sep}: open report.html, or the "
        'trace at https://ui.perfetto.dev and search for "backward: patch_drop".'
    )
    console.print(
        "[bold]3.[/] timm's PatchDropout gathers, with one index for each number; here is one that "
        "indexes, with one for each patch:\n"
    )
    after = case.profile("index", None, force)
    with _progress(console, "timing both", 2 * (case.rounds + 1)) as tick:
        times = case.time(tick)
    _compare(before, after, times, console)


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("   {task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _typical(nanoseconds: Sequence[int]) -> float:
    """The median step in milliseconds: one step that the machine held up decides nothing."""
    import statistics  # not needed for the help, which loads this file

    return statistics.median(nanoseconds) / 1e6


def _compare(
    before: Report, after: Report, times: dict[str, list[float]], console: Console
) -> None:
    import statistics

    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("ms per step", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "ms per step" else "right")

    def add(name: str, was: float, now: float) -> None:
        change = f"{(now - was) / was:+.0%}" if was else ""
        table.add_row(name, f"{was:.2f}", f"{now:.2f}", change)

    rows = before[_PATCH_DROP].row, after[_PATCH_DROP].row
    add("patch_drop, backward wall", *(_typical(row.wall_ns_by_step) for row in rows))
    if before.has_gpu:
        add("patch_drop, backward GPU", *(row.gpu_ms_per_step for row in rows))
    add("patch_drop, forward", *(row.forward_ms_per_step for row in rows))
    backwards = ([p.wall_ns for p in report.passes] for report in (before, after))
    add("whole backward, profiled", *(_typical(found) for found in backwards))
    steps = [statistics.median(found) for found in times.values()]
    add("whole step, without profiler", *steps)
    console.print(table)
    spread = max(
        quartiles[2] - quartiles[0]
        for quartiles in (statistics.quantiles(found, n=4) for found in times.values())
    )
    count = len(next(iter(times.values())))
    console.print(
        f"\nMedians; the whole step's of {count} in turns, {spread:.2f} ms between quartiles."
    )
    if abs(steps[0] - steps[1]) < spread:
        console.print("The whole steps differ by no more than that: no difference is claimed.")
