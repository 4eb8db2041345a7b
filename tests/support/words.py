"""How dense the code of the package reads, and how much its names say.

``python -m support.words`` in the folder ``tests``, or ``make house``, prints the tokens of a line
of code, the names that a function binds, the share of empty nouns among all bound names, and the
files with most of them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from support.house import files

# Names that fit any value, and say of none what it is: a step, a kernel, a module or a row.
_EMPTY = """
one ones found at mine theirs part parts known whole wholes kept what made held said told some
every each was which where here has got of done taken seen given asked thing things stuff
"""
EMPTY_NOUNS = frozenset(_EMPTY.split())
_LISTED = 40
_NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Names:
    """The counts of what one file binds.

    Attributes:
        names: Bound names outside of functions.
        locals: Names bound in functions: parameters without ``self`` and ``cls``, and variables.
        empty: Those of all bound names that are empty nouns.
    """

    names: int
    locals: int
    empty: Counter[str]


@dataclass(frozen=True)
class Words(Names):
    """The counts of one file.

    Attributes:
        tokens: Tokens of code, without comments and docstrings.
        lines: Lines that have such a token.
        functions: Functions and methods.
    """

    tokens: int
    lines: int
    functions: int


def names_of(tree: ast.Module) -> Names:
    """The counts of what a file binds, without those of its tokens: these take most of the time."""
    bound = _bound(tree)
    local = sum(inside for _, inside in bound)
    empty = Counter(name for name, _ in bound if name in EMPTY_NOUNS)
    return Names(len(bound) - local, local, empty)


def words_of(path: Path) -> Words:
    """The counts of one file of code."""
    text = path.read_text("utf-8")
    tree = ast.parse(text)
    documented = _lines_of_docstrings(tree)
    tokens = lines = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _NO_CODE or token.start[0] in documented:
            continue
        tokens += 1
        lines += len({token.start[0], token.end[0]} - {last})
        last = token.end[0]
    functions = sum(isinstance(node, _Function) for node in ast.walk(tree))
    return Words(**vars(names_of(tree)), tokens=tokens, lines=lines, functions=functions)


def _lines_of_docstrings(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # a string that stands alone
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _bound(tree: ast.Module) -> list[tuple[str, bool]]:
    """Each name that code binds, and whether a function binds it."""
    names = list[tuple[str, bool]]()
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, inside = pending.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Name):
                if isinstance(child.ctx, ast.Store):
                    names.append((child.id, inside))
                continue  # it has no other children
            if isinstance(child, ast.arg) and child.arg not in ("self", "cls"):
                names.append((child.arg, True))
            elif isinstance(child, ast.ExceptHandler) and child.name:
                names.append((child.name, inside))
            local = isinstance(child, (*_Function.__args__, ast.Lambda))
            pending.append((child, local or (inside and not isinstance(child, ast.ClassDef))))
    return names


def main() -> None:
    """Print the worst files, and all of the package in one line."""
    words = {file: words_of(path) for file, path in files().items() if file.endswith(".py")}
    worst = sorted(words, key=lambda file: -words[file].empty.total())[:_LISTED]
    print(f"{'worst files by empty nouns':50} {'empty':>5} {'share':>6} {'tokens a line':>14}")
    for file in worst:
        counts = words[file]
        share = counts.empty.total() / (counts.names + counts.locals)
        density = counts.tokens / counts.lines
        print(f"{file:50} {counts.empty.total():5} {share:6.1%} {density:14.2f}")
    everything = words.values()
    empty = sum((counts.empty for counts in everything), Counter[str]())
    tokens, lines = (sum(getattr(w, kind) for w in everything) for kind in ("tokens", "lines"))
    local = sum(counts.locals for counts in everything)
    names = local + sum(counts.names for counts in everything)
    functions = sum(counts.functions for counts in everything)
    print("empty nouns:", ", ".join(f"{name} {times}" for name, times in empty.most_common(12)))
    print(
        f"tokens a code line {tokens / lines:.2f}; names bound a function {local / functions:.2f}; "
        f"empty nouns {empty.total():,} of {names:,} bound names, {empty.total() / names:.1%}"
    )


if __name__ == "__main__":
    main()
