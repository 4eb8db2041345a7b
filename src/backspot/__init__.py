"""Backspot finds the module that makes a PyTorch backward pass slow.

    print(backspot.profile(step, model))   # runs a few training steps

    with backspot.instrument(model):
        ...                                # profile a few steps with torch.profiler yourself
    print(backspot.locate(prof))           # or a trace's path

Importing this does not import torch: only ``profile`` and ``instrument`` need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backspot._version import __version__
from backspot.results import presented

if TYPE_CHECKING:
    from backspot.comparison.changes import Comparison
    from backspot.comparison.compare import compare
    from backspot.errors import BackspotError
    from backspot.live import Instrumentation, instrument, profile
    from backspot.pipeline import locate
    from backspot.results.report import Report

__all__ = [
    "BackspotError",
    "Comparison",
    "Instrumentation",
    "Report",
    "__version__",
    "compare",
    "instrument",
    "locate",
    "profile",
]

_HOMES = {
    "BackspotError": "backspot.errors",
    "Comparison": "backspot.comparison.changes",
    "Instrumentation": "backspot.live",
    "Report": "backspot.results.report",
    "compare": "backspot.comparison.compare",
    "instrument": "backspot.live",
    "locate": "backspot.pipeline",
    "profile": "backspot.live",
}


def _forms() -> presented.Forms:
    from backspot import render

    return render


def _labelling() -> presented.Labelling:
    from backspot import pipeline

    return pipeline


# Results print and save themselves through the renderers, which import them. Only the root of the
# package knows both; it imports neither before it is asked for.
presented.forms, presented.labelling = _forms, _labelling


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the public names have no common type
    if name not in _HOMES:
        raise AttributeError(f"module 'backspot' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
