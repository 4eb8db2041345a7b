"""The questions: what each benchmark answers, what it needs, and how it is asked.

``python -m benchmarks.questions`` prints the table of ``benchmarks/README.md``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        asks: the question.
        where: the module below ``benchmarks``, and the function if it is not ``answer``. It takes a
            ``harness.Run`` and returns figures, or an exit code if it stores none.
        needs: beside torch.
        minutes: of a full run: on an H200 with 16 cores, or on two cores where no GPU is needed.
        stores: whether a full run writes its results without being told where.
        options: of a full run.
        before: what the command begins with.
        device: whether it runs on a GPU too.
        cases: whether it has cases to choose from.
        seconds: the default time limit of a run; 0: none.
        jobs: the default number of worker processes; 0: it starts none.
        load: whether other processes can keep the machine busy.
    """

    asks: str
    where: str
    needs: str = ""
    minutes: str = ""
    options: str = ""
    before: str = ""
    device: bool = True
    cases: bool = True
    seconds: float = 0
    jobs: int = 0
    load: bool = False
    stores: bool = True


_TIMM = "GPU, timm"
_ALL = "GPU, timm, torchvision, transformers"
_TWO = "two GPUs, or CPU"
_CORES = "taskset -c 0,1 "

QUESTIONS = {
    # Accuracy
    "timm_sweep": Question(
        "Does it change any model? Every model of timm, with and without labels",
        "accuracy.timm_sweep", _TIMM, "5", "--jobs 15",
        cases=False, seconds=500, jobs=1,
    ),
    "planted": Question(
        "Does it name the right module? A slow backward is planted at random (`--busy 2`: while "
        "other processes keep the cores busy)",
        "accuracy.planted", "timm, transformers; GPU or CPU", "20",
        "--trials 104 --jobs 8",
        cases=False, seconds=500, jobs=1, load=True,
    ),
    "steady_answer": Question(
        "Does the same step get the same first answer each time, and the planted one? (`--busy 2`: "
        "while other processes keep the cores busy)",
        "accuracy.steady_answer", "GPU or CPU", "2",
        seconds=500, jobs=1, load=True,
    ),
    "planted_python": Question(
        "Does it name the right line? Python loops are planted at random into the step, and their "
        "time is compared",
        "accuracy.planted_python", "timm, transformers; GPU or CPU", "6",
        cases=False, seconds=1200, jobs=1,
    ),
    "step_truth": Question(
        "Is the time of a step the training's? Some 30 small "
        "trainings, each with a clock of its own",
        "accuracy.step_truth", "GPU or CPU; transformers, lightning", "9", "--jobs 12",
        seconds=520, jobs=1,
    ),
    "waits_truth": Question(
        "Are the waits for a GPU those that PyTorch itself warns of, by line and count?",
        "accuracy.waits_truth", "GPU; transformers, lightning", "3",
        seconds=220, jobs=2,
    ),
    "gpu_truth": Question(
        "Are its numbers true? Against a second count of kernels, and CUDA events",
        "accuracy.gpu_truth", _ALL, "9",
        seconds=520, jobs=1,
    ),
    "memory_truth": Question(
        "Are memory, operations and the effect of checkpointing true? Against the allocator and "
        "its snapshot, PyTorch's counter, and the checkpointed model",
        "accuracy.memory_truth", _ALL, "8",
        seconds=900, jobs=1,
    ),
    "memory_ranks": Question(
        "The same of the peak and what modules keep, on two ranks",
        "accuracy.memory_truth:of_ranks", _TWO, "1",
    ),
    "trial_truth": Question(
        "Is a trial of a remedy true? What it says a step saves, against real steps with the "
        "remedy, in turn",
        "accuracy.trial_truth", "GPU or CPU", "6",
        seconds=340, jobs=1,
    ),
    "plan_truth": Question(
        "Is a plan true? Each of its settings and all together, against the setting made in the "
        "real training, for 26 models",
        "accuracy.plan_truth", f"{_ALL}; or CPU", "60; 25",
        seconds=4000, jobs=1,
    ),
    "plan_ladder": Question(
        "How far does a person come who does nothing but what Backspot prints, one setting after "
        "the other? A tutorial's training, from batch 32 without workers",
        "accuracy.plan_ladder", "torchvision; GPU or CPU", "10; 20",
        cases=False, seconds=1800,
    ),
    "price_truth": Question(
        "Is a price that of the cause? 86 cases of 39 rules, each beside an innocent heavy "
        "operator in the same module, function or phase, and their fixes",
        "accuracy.price_truth", "GPU or CPU", "25", "--jobs 3",
        seconds=3600, jobs=1,
    ),
    "limit_truth": Question(
        "Is the device's limit true? Layers of known work against CUDA events, the operations of "
        "all families of timm, and of each module of 4 compiled models",
        "accuracy.limit_truth", _TIMM, "12",
        seconds=900, jobs=1,
    ),
    "compiled_truth": Question(
        "Does it name the right module inside `torch.compile`, leave the code as it is, and what "
        "does it add to a compilation? (`--subset`: 4 minutes)",
        "accuracy.compiled_truth", "GPU, timm, transformers", "25",
        seconds=1800, jobs=1,
    ),
    "compare_runs": Question(
        "Does `compare` claim that equal code is slower, and find 10% of a step? Three recordings "
        "a side (on a busy CPU: `--device cpu --busy 2`)",
        "accuracy.compare_runs", "GPU or CPU", "25",
        "--pairs 50 --jobs 4",
        seconds=3000, jobs=1, load=True,
    ),
    "false_alarms": Question(
        "What is found in 40 healthy models?",
        "accuracy.false_alarms", "timm, torchvision, transformers; GPU or CPU", "6; 30", "--jobs 5",
        seconds=3000, jobs=1, load=True,
    ),
    "what_if": Question(
        "Does a step save what a replay predicts? Some 130 real changes of 22 models",
        "accuracy.what_if", "GPU, torchvision", "5",
        seconds=320, jobs=1,
    ),
    "planted_ranks": Question(
        "Is the slow rank named, with its module and its price, and are the waits true?",
        "accuracy.planted_ranks", _TWO, "2",
    ),
    "planted_transfers": Question(
        "Is what concerns all ranks found: small buckets, late gathers, bubbles of a pipeline?",
        "accuracy.planted_ranks:transfers", "two GPUs, or CPU for pipelines", "1",
    ),
    "published_jobs": Question(
        "Does the replay of a job reproduce what is published about three jobs of 8 to 128 GPUs?",
        "accuracy.published_jobs", "pandas, pyarrow, the published traces", "1",
        "StragglerAnalysis/data",
        device=False,
    ),
    "same_outputs": Question(
        "Are the outputs on recorded traces, to the byte, what they were before a change? (`-o "
        "FILE` before it)",
        "accuracy.same_outputs", "CPU", "1", options="--before FILE",
        device=False, cases=False, stores=False,
    ),
    # Causes
    "causes": Question(
        "Does it name the cause? planted causes, and controls: `record -o recorded` (with "
        "`--gpus 2`: those that need two; without a GPU: those that need none), then "
        "`judge recorded` anywhere",
        "causes.main", "GPU or CPU, torchvision", "4; 1",
        seconds=480, jobs=2,
    ),
    "published_causes": Question(
        "Does it name what people published? 64 slow steps that others fixed, rebuilt, before and "
        "after, 34 by somebody who had not read the rules",
        "causes.published.main", "GPU or CPU", "8; 10", "--jobs 2",
        seconds=900, jobs=1,
    ),
    "blind_set_3": Question(
        "The same of a third set, of other fields, judged apart for each tier; to be run once",
        "causes.published.main:third", "GPU or CPU", "5; 8",
        "--jobs 4",
        seconds=900, jobs=1,
    ),
    "after_fix": Question(
        "What is found once a cause is gone? The fixed variants of all cases of `published_causes` "
        "and `blind_set_3`, controls, and a case book (`--book FOLDER`)",
        "causes.after_fix", "GPU or CPU, torchvision", "9; 25",
        "--jobs 6",
        seconds=1800, jobs=1,
    ),
    # Cost
    "overhead": Question(
        "What does it cost on a training step, and what do memory and shapes?",
        "cost.overhead", "timm, transformers; GPU or CPU", "5",
        seconds=240,
    ),
    "overhead_ranks": Question(
        "What do labels cost where ranks wait for each other?",
        "cost.overhead:of_ranks", f"{_TWO}; timm", "2",
    ),
    "read": Question(
        "How fast, and in how much memory, is a trace read?",
        "cost.read", "2 cores, 3 GB", "8", before=_CORES,
        device=False, cases=False, seconds=480, jobs=1,
    ),
    "startup": Question(
        "How long until a command does anything?",
        "cost.startup", "2 cores", "1", before=_CORES,
        device=False,
    ),
    "ranks": Question(
        "What does it cost to put the ranks of a job together?",
        "cost.ranks", "2 cores", "1",
        device=False, cases=False,
    ),
    "leaks": Question(
        "Does anything grow over 10,000 steps?", "cost.leaks", "CPU", "1",
        "--jobs 3",
        device=False, cases=False, jobs=1,
    ),
    # Robustness
    "fuzz_traces": Question(
        "Do broken traces give anything but a clean error or exact sums?",
        "robustness.fuzz_traces", "CPU", "10", options="--count 20000",
        device=False, cases=False, seconds=900, jobs=2,
    ),
    "fuzz_reports": Question(
        "Do broken saved reports give anything but a clean error?",
        "robustness.fuzz_reports", "CPU", "3",
        device=False, cases=False,
    ),
    "unedited": Question(
        "Is `backspot run` right on public training scripts? Output, exit code, first row and "
        "advice",
        "robustness.unedited", "checkouts of them; CPU or GPU", "60; 9", "--checkouts FOLDER",
        seconds=14400, jobs=1, load=True,
    ),
    "plan_scripts": Question(
        "Does a plan come true in six public training scripts, followed by their own flags or by a "
        "patch?",
        "robustness.plan_scripts", "checkouts of them; GPU or CPU", "10; 20",
        "--checkouts FOLDER",
        seconds=3600,
    ),
    "endings": Question(
        "Does a script start and end under `backspot run` as under `python`? 150 ways",
        "robustness.endings", "CPU, Linux", "15", "--jobs 2",
        device=False, seconds=3600, jobs=1,
    ),
    "random_scripts": Question(
        "Does `backspot run` change what random training scripts print, or how they end?",
        "robustness.random_scripts", "CPU, Linux", "40", options="--count 500 --jobs 2",
        device=False, cases=False, seconds=7200, jobs=1,
    ),
    # Tools
    "trim": Question(
        "Trims an exported trace", "traces.trim", options="BIG -o SMALL",
        device=False, cases=False, stores=False,
    ),
}  # fmt: skip


def table() -> str:
    """Return the questions as a table in Markdown."""
    lines = ["| question | command | needs | minutes |"]
    lines.append("| --- | --- | --- | ---: |")
    for name, question in QUESTIONS.items():
        command = f"{question.before}python -m benchmarks {name} {question.options}".strip()
        cells = (question.asks, f"`{command}`", question.needs, question.minutes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
