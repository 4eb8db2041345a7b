"""How a page is read: what its columns and its drawing mean, for a first look."""

from __future__ import annotations

from backspot.results.report import Report


def reading(report: Report) -> str:
    """The terms of the page's table and tree, folded away; only those that the report has.

    What a module saves is in the notes above, which also say how exact it is.
    """
    known = [
        ("tree", "a block is as wide as its module's time, with the modules inside it"),
        (
            "wall",
            "the clock time that a module is responsible for; all rows add up to the backward",
        ),
    ]
    if report.has_gpu:
        known.append(("GPU", "the time of the module's kernels and copies, added up"))
    known += [
        ("CPU", "the time that the host spends in the module's autograd nodes"),
        ("bwd ÷ fwd", "the wall time over the clock time of the module's forward; 2 is common"),
    ]
    if report.memory:
        known.append(("memory", "what the module has in memory when most is in use, in MB"))
    if report.peaks is not None and report.has_work:
        known.append(("of peak", "the part of the device's peak that the module's kernels reach"))
    terms = "<br>".join(f"<b>{term}</b>: {meaning}" for term, meaning in known)
    return f'<details class="reading"><summary>How to read this</summary><p>{terms}</p></details>'
