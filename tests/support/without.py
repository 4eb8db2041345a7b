"""A copy of the repository without one part, to see that nothing else needs it.

``python -m support.without PART FOLDER`` in the folder ``tests`` makes one. The files of the part
go, as ``support/house.py`` lists them. In the files that put the core and the parts together,
everything goes that names something of these files: imports, entries of lists, base classes,
statements. No other file is touched: what is broken then knows the part.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from support.house import BUILDS_ON, COMPOSERS, HOME, PARTS, RESULTS, files, part_of, results_of

_ALSO = ("tests/support/house.py", "tests/test_architecture.py")
"""What lists the parts, beside the files that put them together."""


class Deleted(NamedTuple):
    """What went with a part.

    Attributes:
        touched: the files that were deleted or changed, as paths in the copy.
        names: what other files can still say of it without an import of a deleted file: the fields
            of the base classes that went, and what the changed files defined.
    """

    touched: list[str]
    names: set[str]


def without(part: str, home: Path) -> Deleted:
    """Copy the repository into a new folder, and delete a part there.

    Args:
        part: its name in ``PARTS``; what builds on it goes, too.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=HOME,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (HOME / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(HOME / name, home / name)
    source = home / "src" / "backspot"
    parts = [part, *(one for one, other in BUILDS_ON.items() if other == part)]
    gone = [file for file in files() if part_of(file) in parts]
    gone += [file for one in parts for file in results_of(one)]
    touched = [f"src/backspot/{file}" for file in gone]
    for file in gone:
        (source / file).unlink()
    emptied = sorted({(source / file).parent for file in gone}, key=lambda one: -len(one.parts))
    for folder in emptied:
        if not any(one.name != "__pycache__" for one in folder.iterdir()):
            shutil.rmtree(folder)
    deletion = _Deletion(parts, gone)
    paths = [source / f"{name}.py" for name in (*COMPOSERS, *RESULTS)]
    paths += [home / name for name in _ALSO]
    changed: set[Path] = set()
    while more := {path for path in paths if path.exists() and deletion.made_in(path, source)}:
        changed |= more
    touched += [path.relative_to(home).as_posix() for path in sorted(changed)]
    names = {name for _, name in deletion.exported}
    for file in gone:
        if file.endswith(".py"):
            names |= _fields(ast.parse((HOME / "src/backspot" / file).read_text("utf-8")), deletion)
    return Deleted(touched, names)


def _fields(tree: ast.Module, deletion: _Deletion) -> set[str]:
    """What the classes of a deleted file define that were bases of a class that is left."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in deletion.bases:
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    names.add(one.name)
                elif isinstance(one, ast.AnnAssign | ast.Assign):
                    targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


class _Deletion:
    """What names something of parts, and what goes with it.

    Args:
        parts: their names.
        files: those that are deleted, as paths in the package.
    """

    def __init__(self, parts: Iterable[str], files: Iterable[str]) -> None:
        names = {Path(file).with_suffix("").as_posix() for file in files}
        self.modules = {_module(name) for name in names}
        rooms = {module.removeprefix("backspot.") for module in self.modules}
        self.texts = {*parts, *files, *self.modules, *names, *rooms}
        self.exported: set[tuple[str, str]] = set()
        """Names that no file has any more, each with its module."""
        self.bases: set[str] = set()
        """The names of deleted classes that were bases of classes that are left."""

    def made_in(self, path: Path, source: Path) -> bool:
        """Delete what a file has of the part; return whether anything was."""
        tree = ast.parse(path.read_text("utf-8"))
        is_inside = path.is_relative_to(source)
        module = _module(path.relative_to(source).with_suffix("").as_posix()) if is_inside else ""
        pruned = _Pruned(self, module, {verb.rpartition(".")[2] for verb in self._verbs(module)})
        result = pruned.visit(tree)
        if not pruned.count:
            return False
        path.write_text(ast.unparse(ast.fix_missing_locations(result)) + "\n", "utf-8")
        return True

    def _verbs(self, module: str) -> Iterable[str]:
        """The deleted modules of the file's own folder, which it may name by their last names."""
        home = module.rpartition(".")[0]
        return (one for one in self.modules if home and one.rpartition(".")[0] == home)


class _Pruned(ast.NodeTransformer):
    """A file without what names something that is gone."""

    def __init__(self, deletion: _Deletion, module: str, siblings: set[str]) -> None:
        self.deletion = deletion
        self.module = module
        self.siblings = siblings
        self.gone: set[str] = set()
        self.values: set[ast.AST] = set()
        self.count = 0

    def names_it(self, node: ast.AST) -> bool:
        """Whether something within a node is gone."""
        return any(
            (isinstance(one, ast.Name) and one.id in self.gone)
            or (isinstance(one, ast.Constant) and self._is_text(one))
            for one in ast.walk(node)
        )

    def _is_text(self, node: ast.Constant) -> bool:
        text = node.value if node not in self.values else None
        return isinstance(text, str) and (text in self.deletion.texts or text in self.siblings)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """Note the values of literal types: one may be called as the part is."""
        types = (one for one in ast.walk(node) if isinstance(one, ast.Subscript))
        named = (one.slice for one in types if ast.unparse(one.value) == "Literal")
        self.values = {one for inside in named for one in ast.walk(inside)}
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        """Visit what is within first: a list loses an entry, and stays."""
        length = len(getattr(node, "body", ())) if isinstance(node, ast.stmt) else 0
        found = super().visit(node)
        if isinstance(node, ast.stmt) and isinstance(found, ast.stmt):
            return self._kept(found, was=length)
        return found

    def _kept(self, node: ast.stmt, was: int) -> ast.stmt | None:
        """Return a statement, ``None`` if it is empty by now or names what is gone.

        Args:
            was: how many statements it had inside.
        """
        if isinstance(node, ast.Import | ast.ImportFrom):
            return node
        if not was or (isinstance(node, ast.If) and self.names_it(node.test)):
            return self._without(node) if self.names_it(node) else node
        body = node.body  # type: ignore[attr-defined]
        is_said = isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None
        return self._without(node) if len(body) < was and len(body) <= is_said else node

    def _without(self, node: ast.stmt) -> None:
        self.count += 1
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = {one.id for one in targets if isinstance(one, ast.Name)}
        if isinstance(node, ast.FunctionDef):
            named = {node.name}
        self._forget(named)

    def _forget(self, names: set[str]) -> None:
        self.gone |= names
        self.deletion.exported |= {(self.module, name) for name in names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        """Leave out what was imported of the part."""
        home, kept = node.module or "", []
        for alias in node.names:
            is_gone = (
                home in self.deletion.modules
                or f"{home}.{alias.name}" in self.deletion.modules
                or (home, alias.name) in self.deletion.exported
            )
            if is_gone:
                self.count += 1
                self._forget({alias.asname or alias.name})
            else:
                kept.append(alias)
        node.names = kept
        return node if kept else None

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        """Leave out the modules of the part."""
        kept = [alias for alias in node.names if alias.name not in self.deletion.modules]
        self.count += len(node.names) - len(kept)
        node.names = kept
        return node if kept else None

    def _entries(self, node: Any) -> Any:
        self.generic_visit(node)
        kept = [one for one in node.elts if not self.names_it(one)]
        self.count += len(node.elts) - len(kept)
        node.elts = kept
        return node

    visit_Tuple = visit_List = visit_Set = _entries  # noqa: N815 - names that ast knows

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        """Leave out entries."""
        self.generic_visit(node)
        items = list(zip(node.keys, node.values, strict=True))
        kept = [one for one in items if not any(part and self.names_it(part) for part in one)]
        self.count += len(items) - len(kept)
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Leave out base classes."""
        kept = [base for base in node.bases if not self.names_it(base)]
        gone = [base for base in node.bases if base not in kept]
        self.deletion.bases |= {ast.unparse(base).rpartition(".")[2] for base in gone}
        self.count += len(node.bases) - len(kept)
        node.bases = kept
        self.generic_visit(node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Leave out names of a list that is one text."""
        words = node.value.split(" ") if isinstance(node.value, str) else []
        names = {name for _, name in self.deletion.exported}
        kept = [word for word in words if word not in names]
        if len(words) > 1 and len(kept) < len(words) and all(map(str.isidentifier, words)):
            self.count += 1
            return ast.Constant(" ".join(kept))
        return node


def _module(name: str) -> str:
    """The name of a module, by its path in the package."""
    return ".".join(["backspot", *name.removesuffix("/__init__").split("/")]).removesuffix(
        ".__init__"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    print("\n".join(without(asked.part, asked.folder).touched))
