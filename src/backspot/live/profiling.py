"""``profile``: a step function in, a report out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, supported_activities

from backspot.analysis.caveats import NO_LABELS, TRANSFORMED
from backspot.errors import UsageError
from backspot.formatting import visible
from backspot.live import torch_internals
from backspot.live.instrumentation import NO_FUNCTION, Instrumentation, instrument
from backspot.live.modules import class_name, unwrap
from backspot.pipeline import locate_export
from backspot.progress import Progress
from backspot.render.labelled_trace import check_labelled
from backspot.results.report import Report

__all__ = ["profile"]

# The words with which torch.profiler and torch's DataLoader mark these in a trace.
_STEP = "ProfilerStep#"
_NEXT_BATCH = "enumerate(DataLoader)#backspot.profile.__next__"


def profile(
    step: Callable[..., Any],
    model: Any,
    *,
    data: Iterable[Any] | None = None,
    steps: int = 3,
    warmup: int = 3,
    depth: int | None = None,
    hooks: Literal["node", "module"] = "node",
    lines: bool = True,
    trace: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Report:
    """Run a training step a few times under the profiler and say which modules make it slow.

    Warms up, labels the modules, profiles with ``torch.profiler`` on the host and on each kind of
    device that is in use, takes the labels off again and locates. The steps are real ones: they
    train the model as they would without Backspot, ``warmup + steps`` times. On a terminal and in a
    notebook, standard error shows how far it is if it takes long.

    Args:
        step: one training step, backward included: ``step()``, or ``step(batch)`` with ``data``.
            What it returns is not looked at.
        model: the module to find slow parts of; or several by name, a loss function with
            parameters or without among them: ``{"": model, "loss": loss_fn}`` gives the paths
            ``blocks.3`` and ``loss``.
        data: where batches come from, usually a ``DataLoader``; waiting for the next one counts as
            part of the step. What ends too early is begun again.
        steps: how many steps to record.
        warmup: how many steps to run before that; the profiler runs idle in the last of them, as
            it too is slow at first.
        depth: how many parts a labelled path may have, as in ``instrument``.
        hooks: as in ``instrument``.
        lines: whether to record which line of source made each node, as in ``instrument``.
        trace: where to write the labelled trace (``.json`` or ``.json.gz``) for a trace viewer:
            the recording itself, and tracks of nested spans ``backward: …``.
        force: overwrite what is at ``trace``.

    Returns:
        The report. A model that the step never called is named among its warnings.

    Raises:
        UsageError: an argument that cannot be meant, a profiler that runs already, or ``data`` that
            ends too early and cannot be begun again.
        AlreadyInstrumentedError: the model, or a part of it, is instrumented already.
        NoBackwardError: where the step ran no backward.
        OutputExistsError: where ``trace`` exists and ``force`` is false; before any step runs.

    What the step raises passes through; the model bears no hooks then.
    """
    _check_arguments(step, model, data, steps, warmup)
    if trace is not None:
        check_labelled(trace, force=force)
    models = dict(model) if isinstance(model, Mapping) else {"": model}
    take = _step_with(step, data)
    named = f"the profile of {visible(getattr(step, '__name__', type(step).__name__))}()"
    with ExitStack() as stack:
        instrumented = [
            stack.enter_context(instrument(part, depth=depth, name=name, hooks=hooks, lines=lines))
            for name, part in models.items()
        ]
        tick = stack.enter_context(Progress("profiling", "steps", total=warmup + steps)).advance
        for _ in range(warmup - 1):
            take()
            tick()
        profiler = torch.profiler.profile(activities=_activities(models))
        with _prepared(profiler):
            if warmup:
                take()
                tick()
            # Kernels that still run have their launch before the recording, and no owner in it.
            _synchronize(models)
        passed_over = torch_internals.PassedOver.calls
        with _recording(profiler):
            for number in range(steps):
                with torch_internals.new_range(f"{_STEP}{number}"):
                    take()
                tick()
            _synchronize(models)
    report = locate_export(profiler, named, trace=trace, force=force)
    transformed = torch_internals.PassedOver.calls > passed_over
    return _with_unused(report, models, instrumented, transformed=transformed)


def _check_arguments(
    step: object, model: object, data: object, steps: object, warmup: object
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
    parts = list(model.items()) if isinstance(model, Mapping) else [("", model)]
    for name, part in parts:
        if not isinstance(part, torch.nn.Module):
            which = f"model[{name!r}]" if isinstance(model, Mapping) else "model"
            raise UsageError(
                f"profile(step, model): {which} must be a torch.nn.Module, not "
                f"{type(part).__name__}{_way_out(part)}"
            )
    if not parts:
        raise UsageError("profile(step, model): the dict of models is empty")
    for word, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            raise UsageError(f"{word}={value!r}: give a whole number of at least {least}")
    if data is not None and not isinstance(data, Iterable):
        raise UsageError(f"data must be iterable, as a DataLoader is, not {type(data).__name__}")
    if torch_internals.recording():
        raise UsageError(
            "a profiler is running already: end it first, or have it record labels with "
            "backspot.instrument(model) and give it to backspot.locate"
        )


def _step_with(step: Callable[..., Any], data: Iterable[Any] | None) -> Callable[[], Any]:
    """The step as a function of nothing; waiting for its batch bears a label."""
    if data is None:
        return step
    batches = iter(data)
    taken = 0

    def take() -> None:
        nonlocal batches, taken
        with torch_internals.new_range(_NEXT_BATCH):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(data)
                try:
                    batch = next(batches)
                except StopIteration:
                    raise UsageError(
                        f"data ended after {taken} batches and cannot be begun again: give a list "
                        "or a DataLoader, or fewer steps"
                    ) from None
            taken += 1
        step(batch)

    return take


# Devices -----------------------------------------------------------------------------------------


def _kind(activity: ProfilerActivity) -> str:
    """The kind of device whose work an activity records, as ``torch.device.type`` calls it."""
    if activity.name == "PrivateUse1":
        return str(torch._C._get_privateuse1_backend_name())
    return str(activity.name).lower()


def _devices(models: Mapping[str, Any]) -> set[torch.device]:
    """The devices in use, but the host: those of the models, and what else the process began."""
    found = {
        tensor.device
        for part in models.values()
        for tensor in (*part.parameters(), *part.buffers())
    }
    for activity in supported_activities() - {ProfilerActivity.CPU}:
        backend = getattr(torch, _kind(activity), None)
        if backend is not None and getattr(backend, "is_initialized", bool)():
            found.add(torch.device(_kind(activity), backend.current_device()))
    return {device for device in found if device.type not in ("cpu", "meta")}


def _activities(models: Mapping[str, Any]) -> list[ProfilerActivity]:
    kinds = {"cpu", *(device.type for device in _devices(models))}
    return [activity for activity in supported_activities() if _kind(activity) in kinds]


def _synchronize(models: Mapping[str, Any]) -> None:
    for device in _devices(models):
        wait = getattr(getattr(torch, device.type, None), "synchronize", None)
        if device.type == "mps":
            torch.mps.synchronize()
        elif wait is not None:
            wait(device)


# The profiler's two states -----------------------------------------------------------------------


@contextmanager
def _prepared(profiler: torch.profiler.profile) -> Iterator[None]:
    with warnings.catch_warnings():
        # torch 2.8 to 2.11 say at every profile that events of earlier cycles are gone.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        profiler.prepare_trace()
    try:
        yield
    except BaseException:
        # There is no other way back from here.
        profiler.start_trace()
        profiler.stop_trace()
        raise


@contextmanager
def _recording(profiler: torch.profiler.profile) -> Iterator[None]:
    try:
        profiler.start_trace()
        yield
    finally:
        if torch_internals.recording():  # else an interrupt came before the start
            profiler.stop_trace()


# What is told of it ------------------------------------------------------------------------------


def _with_unused(
    report: Report,
    models: Mapping[str, Any],
    instrumented: list[Instrumentation],
    *,
    transformed: bool,
) -> Report:
    """The report with a warning for each model of which the step called no part.

    In a transform of ``torch.func`` it may have, unlabelled.
    """
    called = {row.path for row in report.modules if row.is_module and row.calls}
    unused = [
        f"{name!r} ({class_name(unwrap(part))})" if name else class_name(unwrap(part))
        for (name, part), hooked in zip(models.items(), instrumented, strict=True)
        if called.isdisjoint(hooked.paths)
    ]
    # A compiled region may be any of them, its labels compiled away: another warning tells.
    compiled = any(row.calls for row in report.modules if not row.is_module)
    if not unused or compiled:
        return report
    others = tuple(w for w in report.warnings if w not in (NO_LABELS, TRANSFORMED))
    if transformed:
        return replace(report, warnings=(TRANSFORMED, *others))
    told = tuple(
        f"No call of {who} was recorded: hand over the object that the step calls, no copy of it "
        "(or it was compiled as a whole, which takes the labels out)."
        for who in unused
    )
    return replace(report, warnings=told + others)


def _way_out(part: object) -> str:
    if callable(part):
        return NO_FUNCTION
    return "; several go into a dict by name"
