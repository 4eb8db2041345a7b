"""A callback for the ``Trainer`` of Hugging Face transformers.

from backspot.integrations.transformers import BackspotCallback

trainer = Trainer(model, arguments, callbacks=[BackspotCallback()], ...)
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from backspot.errors import MissingDependencyError

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise MissingDependencyError(
        "backspot.integrations.transformers needs transformers, which is not installed: "
        "pip install 'transformers[torch]'"
    ) from None

from transformers.trainer_callback import CallbackHandler

from backspot.integrations._trainer import (
    RecordsSteps,
    Written,
    hand_to_each,
    to_wandb,
)

_LOGGERS = "transformers.integrations."


class BackspotCallback(RecordsSteps, TrainerCallback):  # type: ignore[misc]
    """Records some steps of a training by ``Trainer``, and reports what makes its backward slow.

    The report (``report.html``, ``report.json``, ``trace.json.gz``) is written into the folder
    ``backspot`` in ``args.output_dir``. Rank zero prints the headline and hands the report to what
    ``args.report_to`` names: times to all of them, the text to TensorBoard, the files to MLflow,
    the page to Weights & Biases. Each other rank writes a report of its own. The losses stay the
    same, and nothing remains after the recording.

    ``Trainer`` does not say when a training fails. A recording that is under way then ends with the
    next training, or when Python exits.

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

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: object
    ) -> None:
        """Prepare to count steps."""
        self._end()

        def to_loggers(written: Written) -> None:
            about = (args, state, control)
            hand_to_each(
                _loggers(sys._getframe()), lambda logger: _hand_over(written, logger, about, model)
            )

        self._begin("transformers", model, args.output_dir, to_loggers)
        atexit.register(self._end)

    def on_step_end(self, *_: object, **__: object) -> None:
        """Count a step."""
        self._step_ended()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Remove everything."""
        self._end()

    def _end(self) -> None:
        atexit.unregister(self._end)
        super()._end()


def _loggers(frame: FrameType | None) -> Iterator[Any]:
    """Yield the trainer's callbacks that log.

    A callback has no reference to the others. They are in the handler that calls this one.
    """
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            for callback in handler.callbacks:
                if any(base.__module__.startswith(_LOGGERS) for base in type(callback).__mro__):
                    yield callback
            return
        frame = frame.f_back


def _hand_over(written: Written, logger: Any, about: tuple[Any, Any, Any], model: Any) -> None:
    """Hand a report to one of the trainer's callbacks that log."""
    kinds = {base.__name__ for base in type(logger).__mro__}
    logs: dict[str, Any] = dict(written.scalars)
    if "TensorBoardCallback" in kinds:
        logs["backspot/report"] = written.text
    logger.on_log(*about, logs=logs, model=model)
    if "MLflowCallback" in kinds:
        for path in written.paths:
            sys.modules["mlflow"].log_artifact(str(path), "backspot")
    elif "WandbCallback" in kinds:
        to_wandb(sys.modules["wandb"].run, written)
