"""``backspot skill``: what it tells an agent to run does run, and it is installed as a file."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from backspot.commands import main
from support import preloaded

DATA = Path(__file__).parents[1] / "data"
SCRIPT = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(40):
    loss = model(torch.ones(32, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def skill(capsys):
    assert main(["skill"]) == 0
    return capsys.readouterr().out


def test_it_has_the_head_by_which_agents_find_a_skill(skill):
    _, head, text = skill.split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields["name"] == "backspot"
    assert 0 < len(fields["description"]) <= 1024
    assert len(text.splitlines()) < 100


@pytest.mark.slow
@pytest.mark.posix
def test_its_commands_do_what_it_says(skill, tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    shutil.copy(DATA / "h200/vit_patch_drop.trace.json.gz", tmp_path / "trace.json.gz")
    blocks = re.findall(r"^```\n(.*?)^```$", skill, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.splitlines()]
    assert sum(" run " in command for command in commands) == 3
    inline = re.findall(r"`(backspot [a-z]+ [^`]*(?:json|gz)[^`]*)`", skill)
    assert inline == ["backspot show trace.json.gz"]
    program = f"{shlex.join(preloaded.python())} -m backspot"
    for command in [*commands, *inline]:
        soon = command.replace(" --plan ", " --plan=3 ")  # a minute is a matter of the machine
        ran = subprocess.run(
            re.sub("^backspot", program, soon),
            shell=True,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, (command, ran.stderr)
        assert "no report" not in ran.stderr
    plan = json.loads((tmp_path / "plan/report.json").read_text())["plan"]
    assert all("code" in rung for rung in plan["rungs"])


def test_it_is_installed_where_a_folder_of_skills_is(tmp_path, monkeypatch, capsys, skill):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".claude/skills").mkdir(parents=True)
    assert main(["skill", "--install"]) == 0
    written = tmp_path / ".claude/skills/backspot/SKILL.md"
    assert written.read_text() == skill
    assert not (tmp_path / ".agents").exists()
    assert main(["skill", "--install"]) == 0  # the same again
    written.write_text("my own")
    assert main(["skill", "--install"]) == 6
    assert written.read_text() == "my own"
    assert "overwrite it with --force" in capsys.readouterr().err
    assert main(["skill", "--install", "--force"]) == 0
    assert written.read_text() == skill


def test_without_such_a_folder_it_makes_one_and_a_folder_can_be_named(tmp_path, monkeypatch, skill):
    monkeypatch.chdir(tmp_path)
    assert main(["skill", "--install"]) == 0
    assert (tmp_path / ".agents/skills/backspot/SKILL.md").read_text() == skill
    assert main(["skill", "--install", "mine"]) == 0
    assert (tmp_path / "mine/backspot/SKILL.md").read_text() == skill


@pytest.mark.posix
def test_a_link_is_not_followed_and_nothing_is_written_before_all_can_be(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in (".claude/skills", ".agents/skills/backspot"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".agents/skills/backspot/SKILL.md").symlink_to(tmp_path / "elsewhere")
    for more in ((), ("--force",)):
        assert main(["skill", "--install", *more]) == 6
        assert "is a link" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / ".claude/skills/backspot").exists()


def test_a_user_that_does_not_exist_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["skill", "--install", "~nobody_of_that_name"]) == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["skill", "--install", str(tmp_path / "file")]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("backspot: error: ")
    assert "cannot be written" in line
