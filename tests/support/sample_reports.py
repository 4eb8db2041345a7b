"""Reports for tests, made of numbers that a ViT on a GPU could show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from backspot.results.costs import Hiccup, KernelCost, PhaseName, Row
from backspot.results.findings import Finding, Place
from backspot.results.grouping import ranked_lines, ranked_nodes
from backspot.results.limits import Peaks
from backspot.results.report import Report
from backspot.results.work import WorkOfModule
from support.deaths import HISTORY
from support.report_parts import line, node, phases, report, row
from support.sample_memory import with_memory

ODD_NAMES = (
    "</script><img src=x onerror=alert(1)>",
    "=cmd|' /C calc'!A0",
    "red \x1b[31malert\x1b[0m\x07",
    "turned \u202eeman",
    "tab\tand\nline",
    "half \ud800 pair",
    "[bold]markup[/bold] [link=x]",
    "pipe|tick`star*_under_",
    "漢字のモジュール",
    "long." + ".".join(f"level{number}" for number in range(24)) + ".the_distinctive_end",
)


def vit_rows(
    *,
    blocks: int = 12,
    gpu: bool = True,
    drop: int = 15_690_000,
    pace: Callable[[str], Sequence[float]] = lambda path: (),
    held_up: Sequence[int] = (),
) -> list[Row]:
    """The rows of a ViT with a patch dropout whose backward takes ``drop`` ns in three steps.

    ``pace`` maps a path to that of its row.
    """

    def made(path: str, class_name: str, wall: int, name: str = "", **more: int) -> Row:
        nodes = (node(name, wall - wall // 40, gpu=None if gpu else 0),) if name and wall else ()
        if nodes:
            nodes += (node("torch::autograd::AccumulateGrad", wall // 40, gpu=None if gpu else 0),)
        return row(
            path,
            class_name,
            wall=wall,
            gpu=wall - wall // 50 if gpu else 0,
            cpu=wall // 9 if gpu else wall,
            forward=wall // 2,
            nodes=ranked_nodes(nodes),
            pace=pace(path),
            held_up=held_up,
            **more,
        )

    rows = [
        made("", "VisionTransformer", 66_000, "AddBackward0"),
        made("patch_embed", "PatchEmbed", 31_000, "TransposeBackward0"),
        made("patch_embed.proj", "Conv2d", 1_893_000, "ConvolutionBackward0"),
        made("patch_drop", "PatchDropout", drop, "GatherBackward0"),
        made("norm", "LayerNorm", 405_000, "NativeLayerNormBackward0"),
        made("head", "Linear", 210_000, "AddmmBackward0"),
        made("head_drop", "Dropout", 0),
        made("loss", "CrossEntropyLoss", 96_000, "NllLossBackward0", root="loss"),
        row(
            "(autograd engine)",
            "",
            wall=630_000,
            gpu=0,
            cpu=510_000,
            is_module=False,
            pace=pace("(autograd engine)"),
        ),
        row(
            "(outside model)",
            "",
            wall=90_000,
            gpu=0 if not gpu else 84_000,
            is_module=False,
            nodes=(node("MeanBackward0", 90_000, gpu=None if gpu else 0),),
            pace=pace("(outside model)"),
        ),
    ]
    for number in range(blocks):
        at, more = f"blocks.{number}", number * 1_700
        rows += [
            made(at, "Block", 240_000 + more, "AddBackward0"),
            made(f"{at}.norm1", "LayerNorm", 213_000 + more, "NativeLayerNormBackward0"),
            made(
                f"{at}.attn",
                "Attention",
                804_000 + more,
                "ScaledDotProductEfficientAttentionBackward0",
            ),
            made(f"{at}.attn.qkv", "Linear", 990_000 + more, "AddmmBackward0"),
            made(f"{at}.attn.proj", "Linear", 360_000 + more, "AddmmBackward0"),
            made(f"{at}.norm2", "LayerNorm", 213_000 + more, "NativeLayerNormBackward0"),
            made(f"{at}.mlp.fc1", "Linear", 1_215_000 + more, "AddmmBackward0"),
            made(f"{at}.mlp.act", "GELU", 273_000 + more, "GeluBackward0"),
            made(f"{at}.mlp.fc2", "Linear", 1_170_000 + more, "AddmmBackward0"),
            made(f"{at}.drop_path", "Identity", 0),
        ]
    return rows


def vit(**more: object) -> Report:
    """A ViT on a GPU whose patch dropout is the bottleneck."""
    return report(vit_rows(**more))


_VIT_LINES = {
    "patch_drop": (
        "timm/layers/patch_dropout.py",
        45,
        "x = x.gather(1, keep_indices.unsqueeze(-1)",
    ),
    "qkv": ("timm/layers/attention.py", 119, "qkv = self.qkv(x).reshape(B, N, 3, self.num_heads)"),
    "fc1": ("timm/layers/mlp.py", 48, "x = self.fc1(x)"),
    "fc2": ("timm/layers/mlp.py", 52, "x = self.fc2(x)"),
}


def vit_with_lines(*, exact: bool = True, **more: object) -> Report:
    """The ViT, recorded with ``lines=True``."""
    rows = []
    for one in vit_rows(**more):
        told = _VIT_LINES.get(one.path.rpartition(".")[2])
        lines = (line(one.nodes[0], *told, exact=exact),) if told else ()
        rows.append(replace(one, lines=lines))
    return report(rows)


def vit_with_call_sites() -> Report:
    """The same on a PyTorch that tells only which line called a module; no layer stands out."""
    return vit_with_lines(exact=False, drop=150_000)


def vit_on_a_cpu() -> Report:
    """No cause found, and most rules need a GPU."""
    return report(vit_rows(gpu=False), has_gpu=False, rules=states(9, 14))


def even_vit() -> Report:
    """A ViT without a bottleneck: no single layer takes much, the repeated ones do together."""
    return report(vit_rows(drop=150_000))


def odd() -> Report:
    """Names that try to be something else, in a terminal, a page, a table and a spreadsheet."""
    rows = []
    for index, name in enumerate(ODD_NAMES):
        made = node(name, 5_000_000)
        lines = (line(made, name, index + 1, name),)
        rows.append(row(name, name, wall=9_000_000 - 100_000 * index, nodes=(made,), lines=lines))
    found = Finding(
        rule="odd",
        title="a title with \x1b[2J in it",
        seen="a </script><script>alert(1)</script> and a | pipe",
        remedy=f"set torch.{'very_' * 16}long_name = False & see `it` <b>work</b>",
        wall_ns=3_000_000,
        places=tuple(Place(name, name, 1, 300_000, f"{name}.py:1") for name in ODD_NAMES),
        steps=3,
        link="javascript:alert(1)",
    )
    return report(
        rows,
        warnings=("a warning with \x1b[2J in it",),
        trace="\x1b[2Jtrace.json",
        findings=(found,),
    )


def detailed() -> Report:
    """The same names, recorded with memory and shapes on a GPU that is known."""
    plain = odd()
    rows = []
    for index, one in enumerate(plain.modules, 1):
        flops = 10**12 * index
        work = WorkOfModule(
            forward_flops=flops // 2,
            recompute_flops=None,
            flops=flops,
            forward_bytes=10**9,
            recompute_bytes=None,
            bytes=4 * 10**9,
            flops_by_type={"bf16": flops},
            forward_flops_by_type={"bf16": flops // 2},
            unknown_share=0.1,
        )
        rows.append(replace(one, work=work))
    peaks = Peaks("NVIDIA H200", {"bf16": 989.4}, 4800, "a data sheet")
    known = replace(plain, modules=tuple(rows), peaks=peaks, mfu=0.4, memory_asked=True)
    return with_memory(known, ODD_NAMES[:8])


def unlabelled() -> Report:
    """A trace in which nothing names a module."""
    nodes = ranked_nodes(
        [
            node("GatherBackward0", 15_000_000),
            node("AddmmBackward0", 12_000_000, count=147),
            node("ScaledDotProductEfficientAttentionBackward0", 9_000_000, count=36),
            node("torch::autograd::AccumulateGrad", 3_000_000, count=450),
        ]
    )
    outside = row("(outside model)", "", wall=40_000_000, is_module=False, nodes=nodes)
    return report([outside], source="none")


def empty() -> Report:
    """A backward that took no time at all."""
    return report([row("", "Model", calls=1), row("fc", calls=1)], step_ns=(0, 0, 0), has_gpu=False)


def checkpointed() -> Report:
    """Half of a block's backward is forward work run again."""
    block = row(
        "block",
        "Block",
        wall=6_000_000,
        recompute=3_600_000,
        nodes=ranked_nodes([node("(recompute)", 3_600_000), node("AddmmBackward0", 2_400_000)]),
    )
    return report([block, row("head", wall=900_000, nodes=(node("AddmmBackward0", 900_000),))])


def diagnosed() -> Report:
    """A ViT of whose steps the phases are known, and two things that make them slow."""
    shares = {"data": 3, "copy": 1, "forward": 22, "loss": 1, "backward": 62, "optimizer": 7}
    step_ns = (45_700_000, 45_900_000, 45_500_000)
    by_step = {name: [ns * share // 100 for ns in step_ns] for name, share in shares.items()}
    by_step["idle"] = [ns - sum(of) for ns, *of in zip(step_ns, *by_step.values(), strict=True)]
    return report(
        vit_rows(),
        phases=phases(by_step, busy=100 / 110),
        findings=_found(steps=3),
        rules=states(21, 2),
    )


def states(looked: int, unable: int = 0) -> dict[str, str]:
    """What so many rules did that looked, and so many that needed a GPU."""
    did = ["nothing"] * looked + ["needs a GPU"] * unable
    return {f"rule-{number}": state for number, state in enumerate(did)}


def _found(*, steps: int) -> tuple[Finding, ...]:
    return (
        Finding(
            rule="sorted-indexing",
            title="Indexing backward sorts its indices",
            seen="GatherBackward0 takes 5.1 ms in 1 node a step; 6 kernels of it sort (0.5 ms).",
            remedy="Index whole rows instead: x[torch.arange(len(x))[:, None], keep].",
            wall_ns=5_100_000,
            places=(Place("patch_drop", "PatchDropout", 1, 5_100_000, "patch_dropout.py:47"),),
            steps=steps,
            nodes=("GatherBackward0",),
            link="https://docs.pytorch.org/docs/stable/notes/randomness.html",
        ),
        Finding(
            rule="layout-copies",
            title="Gradients are copied into another layout",
            seen="24 copies a step, 2.1 ms, make a gradient contiguous.",
            remedy="Give the convolution its input in channels_last, or call .contiguous() once.",
            wall_ns=2_100_000,
            places=tuple(
                Place(f"blocks.{number}.attn", "Attention", 2, 175_000) for number in range(12)
            ),
            steps=3,
        ),
    )


_SLOWER = 1.4


def varied() -> Report:
    """Ten steps that vary: in each, other modules are slower, and one waits long for its data."""
    steps, held_up = 10, (6,)

    def pace(path: str) -> tuple[float, ...]:
        number = path.split(".")[1] if path.startswith("blocks.") else ""
        turn = int(number) % 3 if number else 3
        if path == "patch_drop":
            return (1, 1.3, 0.9, 1, 0.05, 1, 1.1, 0.9, 1.9, 1)
        return tuple(
            _SLOWER if turn < 3 and step in range(3 * turn, 3 * turn + 4) else 1
            for step in range(steps)
        )

    data = [14_000_000, 14_400_000, 13_700_000, 17_200_000, 14_100_000] * 2
    data[6] += 60_000_000
    optimizer = [3_000_000, 3_100_000, 3_000_000, 3_050_000, 3_000_000] * 2
    rows = vit_rows(pace=pace, held_up=held_up)
    by_step = {
        "data": data,
        "forward": [10_000_000 + 2_500_000 * (step % 3 == 0) for step in range(steps)],
        "backward": [sum(one.wall_ns_by_step[step] for one in rows) for step in range(steps)],
        "optimizer": optimizer,
    }
    sorting, _ = _found(steps=9)
    return report(
        rows,
        phases=phases(by_step, held_up=held_up),
        findings=(sorting,),
        rules=states(23),
        hiccups=(Hiccup(6, 64_700_000, "(data)"),),
    )


def large(modules: int, *, breadth: int = 12) -> Report:
    """A model of this many modules, with as many nodes and kernels as a real one's."""
    rows = [row("", "Decoder", wall=90_000)]
    paths = [""]
    while len(rows) < modules:
        within = paths[(len(rows) - 1) // breadth]
        paths.append(f"{within}.{'layers' if len(rows) % 2 else 'experts'}.{len(rows)}".lstrip("."))
        at = len(rows)
        names = ("AddmmBackward0", "NativeLayerNormBackward0", "MulBackward0")
        kernel = f"void at::native::vectorized_elementwise_kernel<{at % 60}, float, {'X' * 90}>"
        nodes = tuple(node(name, 1_000 + at % 977) for name in names)
        kernels = tuple(KernelCost(f"{kernel}({which})", 3, 900 + at % 871) for which in range(3))
        kind = f"Expert{at % 9}"
        wall = 3_000 + at % 4_999
        rows.append(
            row(paths[-1], kind, wall=wall, forward=wall // 2, nodes=nodes, kernels=kernels)
        )
    return report(rows)


SAMPLES = {
    "vit": vit,
    "vit_on_a_cpu": vit_on_a_cpu,
    "vit_with_lines": vit_with_lines,
    "vit_with_call_sites": vit_with_call_sites,
    "even_vit": even_vit,
    "odd": odd,
    "unlabelled": unlabelled,
    "empty": empty,
    "checkpointed": checkpointed,
    "diagnosed": diagnosed,
    "varied": varied,
    "detailed": detailed,
    "out_of_memory": lambda: replace(vit(), out_of_memory=HISTORY),
}


# Half a surrogate pair is a legal part of a name; two halves in a row are one character in JSON.
_NAMES = st.text(
    st.one_of(st.characters(), st.sampled_from("ab01.\x1b\u202e=+-@|`<>&\ud800\udfff")),
    max_size=12,
).map(lambda name: name.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))
_TIMES = st.integers(0, 10**12)
_PHASE_NAMES = get_args(PhaseName)
_PACES = st.sampled_from((0.0, 0.5, 1.0, 1.0, 1.5, 4.0))


def _findings(steps: int) -> st.SearchStrategy[Finding]:
    places = st.builds(Place, _NAMES, _NAMES, st.integers(0, 99), _TIMES, _NAMES)
    return st.builds(
        Finding,
        rule=_NAMES,
        title=_NAMES,
        seen=_NAMES,
        remedy=_NAMES,
        wall_ns=_TIMES,
        places=st.lists(places, min_size=1, max_size=5).map(tuple),
        steps=st.integers(1, steps),
        link=st.one_of(
            _NAMES, st.just("https://example.org/?a=<b>&c"), st.just("javascript:alert(1)")
        ),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Any report that keeps the promise that rows and phases sum to the whole."""
    steps = draw(st.integers(1, 4))

    def each(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=steps, max_size=steps))

    paths = draw(st.lists(st.one_of(_NAMES, _PATHS), unique=True, max_size=8))
    rows = []
    for path in paths:
        made = row(
            path,
            draw(_NAMES),
            wall=draw(_TIMES),
            gpu=draw(_TIMES),
            cpu=draw(_TIMES),
            forward=draw(_TIMES),
            calls=draw(st.integers(0, 9)),
            is_module=draw(st.sampled_from((True, True, False))),
            steps=steps,
            pace=each(_PACES),
        )
        names = draw(st.lists(_NAMES, max_size=3, unique=True))
        nodes = ranked_nodes(
            node(name, made.wall_ns // (index + 2) ** 2, steps=1)
            for index, name in enumerate(names)
        )
        told = nodes[: draw(st.integers(0, 2))]
        lines = [line(one, draw(_NAMES), draw(st.integers(1, 9)), draw(_NAMES)) for one in told]
        rows.append(replace(made, nodes=nodes, lines=ranked_lines(lines)))
    made = report(
        rows,
        step_ns=tuple(each(_TIMES)),
        source=draw(st.sampled_from(("backspot", "lightning", "python", "none"))),
        has_gpu=draw(st.booleans()),
        warnings=tuple(draw(st.lists(_NAMES, max_size=2))),
        trace=draw(_NAMES),
        phases=phases(
            {
                name: each(_TIMES)
                for name in draw(st.lists(st.sampled_from(_PHASE_NAMES), max_size=8, unique=True))
            }
        ),
        findings=tuple(draw(st.lists(_findings(steps), max_size=3))),
        rules=states(draw(st.integers(0, 30)), draw(st.integers(0, 30))),
    )
    return replace(made, step_unit=draw(st.sampled_from(("profiler step", "backward pass"))))


_PATHS = st.lists(st.sampled_from(("a", "b", "0", "1", "10")), max_size=4).map(".".join)
