"""Let MkDocs show the documents outside of this folder, and links between all documents work.

The README is the home page. A link to a file that is no page of the site, such as a source file,
becomes plain text.
"""

from __future__ import annotations

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/results/README.md": "results.md",
}
"""Documents outside of ``docs``, from the root of the repository, and their pages."""

_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of other folders."""
    root = posixpath.dirname(config.config_file_path)
    for home, page in ELSEWHERE.items():
        with open(posixpath.join(root, home), encoding="utf-8") as file:  # noqa: PTH123
            files.append(File.generated(config, page, content=file.read()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Point the links of a document to pages of the site, and let the search find guides first."""
    section = page.parent.title if page.parent else None
    page.meta["search"] = {"boost": {"Guides": 4, "Behind it": 0.5}.get(section, 1)}
    homes = {page: home for home, page in ELSEWHERE.items()}
    home = homes.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def pointed(found: re.Match[str]) -> str:
        image, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), path))
        there = ELSEWHERE.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            return text
        there = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({there}{mark}{anchor})"

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(pointed, part) for part in parts[::2]]
    return "".join(parts)
