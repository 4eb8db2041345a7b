"""Teach a coding agent how to use Backspot.

Prints a skill (SKILL.md): what to run, how to read it, what not to do.
With --install it is written to FOLDER/backspot/SKILL.md, where agents look.

Example:
  backspot skill
  backspot skill --install
  backspot skill --install tools/skills
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

EXIT_CODES = (3, 6)

_HERE = ""
_FOLDERS = (".claude/skills", ".agents/skills")
"""Where agents look for the skills of a project: some in the first, most in the second."""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--install",
        metavar="FOLDER",
        nargs="?",
        const=_HERE,
        help="write the skill below FOLDER (default: .claude/skills and .agents/skills, as far as "
        "they exist here, or else .agents/skills)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite another version of it")


def run(args: argparse.Namespace) -> int:
    """Print the skill, or write it."""
    from backspot.commands._console import note, write_text
    from backspot.errors import OutputExistsError, SourceNotFoundError
    from backspot.formatting import visible

    skill = Path(__file__).with_name("SKILL.md").read_text(encoding="utf-8")
    if args.install is None:
        write_text(skill.rstrip())
        return 0
    files = [folder / "backspot" / "SKILL.md" for folder in _targets(args.install)]
    for file in files:
        shown = visible(str(file))
        if file.is_symlink():
            raise OutputExistsError(f"{shown} is a link: remove it, or give another FOLDER")
        if file.exists() and not args.force and file.read_text("utf-8", "replace") != skill:
            raise OutputExistsError(
                f"{shown} is another version: overwrite it with --force, or give another FOLDER"
            )
    for file in files:
        shown = visible(str(file))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(skill, encoding="utf-8")
        except OSError as error:
            raise SourceNotFoundError(f"{shown} cannot be written: {error.strerror}") from error
        note(f"wrote {shown}")
    return 0


def _targets(target: str) -> list[Path]:
    if target != _HERE:
        with suppress(RuntimeError):  # there is no such user
            return [Path(target).expanduser()]
        return [Path(target)]
    there = [Path(name) for name in _FOLDERS if Path(name).is_dir()]
    return there or [Path(_FOLDERS[-1])]
