"""Whatever anybody can observe of a process is the same after Backspot has worked in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support import preloaded

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.posix]

TESTS = str(Path(__file__).parent)

START = f"""
import sys
sys.path.append({TESTS!r})
import os, random, warnings, signal, locale, logging, threading, time
import numpy, torch
from torch import nn
import gc
gc.unfreeze()
from support.process_state import changes, process_state

random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
warnings.simplefilter("always", ResourceWarning)
sys.setrecursionlimit(1234)
sys.setswitchinterval(0.004)
signal.signal(signal.SIGTERM, lambda *_: None)
import helper
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.ones(4, 8)
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
def train(steps):
    for _ in range(steps):
        step()
step()
here = os.path.realpath(os.getcwd())
"""

END = """
found = changes(before, process_state(here))
print("CHANGES", found, flush=True)
os._exit(0)  # with all of PyTorch, Python's own end takes a second
"""

PROFILE = "import backspot\nbefore = process_state(here)\n"
SAVES = """
import backspot
report = backspot.profile(step, model, steps=2, warmup=1)
from backspot.render.formats import formats_of
before = process_state(here)
for each in formats_of(backspot.Report):
    report.save("saved" + each.suffix)
str(report), repr(report), report._repr_html_()
"""
LIGHTNING = """
import lightning, logging
from backspot.integrations.lightning import BackspotCallback
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, _):
        return self.model(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def fit(*callbacks):
    rows = torch.utils.data.TensorDataset(torch.ones(40, 8))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks],
    ).fit(Module(), loader)
fit()
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
fit()
before = process_state(here)
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
fit(BackspotCallback(warmup=1, steps=2))
assert os.path.exists("backspot/report.html")
"""
TRANSFORMERS = """
import transformers
from backspot.integrations.transformers import BackspotCallback
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, x, labels=None):
        found = self.model(x)
        return {"loss": found.square().mean(), "logits": found}
rows = [{"x": torch.ones(8), "labels": torch.tensor(1)} for _ in range(40)]
def fit(*callbacks):
    arguments = transformers.TrainingArguments(
        "out", per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )
    transformers.Trainer(
        Net(), arguments, train_dataset=rows, callbacks=[*callbacks]
    ).train()
fit()
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
fit()
before = process_state(here)
random.seed(1); numpy.random.seed(1); torch.manual_seed(1)
fit(BackspotCallback(warmup=1, steps=2))
assert os.path.exists("out/backspot/report.html")
"""
MAGIC = """
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
shell.run_line_magic("load_ext", "backspot")
shell.user_ns.update(train=train, model=model)
shell.run_cell("train(2)")
before = process_state(here)
shell.run_cell_magic("backspot", "--warmup 1 --steps 2 found", "train(9)")
assert shell.user_ns["found"].steps == 2
"""

WAYS = {
    "profile": PROFILE + "backspot.profile(step, model, steps=2, warmup=1)",
    "profile in detail": PROFILE
    + "backspot.profile(step, model, steps=2, memory=True, shapes=True, trace='trace.json.gz')",
    "save": SAVES,
    "monitor": PROFILE
    + "with backspot.Monitor(model, every=2) as monitor:\n    train(9)\nprint(monitor)",
    "instrument": PROFILE + "for kind in ('call', 'module'):\n"
    "    backspot.instrument(model, hooks=kind).remove()",
    "lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
    "magic": MAGIC,
}
NEEDS = {"lightning": "lightning", "transformers": "transformers", "magic": "IPython"}


def changes_of(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stdout.decode()
    assert "CHANGES " in said, said + done.stderr.decode()
    return said.rpartition("CHANGES ")[2].strip()


@pytest.fixture
def script(tmp_path):
    (tmp_path / "helper.py").write_text("value = 1\n")

    def write(code):
        path = tmp_path / "train.py"
        path.write_text(START + code + END)
        return path

    return write


@pytest.mark.parametrize("way", WAYS)
def test_a_process_is_as_before(way, script, tmp_path):
    pytest.importorskip(NEEDS.get(way, "torch"))
    path = script(WAYS[way])
    done = subprocess.run(
        [*preloaded.python(), str(path)], cwd=tmp_path, capture_output=True, check=False
    )
    assert changes_of(done) == "{}"


# The hooks that count steps are there until the report is made, and so is the signal that asks for
# one. They are not there at the end.
RUN = """
counting = ("_global_optimizer_post_hooks", "Variable._execution_engine", "finders")
def threads():
    return [one for one in threading.enumerate() if one.name.startswith("backspot")]
def state():
    return {name: value for name, value in process_state(here).items() if name not in counting}
assert not os.path.exists("backspot")
before = state()
train(20)
end = time.monotonic() + 60
while time.monotonic() < end and (threads() or not os.path.exists("backspot/report.html")):
    train(1)  # the report is made in a thread meanwhile
train(2)
found = changes(before, state())
found.pop(f"handler of {int(signal.SIGUSR1)}", None)
assert os.path.exists("backspot/report.html")
# The recording waits for the end of the training, to be told with all of its steps.
was, now = found.pop("files", ({}, {}))
more = set(now.values()) - set(was.values())
assert all(name.endswith("trace.json (deleted)") for name in more), more
print("CHANGES", found)
"""


@pytest.mark.parametrize("options", [(), ("--memory", "--shapes", "--trials", "none")])
def test_a_script_is_as_before_once_its_report_is_made(options, script, tmp_path):
    path = script("")
    path.write_text(START + RUN)
    given = ["-m", "backspot", "run", "--warmup", "2", "--steps", "2", *options, str(path)]
    done = subprocess.run(
        [*preloaded.python(), *given], cwd=tmp_path, capture_output=True, check=False
    )
    assert changes_of(done) == "{}"
