"""Inductor: its settings, and the code that it has compiled.

Importing any of it takes seconds, so all of it is looked up once a program has loaded it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from backspot.live.torch_internals.loading import when_loaded

__all__ = [
    "CompiledCode",
    "InductorSettings",
    "compiled_code",
    "inductor_settings",
    "when_inductor_loads",
]

_INDUCTOR_CONFIG = "torch._inductor.config"
_SITES = "inductor_provenance_stack_traces_str"


class InductorSettings(NamedTuple):
    """What Inductor has for recording the launch sites of the code that it generates.

    Attributes:
        config: the module with the setting ``post_grad_custom_post_pass``: a pass over each graph
            just before code is generated. ``config.trace`` has ``provenance_tracking_level``: with
            2, the stack traces of the graph's nodes are kept by launch site.
        pass_class: the base class of such a pass that knows of inference.
        base_class: the base class of all such passes: only these can be cached.
    """

    config: Any
    pass_class: type
    base_class: type

    @property
    def knows_inference(self) -> bool:
        """Whether a pass can be told that the graph is for inference."""
        return self.pass_class is not self.base_class


def inductor_settings() -> InductorSettings | None:
    """Return Inductor's settings; ``None`` if it is not loaded or lacks one of them.

    Without them a compiled region has one owner.
    """
    config = sys.modules.get(_INDUCTOR_CONFIG)
    if not hasattr(config, "post_grad_custom_post_pass"):
        return None
    if not hasattr(getattr(config, "trace", None), "provenance_tracking_level"):
        return None
    try:
        from torch._inductor import custom_graph_pass
    except ImportError:
        return None
    base = getattr(custom_graph_pass, "CustomGraphPass", None)
    if base is None:
        return None
    inference = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", base)
    return InductorSettings(config, inference, base)


def when_inductor_loads(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function once Inductor's settings are loaded, at once if they are.

    Returns:
        A function that takes this back.
    """
    return when_loaded(_INDUCTOR_CONFIG, call)


class CompiledCode(NamedTuple):
    """A compiled graph in memory.

    Attributes:
        key: the key in the names of its calls.
        backward: whether it is a backward graph.
        sites: the stack traces of each launch site, as JSON; ``None`` if they were not kept.
    """

    key: str
    backward: bool
    sites: str | None


def compiled_code() -> list[CompiledCode]:
    """Return the compiled graphs in memory: compiled here, or loaded from a cache.

    The garbage collector knows them all, also those from before Backspot was imported.
    """
    output_code = sys.modules.get("torch._inductor.output_code")
    graph_class = getattr(output_code, "CompiledFxGraph", None)
    if _SITES not in getattr(graph_class, "__annotations__", ()):
        return []
    return [
        CompiledCode(
            str(getattr(graph, "_fx_graph_cache_key", None)),
            bool(getattr(graph, "fx_kwargs", {}).get("is_backward")),
            getattr(graph, _SITES, None),
        )
        for graph in gc.get_referrers(graph_class)
        if type(graph) is graph_class
    ]
