"""Run the notebooks from their sources and write what they show beside them.

    python notebooks/execute.py            # all of them
    python notebooks/execute.py 02         # those whose names start so

The percent scripts are the sources; the ``.ipynb`` are made from them here and in no other way.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
# What libraries below write to the process's own standard error, with process numbers and times.
_CHATTER = re.compile(r"(?m)^(USDT|ERROR|WARNING|INFO):.*\.cpp:\d+\].*\n?")


def sources() -> list[Path]:
    """The notebooks' sources, in the order in which they are read."""
    return sorted(FOLDER.glob("[0-9]*.py"))


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook that a source makes when it is run, in its folder, from top to bottom."""
    notebook = jupytext.read(source)
    # tqdm, which timm imports, asks for widgets and names the folder that it lies in.
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
    client = NotebookClient(
        notebook,
        timeout=300,
        startup_timeout=300,  # where others compute too, a minute can be too short
        kernel_name="python3",
        resources={"metadata": {"path": FOLDER}},
    )
    client.execute()
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _without_chatter(output))]
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    return notebook


def _without_chatter(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    if output.output_type == "stream":
        output.text = _CHATTER.sub("", output.text)
        return output if output.text.strip() else None
    if output.output_type == "display_data" and output.data == {"text/plain": ""}:
        return None  # where a line of progress was
    return output


def main(prefixes: list[str]) -> None:
    """Run and write the notebooks."""
    for source in sources():
        if not prefixes or source.name.startswith(tuple(prefixes)):
            target = source.with_suffix(".ipynb")
            nbformat.write(execute(source), target)
            sys.stdout.write(f"{target.name}: {target.stat().st_size // 1000} kB\n")


if __name__ == "__main__":
    main(sys.argv[1:])
