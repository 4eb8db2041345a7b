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
    from collections import Counter
    from functools import partial

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
    HOW = sys.argv[3]
    FOLDER = os.path.dirname(backspot.live.__file__)


    def traced(run, each):
        '''Run, and call ``each`` at every line (or bytecode) of the live half.'''

        def enter(frame, event, arg):
            if not frame.f_code.co_filename.startswith(FOLDER):
                return None
            frame.f_trace_opcodes = EVENT == "opcode"
            return arrive

        def arrive(frame, event, arg):
            if event == EVENT:
                code = frame.f_code
                if EVENT == "line":
                    each((code.co_filename, frame.f_lineno))
                else:
                    each((code.co_filename, code.co_firstlineno, frame.f_lasti))
            return arrive

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


    def moments_of(run):
        '''All moments of a run: where it is, and how often it has been there with this time.'''
        times, moments = Counter(), []

        def note(place):
            times[place] += 1
            moments.append((place, times[place]))

        traced(run, note)
        assert moments, "nothing of the live half was traced"
        return moments


    def interrupted(moment, run):
        '''Run, with an interrupt at one moment; what is raised, or None if it does not come.'''
        at, left = moment

        def interrupt(place):
            nonlocal left
            if place == at:
                left -= 1
                if not left:
                    sys.settrace(None)
                    raise KeyboardInterrupt

        return traced(run, interrupt)


    def chosen(moments, elsewhere=()):
        '''The moments at which to interrupt.

        Args:
            moments: of a whole run.
            elsewhere: the places that are interrupted with other hooks as well.
        '''
        if HOW == "every":
            return moments
        if EVENT == "opcode":
            return moments[::17]
        times = dict(moments)
        if HOW == "first and last":
            return [(place, time) for place, time in moments if time in (1, times[place])]
        # Each place of its own, and one of three others: one half at the first time.
        places = [place for place in times if place not in elsewhere]
        places += [place for place in times if place in elsewhere][::3]
        return [(place, 1 if at % 2 else times[place]) for at, place in enumerate(places)]


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
        error = interrupted(moment, step)
        # It would end with the exception, in a later session. That writes into memory that is free,
        # and whether the process dies of it is chance.
        for frame in frames(error):
            held = [name for name, value in frame.f_locals.items() if type(value) is new_range]
            assert not held, (moment, frame, held)
        kept.append(error)


    markers = sys.argv[2] != "plain"
    instrumentation = backspot.instrument(model, lines=True, hooks=HOOKS, markers=markers)
    whole = record(step)
    expected = {"call": 8, "module": 10}[HOOKS] if markers else 5
    assert len(whole) == expected, whole
    moments = []
    record(step, lambda: moments.extend(chosen(moments_of(step))), step)
    stopped = 0
    for number, moment in enumerate(moments):
        before = kept[-1:]
        # The last exception goes while the next profiler records; the steps after it and after the
        # next one are whole.
        found = record(before.clear, step, interrupted_step, step)
        assert found[:len(whole)] == found[-len(whole):] == whole, (moment, found)
        stopped += kept[-1] is not None
        if number % 3:
            kept[:] = kept[-1:]
    assert stopped > 20
    assert stopped > 0.9 * len(moments), (stopped, len(moments))
    assert record(step) == whole
    instrumentation.remove()
    kept.clear()
    assert record(step) == []
    print("alive after", stopped)
"""

WHILE_INSTRUMENTING = """
    import copyreg

    def hooks_of(model):
        return [
            hook
            for module in model.modules()
            for name, held in vars(module).items()
            if name.endswith(("hooks", "kwargs", "called")) and held
            for hook in held.values()
        ]


    def nothing_left(model):
        assert not hooks_of(model), hooks_of(model)
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


    def instrument(hooks):
        sessions.watches_starts = hooks != "node"
        return backspot.instrument(model, hooks="module" if hooks == "module" else "call")


    def train():
        model(torch.randn(2, 4)).sum().backward()


    # What is done with hooks, and which part of it ``trace`` interrupts: that returns the error.


    def instrumenting(hooks, trace):
        made = []
        error = trace(lambda: made.append(instrument(hooks)))
        if not made:
            nothing_left(model)
            made.append(instrument(hooks))
        made[0].remove()
        nothing_left(model)
        return error


    def removing(hooks, trace):
        instrumentation = instrument(hooks)
        record(train)
        error = trace(instrumentation.remove)
        instrumentation.remove()
        nothing_left(model)
        return error


    def instrumenting_while_recording(hooks, trace):
        made = []
        with profile(activities=[ProfilerActivity.CPU]):
            error = trace(lambda: made.append(instrument(hooks)))
            for instrumentation in made:
                instrumentation.remove()
            nothing_left(model)
        nothing_left(model)
        return error


    def removing_while_recording(hooks, trace):
        with profile(activities=[ProfilerActivity.CPU]):
            instrumentation = instrument(hooks)
            error = trace(instrumentation.remove)
            instrumentation.remove()
            nothing_left(model)
        nothing_left(model)
        return error


    def recording(hooks, trace):
        instrumentation = instrument(hooks)
        profiler = profile(activities=[ProfilerActivity.CPU])


        def step():
            with profiler:
                train()


        error = trace(step)
        end(profiler.profiler)
        instrumentation.remove()
        nothing_left(model)
        return error


    KIND = sys.argv[2]
    parts = (
        instrumenting, removing, instrumenting_while_recording, removing_while_recording, recording
    )
    for part in parts:  # the first time takes other ways
        part(KIND, lambda run: run())
    for part in parts:
        moments, elsewhere = [], []
        part(KIND, lambda run: moments.extend(moments_of(run)))
        if KIND != "call":
            part("call", lambda run: elsewhere.extend(moments_of(run)))
        moments = chosen(moments, {place for place, _ in elsewhere})
        stopped = sum(
            part(KIND, partial(interrupted, moment)) is not None for moment in moments
        )
        assert stopped > 20
        assert stopped > 0.9 * len(moments), (part, stopped, len(moments))
        print(part.__name__, "was interrupted", stopped, "times")
"""


def run(script, event, hooks, how):
    source = textwrap.dedent(COMMON) + textwrap.dedent(script)
    command = [*preloaded.python(), preloaded.WHOLE, "-c", source, event, hooks, how]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def how_often(request, *, is_default):
    if request.config.getoption("--every-bytecode"):
        return "every"
    return "first and last" if is_default else "once"


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
    # Markers open and close ranges at lines of their own, with the hooks that users have.
    how = how_often(request, is_default=(event, hooks) == ("line", "call"))
    done = run(IN_A_STEP, event, hooks, how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "alive after" in done.stdout


# By lines: past the last line of ``instrument`` the handle is on its way to the caller already.
@pytest.mark.slow
@pytest.mark.parametrize("hooks", MODES)
def test_interrupted_instrumenting_and_removing_can_be_done_again(hooks, request):
    how = how_often(request, is_default=hooks == "call")
    done = run(WHILE_INSTRUMENTING, "line", hooks, how)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recording was interrupted" in done.stdout
