"""Record the commands of the documentation in a terminal of their own.

    python docs/make_recording.py [FOLDER]

writes ``terminal.cast`` (asciicast v2, for ``asciinema play``) and ``terminal.svg`` (the same,
animated, for pages) into ``docs/images``. The commands run for real, in a pseudo-terminal of 80 by
24; how fast they are typed and how long their output stays is fixed, so that the files change with
the output alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
COLUMNS, LINES = 80, 24
FILES = {
    "trace.json.gz": DATA / "h200" / "vit_patch_drop.trace.json.gz",
    "before.json.gz": DATA / "findings" / "sorted_detector.trace.json.gz",
    "after.json.gz": DATA / "findings" / "gather_detector.trace.json.gz",
}
SCENES = (
    ("backspot show trace.json.gz", 9.0),
    ("backspot explain sorted-indexing", 6.0),
    ("backspot diff before.json.gz after.json.gz", 7.0),
)
"""What is typed, and for how many seconds the output stays."""
PROMPT = "\x1b[32m$\x1b[0m "
KEY, KEYS = 0.12, 3  # seconds between keystrokes, of which so many come at once
RUNS = 0.4  # seconds that a command seems to take


def output_of(command: str, folder: Path) -> str:
    """Run a command in a terminal; return what it writes there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
    }
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    process = subprocess.Popen(  # noqa: S603 - the commands above
        ["/bin/sh", "-c", command],
        cwd=folder,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        text += data
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command} failed")
    return text.decode()


def events() -> Iterator[tuple[float, str]]:
    """Yield what the terminal shows, and when."""
    at = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, source in FILES.items():
            shutil.copy(source, folder / file)
        program = folder / "bin" / "backspot"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m backspot "$@"\n', "utf-8")
        program.chmod(0o755)
        for command, stays in SCENES:
            yield at, f"\x1b[H\x1b[2J{PROMPT}"
            at += 4 * KEY
            for start in range(0, len(command), KEYS):
                at += KEY
                yield at, command[start : start + KEYS]
            at += RUNS
            yield at, "\r\n" + output_of(command, folder)
            at += stays
    yield at, ""


def cast(shown: list[tuple[float, str]]) -> str:
    """The recording as an asciicast."""
    head = {"version": 2, "width": COLUMNS, "height": LINES, "title": "Backspot"}
    lines = [head, *([round(at, 2), "o", text] for at, text in shown)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


STYLE = re.compile(r"\x1b\[([0-9;]*)m")
CLASSES = {"1": "b", "2": "d", "31": "r", "32": "g", "33": "y", "36": "c"}
CLEAR = "\x1b[H\x1b[2J"
WIDE, HIGH, PAD = 8.4, 17, 14
CSS = """\
text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;\
white-space:pre;fill:#d8dee9}
.b{font-weight:700}.d{fill:#8b95a7}.r{fill:#e06c75}.g{fill:#98c379}.y{fill:#e5c07b}.c{fill:#56b6c2}
"""


def line_as_svg(text: str, row: int) -> str:
    """One line of the terminal, as its pieces of one style."""
    pieces, classes, column, end = [], [], 0, 0
    for found in [*STYLE.finditer(text), None]:
        piece = text[end : found.start() if found else None]
        if piece.strip():
            kind = f' class="{" ".join(classes)}"' if classes else ""
            at = f'x="{PAD + column * WIDE:g}" textLength="{len(piece) * WIDE:g}"'
            pieces.append(f"<tspan {at}{kind}>{escape(piece, quote=False)}</tspan>")
        column += len(piece)
        if found:
            codes = found[1].split(";")
            end = found.end()
            kept = [] if codes in (["0"], [""]) else classes
            classes = [*kept, *(CLASSES[code] for code in codes if code in CLASSES)]
    return f'<text y="{PAD + (row + 1) * HIGH}">{"".join(pieces)}</text>' if pieces else ""


def svg(shown: list[tuple[float, str]]) -> str:
    """The recording as an animated image: a strip of frames that jumps from one to the next."""
    width, height = round(2 * PAD + COLUMNS * WIDE), 2 * PAD + (LINES + 1) * HIGH
    screen, frames, times = "", [], []
    for at, text in shown[:-1]:
        screen = text.removeprefix(CLEAR) if text.startswith(CLEAR) else screen + text
        lines = screen.replace("\r", "").split("\n")
        lines = lines[:-1] if not lines[-1] else lines
        if len(lines) > LINES + 1:
            raise SystemExit(f"the output has {len(lines)} lines and scrolls: {lines[0]}")
        frames.append("".join(line_as_svg(line, row) for row, line in enumerate(lines)))
        times.append(at)
    whole = shown[-1][0]
    first_result = next(index for index, (_, text) in enumerate(shown) if text[:2] == "\r\n")
    jumps = "".join(
        f"{100 * at / whole:.3f}%{{transform:translateY({-index * height}px)}}"
        for index, at in enumerate(times)
    )
    strip = "".join(
        f'<g transform="translate(0,{index * height})">{frame}</g>'
        for index, frame in enumerate(frames)
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-label="Backspot in a terminal">
<style>{CSS}
.strip{{animation:strip {whole:.2f}s steps(1,end) infinite}}
@keyframes strip{{{jumps}}}
@media (prefers-reduced-motion){{.strip{{animation:none;\
transform:translateY({-first_result * height}px)}}}}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#1f2430"/>
<g class="strip">{strip}</g>
</svg>
"""


def main(folder: Path) -> None:
    """Write both files."""
    shown = list(events())
    (folder / "terminal.cast").write_text(cast(shown), encoding="utf-8")
    (folder / "terminal.svg").write_text(svg(shown), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "docs" / "images")
