"""The frame of every page: its head with the styles, and the choice of light or dark."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from string import Template

from backspot._version import __version__
from backspot.render.html._fragments import asset, shown


def page(
    title: str,
    about: str,
    main: str,
    footer: str,
    *,
    styles: Sequence[str] = (),
    scripts: Sequence[str] = (),
    data: str = "",
) -> bytes:
    """A page in UTF-8 that loads nothing, and whose content security policy forbids it to.

    Args:
        main: its content, as HTML, with ``id="modules"`` where the modules begin.
        styles: files in this folder to add to the style of every page.
        scripts: the same, for the script.
        data: what the scripts read, as HTML.
    """
    script = "\n".join(map(asset, ("theme.js", *scripts)))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    whole = Template(asset("page.html")).substitute(
        version=__version__,
        title=shown(title),
        about=shown(about),
        style="\n".join(map(asset, ("report.css", *styles))),
        main=main,
        footer=shown(footer),
        data=data,
        script=script,
        script_hash=f"sha256-{digest}",
    )
    return whole.encode()
