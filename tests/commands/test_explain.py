"""``backspot explain``: a rule's section of the page of findings; and completion with TAB."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from backspot.analysis.parts import RULES as RULES_OF_PARTS
from backspot.commands import VERBS, main
from backspot.job.findings import all_rules as rules_over_ranks

RULES = sorted(rule.name for of in (*RULES_OF_PARTS, rules_over_ranks) for rule in of())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_explained(rule, capsys):
    assert main(["explain", rule]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{rule}\n\nCause. ")
    assert "\nFound by " in out
    assert "\nFix. " in out
    assert "**" not in out
    assert "](" not in out
    assert "  " not in out.replace("\n  ", "")


def test_all_rules_are_listed(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split("  ")[0] for line in lines) == RULES


@pytest.mark.parametrize(
    ("wrong", "hint"), [("host-waitss", "host-waits"), ("xyz", "explain lists them")]
)
def test_a_rule_that_does_not_exist_is_one_line_with_a_way_out(wrong, hint, capsys):
    assert main(["explain", wrong]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert hint in err


def completed(line):
    """What a shell would offer after this line, as argcomplete hands it over."""
    if importlib.util.find_spec("argcomplete") is None:
        pytest.skip("needs argcomplete")
    code = "import os; os.dup2(1, 8); from backspot.commands import main; main()"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False, text=True
    )
    return {word.strip() for word in done.stdout.splitlines()}


def test_verbs_options_and_rules_are_completed():
    assert completed("backspot ") >= set(VERBS)
    assert completed("backspot run --ste") == {"--steps"}
    assert completed("backspot explain host-w") == {"host-waits"}
