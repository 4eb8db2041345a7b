"""The client of ``preloaded.py``: it asks the server for a process, and ends as that ends.

Hundreds of tests start it, so it imports little: ``socket``, ``signal`` and ``json`` would take
twice as long as all of Python's own start.
"""

import _signal  # type: ignore[import-not-found]
import _socket
import array
import marshal
import os
import sys


def ask(address: str, arguments: list[str]) -> None:
    """Run Python with these arguments in a fork of the server, and end as it ends."""
    handed_on = [0, 1, 2, *_handed_on()]
    asked = marshal.dumps(
        [arguments, dict(os.environ), os.getcwd(), handed_on]  # noqa: PTH109
    )
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(address)
    passed = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", handed_on))
    server.sendmsg([len(asked).to_bytes(4, "big")], [passed])
    for descriptor in handed_on[3:]:
        os.close(descriptor)
    server.sendall(asked)
    child = _number_from(server)
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1):
        _signal.signal(number, lambda number, _: os.kill(child, number))
    ended = _number_from(server)
    if ended < 0:
        if -ended != _signal.SIGKILL:  # that nothing can catch
            _signal.signal(-ended, _signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)


def _number_from(server: _socket.socket) -> int:
    """Wait for a line with a number."""
    line = b""
    while not line.endswith(b"\n"):
        got = server.recv(1)
        if not got:
            sys.exit("the server of the tests has ended, or did not understand what it was asked")
        line += got
    return int(line)


def _handed_on() -> list[int]:
    """Return the descriptors that a process has from its parent besides its streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # that of the folder itself is closed
            continue
    return found


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])
