"""The callbacks for trainers, on the real packages: `pip install -e '.[dev,full]'`.

Importing the trainers takes seconds, so they are imported within the tests.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from importlib.util import find_spec

import pytest

torch = pytest.importorskip("torch")

import backspot  # noqa: E402
from support.leftovers import hooks_on, left_in_torch  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # importing the trainers takes seconds
    pytest.mark.xdist_group("trainers"),
    pytest.mark.filterwarnings("ignore"),  # of the trainers
]

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
FILES = {"report.html", "report.json", "trace.json.gz"}


def needs(*packages):
    lacking = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


@pytest.fixture(autouse=True)
def files_only(monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("mlflow").setLevel(logging.ERROR)


def tensorboard(folder):
    """The scalars and texts by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()
    scalars = {tag: found.Scalars(tag) for tag in tags["scalars"]}
    texts = {tag: found.Tensors(tag)[0].tensor_proto.string_val[0] for tag in tags["tensors"]}
    return scalars, texts


# Lightning ---------------------------------------------------------------------------------------


def lit(
    callbacks,
    *,
    logger=False,
    fails_at=None,
    batches=16,
    accelerator="cpu",
    compiles=False,
    **options,
):
    """Train a small module; the module, its losses and the trainer."""
    import lightning.pytorch as pl
    from torch import nn

    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
            self.loss = nn.MSELoss()
            self.losses = []

        def training_step(self, batch, index):
            if index == fails_at:
                raise RuntimeError("broken")
            loss = self.loss(self.net(batch), batch[:, :1])
            self.losses.append(loss.item().hex())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, data = Lit(), torch.randn(4 * batches, 8)
    if compiles:
        model.net.compile()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator=accelerator,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=callbacks,
        **options,
    )
    raised = None
    try:
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    except RuntimeError as error:
        raised = error
    return model, trainer, raised


@needs("lightning", "tensorboard", "mlflow")
def test_lightning_gets_the_report_in_its_folder_and_its_loggers(tmp_path, capfd):
    from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

    from backspot.integrations.lightning import BackspotCallback

    mlflow = MLFlowLogger(tracking_uri=(tmp_path / "mlruns").as_uri())
    loggers = [TensorBoardLogger(tmp_path), mlflow, CSVLogger(tmp_path / "csv")]
    plain, *_ = lit([])
    model, trainer, _ = lit([BackspotCallback(warmup=1, steps=2)], logger=loggers)
    assert model.losses == plain.losses
    assert not [*hooks_on(model), *left_in_torch()]

    folder = tmp_path / "lightning_logs" / "version_0" / "backspot"
    assert {path.name for path in folder.iterdir()} == FILES
    report = backspot.Report.load(folder / "report.json")
    assert report.trace == "training by Lightning, steps 5 to 6"
    assert {"net.0", "net.2", "loss"} <= {row.path for row in report.modules}
    said = capfd.readouterr().err
    assert f"backspot: {str(report)[:30]}" in said  # of a module, or of a phase that takes more
    assert f"backspot: the report is in {folder / 'report.html'}" in said

    scalars, texts = tensorboard(trainer.log_dir)
    assert scalars["backspot/backward_ms"][0].value == pytest.approx(report.wall_ms)
    assert scalars["backspot/step_ms"][0].step == 6
    assert b"net.2" in texts["backspot/report/text_summary"]
    stored = mlflow.experiment.list_artifacts(mlflow.run_id, "backspot")
    assert {one.path for one in stored} == {f"backspot/{name}" for name in FILES}
    metrics = mlflow.experiment.get_run(mlflow.run_id).data.metrics
    assert metrics["backspot/backward_ms"] == pytest.approx(report.wall_ms)


@needs("lightning")
def test_accumulated_batches_are_one_step_for_lightning(tmp_path):
    from backspot.integrations.lightning import BackspotCallback

    lit(
        [BackspotCallback(warmup=1, steps=2)],
        accumulate_grad_batches=2,
        default_root_dir=tmp_path,
    )
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert (report.steps, len(report.passes)) == (2, 4)


@needs("lightning")
def test_lightning_with_stacks_knows_the_lines_of_the_step(tmp_path):
    from backspot.integrations.lightning import BackspotCallback

    lit([BackspotCallback(warmup=1, steps=2, stacks=True)], default_root_dir=tmp_path)
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert any(line.function == "training_step" for line in report.host)
    assert any("lightning" in line.file for line in report.host)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs("lightning")
def test_lightning_on_a_gpu_gets_the_same_losses_and_gpu_times(tmp_path):
    from backspot.integrations.lightning import BackspotCallback

    plain, *_ = lit([], accelerator="gpu", devices=1)
    callback = BackspotCallback(warmup=1, steps=2, folder=tmp_path)
    model, *_ = lit([callback], accelerator="gpu", devices=1)
    assert model.losses == plain.losses
    assert backspot.Report.load(tmp_path / "report.json").gpu_ns


@needs("lightning")
def test_a_training_by_lightning_that_fails_leaves_nothing(tmp_path):
    from backspot.integrations.lightning import BackspotCallback

    callback = BackspotCallback(warmup=1, steps=4, folder=tmp_path)
    model, _, raised = lit([callback], fails_at=8)
    assert str(raised) == "broken"
    assert not [*hooks_on(model), *left_in_torch()]
    assert backspot.Report.load(tmp_path / "report.json").steps == 2


@needs("lightning")
def test_a_logger_that_fails_does_not_end_the_training(tmp_path, capfd):
    from lightning.pytorch.loggers import CSVLogger

    from backspot.integrations.lightning import BackspotCallback

    class Broken(CSVLogger):
        def log_metrics(self, metrics, step=None):
            if any("backspot" in name for name in metrics):
                raise OSError("no network")

    model, *_ = lit([BackspotCallback(warmup=1, steps=2)], logger=Broken(tmp_path))
    assert len(model.losses) == 16
    assert "Broken did not take the report: no network" in capfd.readouterr().err


@needs("lightning")
@pytest.mark.skipif(VERSION < (2, 14), reason="this PyTorch compiles no module of its own")
@pytest.mark.parametrize("compiled", [True, False])
def test_the_modules_inside_compiled_code_are_known_unless_that_is_unwanted(
    compiled, tmp_path, forget_graphs
):
    import torch._inductor.config as config

    from backspot.integrations.lightning import BackspotCallback

    torch._dynamo.reset()
    callback = BackspotCallback(warmup=1, steps=2, folder=tmp_path, compiled=compiled)
    with config.patch({"cpp.enable_kernel_profile": True}):
        lit([callback], compiles=True)
    assert config.post_grad_custom_post_pass is None
    assert not config.trace.provenance_tracking_level
    rows = {row.path for row in backspot.Report.load(tmp_path / "report.json").modules}
    assert ({"net.0", "net.2"} <= rows) == compiled
    with pytest.raises(backspot.UsageError, match="compiled=1: give True or False"):
        BackspotCallback(compiled=1)


@needs("lightning")
def test_too_few_steps_of_a_trainer_are_one_clear_line(tmp_path, capfd):
    from backspot.integrations.lightning import BackspotCallback

    lit([BackspotCallback(warmup=3, folder=tmp_path)], batches=8)
    (line,) = [one for one in capfd.readouterr().err.splitlines() if "backspot" in one]
    assert "the training ended after 8 steps, and a report needs 15" in line
    with pytest.raises(backspot.UsageError, match="steps=0"):
        BackspotCallback(steps=0)


# transformers ------------------------------------------------------------------------------------


def hugging(tmp_path, callbacks, *, use_cpu=True, **options):
    """Train a small model; the model and the trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    set_seed(0)
    tokens = torch.randint(0, 20, (64, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    size = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size))
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=10,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=use_cpu,
        **options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return model, trainer


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@needs("transformers", "accelerate", "tensorboard", "mlflow")
def test_transformers_gets_the_report_in_its_folder_and_its_loggers(tmp_path, monkeypatch):
    import mlflow

    from backspot.integrations.transformers import BackspotCallback

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    _, plain = hugging(tmp_path / "plain", [], report_to=[])
    callback = BackspotCallback(warmup=1, steps=2)
    model, trainer = hugging(tmp_path, [callback], report_to=["tensorboard", "mlflow"])

    assert len(losses(plain)) == 10
    assert losses(trainer) == losses(plain)
    same = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in same)
    assert not [*hooks_on(model), *left_in_torch()]

    assert {path.name for path in (tmp_path / "backspot").iterdir()} == FILES
    report = backspot.Report.load(tmp_path / "backspot" / "report.json")
    assert report.trace == "training by transformers, steps 5 to 6"
    assert (report.steps, len(report.passes)) == (2, 4)
    assert "transformer.h.1.attn" in {row.path for row in report.modules}

    scalars, texts = tensorboard(tmp_path / "tensorboard")
    assert scalars["train/backspot/backward_ms"][0].value == pytest.approx(report.wall_ms)
    assert b"transformer.h" in texts["train/backspot/report/text_summary"]
    (run,) = mlflow.search_runs(output_format="list", search_all_experiments=True)
    assert run.data.metrics["backspot/backward_ms"] == pytest.approx(report.wall_ms)
    stored = mlflow.artifacts.list_artifacts(run_id=run.info.run_id, artifact_path="backspot")
    assert {one.path for one in stored} == {f"backspot/{name}" for name in FILES}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs("transformers", "accelerate")
def test_transformers_on_a_gpu_gets_the_same_losses_and_gpu_times(tmp_path):
    from backspot.integrations.transformers import BackspotCallback

    _, plain = hugging(tmp_path / "plain", [], use_cpu=False, report_to=[])
    callback = BackspotCallback(warmup=1, steps=2)
    _, trainer = hugging(tmp_path, [callback], use_cpu=False, report_to=[])
    assert losses(trainer) == losses(plain)
    assert backspot.Report.load(tmp_path / "backspot" / "report.json").gpu_ns


# Both --------------------------------------------------------------------------------------------


def test_weights_and_biases_gets_the_page(tmp_path, monkeypatch):
    from backspot.integrations._trainer import Written, to_wandb

    # The package needs an account; this is all that is used of it.
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Html=lambda page: page))
    logged = {}
    (tmp_path / "report.html").write_text("<p>a page</p>")
    to_wandb(types.SimpleNamespace(log=logged.update), Written(None, (tmp_path / "report.html",)))
    assert logged == {"backspot/report": "<p>a page</p>"}


@pytest.mark.parametrize(
    ("name", "package"), [("lightning", "lightning"), ("transformers", "transformers[torch]")]
)
def test_a_trainer_that_is_not_installed_is_one_clear_line(name, package):
    blocked = ["lightning", "pytorch_lightning", "transformers"]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked}))\n"
        f"import backspot.integrations.{name}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("backspot.MissingDependencyError: ")
    assert package in last


def test_importing_backspot_imports_no_trainer():
    code = "import backspot, sys; print([*sys.modules.keys() & {'torch', 'lightning', 'IPython'}])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ}, check=True, text=True
    )
    assert done.stdout.strip() == "[]"
