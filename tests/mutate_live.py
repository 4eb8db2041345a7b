"""Break the live half in one place at a time, and see that a test notices.

``python tests/mutate_live.py`` runs all of them, which takes some minutes; ``... marker label`` the
ones with one of these words in their name, ``-j 8`` eight at a time. The exit status is 1 if a
mutation survives its tests, or does not fit the code any more: then change its row below.

``tests/test_mutations.py`` checks with every run of the suite that each row still fits.
"""

from __future__ import annotations

import sys

from support.mutations import Mutation, main

INSTRUMENTATION = "live/test_instrumentation.py"
EXPORTING = "live/test_exporting.py"
REMOVED = "test_a_model_that_is_instrumented_within_a_profile_and_removed_before_its_end"
LABELLING = "live/test_labelling.py"
CALLS = "live/test_call_wrapper.py"
MARKERS = "live/test_markers.py"
INTERRUPTIONS = "live/test_interruptions.py"
TRANSFORMS = "live/test_transforms.py"
SAME = "live/test_same_training.py"
COPIES = "live/test_copies.py"
LINES = "live/test_source_lines.py"
PROFILING = "live/test_profiling.py"
UNUSED = "live/test_unused_gradients.py"
TRUE_OWNERS = "training/test_true_owners.py"
BROKEN_OFF = "training/test_interrupted.py"
ATTRIBUTION = "analysis/test_attribution.py"

OPEN_WHEN_THE_PROFILER_STOPS = (
    ("live/hooks.py", "    _local.thread.drop(scope)  # it may", "    pass  # it may"),
)

MUTATIONS = (
    # When labels are written.
    Mutation(
        "the gate is ignored: labels without a profiler",
        "live/hooks.py",
        "        if not _labelling():\n",
        "        if False:\n",
        f"{INSTRUMENTATION}::test_with_node_hooks_a_module_has_one_while_no_profiler_records",
    ),
    Mutation(
        "a thread that is profiled with all others is not labelled",
        "live/torch_internals/profiler.py",
        "return profiling._is_profiler_enabled or enabled_here()  # the flag",
        "return enabled_here()  # the flag",
        f"{LABELLING}::test_each_thread_has_its_own_calls",
    ),
    Mutation(
        "labels in transforms of torch.func",
        "live/torch_internals/autograd.py",
        "        and (innermost_transform() is None or pass_over())\n",
        "",
        f"{TRANSFORMS}::test_functional_transforms_are_left_alone",
    ),
    Mutation(
        "labels while a model is exported",
        "live/torch_internals/autograd.py",
        "        and not _compiler._is_compiling_flag\n",
        "",
        f"{TRANSFORMS}::test_an_export_that_is_profiled_is_not_labelled",
    ),
    Mutation(
        "the hook before a call is compiled with it",
        "live/hooks.py",
        "        if _is_dynamo_compiling():  # asked first and alone: Dynamo folds it\n",
        "        if False:\n",
        TRANSFORMS,
    ),
    Mutation(
        "Dynamo compiles the frames of hooks",
        "live/torch_internals/dynamo.py",
        "strategy(function.__code__, skip)",
        "pass",
        f"{TRANSFORMS}::test_compiling_is_undisturbed",
    ),
    # Backward labels that come with the export.
    Mutation(
        "an export that is to be read has backward labels",
        "live/exporting.py",
        "    if is_plain_export():\n",
        "    if False:\n",
        f"{EXPORTING}::test_whoever_reads_an_export_gets_pytorchs_own_file",
    ),
    Mutation(
        "a profiler without a trace has no markers",
        "live/sessions.py",
        "                scope.marks_nodes = not later\n",
        "                scope.marks_nodes = False\n",
        f"{EXPORTING}::test_what_writes_no_trace_has_markers_while_it_records",
    ),
    Mutation(
        "the end of a session is not waited for",
        "live/sessions.py",
        " or (self.labelled and self._completes):\n",
        ":\n",
        f"{EXPORTING}::{REMOVED}",
    ),
    Mutation(
        "that a label was written is not noted",
        "live/calls.py",
        "            sessions.labelled = True\n",
        "",
        f"{EXPORTING}::test_a_packed_export_has_them_too",
    ),
    Mutation(
        "the wrapper around exports stays",
        "live/torch_internals/profiler.py",
        "            if not self._results:\n",
        "            if False:\n",
        f"{EXPORTING}::test_a_profiler_keeps_no_model_alive_and_nothing_keeps_a_profiler",
    ),
    Mutation(
        "an export under a wrapper of other code is not surrounded",
        "live/torch_internals/profiler.py",
        "            if not self._watch.is_outermost():\n",
        "            if not self._results:\n",
        f"{EXPORTING}::test_other_code_may_wrap_the_export_and_put_back_what_it_found",
    ),
    Mutation(
        "an older trace is taken for the export",
        "live/exporting.py",
        "    if path is None or _state(path) in (None, before):\n",
        "    if path is None or _state(path) is None:\n",
        f"{EXPORTING}::test_an_older_trace_stays_as_it_is_where_an_export_writes_nothing",
    ),
    Mutation(
        "a trace of any length is labelled",
        "live/exporting.py",
        "    if length > _MOST:\n",
        "    if False:\n",
        f"{EXPORTING}::test_a_trace_that_is_too_large_has_pytorchs_own_file",
    ),
    Mutation(
        "tracks of an earlier copy stay",
        "render/labelled_trace.py",
        "            rest = _without_added(read)\n",
        "            rest = read(_PIECE)\n",
        f"{EXPORTING}::test_what_shows_a_trace_again_writes_costs_into_the_same_spans",
    ),
    # Names.
    Mutation(
        "a forward label of the wrong kind",
        "live/owner.py",
        "self.forward = self.label(Kind.FORWARD)",
        "self.forward = self.label(Kind.BACKWARD)",
        f"{LABELLING}::test_forward_labels_nest_as_the_calls_do",
    ),
    Mutation(
        "a label under the class in the path's place",
        "live/owner.py",
        "format_label(Label(kind, self.path, self.class_name, call))",
        "format_label(Label(kind, self.class_name, self.class_name, call))",
        f"{LABELLING}::test_forward_labels_nest_as_the_calls_do",
    ),
    Mutation(
        "names that are not escaped",
        "trace/labels.py",
        "    if name.isprintable() and _RESERVED.isdisjoint(name):\n",
        "    if name:\n",
        "trace/test_labels.py",
    ),
    Mutation(
        "a repeated call without its number",
        "live/calls.py",
        "            label = self._again(owner)\n",
        "            label = owner.forward\n",
        f"{LABELLING}::test_repeated_calls_are_numbered_within_one_outermost_forward",
    ),
    Mutation(
        "calls are counted on from one forward to the next",
        "live/calls.py",
        "            counts.clear()\n",
        "",
        f"{LABELLING}::test_repeated_calls_are_numbered_within_one_outermost_forward",
    ),
    Mutation(
        "a shared module under its second path",
        "live/modules.py",
        "        if id(module) in visited:\n",
        "        if False:\n",
        f"{LABELLING}::test_a_shared_module_has_its_first_path",
    ),
    Mutation(
        "the parts that wrappers add stay in paths",
        "live/torch_internals/modules.py",
        '    "DataParallel": "module",\n',
        "",
        f"{LABELLING}::test_what_wrappers_add_is_left_out_of_paths",
    ),
    # Calls and their ranges.
    Mutation(
        "a range that is left open",
        "live/calls.py",
        "            call.opened.__exit__(None, None, None)\n",
        "            sessions.put_aside(call.opened)\n",
        f"{LABELLING}::test_forward_labels_nest_as_the_calls_do",
    ),
    Mutation(
        "the end of a call closes whatever call is open",
        "live/hooks.py",
        "            if call.kwargs_id != id(kwargs) or call.owner is not owner:\n",
        "            if False:\n",
        f"{INTERRUPTIONS}::test_a_recursive_call_that_never_began_does_not_end_its_callers_label",
    ),
    Mutation(
        "a call of the same module is taken for the one that failed",
        "live/calls.py",
        "self.calls[-1].owner is owner and not failed:",
        "self.calls[-1].owner is owner:",
        f"{INTERRUPTIONS}::test_a_recursive_call_that_never_began_does_not_end_its_callers_label",
    ),
    Mutation(
        "an error skips the end of a call",
        "live/torch_internals/modules.py",
        "    module._forward_hooks_always_called[KEY] = True\n",
        "",
        f"{INTERRUPTIONS}::test_a_failure_that_its_caller_handles_ends_the_label_of_what_failed",
    ),
    Mutation(
        "what an interrupt left behind is not cleared away",
        "live/calls.py",
        "            self.repair(module, call)\n",
        "            pass\n",
        f"{INTERRUPTIONS}::test_another_call_after_an_interrupt_does_not_stand_in_the_"
        "interrupted_one",
    ),
    Mutation(
        "another's hook runs before the label opens",
        "live/torch_internals/modules.py",
        "move_to_end(KEY, last=False)",
        "move_to_end(KEY)",
        f"{LABELLING}::test_hooks_of_others_run_in_between",
    ),
    # Sessions of the profiler.
    Mutation(
        "a range ends in a later session",
        "live/sessions.py",
        "        if number == self.number:\n            # After",
        "        if True:\n            # After",
        f"{INTERRUPTIONS}::test_the_process_survives_ranges_that_outlive_their_session",
        OPEN_WHEN_THE_PROFILER_STOPS,
    ),
    Mutation(
        "sessions are not counted",
        "live/sessions.py",
        "        self.number += 1\n        self.dispose()",
        "        self.dispose()",
        f"{INTERRUPTIONS}::test_the_process_survives_ranges_that_outlive_their_session",
        (
            *OPEN_WHEN_THE_PROFILER_STOPS,
            ("live/sessions.py", "self.number += 1  # before the session ends", "pass  #"),
        ),
    ),
    Mutation(
        "the watch on the profiler does not end",
        "live/torch_internals/lookup.py",
        "            self._place.set(self._original)\n",
        "            pass\n",
        f"{INSTRUMENTATION}::test_the_watch_on_the_profiler_ends_with_the_last_instrumentation",
    ),
    Mutation(
        "the second hook stays when the profiler stops",
        "live/hooks.py",
        "                take_away(module, only_after=True)\n",
        "                pass\n",
        f"{INSTRUMENTATION}::test_with_node_hooks_a_module_has_one_while_no_profiler_records",
    ),
    # Owners and markers.
    Mutation(
        "an owner off by one call",
        "live/calls.py",
        "self[bisect_right(self, number, key=_first) - 1][1]",
        "self[bisect_right(self, number, key=_first) - 2][1]",
        MARKERS,
    ),
    Mutation(
        "an owner off by one number",
        "live/calls.py",
        "        intervals.append((number, owner))\n",
        "        intervals.append((number + 1, owner))\n",
        MARKERS,
    ),
    Mutation(
        "a call's end gives its number to the callee",
        "live/calls.py",
        "intervals.append((number, calls[-2].owner if len(calls) > 1 else None))",
        "intervals.append((number, call.owner))",
        MARKERS,
    ),
    Mutation(
        "another thread's node gets an owner of this one",
        "live/calls.py",
        "return owner if number < following else None",
        "return owner",
        f"{MARKERS}::test_a_node_made_on_another_thread_bears_no_marker",
    ),
    Mutation(
        "a marker on the node after the right one",
        "live/markers.py",
        "    hook(node)\n    if",
        "    hook(node.next_functions[0][0] or node)\n    if",
        f"{MARKERS}::test_a_marker_stands_in_the_event_of_its_node_and_before_the_node",
    ),
    Mutation(
        "two markers on one node",
        "live/markers.py",
        "    if _KEY in metadata:  # most inputs: they are the output of the call before\n",
        "    if False:\n",
        f"{MARKERS}::test_a_feature_belongs_to_the_module_that_made_it",
    ),
    Mutation(
        "no marker on what was joined",
        "live/markers.py",
        "    if type(node) in _JOINS:\n",
        "    if False:\n",
        f"{MARKERS}::test_what_a_module_joins_bears_its_marker_too",
    ),
    Mutation(
        "a stale view is asked for its node",
        "live/markers.py",
        "    if _version_of(tensor) and _is_view(tensor):\n",
        "    if False:\n",
        f"{SAME}::test_looking_at_a_view_of_changed_memory_makes_no_node",
    ),
    Mutation(
        "what bears no marker is not counted",
        "live/markers.py",
        "        profiler.emit(caller.unmarked)\n",
        "        pass\n",
        f"{SAME}::test_a_stale_view_is_counted_and_not_asked",
    ),
    Mutation(
        "outputs in containers are not looked into",
        "live/markers.py",
        "            elif isinstance(item, dict):\n",
        "            elif isinstance(item, frozenset):\n",
        f"{MARKERS}::test_outputs_in_containers_are_looked_into",
    ),
    Mutation(
        "a mode of the user's hears that nodes are asked for",
        "live/markers.py",
        "    if _mode_enabled():\n        with",
        "    if False:\n        with",
        f"{TRANSFORMS}::test_a_torch_function_mode_hears_nothing_of_us",
    ),
    Mutation(
        "a mode of the user's hears of an operator",
        "live/torch_internals/autograd.py",
        "    if not _takes_dictionaries or dispatch_modes():",
        "    if not _takes_dictionaries:",
        f"{SAME}::test_a_mode_of_the_user_hears_of_no_operator_of_ours",
    ),
    # Removal and copies.
    Mutation(
        "a hook that is not removed",
        "live/instrumentation.py",
        "            take_away(module, keep_after=id(module) in failing)\n",
        "            pass\n",
        f"{INSTRUMENTATION}::test_nothing_is_left_on_the_model_or_in_pytorch_after_removal",
    ),
    Mutation(
        "full backward hooks that are not removed",
        "live/torch_internals/modules.py",
        "(*_BEFORE, *_BACKWARD, *after)",
        "(*_BEFORE, *after)",
        f"{INSTRUMENTATION}::test_nothing_is_left_on_the_model_or_in_pytorch_after_removal",
    ),
    Mutation(
        "PyTorch's flag for full backward hooks stays",
        "live/torch_internals/modules.py",
        "        module._is_full_backward_hook = None\n",
        "        pass\n",
        f"{INSTRUMENTATION}::test_removal_leaves_the_model_as_it_was",
    ),
    Mutation(
        "the hook on copies stays after removal",
        "live/instrumentation.py",
        "    end_plain_copies(scope)\n",
        "",
        f"{COPIES}::test_copying_is_pythons_own_again_after_removal",
    ),
    Mutation(
        "copies bear hooks",
        "live/hooks.py",
        "    return plain.__reduce_ex__(4)\n",
        "    return dictionary.__reduce_ex__(4)\n",
        f"{COPIES}::test_a_copy_is_a_plain_model",
    ),
    Mutation(
        "markers in a graph that outlives the instrumentation",
        "live/owner.py",
        "if scope.active and _recording():",
        "if _recording():",
        f"{INSTRUMENTATION}::test_hooks_that_a_graph_still_holds_do_nothing_after_removal",
    ),
    Mutation(
        "removal within a forward leaves its labels open",
        "live/instrumentation.py",
        "        current_thread().drop(self._scope)\n",
        "",
        f"{INSTRUMENTATION}::test_removal_within_a_forward_closes_its_labels",
    ),
    Mutation(
        "a model is kept alive",
        "live/owner.py",
        "        self.model = weakref.ref(model)\n",
        "        self.model = lambda: model\n",
        f"{INSTRUMENTATION}::test_nothing_is_kept_alive",
    ),
    Mutation(
        "what is instrumented may be instrumented again",
        "live/instrumentation.py",
        "        _check_plain(model)\n",
        "",
        f"{INSTRUMENTATION}::test_what_is_instrumented_is_not_instrumented_again",
    ),
    # Lines, optimizers, profile().
    Mutation(
        "the line of the node before",
        "live/source_lines.py",
        "                keep((number, place))\n",
        "                keep((number + 1, place))\n",
        "training/test_lines.py",
    ),
    Mutation(
        "a line of PyTorch's own",
        "live/source_lines.py",
        "    while frame is not None and _inside[frame.f_code.co_filename]:\n",
        "    while frame is not None and False:\n",
        f"{LINES}::test_a_line_stands_with_its_file_function_and_costs",
    ),
    Mutation(
        "what hears of nodes stays on the thread",
        "live/source_lines.py",
        "            _pop_node_hook()\n",
        "            pass\n",
        f"{LINES}::test_after_an_error_in_forward_the_next_step_is_told_and_nothing_stays",
    ),
    Mutation(
        "a parameter that an optimizer holds is called unused",
        "live/optimizers.py",
        "if id(p) not in all_ids)",
        "if True)",
        f"{UNUSED}::test_an_optimizer_with_all_parameters_leaves_nothing_to_say",
    ),
    Mutation(
        "a parameter that no optimizer holds is not told",
        "live/optimizers.py",
        "                    profiler.emit(owner.unused(unused))\n",
        "                    pass\n",
        f"{UNUSED}::test_a_prefix_left_out_of_the_optimizer_is_found_with_its_whole_backward",
    ),
    Mutation(
        "profile() takes one step too few",
        "live/profiling.py",
        "LeftAlone(max(warmup - 1, 0), counted=stacks),",
        "LeftAlone(max(warmup - 2, 0), counted=stacks),",
        f"{PROFILING}::test_one_call_names_the_slow_module",
    ),
    Mutation(
        "profile() leaves the profiler on where a step fails",
        "live/recording.py",
        "    finally:\n        if is_recording():",
        "    except ZeroDivisionError:\n        if is_recording():",
        f"{PROFILING}::test_what_the_step_raises_passes_through_and_the_next_profile_works",
    ),
    # The wrapper on the classes of modules, where compiled code checks that of all modules.
    Mutation(
        "the wrapper on classes does not step aside while Dynamo compiles",
        "live/class_calls.py",
        "            self._take()\n            # Where guards",
        "            # Where guards",
        f"{CALLS}::test_no_class_has_the_wrapper_while_dynamo_compiles",
    ),
    Mutation(
        "the wrapper does not come back to the classes after a compilation",
        "live/class_calls.py",
        "                if vars(cls).get(_CALL) is before:\n",
        "                if False:\n",
        f"{CALLS}::test_a_region_keeps_its_graph_and_is_compiled_once",
    ),
    Mutation(
        "the wrapper stays on the classes when the profiler stops",
        "live/class_calls.py",
        "        self._stop_loading()\n        self._take()\n",
        "        self._stop_loading()\n",
        f"{CALLS}::test_the_call_of_all_modules_stays_where_a_model_has_such_a_class",
    ),
    Mutation(
        "the own call of a class is gone after the wrapper was on it",
        "live/class_calls.py",
        "                setattr(cls, _CALL, before)\n",
        "                delattr(cls, _CALL)\n",
        f"{CALLS}::test_a_region_keeps_its_graph_and_is_compiled_once",
    ),
    # The offline half: who owns a node.
    Mutation(
        "a node belongs to the operator before its own",
        "analysis/attribution/join.py",
        'position = np.searchsorted(operators.sequence, sequence, side="right") - 1\n    late',
        'position = np.searchsorted(operators.sequence, sequence, side="right") - 2\n    late',
        f"{TRUE_OWNERS} {ATTRIBUTION}",
    ),
    Mutation(
        "a node that no operator made belongs to the one before",
        "analysis/attribution/join.py",
        "    is_passed = above < len(operators.start) and bool(operators.start[above] < start)\n",
        "    is_passed = True\n",
        f"{ATTRIBUTION} analysis/test_join.py {BROKEN_OFF}",
    ),
    Mutation(
        "AccumulateGrad belongs to nobody",
        "analysis/attribution/join.py",
        "        feeder[nodes[is_fed]] = feeders[is_fed]\n",
        "        pass\n",
        ATTRIBUTION,
    ),
    Mutation(
        "markers say nothing",
        "analysis/attribution/spans.py",
        "    spans.marked[span[is_in_node]] = named[events.name[markers[is_in_node]]]\n",
        "",
        "analysis/test_join.py",
    ),
    Mutation(
        "device work belongs to who ran a millisecond later",
        "analysis/attribution/launches.py",
        "for column in (events.start, events.thread)",
        "for column in (events.start + 10**6, events.thread)",
        f"{ATTRIBUTION} analysis/test_h200_traces.py",
    ),
)

if __name__ == "__main__":
    # Node hooks take over where no start of a profiler is noticed, so they are tried too.
    sys.exit(main(__doc__, MUTATIONS, "--hooks", "all"))
