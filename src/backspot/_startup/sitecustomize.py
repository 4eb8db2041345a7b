"""Python runs this at its start in the processes that a script under ``backspot run`` starts.

It takes itself out of the path, and runs what Python runs without it. This may be another Python
than Backspot's, so all of it is older than most, and nothing here ends the start.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

import os
import sys


def _follow(package):
    from _frozen_importlib_external import SourceFileLoader  # which is in memory

    # Without the rest of the package, which each start of Python would wait for.
    for name in ("imports", "children"):
        module = type(sys)("backspot." + name)
        module.__file__ = os.path.join(package, name + ".py")
        # As an import does, with the bytecode that is kept.
        code = SourceFileLoader(module.__name__, module.__file__).get_code(module.__name__)
        sys.modules[module.__name__] = module
        exec(code, vars(module))  # type: ignore[arg-type]
    module.wait()


_startup = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [one for one in sys.path if one != _startup]
_self = sys.modules.pop("sitecustomize", None)  # Python 2 clears a module that nobody holds
_python = "%s %x\n" % (sys.prefix, sys.hexversion)
_given = os.environ.get("BACKSPOT_CHILDREN", "")
if _given.startswith(_python) and os.path.exists(_given.split("\n", 2)[2]):
    try:
        _follow(os.path.dirname(_startup))
    except Exception:
        sys.modules.pop("backspot.children", None)
        sys.modules.pop("backspot.imports", None)
__import__("sitecustomize")
