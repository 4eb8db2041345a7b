"""All steps of a training as a small picture, in SVG that needs no script: a bar for each stretch.

A bar is as high as the mean step of its stretch; the darker part is a typical step.
"""

from __future__ import annotations

from backspot.formatting import counted, duration
from backspot.render.html._fragments import shown
from backspot.render.training import training_facts, training_line
from backspot.results.report import Report
from backspot.results.training import Stretch

_HEIGHT = 64
_FEWEST = 3
"""Stretches from which there is a course to draw."""


def training_picture(report: Report) -> str:
    """The account of all steps and their picture, or nothing where they were not noted."""
    training = report.training
    if training is None:
        return ""
    facts_of_training = training_facts(training, report.rare)
    facts = "".join(f"<li>{shown(text)}</li>" for text in facts_of_training)
    drawn = ""
    if len(training.stretches) >= _FEWEST:
        most = max(stretch.step_ns for stretch in training.stretches)
        wide = 100 / len(training.stretches)
        bars = "".join(
            _bar(stretch, wide * index, wide, most)
            for index, stretch in enumerate(training.stretches)
        )
        last = training.stretches[-1]
        label = (
            f"Mean step in the course of the training, steps {training.stretches[0].first:,} to "
            f"{last.first + last.steps - 1:,}, at most {duration(most)}"
        )
        drawn = (
            f'<svg role="img" height="{_HEIGHT}" aria-label="{label}">{bars}</svg>'
            f'<p class="muted">{label}.</p>'
        )
    title = training_line(training, has_gpu=report.has_gpu)
    return (
        f'<section class="step training"><h2>{shown(title)}</h2>{drawn}'
        f'<ul class="facts">{facts}</ul></section>'
    )


def _bar(stretch: Stretch, left: float, wide: float, most: int) -> str:
    """A bar for the mean step of a stretch, and one in front of it for a typical step."""
    steps = counted(stretch.steps, "step")
    text = f"{steps} from step {stretch.first:,} on: {duration(stretch.step_ns)} each"
    drawn = ""
    for nanoseconds, kind in (
        (stretch.step_ns, "c0"),
        (min(stretch.typical_ns, stretch.step_ns), "c1"),
    ):
        high = _HEIGHT * nanoseconds / most
        drawn += (
            f'<rect class="{kind}" x="{left + 0.1 * wide:.2f}%" width="{0.8 * wide:.2f}%" '
            f'y="{_HEIGHT - high:.1f}" height="{high:.1f}"/>'
        )
    return f"<g><title>{text}</title>{drawn}</g>"
