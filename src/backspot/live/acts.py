"""What parts do with a training that still lives: around its recorded steps, and after its report.

``parts.py`` lists them. ``profile`` and the recorder call each, and know none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from backspot.analysis.recording import Recording
from backspot.presented import Presented
from backspot.results.report import Report


@dataclass(frozen=True)
class Living:
    """What still lives of a training after it was recorded.

    Attributes:
        models: the models by name.
        optimizers: those that took a step.
        loader: where the batches come from, if that is known.
        step: runs one more real step of the training; ``None`` if only the training does.
        why_no_step: why one more step must not be run; ``""`` if it may.
    """

    models: Mapping[str, torch.nn.Module]
    optimizers: Sequence[torch.optim.Optimizer] = ()
    loader: Any = None
    step: Callable[[], object] | None = None
    why_no_step: str = ""


class Act:
    """What a part does with a training. By default, nothing."""

    def __enter__(self) -> Act:
        """Begin, before the steps run."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End, when there is a report or an error in its place."""

    def use(self, path: Path, recording: Recording) -> None:
        """See the exported trace, and its recording, before there is a report."""

    def after(self, report: Report, live: Living) -> Report:
        """Return the report with what the training, as it still lives, adds to it."""
        return report


class Joint(Act):
    """What the processes of a training answer together, beside the report of each.

    Attributes:
        file_name: what the files of the answer are called.
    """

    file_name: str

    def collect(self) -> Presented:
        """Return the answer, in the first process.

        Raises:
            UsageError: If there is none.
        """
        raise NotImplementedError
