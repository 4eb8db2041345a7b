"""The program as a user starts it, in a process of its own."""

import os
import subprocess
import sys

PROGRAM = [sys.executable, "-m", "backspot"]


def program(*arguments, python=(sys.executable,), **more):
    environment = {**os.environ, **more.pop("env", {})}
    command = [*python, "-m", "backspot", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, env=environment, **more)
