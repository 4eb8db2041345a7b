"""A callback for the ``Trainer`` of Lightning.

from backspot.integrations.lightning import BackspotCallback

trainer = lightning.Trainer(callbacks=[BackspotCallback()])
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from backspot.errors import MissingDependencyError


def _package() -> Any:
    """Return Lightning under the name that is in use; both names have classes of their own."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise MissingDependencyError(
        "backspot.integrations.lightning needs Lightning, which is not installed: "
        "pip install lightning"
    )


_Callback: Any = _package().Callback

# After the line above, so that a missing Lightning is noticed before torch is imported.
from backspot.integrations._trainer import (  # noqa: E402
    RecordsSteps,
    Written,
    hand_to_each,
    to_wandb,
)


class BackspotCallback(RecordsSteps, _Callback):  # type: ignore[misc]
    """Records some steps of a training by Lightning, and reports what makes its backward slow.

    The report (``report.html``, ``report.json``, ``trace.json.gz``) is written into the folder
    ``backspot`` in ``trainer.log_dir``, or in ``trainer.default_root_dir`` without a logger. Rank
    zero prints the headline and hands the report to the loggers: times to all of them, the text to
    TensorBoard, the files to MLflow, the page to Weights & Biases. Each other rank writes a report
    of its own. A step ends with the batch whose optimizer step it was. The losses stay the same,
    and nothing remains after the recording.

    Args:
        warmup: how many steps to wait for first. Default 5.
        steps: how many steps to time without the profiler, and then how many to record. Default 10.
        every: make another report after each so many steps. ``None`` (default): one report.
        depth: as in ``instrument``. ``None`` (default): all.
        compiled: as in ``instrument``. Default true.
        stacks: whether to record three steps more with the lines of Python that run, for
            ``report.host``. Default false.
        folder: where to write the report. ``None`` (default): as above.

    Raises:
        UsageError: If an argument is invalid.
    """

    _steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Prepare to count steps."""
        parent = trainer.log_dir or trainer.default_root_dir  # on all ranks: it is broadcast
        self._steps = trainer.global_step

        def to_loggers(written: Written) -> None:
            step = trainer.global_step
            hand_to_each(trainer.loggers, lambda logger: _hand_over(written, logger, step))

        self._begin("Lightning", pl_module, parent, to_loggers)

    def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
        """Count a step, if an optimizer has stepped since the last one."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._step_ended()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove everything."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove everything."""
        self._end()


def _hand_over(written: Written, logger: Any, step: int) -> None:
    """Hand a report to a logger of Lightning."""
    logger.log_metrics(written.scalars, step)
    kinds = {base.__name__ for base in type(logger).__mro__}
    if "TensorBoardLogger" in kinds:
        logger.experiment.add_text("backspot/report", written.text, step)
    elif "MLFlowLogger" in kinds:
        for path in written.paths:
            logger.experiment.log_artifact(logger.run_id, str(path), "backspot")
    elif "WandbLogger" in kinds:
        to_wandb(logger.experiment, written)
