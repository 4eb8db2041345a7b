"""Join the files of ``news/`` into the newest section of CHANGELOG.md, and delete them.

Usage: python docs/make_changelog.py

A file a change, so that two changes never meet in one line. Its text becomes an item of the list:
one line that begins with what it is about, ``**Labels cost less.** …``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEWS = ROOT / "news"
CHANGELOG = ROOT / "CHANGELOG.md"
MOST_WORDS = 80


def main() -> None:
    """Write the changelog, and then delete what it has now.

    Raises:
        SystemExit: If a file is not well formed. Nothing is written then.
    """
    files = sorted(NEWS.glob("*"))
    if wrong := [f"{file.name}: {what}" for file in files for what in wrong_in(file)]:
        raise SystemExit("\n".join(wrong))
    news = [file.read_text("utf-8").strip() for file in files]
    CHANGELOG.write_text(joined(CHANGELOG.read_text("utf-8"), news), encoding="utf-8")
    for file in files:
        file.unlink()


def joined(changelog: str, news: Iterable[str]) -> str:
    """Return the changelog with these items at the end of its newest section."""
    first = re.search(r"^## .*$", changelog, re.MULTILINE)
    if first is None:
        raise SystemExit("CHANGELOG.md: give the newest version a heading, ## VERSION")
    older = re.compile(r"^## ", re.MULTILINE).search(changelog, first.end())
    end = older.start() if older else len(changelog)
    items = "".join(f"- {text}\n" for text in news)
    newest = f"{changelog[:end].rstrip()}\n{items}"
    return newest + ("\n" + changelog[end:] if older else "")


def wrong_in(file: Path) -> Iterator[str]:
    """Yield what is wrong with a file, in words that say how to correct it."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*\.md", file.name):
        yield "name it after the change, as in labels-cost-less.md"
        return
    text = file.read_text("utf-8")
    if not re.fullmatch(r"\*\*[A-Z`][^*\n]*\.\*\* \S[^\n]*\.\n", text):
        yield "write one line: **What it is about.** What users notice."
    if len(text.split()) > MOST_WORDS:
        yield f"write at most {MOST_WORDS} words, and link a page that says more"
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith("https://") and not (ROOT / target).exists():
            yield f"{target}: there is no such file; links start at the root of the repository"


if __name__ == "__main__":
    main()
