"""Python processes that start with PyTorch in memory: its import takes seconds of a core.

So are Backspot, half a second of each, and what it needs of others, and what Inductor is made of.

``[*python(), ...]`` stands for ``[sys.executable, ...]``. A small client, ``asking.py``, sends its
arguments, environment, folder and streams to a server that has imported all that and used nothing
of it. The server forks, and the fork goes on like a new interpreter. No module of torch or Backspot
is in its ``sys.modules`` until something imports it: a finder brings it back then, and what it
imports with it; PyTorch comes back as a whole, but for what the first compilation imports. Signals
and the exit code pass through the client, and a client that is killed takes its process with it.

A fork ends as Python ends, but for what takes longest: what the server has imported, other than
Backspot, is not taken apart, object by object. ``[*python(), WHOLE, ...]`` does that too, for tests
of what could crash there.

All that a fork touches, and be it a count of references, is copied for it, a page each time. So the
server does itself what is the same for all forks.

What a process starts by ``sys.executable`` is an ordinary Python. ``parent(folder)`` stands for a
Python whose processes start with PyTorch in memory too: ``sys.executable`` is a program in
``folder`` that starts them so.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

WHOLE = "--whole"
SHARED = "BACKSPOT_TESTS_SERVER"
_CLIENT = Path(__file__).with_name("asking.py")
_PARENT = "--parent"
_MOST_DESCRIPTORS = 100
"""More files than a process of these tests passes on; Linux passes at most 253 at once."""

# In the tests ------------------------------------------------------------------------------------


@cache
def python() -> list[str]:
    """Return the start of a command that runs Python; the first call starts the server.

    Workers whose environment names a folder by ``SHARED`` have one server.
    """
    if sys.platform != "linux":
        return [sys.executable]
    import atexit
    import fcntl
    import tempfile

    own = None if SHARED in os.environ else tempfile.TemporaryDirectory()
    folder = Path(own.name if own else os.environ[SHARED])
    address, alive = folder / "socket", folder / "alive"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            users = os.open(alive, os.O_WRONLY | os.O_NONBLOCK)  # refused where nobody reads
        except OSError:
            users = _start_server(address, alive)

    held = [users]

    def leave() -> None:
        while held:  # the fork of a fork has none
            os.close(held.pop())

    def end() -> None:
        if own and held:  # in no fork: it has left, and the folder is not its own
            own.cleanup()
        leave()

    atexit.register(end)
    os.register_at_fork(after_in_child=leave)  # the server does not wait for a fork that is left
    # No site-packages: the client starts in some milliseconds.
    return [sys.executable, "-I", "-S", str(_CLIENT), str(address)]


def _start_server(address: Path, alive: Path) -> int:
    """Start it; return a descriptor to keep open: the server ends when nobody has one."""
    import subprocess

    for path in (address, alive):
        path.unlink(missing_ok=True)
    os.mkfifo(alive)
    reading = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    users = os.open(alive, os.O_WRONLY)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(address))
    listening.listen(64)
    server = subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno())],
        stdin=reading,
        pass_fds=[listening.fileno()],
    )
    _SERVERS.append(server)  # nobody waits for it: other workers can need it longer
    listening.close()
    os.close(reading)
    return users


_SERVERS: list[Any] = []


def executable(folder: Path) -> Path:
    """Write a program that starts Python so, for what takes one path and no arguments."""
    import shlex

    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(python())} "$@"\n')
    path.chmod(0o755)
    return path


def write_kernel(folder: Path) -> None:
    """Write what makes Jupyter's kernels start so, where ``JUPYTER_PATH`` is the folder."""
    import json

    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [*python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(about))


def parent(folder: Path) -> list[str]:
    """Return the start of a command that runs Python, whose processes are started so too."""
    import shlex

    if sys.platform != "linux":
        return [sys.executable]
    path = folder / "python"
    start = [*python(), _PARENT, str(path)]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(start)} "$@"\n')
    path.chmod(0o755)
    return start


# The server --------------------------------------------------------------------------------------


def _serve(listening: socket.socket) -> list[str]:
    """Fork for each client; return, in the fork, the arguments for Python."""
    import atexit
    import gc
    import marshal
    import select
    import weakref

    atexit.register(_say_no_more)  # first: it runs last
    import msgspec  # noqa: F401 - what Backspot itself needs, and rich
    import torch._dynamo  # noqa: F401 - which the first optimizer imports
    from rich import console, table  # noqa: F401

    with suppress(ImportError):
        import numpy.ma  # noqa: F401 - which Backspot imports where PyTorch has numpy
    _KEPT_MODULES.import_compiler()
    _KEPT_MODULES.import_backspot()
    _FINALIZERS.extend(finalizer for finalizer in weakref.finalize._registry if finalizer.atexit)
    _finalize_at_exit(False)
    own = ("sys", "builtins", "__main__", "backspot")
    _KEPT.extend(
        "".join([*name])  # a copy: all copies are side by side in memory
        for name in sys.modules
        if name.partition(".")[0] not in own
    )
    _KEPT_MODULES.hide()
    gc.freeze()  # a fork that looks for garbage copies every page that it looks at

    waking, waker = socket.socketpair()
    for end in (waking, waker):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    clients: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([0, listening, waking, *clients.values()], [], [])
        if 0 in ready:
            for child in clients:
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        if waking in ready:
            waking.recv(1 << 16)
            while clients:
                child, status = os.waitpid(-1, os.WNOHANG)
                if not child:
                    break
                with clients.pop(child) as client, suppress(OSError):  # it may have been killed
                    client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        for child, client in list(clients.items()):
            if client in ready:
                os.kill(child, signal.SIGKILL)  # the client was
        if listening in ready:
            client, _ = listening.accept()
            client.settimeout(_PATIENCE_S)
            streams: list[int] = []
            try:
                size, streams, _, _ = socket.recv_fds(client, 4, _MOST_DESCRIPTORS)
                with client.makefile("rb") as asked:
                    said = asked.read(int.from_bytes(size, "big"))
                arguments, environment, folder, numbers = marshal.loads(said)
            except (OSError, ValueError, EOFError):  # it was killed, or stopped, meanwhile
                client.close()
                for stream in streams:
                    os.close(stream)
                continue
            child = os.fork()
            if child:
                clients[child] = client
                with suppress(OSError):  # it was killed: the next round ends the child, too
                    client.sendall(b"%d\n" % child)
                for stream in streams:
                    os.close(stream)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (waking, waker, listening, client, *clients.values()):
                other.close()
            _have(streams, numbers)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            return arguments


def _have(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors other numbers, which can be those that others of them have."""
    import fcntl

    free = max(*descriptors, *numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


class _KeptModules:
    """Finds the modules that are in memory already, and brings them back as an import does."""

    def __init__(self) -> None:
        self._torch: dict[str, Any] = {}
        self._compiler: dict[str, Any] = {}
        self._backspot: dict[str, Any] = {}
        self._needs: dict[str, dict[str, None]] = {}

    def import_compiler(self) -> None:
        """Import what the first compilation imports, and note what each module imports."""
        from importlib import import_module

        before = set(sys.modules)
        with self._noting():
            for name in _COMPILER:
                with suppress(ImportError):  # of another PyTorch
                    import_module(name)
        self._compiler = dict.fromkeys(
            name
            for name, module in sys.modules.items()
            if name not in before
            and name.partition(".")[0] in _TORCH
            and getattr(module, "__spec__", None) is not None
        )

    def import_backspot(self) -> None:
        """Import all of it, and note what each module imports."""
        from importlib import import_module
        from pkgutil import walk_packages

        with self._noting():
            for module in walk_packages(import_module("backspot").__path__, "backspot."):
                if not module.name.startswith(_LEFT_OUT):
                    import_module(module.name)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what each module imports."""
        import builtins
        from importlib.util import resolve_name

        original = builtins.__import__

        def noting(
            name: str, within: Any = None, local: Any = None, fromlist: Any = (), level: int = 0
        ) -> Any:
            imported = original(name, within, local, fromlist, level)
            importer = within or {}
            if level:
                name = resolve_name("." * level + name, importer["__package__"])
            names = [name, *(f"{name}.{each}" for each in fromlist or ())]
            needs = self._needs.setdefault(importer.get("__name__", ""), {})
            needs.update((each, None) for each in names if each in sys.modules)
            return imported

        builtins.__import__ = noting
        try:
            yield
        finally:
            builtins.__import__ = original

    def hide(self) -> None:
        """Have none of them in ``sys.modules``, nor as attributes of their packages."""
        self._backspot = _taken("backspot")
        self._torch = _taken(*_TORCH)
        self._compiler = {name: self._torch.pop(name) for name in self._compiler}
        kept = {**self._torch, **self._compiler, **self._backspot}
        for name, module in {**self._compiler, **self._backspot}.items():
            package, _, own = name.rpartition(".")
            if package and vars(kept[package]).get(own) is module:
                delattr(kept[package], own)
        sys.meta_path.insert(0, self)

    def forget_backspot(self) -> None:
        """Have it imported as it is anywhere else."""
        self._backspot = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        from importlib.machinery import ModuleSpec

        kept = self._torch.get(name) or self._compiler.get(name) or self._backspot.get(name)
        if kept is None or (name == "backspot" and not self._is_found(kept)):
            return None
        return ModuleSpec(
            name,
            _Bringing(self, kept),
            origin=kept.__spec__.origin,
            is_package=kept.__spec__.submodule_search_locations is not None,
        )

    def _is_found(self, package: Any) -> bool:
        """Whether this process would find the same package; where it does not, forget all of it."""
        from importlib.machinery import PathFinder

        found = PathFinder.find_spec(package.__name__)
        if found is None or found.origin != package.__spec__.origin:
            self._backspot = {}
        return bool(self._backspot)

    def bring(self, module: Any) -> None:
        """Have in ``sys.modules`` what the import of a module had there."""
        from importlib import import_module

        if module.__name__ in self._torch:
            sys.modules.update(self._torch)
            self._torch = {}
            return
        for name in self._needs.get(module.__name__, ()):
            if name not in sys.modules:
                import_module(name)


class _Bringing:
    """The loader of a module that is in memory already."""

    def __init__(self, modules: _KeptModules, module: Any) -> None:
        self._modules, self._module, self._spec = modules, module, module.__spec__

    def create_module(self, spec: object) -> Any:
        return self._module

    def exec_module(self, module: Any) -> None:
        vars(module)["__spec__"] = self._spec  # some refuse attributes that they do not know
        self._modules.bring(module)


_KEPT_MODULES = _KeptModules()
_TORCH = ("torch", "torchgen", "functorch")
_COMPILER = ("torch._inductor.compile_fx", "torch._functorch.aot_autograd")
_LEFT_OUT = ("backspot.__main__", "backspot._startup", "backspot.integrations.")
"""What runs when it is imported, or needs packages that are seldom there."""


def _taken(*packages: str) -> dict[str, Any]:
    """Take the modules of packages out of ``sys.modules``."""
    names = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


def _go_on_as_python(arguments: list[str]) -> None:
    """Do what the interpreter does with its arguments."""
    import runpy
    import warnings

    if arguments[0] == WHOLE:
        del arguments[0]
        _finalize_at_exit(True)
        _KEPT.clear()
    else:
        _leave_the_rest()
    sys.path[0:1] = [""]
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == _PARENT:
        _be_a_parent(arguments[1])
        del arguments[:2]
    warnings._processoptions(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))
    while arguments[0][:2] in ("-u", "-B", "-W", "-X", "-s", "-P", "-E"):
        option = arguments.pop(0)
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)
        elif option == "-B":
            sys.dont_write_bytecode = True
        elif option[:2] in ("-W", "-X"):  # which multiprocessing writes in one word
            value = option[2:] or arguments.pop(0)
            if option[:2] == "-W":
                warnings._processoptions([value])
    if arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif arguments[0] == "-m":
        sys.path[0] = os.getcwd()  # noqa: PTH109
        sys.argv[:] = arguments[1:]
        runpy._run_module_as_main(arguments[1])
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))  # noqa: PTH120
        sys.argv[:] = arguments
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        path = os.path.abspath(arguments[0])  # noqa: PTH100
        code = compile(Path(path).read_bytes(), path, "exec")
        vars(main)["__file__"] = path
        exec(code, vars(main))


def _be_a_parent(executable: str) -> None:
    """Start processes by a program, and do what Python does at the start of each of them."""
    from importlib import import_module
    from multiprocessing import spawn

    sys.executable = executable
    spawn.set_executable(executable)
    sys.modules.pop("sitecustomize", None)
    try:
        import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    if "backspot.children" in sys.modules:  # of this process alone, and other modules know another
        _KEPT_MODULES.forget_backspot()


def _leave_the_rest() -> None:
    """Let this process end before what it has from the server is taken apart."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)  # nothing is left to flush
    libc.on_exit(libc._exit, None)


_KEPT: list[str] = []
"""The modules that stay whole at the end."""

_PATIENCE_S = 10.0
"""How long the server waits for a client that has connected: all others wait meanwhile."""

_FINALIZERS: list[Any] = []
"""What takes apart what the server has imported: PyTorch's libraries of operators, one by one."""


def _finalize_at_exit(whether: bool) -> None:
    for finalizer in _FINALIZERS:
        finalizer.atexit = whether


def _say_no_more() -> None:
    """Keep nanobind from listing what ``gc.freeze`` has kept as leaks; let modules be."""
    import ctypes

    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    if _KEPT:
        kept = [_KEPT_MODULES, *(sys.modules.pop(name, None) for name in _KEPT)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


if __name__ == "__main__":
    _go_on_as_python(_serve(socket.socket(fileno=int(sys.argv[1]))))
