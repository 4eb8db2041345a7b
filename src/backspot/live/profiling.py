"""``profile``: run a training step under the profiler and return a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backspot.analysis.caveats import NO_CALLS, NO_LABELS, TRANSFORMED
from backspot.analysis.recording import Options, Recording
from backspot.checks import check_flag, check_whole
from backspot.errors import BackspotError, UsageError
from backspot.formatting import visible
from backspot.live.acts import Living, records_of, takes
from backspot.live.instrumentation import NO_FUNCTION, Instrumentation, check_arguments
from backspot.live.loaders import fetch, newest
from backspot.live.modules import class_name, unwrap
from backspot.live.optimizers import stepping
from backspot.live.parts import ASKING, acts_of
from backspot.live.ranks import rank_and_ranks
from backspot.live.recording import (
    DETAIL,
    MOST_CALLS,
    TIMES,
    Labelled,
    LeftAlone,
    Measurement,
    Profiled,
    Settled,
    Stage,
    Timed,
    in_detail,
)
from backspot.live.source_lines import place_of_frame
from backspot.live.step_log import StepLog
from backspot.live.torch_internals import autograd
from backspot.live.torch_internals.profiler import new_range, recording as is_recording
from backspot.pipeline import locate_export
from backspot.progress import Progress
from backspot.render.labelled_trace import check_labelled
from backspot.results.report import Report, changed
from backspot.trace.names import NEXT_BATCH

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from backspot.live.parts import Asked

_TOO_MANY = (
    "A step calls {:,} Python functions, of which PyTorch cannot record all stacks: the lines of "
    "Python are not known."
)
_ALONE = "a step of one rank alone would wait for the others"
_FETCH = f"{NEXT_BATCH}backspot.profile.__next__"  # as torch's DataLoader marks it, with a class


@takes(ASKING)
def profile(
    step: Callable[..., Any],
    model: torch.nn.Module | Mapping[str, torch.nn.Module],
    *,
    data: Iterable[Any] | None = None,
    steps: int = 10,
    warmup: int = 3,
    unprofiled: int = 10,
    depth: int | None = None,
    shapes: bool = False,
    stacks: bool = True,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
    **asked: Unpack[Asked],
) -> Report:
    """Run a training step a few times under the profiler and find the modules that make it slow.

    The steps are real: they train the model ``warmup + unprofiled + steps`` times, and three times
    more for what is recorded in detail (``stacks``, ``shapes``); with workers of a ``DataLoader``,
    also until these have found their pace, at most twice as many steps as they keep batches ready.
    ``steps`` of them are recorded with labels by ``torch.profiler``, on the host and on the devices
    in use, and analysed as ``locate`` does.
    Batches, model and optimizer are not reset, and nothing but ``trace`` is written to disk. Only
    the calling process is profiled, and no worker of a ``DataLoader``.

    Args:
        step: one training step, backward included: called as ``step()``, or as ``step(batch)`` with
            ``data``.
        model: the module to examine, or several by name, loss functions too: ``{"": model, "loss":
            loss_fn}`` gives paths such as ``blocks.3`` and ``loss``.
        data: the source of batches, usually a ``DataLoader``; waiting for a batch is part of the
            step. It is iterated again if it ends too early.
        steps: how many steps to record, at least 1. Default 10: with fewer, one step that is held
            up counts for much.
        warmup: how many steps to run before that, at least 0. Default 3.
        unprofiled: how many steps to time without the profiler, for ``unprofiled_step_ns``: before
            the recording, as the device's profiler slows its process down afterwards too. Default
            10.
        depth: the deepest level that is labelled, as in ``instrument``. ``None`` (default): all.
        shapes: whether to record the inputs of operators, for ``Row.work``, in three steps of their
            own. Default false.
        stacks: whether to record which lines of Python run and wait, for ``Report.host`` and
            ``Report.waits``, in the same three steps; not where another profiler uses Python's
            profiling function, or a step calls more than 600,000 functions. Default true.
        trace: where to write the recording for a trace viewer (``.json`` or ``.json.gz``), with
            tracks of nested spans ``backward: …``. ``None`` (default) writes none.
        force: whether to overwrite a file at ``trace``. Default false.

    Returns:
        The report, with a warning for each model that the step never called.

    Raises:
        BackspotError: If memory runs low before one step is recorded.
        UsageError: If an argument is invalid, a profiler is running already, or ``data`` cannot be
            iterated again.
        AlreadyInstrumentedError: If the model or a part of it is labelled already.
        NoBackwardError: If the step runs no backward.
        OutputExistsError: If ``trace`` exists, without ``force``; before any step runs.

    An exception of ``step`` is passed on, after the labels are removed.

    Example:
        >>> import backspot, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     model(torch.randn(32, 64)).square().mean().backward()
        ...     optimizer.step()
        >>> report = backspot.profile(step, model, steps=2, warmup=1)
        >>> report["1"].row.class_name
        'Linear'
        >>> report["0"].row.calls
        1.0
    """
    _check_arguments(step, model, data, steps, warmup, unprofiled)
    check_flag("shapes", shapes)
    check_flag("stacks", stacks)
    acts = acts_of(asked)
    if trace is not None:
        check_labelled(trace, force=force)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    for name, model_part in models.items():
        check_arguments(model_part, depth, name)
    take = _step_with(step, data)
    named = f"the profile of {visible(getattr(step, '__name__', type(step).__name__))}()"
    # Without a step before, the first one to be timed would be a warm-up.
    before = unprofiled if warmup > 1 else 0
    stages: tuple[Stage, ...] = (
        Labelled(lambda: models, depth),
        LeftAlone(max(warmup - 1, 0), counted=stacks),
        Settled(),
        Timed(before),
        Profiled(TIMES, steps, prepared=min(warmup, 1)),
        Timed(unprofiled - before),
        *in_detail(records=records_of(acts), shapes=shapes, stacks=stacks, prepared=0),
    )
    passed_over = autograd.PassedOver.calls
    total = sum(stage.count for stage in stages)
    log = StepLog()
    with ExitStack() as around:
        for act in acts:
            around.enter_context(act)
        with (
            Progress("profiling", "steps", total=total) as progress,
            stepping() as optimizers,
            log,
        ):
            measurement = Measurement(
                stages,
                step_ended=progress.advance,
                log=log,
                # On the training's own thread, by the watch on memory, where a profiler may stop.
                end_inside=lambda: steps_to_run.close(),
            )
            steps_to_run = measurement.steps()
            with closing(steps_to_run):
                for _ in steps_to_run:
                    take()
                    log.step_ended()
            loader = newest(data)
        if measurement.shortage and not measurement.profiles[TIMES].count:
            raise BackspotError(f"profile: no report, as {measurement.shortage}")
        detail = measurement.profiles.get(DETAIL)
        transformed = autograd.PassedOver.calls > passed_over

        def with_what_training_shows(report: Report, _: Recording, __: Options) -> Report:
            if stacks and measurement.calls > MOST_CALLS:
                many = _TOO_MANY.format(measurement.calls)
                report = changed(report, warnings=(*report.warnings, many))
            if measurement.shortage:
                report = changed(
                    report, warnings=(f"Only {measurement.shortage}.", *report.warnings)
                )
            return _with_unused(report, models, measurement.labelled, transformed=transformed)

        def use(path: Path, recording: Recording) -> None:
            for act in acts:
                act.use(path, recording)

        report = locate_export(
            measurement.profiles[TIMES].profiler,
            named,
            Options(
                live=True,
                warmed_up=warmup > 0,
                real_steps=tuple(measurement.times_ns),
                training=log.training(),
                slowed_by=measurement.slowed_by,
                place=place_of_frame,
            ),
            in_detail=detail.profiler if detail and detail.count else None,
            parts=(with_what_training_shows,),
            trace=trace,
            force=force,
            use=use,
        )
    why_no_step = _ALONE if rank_and_ranks()[1] > 1 else ""
    live = Living(models, optimizers, loader, take, why_no_step)
    for act in acts:
        report = act.after(report, live)
    return report


def _check_arguments(
    step: object,
    model: object,
    data: object,
    steps: object,
    warmup: object,
    unprofiled: object,
) -> None:
    if isinstance(step, torch.nn.Module):
        raise UsageError(
            f"profile({class_name(step)}, ...): give the function that runs a training step first, "
            "then the model"
        )
    if not callable(step):
        raise UsageError(
            f"profile(step, ...): step must be a function, not {type(step).__name__}; "
            "hand it over without calling it"
        )
    named_models = list(model.items()) if isinstance(model, Mapping) else [("", model)]
    for name, candidate in named_models:
        if not isinstance(candidate, torch.nn.Module):
            argument = f"model[{name!r}]" if isinstance(model, Mapping) else "model"
            raise UsageError(
                f"profile(step, model): {argument} must be a torch.nn.Module, not "
                f"{type(candidate).__name__}"
                f"{NO_FUNCTION if callable(candidate) else '; several go into a dict by name'}"
            )
    if not named_models:
        raise UsageError("profile(step, model): the dict of models is empty")
    check_whole("steps", steps, 1)
    check_whole("warmup", warmup, 0)
    check_whole("unprofiled", unprofiled, 0)
    if data is not None and not isinstance(data, Iterable):
        raise UsageError(f"data must be iterable, as a DataLoader is, not {type(data).__name__}")
    if is_recording():
        raise UsageError(
            "a profiler is running already: end it first, or have it record labels with "
            "backspot.instrument(model) and give it to backspot.locate"
        )


def _step_with(step: Callable[..., Any], data: Iterable[Any] | None) -> Callable[[], Any]:
    """Return the step as a function without arguments; a label is around fetching its batch."""
    if data is None:
        return step
    batches = iter(data)
    taken = 0

    def take() -> None:
        nonlocal batches, taken
        with new_range(_FETCH):
            try:
                batch = fetch(batches)
            except StopIteration:
                batches = iter(data)
                try:
                    batch = fetch(batches)
                except StopIteration:
                    raise UsageError(
                        f"data ended after {taken} batches and cannot be begun again: give a list "
                        "or a DataLoader, or fewer steps"
                    ) from None
            taken += 1
        step(batch)

    return take


# Warnings ----------------------------------------------------------------------------------------


def _with_unused(
    report: Report,
    models: Mapping[str, torch.nn.Module],
    labelled: Mapping[str, Instrumentation],
    *,
    transformed: bool,
) -> Report:
    """Return the report with a warning for each model of which the step called no module.

    Calls inside a transform of ``torch.func`` have no labels, so the warning is another then.
    """
    called = {row.path for row in report.modules if row.is_module and row.calls}
    unused = [
        f"{name!r} ({class_name(unwrap(unused_model))})"
        if name
        else class_name(unwrap(unused_model))
        for name, unused_model in models.items()
        if called.isdisjoint(labelled[name].paths)
    ]
    # A compiled region can be any of them, without labels: the report has a warning for that.
    compiled = any(row.calls for row in report.modules if not row.is_module)
    if not unused or compiled:
        return report
    others = tuple(w for w in report.warnings if w not in (NO_CALLS, NO_LABELS, TRANSFORMED))
    if transformed:
        return changed(report, warnings=(TRANSFORMED, *others))
    sentences = tuple(
        f"No call of {who} was recorded: hand over the object that the step calls, no copy of it "
        "(or it was compiled as a whole, which takes the labels out)."
        for who in unused
    )
    return changed(report, warnings=sentences + others)
