"""Write cli.md: the reference of the command line, made from the parser of each verb.

Usage: python docs/make_cli.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from backspot.commands import VERBS

HEAD = """\
# The command line

Every command has the form `backspot VERB`.
`backspot VERB --help` says this at more length. Every verb but `run` and `demo` works without
torch.

Made from the parser by `python docs/make_cli.py`.
"""
GUIDES = {"run": "run.md", "diff": "json.md#what-is-more-than-noise", "ranks": "ranks.md"}
"""Where the site says at length what the help of a verb has in short."""
SHELL = """\
## Completion

After `pip install 'backspot[completion]'`, TAB completes verbs, options and names of rules:

```
eval "$(register-python-argcomplete backspot)"                # bash and zsh
register-python-argcomplete --shell fish backspot | source    # fish
```

## Environment

- `COLUMNS`: the width of tables, where `--width` is not given
- `NO_COLOR`, `FORCE_COLOR`: no colours; colours also in files and pipes
- `BACKSPOT_DEBUG=1`: prints the traceback of an error
"""


def main() -> None:
    """Write the file beside this script."""
    Path(__file__).with_name("cli.md").write_text(made(), encoding="utf-8")


def made() -> str:
    """Return the whole page."""
    parts = [HEAD, " · ".join(f"[`{name}`](#backspot-{name})" for name in VERBS) + "\n"]
    seen: dict[tuple[str, str], str] = {}
    for name in VERBS:
        parts += _verb(name, seen)
    return "\n".join([*parts, SHELL])


def _verb(name: str, seen: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield a verb's section; ``seen`` has the arguments so far, each with its first verb."""
    verb = import_module(f"backspot.commands.{name}")
    parser = argparse.ArgumentParser(prog=f"backspot {name}", add_help=False)
    verb.prepare_parser(parser)
    about, _, example = (verb.__doc__ or "").partition("Example:\n")
    yield f"## backspot {name}\n"
    if name in GUIDES:
        about = f"{about.strip().partition(chr(10))[0]} [More]({GUIDES[name]})."
    yield f"{about.strip()}\n"
    yield f"```\n{_dedented(example)}\n```\n"
    known: dict[str, list[str]] = {}
    for action in parser._actions:
        argument = _spelled(action), _meaning(action)
        first = seen.setdefault(argument, name)
        if first == name:
            yield f"- {argument[0]}: {argument[1]}"
        else:
            known.setdefault(first, []).append(argument[0])
    for first, spelled in known.items():
        yield f"- {', '.join(spelled)}: as for [`{first}`](#backspot-{first})"
    codes = ", ".join(map(str, verb.EXIT_CODES))
    yield f"\n[Exit codes](for-agents.md#exit-codes) of its own: {codes}.\n" if codes else ""


def _spelled(action: argparse.Action) -> str:
    """Return an argument as it is typed: ``-o FILE``, ``TRACE …``, ``--by {path,class}``."""
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    value = action.metavar or choices
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value or action.dest}{' …' if action.nargs in ('+', '*') else ''}`"
    takes_value = action.nargs != 0
    names = [f"{name} {value}" if takes_value else name for name in action.option_strings]
    return ", ".join(f"`{name}`" for name in names)


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "") % {"default": action.default, "prog": "backspot"}
    return " ".join(text.split())


def _dedented(text: str) -> str:
    return "\n".join(line.removeprefix("  ") for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    main()
