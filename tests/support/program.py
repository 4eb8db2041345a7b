"""The program as a user starts it, in a process of its own."""

import os
import subprocess
import sys

PROGRAM = [sys.executable, "-m", "backspot"]


def program(*arguments, **more):
    environment = {**os.environ, **more.pop("env", {})}
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, check=False, env=environment, **more
    )
