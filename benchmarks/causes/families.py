"""What is found in ordinary models trained as they should be: one of each of 24 timm families.

    python -m benchmarks.causes.families record -o families --tar families     # on a GPU
    python -m benchmarks.causes.families judge families                        # anywhere

Nothing is planted here: bf16 autocast, channels_last, cuDNN's search, fused AdamW, batch 64, images
on the GPU. Whatever a report finds stands in the model's own code. ``judge`` prints all of it.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections import Counter
from pathlib import Path

from benchmarks.causes.judge import judge, recorded_facts, show_findings
from benchmarks.causes.record import add_recording_arguments, record, work
from benchmarks.common import RESULTS, print_table, write_json

NAMES = (
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
    "resnet50",
    "efficientnet_b0",
    "regnety_016",
    "maxvit_tiny_rw_224",
    "coatnet_0_rw_224",
    "mixer_b16_224",
    "beit_base_patch16_224",
    "eva02_small_patch14_224",
    "cait_s24_224",
    "xcit_small_12_p16_224",
    "densenet121",
    "mobilenetv3_large_100",
    "levit_256",
    "pvt_v2_b1",
    "poolformer_s12",
    "focalnet_tiny_srf",
    "dm_nfnet_f0",
    "hrnet_w18",
    "dla34",
    "ghostnet_100",
    "tresnet_m",
)


def _cases() -> dict[str, object]:
    from benchmarks.causes.case import Built, Case, Context

    import torch  # isort: skip

    def build(name: str, context: Context) -> Built:
        import timm

        from benchmarks.causes.training import train_resnet

        torch.backends.cudnn.benchmark = True
        with torch.device(context.device):
            model = timm.create_model(name)
        model.to(context.device, memory_format=torch.channels_last).train()
        size = model.pretrained_cfg["input_size"]
        data = context.randn(context.pick(64, 2), *size)
        return train_resnet(context, model, data.contiguous(memory_format=torch.channels_last))

    return {
        name: Case(name, name, "", False, None, {}, 1, 1, functools.partial(build, name))
        for name in NAMES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="record one step of each")
    add_recording_arguments(recording, seconds=270)
    judging = verbs.add_parser("judge", help="print what reports of recorded traces find")
    judging.add_argument("folder", type=Path)
    judging.add_argument("--no-shapes", action="store_true", help="as if recorded without shapes")
    judging.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    judging.add_argument("--out", type=Path, default=RESULTS / "families.json")
    for verb in (recording, judging):
        verb.add_argument("--cases", default="", help="comma-separated names (default: all)")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.cases.split(",") if name] or list(NAMES)
    if arguments.verb == "judge":
        _judge(arguments, set(wanted))
    elif arguments.child:
        work(arguments, _cases(), steps=1)  # type: ignore[arg-type]
    else:
        record("benchmarks.causes.families", arguments, {1: wanted})


def _judge(arguments: argparse.Namespace, wanted: set[str]) -> None:
    found = judge(arguments.folder, wanted, shapes=not arguments.no_shapes, jobs=arguments.jobs)
    for name, result in found.items():
        show_findings(name, result)
    fired = Counter(finding["rule"] for result in found.values() for finding in result["findings"])
    print()
    print_table(["rule", "models"], [[rule, count] for rule, count in fired.most_common()])
    if not arguments.cases:
        facts = recorded_facts(arguments.folder)
        document = {
            "benchmark": "families",
            "hardware": facts["hardware"],
            "rules": dict(fired.most_common()),
            "recorded": facts["cases"],
            "models": found,
        }
        write_json(arguments.out, document)
        print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
