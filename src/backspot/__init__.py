"""Backspot finds the module that makes a PyTorch backward pass slow.

    print(backspot.profile(step, model))   # runs a few training steps

    with backspot.instrument(model):
        ...                                # profile a few steps with torch.profiler yourself
    print(backspot.locate(prof))           # or the path of a trace

Importing ``backspot`` imports neither torch nor numpy: public names are loaded on first use, and
only ``profile``, ``instrument`` and ``Monitor`` need torch. What a report holds, down to the cost
of a node, are the classes of ``backspot.results``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from backspot import presented
from backspot._version import __version__ as __version__

if TYPE_CHECKING:
    from backspot import results as results
    from backspot.comparison.compare import compare as compare
    from backspot.errors import (
        AlreadyInstrumentedError as AlreadyInstrumentedError,
        BackspotError as BackspotError,
        MissingDependencyError as MissingDependencyError,
        NoBackwardError as NoBackwardError,
        NotATraceError as NotATraceError,
        OutputExistsError as OutputExistsError,
        SourceNotFoundError as SourceNotFoundError,
        UsageError as UsageError,
    )
    from backspot.job.gather import ranks as ranks
    from backspot.live import (
        Alarm as Alarm,
        Instrumentation as Instrumentation,
        Monitor as Monitor,
        instrument as instrument,
        profile as profile,
    )
    from backspot.pipeline import locate as locate
    from backspot.results import (
        Comparison as Comparison,
        Finding as Finding,
        JobReport as JobReport,
        Report as Report,
        Row as Row,
    )
    from backspot.trace.source import Source as Source

_NAMES = {
    "backspot.comparison.compare": "compare",
    "backspot.errors": "AlreadyInstrumentedError BackspotError MissingDependencyError "
    "NoBackwardError NotATraceError OutputExistsError SourceNotFoundError UsageError",
    "backspot.job.gather": "ranks",
    "backspot.live": "Alarm Instrumentation Monitor instrument profile",
    "backspot.pipeline": "locate",
    "backspot.results": "Comparison Finding JobReport Report Row",
    "backspot.trace.source": "Source",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOMES, "__version__", "results"])


def _forms() -> presented.Forms:
    from backspot import render

    return render


def _save_labelled(*args: Any, **options: Any) -> Any:
    from backspot.pipeline import save_labelled

    return save_labelled(*args, **options)


# Results print and save themselves through the renderers, which import the results. Only the root
# of the package knows both, and it imports the renderers on first use.
presented.forms, presented.save_labelled = _forms, _save_labelled


def __getattr__(name: str) -> Any:
    if name == "results":
        return import_module("backspot.results")
    if name not in _HOMES:
        raise AttributeError(f"module 'backspot' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic command ``%%backspot`` to IPython; called by ``%load_ext backspot``."""
    from backspot.integrations.ipython import CellMagic

    shell.register_magic_function(CellMagic(shell).backspot, "cell")


def __dir__() -> list[str]:
    return [*__all__]
