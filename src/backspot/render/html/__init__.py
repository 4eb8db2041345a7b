"""A report as a page: one file that needs no network, and says what matters without a script.

The look and the behaviour are in ``template.html``, ``report.css`` and the scripts beside this
file; the scripts are joined in the order of ``_SCRIPTS``.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pkgutil import get_data
from string import Template

from backspot._version import __version__
from backspot.formatting import counted, visible
from backspot.render._sentences import (
    Part,
    answer,
    coverage,
    remedies,
    setting,
)
from backspot.render.formats import Format
from backspot.render.html._fragments import (
    facts_list,
    findings_list,
    module_table,
    operator_table,
    phases_bar,
    sentence,
    shown,
    warnings_list,
)
from backspot.render.html._page_data import page_data
from backspot.render.view import View, only_nodes, select
from backspot.results.report import Report

__all__ = ["FORMATS", "asset", "to_html"]

_SCRIPTS = ("model.js", "icicle.js", "table.js", "details.js", "report.js")
_STATIC_ROWS = 25
_FINDINGS = 5
_OPERATORS = 200


def to_html(report: Report) -> bytes:
    """The report as a page in UTF-8.

    Everything that the trace names is text there: it is escaped in the markup, and the script sets
    it as text. The page asks for nothing, and its content policy lets it ask for nothing.
    """
    script = "\n".join(asset(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    plain = only_nodes(report)
    said = answer(report)
    table, notes = _operators(report) if plain else _modules(report)
    page = Template(asset("template.html")).substitute(
        version=__version__,
        per=report.per,
        title=shown(_title(said)),
        trace=shown(report.trace),
        style=asset("report.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        answer=sentence(said),
        setting=facts_list(setting(report)),
        warnings=warnings_list(remedies(report)),
        phases=phases_bar(report),
        findings=findings_list(report, shown_first=_FINDINGS) or _NOTHING_FOUND,
        heading="Autograd nodes" if plain else "Modules",
        explorer="" if plain else asset("explorer.html"),
        table=table,
        notes=notes,
        data="{}" if plain else page_data(report),
    )
    return page.encode()


FORMATS = (Format(".html", {Report: to_html}),)


_NOTHING_FOUND = (
    '<section class="findings"><h2>Why, and what to do</h2><p class="muted">No rule found anything '
    "that makes this step slower than it need be. (Most rules look at what a GPU does.) The "
    "ranking below still says where it goes.</p>"
    "</section>"
)


@cache
def asset(name: str) -> str:
    """The text of a file of this folder."""
    data = get_data(__package__, name) or b""
    return data.decode().rstrip("\n")


def _title(said: Sequence[Part]) -> str:
    text = visible("".join(text for _, text in said))
    return f"{text[:100]} · Backspot"


def _modules(report: Report) -> tuple[str, str]:
    """The table that needs no script; how much has an owner, and what the table leaves out."""
    chosen = select(report, View(top=_STATIC_ROWS))
    hidden = ""
    if chosen.hidden or chosen.idle:
        rest = counted(len(chosen.hidden) + chosen.idle, "more module")
        hidden = f' <span class="no-script">{rest} with the page\'s script.</span>'
    notes = f'<p class="muted">{shown(coverage(report))}{hidden}</p>'
    return module_table(report, chosen), notes


def _operators(report: Report) -> tuple[str, str]:
    rest = len(report.operators) - _OPERATORS
    more = f'<p class="muted">{counted(rest, "more node name")} in the .json form.</p>'
    return operator_table(report, _OPERATORS), more if rest > 0 else ""
