"""The phases of a step in words: their names and shares, and what a long one means."""

from __future__ import annotations

from backspot.formatting import duration, percent
from backspot.results.costs import Phase, PhaseName
from backspot.results.findings import stable
from backspot.results.report import Report, lines_of

_LONG = 0.2
"""From this share of the step, a phase other than forward and backward gets an explanation."""

_NOTABLE = 0.1
"""From this share of the idle time, the profiler's part of it is worth saying."""

PHASES: dict[PhaseName, str] = {
    "data": "waiting for data",
    "host": "host code before the first operator",
    "copy": "copies to the GPU",
    "forward": "forward",
    "loss": "loss",
    "metrics": "metrics",
    "backward": "backward",
    "scaler": "gradient scaler",
    "clipping": "gradient clipping",
    "optimizer": "optimizer",
    "zero_grad": "zero_grad",
    "averaging": "average of the weights",
    "rollout": "rollout",
    "scoring": "scoring",
    "reference": "reference model",
    "teacher": "forward without gradients (teacher)",
    "evaluation": "forward without gradients",
    "saving": "saving a checkpoint",
    "trainer": "trainer and callbacks",
    "other": "other work",
    "idle": "idle",
}

_ON_A_CPU: dict[PhaseName, str] = {"copy": "copies of the batch", "idle": "idle (Python)"}
"""What phases are called where the trace has no work of a device."""

_TAKES: dict[PhaseName, str] = {
    "data": "Waiting for data takes",
    "host": "Host code before the first operator takes",
    "copy": "Copying the batch takes",
    "loss": "The loss takes",
    "metrics": "Reading metrics takes",
    "scaler": "The gradient scaler takes",
    "clipping": "Clipping the gradients takes",
    "optimizer": "The optimizer takes",
    "zero_grad": "zero_grad takes",
    "averaging": "Averaging the weights takes",
    "rollout": "The rollout takes",
    "scoring": "Scoring takes",
    "reference": "The reference model takes",
    "teacher": "The teacher's forward without gradients takes",
    "evaluation": "The forward without gradients takes",
    "saving": "Saving checkpoints takes",
    "trainer": "The trainer, with its callbacks, takes",
    "other": "Work outside the model takes",
    "idle": "Idle time takes",
}


_BARE_BATCH = "the size of its batches, as no activations are kept for a backward"
_BARE_PRECISION = "the precision that it runs in, and whether it is compiled"

_MEANINGS: dict[PhaseName, tuple[str, str]] = {
    "data": (
        "the time until the model has its next batch",
        "what the host does in this time, such as loading data without worker processes",
    ),
    "host": (
        "Python before the model has its batch, with no operator and no loader's mark in it",
        "the lines of this time, which backspot run --stacks shows: it may be loading of data",
    ),
    "copy": (
        "copies from the host to the GPU while no kernel runs",
        "pinned memory with non_blocking=True, and at the size of the batch",
    ),
    "loss": (
        "work after the model's forward and before the backward",
        "the loss function and at what else runs there",
    ),
    "metrics": (
        "values that the host reads outside of the model, and what computes them",
        "whether they can stay on the device, and be read in fewer steps",
    ),
    "scaler": (
        "the gradient scaler looks at all gradients, and the host reads whether they are finite",
        "whether bfloat16 does, which needs no scaler",
    ),
    "clipping": (
        "what is done with the gradients between the backward and the optimizer's step",
        "whether torch.nn.utils.clip_grad_norm_ does it for all gradients at once, and nothing "
        "reads their norms one by one",
    ),
    "optimizer": (
        "updates of the parameters",
        "what it does for each parameter, and whether one operator can do it for all",
    ),
    "zero_grad": (
        "gradients are dropped, or set to zero",
        "whether set_to_none=True, the default, is in use",
    ),
    "averaging": (
        "an average of the weights is brought up to date",
        "whether one operator does it for all parameters (torch._foreach_lerp_), or fewer steps",
    ),
    "rollout": (
        "the model generates, without gradients, what it is then trained on",
        "how much one call generates: more sequences or environments at once, and a cache of keys "
        "and values where a sequence grows",
    ),
    "scoring": (
        "what was generated is scored without gradients, for the training on it",
        _BARE_BATCH,
    ),
    "reference": (
        "a frozen model of this name runs without gradients on what is trained on",
        _BARE_PRECISION,
    ),
    "teacher": (
        "a model of this name runs without gradients on what is trained on",
        _BARE_PRECISION,
    ),
    "evaluation": ("the model runs without gradients inside the step", _BARE_BATCH),
    "saving": ("a checkpoint is copied and written", "saving in fewer steps, or in a thread"),
    "trainer": (
        "Lightning's own work, callbacks and hooks",
        "the callbacks and what is logged in each step",
    ),
    "other": (
        "recorded work that belongs to no other phase",
        "its operators in a trace viewer",
    ),
    "idle": (
        "nothing is recorded, neither on the host nor on a GPU",
        "what the program does besides PyTorch's operators, such as logging or waiting for "
        "another process",
    ),
}
"""What a long phase means and what to look at first; only what follows from any such trace."""


def kept_phases(report: Report) -> list[Phase]:
    """The phases that take any time."""
    return [phase for phase in report.phases if phase.wall_ns]


def phase_text(report: Report, phase: Phase) -> tuple[str, str, str]:
    """A phase's name, its time in a step, and its share of it."""
    share = percent(phase.wall_ns / report.step_ns if report.step_ns else 0.0)
    name = PHASES[phase.name]
    if not report.has_gpu:
        name = _ON_A_CPU.get(phase.name, name)
    return name, duration(phase.wall_ns), share


def explained(report: Report) -> list[str]:
    """A sentence for each phase that takes much of the step, the longest first."""
    phases = [phase for phase in report.phases if abs(phase.wall_ns) > _LONG * report.step_ns]
    sentences = []
    for phase in sorted(phases, key=lambda phase: -abs(phase.wall_ns)):
        if phase.name in _MEANINGS:
            name, _, share = phase_text(report, phase)
            meaning, first = _meaning(report, phase.name)
            name = f"{name[0].upper()}{name[1:]} ({share} of the {report.per})"
            sentences.append(f"{name}: {meaning}; look first at {first}.")
    return sentences


def _meaning(report: Report, phase: PhaseName) -> tuple[str, str]:
    """What a long phase means, and what to look at first."""
    if phase == "copy" and not report.has_gpu:
        return "copies before the forward", "the size of the batch"
    if phase == "idle" and not report.has_gpu:
        meaning = "no operator runs, so this is Python and the program's other work"
        lines = "" if lines_of(report) else ", whose lines backspot run --stacks shows"
        return f"{meaning}{_of_profiler(report)}", (
            f"Python code between operators{lines}: loops over small tensors, logging and waiting "
            "for another process"
        )
    if phase == "other" and not _has_forward(report):
        return (
            "the trace shows neither modules nor the forward of these nodes, so this may be "
            "forward, loss or anything else"
        ), "its operators in a trace viewer"
    return _MEANINGS[phase]


def _of_profiler(report: Report) -> str:
    """How much of the idle time of a CPU may be the profiler's own, if that is known."""
    idle = sum(phase.wall_ns for phase in report.phases if phase.name == "idle")
    real = report.replayed_step.ns if report.replayed_step else report.step_ns
    least = min(idle, report.step_ns - real)
    if least < _NOTABLE * idle:
        return ""
    return f"; up to {duration(least)} of it may be the profiler's own"


def _has_forward(report: Report) -> bool:
    return report.source != "none" or any(phase.name == "forward" for phase in report.phases)


def taking(report: Report, path: str) -> str:
    """That a phase without modules, ``(data)`` and the like, takes time."""
    phase = _phase_of(path)
    if phase == "idle" and not report.has_gpu:
        return "Python between operators takes"
    if phase == "other" and not _has_forward(report):
        return "Work outside the backward takes"
    return _TAKES[phase]


def first_look(report: Report) -> str:
    """What to look at first in the phase that the answer is about, if no finding is about it."""
    subject = report.answer
    places = {place.path for finding in stable(report.findings) for place in finding.places}
    if subject.kind != "phase" or subject.path in places:
        return ""
    return f"Look first at {_meaning(report, _phase_of(subject.path))[1]}."


def _phase_of(path: str) -> PhaseName:
    return next(name for name in PHASES if path == f"({name})")
