"""What the project's own benchmarks and tests use of the inside, beside the public names.

Nothing here is promised: a name goes or changes with the code behind it. Each is imported on first
use, so that what reads traces needs no torch. ``about(name)`` says what a name is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    # Traces
    "Category": ("backspot.trace", "The kinds of events of a trace."),
    "Kind": ("backspot.trace.labels", "The kinds of labels of a module."),
    "names": ("backspot.trace.names", "How PyTorch spells what it writes into traces."),
    "read_events": ("backspot.trace", "The events of a trace or a profiler, in columns."),
    # Owners and rows
    "attribute": ("backspot.analysis.attribution.ownership", "Which module owns which events."),
    "Recording": ("backspot.analysis.recording", "A trace and all that is computed of it once."),
    "Options": ("backspot.analysis.recording", "What is known of a training beside its trace."),
    "report_of": ("backspot.pipeline", "The report of a recording, with all parts."),
    "all_rules": ("backspot.analysis.findings", "The rules that say why a step is slow."),
    "changed": ("backspot.results.report", "A report with other values in some fields."),
    "gain_of": ("backspot.results.findings", "What following a finding saves, if that is known."),
    "helps": ("backspot.results.findings", "Whether a remedy is known to help, or not to."),
    # Replays
    "Prediction": ("backspot.analysis.replay.predict", "What steps with changes would take."),
    "Refusal": ("backspot.analysis.replay.replayable", "Why a recording is not replayed."),
    "predict": ("backspot.analysis.replay.predict", "The prediction for a recording."),
    # Comparisons
    "quantile": ("backspot.comparison.distributions", "How far chance alone goes: Student's t."),
    # Jobs
    "Graph": ("backspot.job.replay", "The tasks of all ranks, and which of them wait for which."),
    "Summary": ("backspot.job.summary", "What one rank says of itself."),
    "from_bytes": ("backspot.job.summary", "A summary as ranks send it."),
    "answer": ("backspot.job.answer", "The answer for ranks that sent their summaries."),
    "from_json": ("backspot.job.summary", "A summary as it is saved."),
    "summarize": ("backspot.job.reduce", "The summary of the trace of a rank."),
    "to_bytes": ("backspot.job.summary", "A summary as ranks send it, in bytes."),
    # What is shown
    "View": ("backspot.render.view", "How deep and by what the rows of a text are grouped."),
    "format_for": ("backspot.render.formats", "The format of a file, by its name."),
    "render_comparison": ("backspot.render.comparison", "The text of a comparison."),
    "render_subtree": ("backspot.render.text_parts", "The text of a module and those inside."),
    "render_text": ("backspot.render.text", "The text of a report."),
    "suffixes": ("backspot.render", "The suffixes of the files that a report can be saved as."),
    # A training that lives
    "STEPS_IN_DETAIL": ("backspot.live.recording", "Steps that are recorded in detail beside."),
    "Living": ("backspot.live.acts", "A training that a part acts on."),
    "SiteTables": ("backspot.live.frames", "Which modules the launches of compiled code are of."),
    "forget_compilations": (
        *("backspot.live.torch_internals.dynamo", "What was compiled is compiled again."),
    ),
    "inductor": ("backspot.live.torch_internals.inductor", "What Inductor says of its code."),
    "place_of": ("backspot.live.frames", "A module as compiled code names it."),
    "sessions": ("backspot.live.sessions", "The profilers of this process, noticed or not."),
    "unread_marked": ("backspot.live.host_marks", "Marks gradients that nobody reads."),
    "written_class_name": ("backspot.live.modules", "The name of a class as labels have it."),
    # Trials and plans
    "Live": ("backspot.live.trials.trial", "A training whose copies can be tried."),
    "Planning": ("backspot.live.plan.planning", "The act that makes a plan of a training."),
    "chains_of": ("backspot.live.trials.attempts", "What calls follow each other in a step."),
    "interval": ("backspot.live.trials.measuring", "A median and the interval that holds it."),
    "verdict_of": ("backspot.live.trials.measuring", "Whether a remedy helps, by an interval."),
    "with_trials": ("backspot.live.trials.attempts", "A report whose remedies were tried."),
}
_MODULES = ("inductor", "names")


def about(name: str) -> str:
    """Return in a sentence what a name is."""
    return _NAMES[name][1]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _ = _NAMES[name]
    module = import_module(home)
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return ["about", *_NAMES]
