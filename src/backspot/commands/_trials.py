"""The option of trials."""

import argparse


def _trials(word: str) -> str:
    if word == "all":
        raise argparse.ArgumentTypeError("all is gone: --plan tries the model and the loader")
    return word


OPTIONS = {
    "trials": {
        "type": _trials,
        "choices": ("operators", "none"),
        "default": "operators",
        "help": "what to try of what the findings advise, on copies, within five seconds in which "
        "the training stands still (default: operators)",
    },
}
