"""An interrupt at any line or bytecode of the live half, with its exception kept, harms nothing.

Each run is a process of its own, for what it looks for is the death of the process: a range that
ends or is freed while a later profiler records writes into memory that is gone.
"""

import subprocess
import textwrap

import pytest

from support import preloaded
from support.hooks import MODES

WITHOUT_HOOKS = True

COMMON = """
    import faulthandler
    import os
    import sys

    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    import backspot
    import backspot.live
    from backspot.live.sessions import sessions
    from backspot.live.torch_internals.profiler import new_range

    # Where no profiler's start is noticed there are node hooks.
    sessions.watches_starts = sys.argv[2] != "node"
    HOOKS = "module" if sys.argv[2] == "module" else "call"
    faulthandler.enable()
    EVENT = sys.argv[1]  # "line" or "opcode"
    FOLDER = os.path.dirname(backspot.live.__file__)


    def interrupted(number, run):
        '''Run, with an interrupt at one line (or bytecode) of the live half; None past the last.'''

        def enter(frame, event, arg):
            if not frame.f_code.co_filename.startswith(FOLDER):
                return None
            frame.f_trace_opcodes = EVENT == "opcode"
            return count

        def count(frame, event, arg):
            nonlocal number
            if event == EVENT:
                number -= 1
                if number == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return count

        # From Python 3.12 on bytecodes are traced only if some frame has asked for it before.
        sys._getframe().f_trace_opcodes = EVENT == "opcode"
        sys.settrace(enter)
        try:
            run()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.settrace(None)
        return None


    def labels(profiler):
        events = profiler.profiler.kineto_results.events()
        starts = ("forward: ", "backward: ")
        return [e.name() for e in sorted(events, key=lambda e: e.start_ns())
                if e.name().startswith(starts)]


    def net():
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid(), nn.Tanh()))


    def record(*steps):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for step in steps:
                step()
        return labels(profiler)
"""

IN_A_STEP = """
    model, x = net(), torch.randn(2, 4)
    kept = []


    def step():
        model(x).sum().backward()


    def frames(error):
        traceback = error and error.__traceback__
        while traceback is not None:
            yield traceback.tb_frame
            traceback = traceback.tb_next


    def interrupted_step():
        error = interrupted(number, step)
        assert error is not None or number > 40, "nothing of the live half was traced"
        # It would end with the exception, in a later session. That writes into memory that is free,
        # and whether the process dies of it is chance.
        for frame in frames(error):
            held = [name for name, value in frame.f_locals.items() if type(value) is new_range]
            assert not held, (number, frame, held)
        kept.append(error)


    markers = sys.argv[2] != "plain"
    instrumentation = backspot.instrument(model, lines=True, hooks=HOOKS, markers=markers)
    whole = record(step)
    expected = {"call": 8, "module": 10}[HOOKS] if markers else 5
    assert len(whole) == expected, whole
    stride = int(sys.argv[3])
    number = int(sys.argv[4]) - stride
    while not kept or kept[-1] is not None:
        number += stride
        before = kept[-1:]
        # The last exception goes while the next profiler records; the steps after it and after the
        # next one are whole.
        found = record(before.clear, step, interrupted_step, step)
        assert found[:len(whole)] == found[-len(whole):] == whole, (number, found)
        if number // stride % 3:
            kept[:] = kept[-1:]
    assert record(step) == whole
    instrumentation.remove()
    kept.clear()
    assert record(step) == []
    print("alive after", number)
"""

WHILE_INSTRUMENTING = """
    import copyreg

    def hooks(model):
        return [
            hook
            for module in model.modules()
            for name, held in vars(module).items()
            if name.endswith(("hooks", "kwargs", "called")) and held
            for hook in held.values()
        ]


    def nothing_left(model):
        assert not hooks(model), hooks(model)
        assert all(module._is_full_backward_hook is None for module in model.modules())
        assert sys.getrecursionlimit() == limit
        assert copyreg.dispatch_table == reducers
        assert nn.Module.__call__ is call


    def end(profiler):
        '''End what an interrupt has left of a profiler: PyTorch itself cannot be interrupted.'''
        if not profiler.profiling_start_time_ns and not torch.autograd._profiler_enabled():
            profiler._start_trace()  # PyTorch 2.4 prepares no other after one that did not start
        if torch.autograd._profiler_enabled():
            torch.autograd._disable_profiler()
        if torch.autograd.profiler._is_profiler_enabled:
            torch.autograd.profiler._set_is_profiler_enabled(False)


    model = net()
    record(lambda: model(torch.randn(2, 4)).sum().backward())  # imports what PyTorch wants
    call = nn.Module.__call__
    limit, reducers = sys.getrecursionlimit(), dict(copyreg.dispatch_table)
    stride, first = int(sys.argv[3]), int(sys.argv[4])
    number, error = first - stride, True
    while error is not None:
        number += stride
        made = []
        error = interrupted(
            number, lambda: made.append(backspot.instrument(model, hooks=HOOKS))
        )
        if not made:
            nothing_left(model)
            made.append(backspot.instrument(model, hooks=HOOKS))
        made[0].remove()
        nothing_left(model)
    assert number > 50
    print("instrumented after", number)

    number, error = first - stride, True
    while error is not None:
        number += stride
        instrumentation = backspot.instrument(model, hooks=HOOKS)
        record(lambda: model(torch.randn(2, 4)).sum().backward())
        error = interrupted(number, instrumentation.remove)
        instrumentation.remove()
        nothing_left(model)
    assert number > 10
    print("removed after", number)

    number, error = first - stride, True
    while error is not None:
        number += stride
        with profile(activities=[ProfilerActivity.CPU]):
            error = interrupted(
                number, lambda: made.append(backspot.instrument(model, hooks=HOOKS))
            )
            for instrumentation in made:
                error = interrupted(number, instrumentation.remove) or error
                instrumentation.remove()
            made.clear()
            nothing_left(model)
        nothing_left(model)
    print("removed while recording after", number)

    number, error = first - stride, True
    while error is not None:
        number += stride
        instrumentation = backspot.instrument(model, hooks=HOOKS)
        x = torch.randn(2, 4)
        profiler = profile(activities=[ProfilerActivity.CPU])


        def step():
            with profiler:
                model(x).sum().backward()


        error = interrupted(number, step)
        end(profiler.profiler)
        instrumentation.remove()
        nothing_left(model)
    print("recorded after", number)
"""


def run(script, event, hooks, stride, first=1):
    arguments = (event, hooks, str(stride), str(first))
    source = textwrap.dedent(COMMON) + textwrap.dedent(script)
    command = [*preloaded.python(), preloaded.WHOLE, "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "hooks"),
    [
        ("line", "call"),
        ("line", "plain"),  # call, without markers
        ("line", "node"),
        ("line", "module"),
        ("opcode", "call"),
        ("opcode", "plain"),
        ("opcode", "node"),
    ],
)
def test_an_interrupted_step_leaves_no_range_to_a_later_session(event, hooks, request):
    every = request.config.getoption("--every-bytecode")
    # Markers open and close ranges at lines of their own, with the hooks that users have.
    at_all = every or (event, hooks) == ("line", "call")
    done = run(IN_A_STEP, event, hooks, 1 if at_all else {"line": 3, "opcode": 17}[event])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "alive after" in done.stdout


# By lines: past the last line of ``instrument`` the handle is on its way to the caller already.
@pytest.mark.slow
@pytest.mark.parametrize("hooks", MODES)
def test_interrupted_instrumenting_and_removing_can_be_done_again(hooks, request):
    # Most lines are the same with all hooks: each kind but the default has a third of them.
    every = request.config.getoption("--every-bytecode") or hooks == "call"
    where = (1, 1) if every else (3, 1 + MODES.index(hooks))
    done = run(WHILE_INSTRUMENTING, "line", hooks, *where)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recorded after" in done.stdout
