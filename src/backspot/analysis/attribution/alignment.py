"""Which launches of a compiled graph are which sites of its code: sequences of names, aligned.

If the names agree one by one, the k-th launch is the k-th site. Else each site that has one place
only among the launches is known, and the rest is not: never the likeliest of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from backspot.analysis.timeline import NOTHING
from backspot.trace import names
from backspot.trace.compiled import Site

_REPLAYED = (
    "a CUDA graph was replayed, whose kernels are not those of the code, one by one; "
    'compile without mode="reduce-overhead" to see the same work without graphs'
)
_MOST_NAMED = 3  # launches in a warning


def align(
    sites: Sequence[Site], called: Sequence[str], *, every: bool
) -> tuple[list[int], str] | str:
    """Return the index of each launch's site, ``NOTHING`` if unknown; or why none is known.

    Args:
        every: whether each launch must be a site.

    Returns:
        The indices, and why those between some launches are unknown, ``""`` if none are.
    """
    # The profiler does not see generated C++ code, unless Inductor was told to show it.
    visible = [index for index, site in enumerate(sites) if not names.is_generated_cpp(site.name)]
    choices = [list(range(len(sites))), visible]
    for chosen in choices:
        if (in_order := _each(sites, chosen, called)) is not None:
            return in_order, ""
    for chosen in () if every else choices:
        if chosen and (places := embed([sites[index].name for index in chosen], called)):
            aligned = [chosen[place] if place >= 0 else NOTHING for place in places]
            return _with_reductions(sites, called, aligned), ""
    if not every and (between := _between_certain([site.name for site in sites], called)):
        aligned, unknown = between
        return _with_reductions(sites, called, aligned), unknown
    if len(called) not in (len(sites), len(visible)):
        return f"it has {len(sites)} launch sites, and {len(called)} launches were recorded"
    chosen = choices[0] if len(called) == len(sites) else visible
    return next(
        f"a launch of {name} was recorded where its code has {sites[index].name}"
        for index, name in zip(chosen, called, strict=True)
        if not names.is_launch_of(sites[index].name, name)
    )


def embed(sites: Sequence[str], called: Sequence[str]) -> list[int]:
    """Find sites among more launches: the site of each launch, ``NOTHING`` if it is not certain.

    Each site is as early as the sites before allow, and as late as the sites after allow. Where
    both are one launch, it is this site's in every order-preserving assignment.

    Returns:
        The sites of the launches; an empty list if there is no such assignment.
    """
    early = _earliest(sites, called)
    late = [len(called) - 1 - index for index in reversed(_earliest(sites[::-1], called[::-1]))]
    if not early:
        return []
    aligned = [NOTHING] * len(called)
    for site, (first, last) in enumerate(zip(early, late, strict=True)):
        if first == last:
            aligned[first] = site
    return aligned


def _each(sites: Sequence[Site], chosen: Sequence[int], called: Sequence[str]) -> list[int] | None:
    """Return the site of each launch; ``None`` unless the launches are those of the code, in order.

    Args:
        chosen: the indices of those that the profiler sees.
    """
    aligned: list[int] = []
    left = list(reversed(chosen))
    for name in called:
        if left and names.is_launch_of(sites[left[-1]].name, name):
            aligned.append(left.pop())
        elif aligned and sites[aligned[-1]].then and name in names.AFTER_REDUCTION:
            aligned.append(aligned[-1])
        else:
            return None
    return None if left else aligned


def _between_certain(sites: Sequence[str], called: Sequence[str]) -> tuple[list[int], str] | None:
    """Match the launches between those that are certain, each stretch for itself.

    A generated kernel that the code calls once, and that was launched once, is certain: its site
    and its launch have the same name.

    Returns:
        The site of each launch, and why those of the first unknown stretch are unknown; ``None`` if
        no launch is certain, or they came in another order.
    """
    times = Counter(sites), Counter(called)
    single = {name for name, count in times[0].items() if count == 1 == times[1][name]}
    certain = [
        (sites.index(name), launch_index)
        for launch_index, name in enumerate(called)
        if name in single
    ]
    if not certain or any(site > after for (site, _), (after, _) in pairwise(certain)):
        return None
    aligned: list[int] = []
    unknown = ""
    for (site, launch), (next_site, next_launch) in pairwise(
        ((-1, -1), *certain, (len(sites), len(called)))
    ):
        inside, launches = sites[site + 1 : next_site], called[launch + 1 : next_launch]
        stretch = embed(inside, launches)
        if inside and not stretch:
            stretch = _from_both_ends(inside, launches)
            behind = f"behind {called[launch]}, " if launch >= 0 else ""
            unknown = unknown or (
                f"{behind}its code has {_list(inside)}, and {_list(launches)} was recorded"
            )
        places = stretch or [NOTHING] * len(launches)
        aligned += [site + 1 + place if place >= 0 else NOTHING for place in places]
        aligned.append(next_site)
    return aligned[:-1], unknown


def _from_both_ends(sites: Sequence[str], called: Sequence[str]) -> list[int]:
    """Return the site of each launch, as far as they agree one by one from either end."""
    aligned = [NOTHING] * len(called)
    for site, launch in _agreeing(sites, called):
        aligned[launch] = site
    for site, launch in _agreeing(sites[::-1], called[::-1]):
        site, launch = len(sites) - 1 - site, len(called) - 1 - launch
        aligned[launch] = site if aligned[launch] in (NOTHING, site) else NOTHING
    return aligned


def _agreeing(sites: Sequence[str], called: Sequence[str]) -> list[tuple[int, int]]:
    """Return the sites and launches that agree, up to the first ones that do not."""
    pairs: list[tuple[int, int]] = []
    for launch, name in enumerate(called):
        if len(pairs) < len(sites) and names.is_launch_of(sites[len(pairs)], name):
            pairs.append((len(pairs), launch))
        elif name not in names.AFTER_REDUCTION:
            break
    return pairs


def _list(launch_names: Sequence[str]) -> str:
    shown = ", ".join(launch_names[:_MOST_NAMED]) or "nothing"
    return (
        f"{shown} and {len(launch_names) - _MOST_NAMED} more"
        if len(launch_names) > _MOST_NAMED
        else shown
    )


def align_kernels(sites: Sequence[Site], kernels: Sequence[str]) -> tuple[list[int], str] | str:
    """Return the index of the site of each kernel that a replay ran, as ``align`` does."""
    generated = [index for index, site in enumerate(sites) if names.is_triton(site.name)]
    ran = [index for index, name in enumerate(kernels) if names.is_triton(name)]
    if not ran or [sites[index].name for index in generated] != [kernels[index] for index in ran]:
        return _REPLAYED
    aligned = [NOTHING] * len(kernels)
    pairs = [(-1, -1), *zip(generated, ran, strict=True), (len(sites), len(kernels))]
    for (site, kernel), (next_site, next_kernel) in pairwise(pairs):
        if kernel >= 0:
            aligned[kernel] = site
        between = list(range(site + 1, next_site))
        if site >= 0 and sites[site].then:
            between.insert(0, site)
        if between and len({sites[index].parts for index in between}) == 1:
            aligned[kernel + 1 : next_kernel] = [between[0]] * (next_kernel - kernel - 1)
    return aligned, ""


def _with_reductions(
    sites: Sequence[Site], called: Sequence[str], aligned: Sequence[int]
) -> list[int]:
    """Return the site of each launch, also of those that finish the reduction of a site before."""
    complete: list[int] = []
    reducing = NOTHING
    for index, name in zip(aligned, called, strict=True):
        if index >= 0:
            reducing = index if sites[index].then else NOTHING
        elif name not in names.AFTER_REDUCTION:
            reducing = NOTHING
        complete.append(index if index >= 0 else reducing)
    return complete


def _earliest(sites: Sequence[str], called: Sequence[str]) -> list[int]:
    """Return the earliest launch of each site, in order; an empty list if there are too few."""
    launches: list[int] = []
    for launch, name in enumerate(called):
        if len(launches) < len(sites) and names.is_launch_of(sites[len(launches)], name):
            launches.append(launch)
    return launches if len(launches) == len(sites) else []


def follow_directly(sites: Sequence[Site], aligned: Sequence[int]) -> list[bool]:
    """Return of each launch whether it follows the one before, without code that nobody sees."""
    unseen = [names.is_generated_cpp(site.name) for site in sites]
    follows: list[bool] = []
    before = 0
    for number, index in enumerate(aligned):
        site = before if index < 0 else index
        follows.append(number > 0 and not any(unseen[before:site]))
        before = max(before, index + 1)
    return follows
