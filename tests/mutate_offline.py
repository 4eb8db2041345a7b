"""Break the half that reads traces in one place at a time, and see that a quick test notices.

``python tests/mutate_offline.py`` runs all of them, each with the tests of its row that are not
slow; words, ``-j`` and the exit status are those of ``mutate_live.py``.
"""

from __future__ import annotations

import sys

from support.mutations import Mutation, main

ATTRIBUTION = "analysis/test_attribution.py"
OF_WORK = "analysis/test_accounting.py analysis/test_h200_accounting.py"
PARTIAL = "analysis/test_partial.py"
PHASES = "analysis/test_phases.py"
STEPS = "analysis/test_steps.py"
TIMELINE = "analysis/test_timeline.py"
TYPICAL = "analysis/test_typical.py"
LIMITS = "analysis/test_limits.py"
COMPILED = "analysis/test_compiled.py"
MEMORY = "analysis/test_memory.py"
COMMUNICATION = "analysis/test_communication.py"
CHANGES = "analysis/test_changes.py"
KNOWN = "analysis/test_replay_known.py"
REPLAY = "analysis/test_replay.py"
FINDINGS = "analysis/test_findings.py"
NO_FALSE = "analysis/test_no_false_findings.py"
READ = "trace/test_read.py"
HOSTILE = "trace/test_hostile.py"
NOISE = "comparison/test_noise.py"
COMPARISON = "comparison/test_comparison.py"
ALIGN = "comparison/test_align.py"
WAITING = "job/test_waiting.py"
ANSWER = "job/test_answer.py"
OF_RANKS = "job/test_findings.py"

MUTATIONS = (
    # Readers.
    Mutation(
        "the fraction of a microsecond is cut off",
        "trace/json_events.py",
        "np.rint((microseconds - whole_us) * 1000)",
        "np.floor((microseconds - whole_us) * 1000)",
        READ,
    ),
    Mutation(
        "the parts of a kernel's blocks are lost",
        "trace/json_events.py",
        "np.rint(blocks[is_known] * 1000)",
        "(1000 * np.rint(blocks[is_known]))",
        READ,
    ),
    Mutation(
        "a collective has elements for bytes",
        "trace/json_events.py",
        '(args.elements or 0) * item_size(args.dtype or "")',
        "(args.elements or 0)",
        "job/test_summary.py",
    ),
    Mutation(
        "device work without a device is left on the first",
        "trace/json_events.py",
        "device[index] = pid if isinstance(pid, int) and 0 <= pid < _MOST_DEVICES else 0",
        "device[index] = 0",
        READ,
    ),
    Mutation(
        "the last event of a piece of the text is lost",
        "trace/chrome.py",
        "                rest = buffer[cut[1] :]\n                continue\n",
        '                rest = b""\n                continue\n',
        READ,
    ),
    Mutation(
        "a trace that is cut short passes for a whole one",
        "trace/chrome.py",
        "        self.truncated = after is None\n",
        "",
        READ,
    ),
    Mutation(
        "an arrow leads from the first start with its number",
        "trace/columns.py",
        'position = np.searchsorted(identity[starts], identity[ends], side="right") - 1',
        'position = np.searchsorted(identity[starts], identity[ends], side="left")',
        READ,
    ),
    Mutation(
        "an event from years before is kept",
        "trace/columns.py",
        "            is_possible &= np.abs(start - middle) < LONGEST_NS\n",
        "            is_possible &= start - middle < LONGEST_NS\n",
        HOSTILE,
    ),
    Mutation(
        "blocks of memory keep the time of the clock",
        "trace/columns.py",
        '            columns["time"] -= origin\n',
        "",
        MEMORY,
    ),
    Mutation(
        "the only call of a module has no number",
        "trace/labels.py",
        'int(match["call"] or 1)',
        'int(match["call"] or 0)',
        "trace/test_labels.py",
    ),
    # Whose: the owners of nodes and of device work.
    Mutation(
        "a node without a number of its own goes to the step before",
        "analysis/attribution/join.py",
        "number - floor <= _NEAR and not has_pass_since",
        "number - floor <= _NEAR",
        ATTRIBUTION,
    ),
    Mutation(
        "a gradient is fed by a node of another pass",
        "analysis/attribution/join.py",
        "feeders = np.where(take(passes, feeders, NOTHING - 1) == run, feeders, NOTHING)",
        "feeders = np.where(feeders >= 0, feeders, NOTHING)",
        ATTRIBUTION,
    ),
    Mutation(
        "one recorded thread is several logical ones",
        "analysis/attribution/join.py",
        "            others.pop(thread, None)\n",
        "            others.get(thread)\n",
        ATTRIBUTION,
    ),
    Mutation(
        "a line that made another kind of node is named",
        "analysis/attribution/join.py",
        'if table.lines[place].node not in ("", *called[node]):',
        "if False:",
        "trace/test_source_lines.py",
    ),
    Mutation(
        "work without a launch record is the engine's",
        "analysis/attribution/ownership.py",
        "    owners[work.launch == NOTHING] = Special.NO_LAUNCH\n",
        "",
        OF_WORK,
    ),
    Mutation(
        "what runs again belongs to the node that needs it",
        "analysis/attribution/ownership.py",
        "np.where(spans.caller >= 0, spans.caller, spans.parent)[again]",
        "spans.parent[again]",
        "analysis/test_recompute.py",
    ),
    Mutation(
        "what runs again belongs to the first call of its modules",
        "analysis/attribution/recompute.py",
        "return map(int, reversed(self._order[low:high]))",
        "return map(int, self._order[low:high])",
        "analysis/test_recompute.py",
    ),
    Mutation(
        "a hook's own collective is an exchange of gradients",
        "analysis/attribution/communication.py",
        "of_gradients=reduces & (by_sharding | by_engine | take(accumulates, node, False)),",
        "of_gradients=reduces,",
        COMMUNICATION,
    ),
    Mutation(
        "a wait for code to load is a wait of the queue",
        "analysis/attribution/launches.py",
        "(first[events.name[work[slow]]] == since) & (queued < _FULL)",
        "queued < _FULL",
        "analysis/test_loading.py",
    ),
    Mutation(
        "a launch is inferred although the host has been elsewhere since",
        "analysis/attribution/launches.py",
        "        still = ~spans.any_starts(thread[before], low, high)\n",
        "        still = low <= high\n",
        OF_WORK,
    ),
    Mutation(
        "a pass waits for the device whose work starts last",
        "analysis/attribution/launches.py",
        'of_passes = of_passes[np.argsort(work.end[of_passes], kind="stable")]',
        'of_passes = of_passes[np.argsort(work.start[of_passes], kind="stable")]',
        OF_WORK,
    ),
    Mutation(
        "what a closure launches is the optimizer's",
        "analysis/attribution/launches.py",
        "    start = passes.after(events.start[marks], events.end[marks])\n",
        "    start = events.start[marks]\n",
        OF_WORK,
    ),
    Mutation(
        "a step that begins between forward and backward counts",
        "analysis/attribution/passes.py",
        "return bool(2 * (made_at < marked[run])[forward].sum() > forward.sum())",
        "return False",
        PARTIAL,
    ),
    Mutation(
        "an evaluation behind the last step is a part of it",
        "analysis/attribution/partial.py",
        "evaluated = not is_ended and between.evaluation_follows()",
        "evaluated = False",
        PARTIAL,
    ),
    Mutation(
        "a pass outside of all marks is cut off before an evaluation",
        "analysis/attribution/partial.py",
        "if end < passes.end[-1]:",
        "if end < 0:",
        PARTIAL,
    ),
    Mutation(
        "a forward has the time before the first step",
        "analysis/accounting/rows.py",
        "        spent = spent.where(spent.step >= 0)\n        step = spent.step\n",
        "        step = np.maximum(spent.step, 0)\n",
        "analysis/test_h200_traces.py",
    ),
    Mutation(
        "the shares of a split are each rounded down",
        "analysis/attribution/shares.py",
        "amounts * (begin + self.weight[share]) // _WHOLE - amounts * begin // _WHOLE",
        "amounts * self.weight[share] // _WHOLE",
        COMPILED,
    ),
    # How much: timelines, the clock, steps and phases.
    Mutation(
        "a span that began before the last one ended counts its overlap again",
        "analysis/timeline.py",
        "np.maximum(start[1:], np.maximum.accumulate(end)[:-1])",
        "np.maximum(start[1:], end[:-1])",
        TIMELINE,
    ),
    Mutation(
        "where a timeline is cut, the value behind the cut begins before it",
        "analysis/timeline.py",
        "values = np.append(NOTHING, self.values)[place]",
        "values = np.append(self.values, NOTHING)[place]",
        TIMELINE,
    ),
    Mutation(
        "of spans that begin together the shortest is outermost",
        "analysis/timeline.py",
        "order = np.lexsort((-end, start))",
        "order = np.lexsort((end, start))",
        TIMELINE,
    ),
    Mutation(
        "of timelines that hold something the last decides",
        "analysis/timeline.py",
        "values = np.where(values == NOTHING, timeline.over(edges), values)",
        "values = np.where(timeline.over(edges) == NOTHING, values, timeline.over(edges))",
        TIMELINE,
    ),
    Mutation(
        "a wait that ended long before holds the idle time of a device",
        "analysis/accounting/clock.py",
        "caused = (last_wait >= 0) & (waits.end[wait] >= begin)",
        "caused = last_wait >= 0",
        OF_WORK,
    ),
    Mutation(
        "communication hides the compute beside it",
        "analysis/accounting/clock.py",
        "for level in Precedence)",
        "for level in reversed(Precedence))",
        f"{COMMUNICATION} {OF_WORK}",
    ),
    Mutation(
        "work that waits in its queue runs",
        "analysis/accounting/clock.py",
        "runs = clock.edges[of_work] >= work.start[item]",
        "runs = clock.edges[of_work] >= work.launch[item]",
        OF_WORK,
    ),
    Mutation(
        "a step waits for work that is launched at its end",
        "analysis/accounting/steps.py",
        'before = np.searchsorted(launched[order], times, side="left")',
        'before = np.searchsorted(launched[order], times, side="right")',
        f"{STEPS} {PHASES}",
    ),
    Mutation(
        "what is launched while a batch is fetched waits for data",
        "analysis/accounting/phases.py",
        "(phase < 0) | is_in(phase, (DATA, HOST)) | (work.launch < 0)",
        "(phase < 0) | (work.launch < 0)",
        PHASES,
    ),
    Mutation(
        "a device is busy before its work starts",
        "analysis/accounting/phases.py",
        "key = phase_of(spent) + phases * spent.runs",
        "key = phase_of(spent) + phases * (ledger.holders.work[spent.holder] >= 0)",
        PHASES,
    ),
    Mutation(
        "a step that two modules slow down is compared with itself",
        "analysis/typical.py",
        "    usual *= np.where(is_known, _common(times[1:], usual), 1)\n",
        "",
        TYPICAL,
    ),
    Mutation(
        "what is slow in one of four steps is a hiccup",
        "analysis/typical.py",
        "(times >= max(2, steps / _OFTEN)) | alike",
        "(times > max(2, steps / _OFTEN)) | alike",
        TYPICAL,
    ),
    Mutation(
        "what happens in some steps is rounded to never",
        "analysis/typical.py",
        "mean: Ints = -(-(by_step @ self.weight) // self._sum)",
        "mean: Ints = by_step @ self.weight // self._sum",
        TYPICAL,
    ),
    Mutation(
        "the parts of a typical step are each rounded down",
        "analysis/typical.py",
        "np.diff(np.cumsum(rest * weight) // self._sum, prepend=0)",
        "rest * weight // self._sum",
        TYPICAL,
    ),
    # How much: work and memory.
    Mutation(
        "an operator that calls itself has the work of its outer call",
        "analysis/accounting/work.py",
        "index = index[~_call_themselves(events, index)]",
        "index = index[index >= 0]",
        LIMITS,
    ),
    Mutation(
        "what a module frees before its backward is for its backward",
        "analysis/memory/peaks.py",
        "needed = self.until[chosen] >= begun[owner, run]",
        "needed = self.until[chosen] >= 0",
        MEMORY,
    ),
    Mutation(
        "what a node allocates is a gradient although the pass frees it",
        "analysis/memory/peaks.py",
        "survives = self.until > np.append(passes.end, FAR)[own_run]",
        "survives = self.until > np.append(passes.start, FAR)[own_run]",
        MEMORY,
    ),
    # What if.
    Mutation(
        "a launch finds room in a full queue",
        "analysis/replay/simulation.py",
        "= end[batch.room]",
        "= -np.inf",
        KNOWN,
    ),
    Mutation(
        "work follows the work before it without the recorded gap",
        "analysis/replay/simulation.py",
        "np.add(takes, gap[places], out=end[places])",
        "end[places] = takes",
        REPLAY,
    ),
    Mutation(
        "a wait that is left out is waited for",
        "analysis/replay/simulation.py",
        "            after = end[cause] + lag\n"
        "            if event in skips:\n"
        "                after[skips[event]] = -np.inf\n",
        "            after = end[cause] + lag\n",
        KNOWN,
    ),
    Mutation(
        "a step ends with the host although its device works on",
        "analysis/replay/simulation.py",
        "ends[step] = np.maximum(ends[step], self.end[own_work].max(axis=0))",
        "ends[step] = np.maximum(ends[step], self.end[own_work].min(axis=0))",
        REPLAY,
    ),
    Mutation(
        "a module is worth the update of the others, too",
        "analysis/replay/replayable.py",
        "= parameters / np.maximum(parameters.sum(axis=1, keepdims=True), 1)",
        "= np.minimum(parameters, 1)",
        CHANGES,
    ),
    Mutation(
        "what comes before the first step becomes shorter, too",
        "analysis/replay/saving.py",
        "changing_work = np.where(of_steps[:, None], work[:, :-1], 0.0)",
        "changing_work = work[:, :-1]",
        REPLAY,
    ),
    Mutation(
        "chains of several steps run as one kernel",
        "analysis/replay/changes.py",
        "(len(passes.start) + 1) + before) * 2 + backward",
        "(len(passes.start) + 1)) * 2 + backward",
        CHANGES,
    ),
    Mutation(
        "of several changes only the last one counts",
        "analysis/replay/changes.py",
        "host[updating] *= 1 - change.update[0]",
        "host[updating] = 1 - change.update[0]",
        CHANGES,
    ),
    Mutation(
        "a module of a kernel saves the others' shares",
        "analysis/replay/saving.py",
        "(worked_on, 1 - fraction),",
        "(worked_on, fraction),",
        COMPILED,
    ),
    Mutation(
        "a factor of a module holds for those whose names begin alike",
        "analysis/replay/saving.py",
        'for path in {"", *accumulate(module.path.split("."), "{}.{}".format)}:',
        "for path in filter(module.path.startswith, found):",
        KNOWN,
    ),
    Mutation(
        "the factor of the module around counts more than a module's own",
        "analysis/replay/saving.py",
        "paths = sorted(factors, key=len)",
        "paths = sorted(factors, key=len, reverse=True)",
        KNOWN,
    ),
    Mutation(
        "a call waits for work that was launched after it",
        "analysis/replay/waits.py",
        'last = int(np.searchsorted(launched, start, side="right")) - 1',
        "last = len(queue) - 1",
        f"{KNOWN} {REPLAY}",
    ),
    Mutation(
        "a launch into a full queue takes that long by itself",
        "analysis/replay/waits.py",
        "_HELD, _BRIM = 12_000, 990",
        "_HELD, _BRIM = 100_000, 990",
        KNOWN,
    ),
    # Why: rules.
    Mutation(
        "casts of parameters count as casts of activations",
        "analysis/findings/rules/copies.py",
        "    nodes &= ~of_parameters & ~losses[evidence.ownership.owner]\n",
        "    nodes &= ~losses[evidence.ownership.owner]\n",
        NO_FALSE,
    ),
    Mutation(
        "a batch that is cast on the device travels at full width",
        "analysis/findings/rules/copies.py",
        "    work &= ~_narrow(evidence, work)\n",
        "",
        NO_FALSE,
    ),
    Mutation(
        "a sparse table writes a dense gradient",
        "analysis/findings/rules/indexing.py",
        "    nodes &= ~evidence.spans_around(evidence.events.named(Category.OPERATOR, *sparse))\n",
        "",
        NO_FALSE,
    ),
    Mutation(
        "additive attention is attention",
        "analysis/findings/rules/compute.py",
        "return bool(high <= _ALIKE * low)",
        "return True",
        NO_FALSE,
    ),
    Mutation(
        "a backward that is slow in one step is slow",
        "analysis/findings/rules/compute.py",
        "odd = (2 * often > holds.shape[1]) & (often >= least)",
        "odd = often > 0",
        NO_FALSE,
    ),
    Mutation(
        "half of a needless node counts as all of it",
        "analysis/findings/rules/gradients.py",
        "of_span[fed] / 2)",
        "of_span[fed])",
        NO_FALSE,
    ),
    Mutation(
        "a gradient that an input wants is needless",
        "analysis/findings/rules/gradients.py",
        "behind = last >= 0 and spans.start[wasted].max(initial=-1) > last",
        "behind = last >= 0",
        NO_FALSE,
    ),
    Mutation(
        "a busy device waits for its host",
        "analysis/findings/observations.py",
        "if evidence.costs.busy_ns > (1 - LEAST_LAUNCHING) * evidence.step_ns:",
        "if evidence.costs.busy_ns > evidence.step_ns:",
        "analysis/test_rules.py",
    ),
    Mutation(
        "an operator that launches kernels computes on the host",
        "analysis/findings/observations.py",
        "        members = members[quiet]\n",
        "",
        f"{FINDINGS} {NO_FALSE}",
    ),
    Mutation(
        "what some steps leave behind is held over all steps",
        "analysis/memory/rules.py",
        "grows = left.min(axis=1)",
        "grows = left.max(axis=1)",
        MEMORY,
    ),
    Mutation(
        "a little free memory is fragmentation",
        "analysis/memory/rules.py",
        "free < max(_FRAGMENTATION_LEAST * reserved, _FRAGMENTATION_LEAST_BYTES)",
        "free < min(_FRAGMENTATION_LEAST * reserved, _FRAGMENTATION_LEAST_BYTES)",
        MEMORY,
    ),
    # Comparison.
    Mutation(
        "steps that follow each other are taken to be independent",
        "comparison/noise.py",
        "Error(max(alone.variance, together), 1.5 * (steps / length - 1))",
        "alone",
        NOISE,
    ),
    Mutation(
        "steps that something held up widen the noise",
        "comparison/noise.py",
        "if step not in self.left_out",
        "if step >= 0",
        NOISE,
    ),
    Mutation(
        "what all modules do alike is a change of each",
        "comparison/noise.py",
        "clear = beyond and abs(own) > reach and",
        "clear = beyond and",
        f"{NOISE} {COMPARISON}",
    ),
    Mutation(
        "recordings that are alike by luck know more than their steps",
        "comparison/noise.py",
        "max(squares / freedom, fmean(steps) if steps else 0.0)",
        "squares / freedom",
        NOISE,
    ),
    Mutation(
        "two recordings a side tell of the code",
        "comparison/noise.py",
        "ENOUGH = 3",
        "ENOUGH = 2",
        COMPARISON,
    ),
    Mutation(
        "the limit of a change is a share of the shorter backward",
        "comparison/judge.py",
        "total = max(mean_of(self.before.to(time)), mean_of(self.after.to(time)))",
        "total = min(mean_of(self.before.to(time)), mean_of(self.after.to(time)))",
        COMPARISON,
    ),
    Mutation(
        "modules that cannot be told apart are guessed",
        "comparison/align.py",
        "sum(claim >= len(ballots) for claim in claims[side, path]) > 1",
        "sum(claim > len(ballots) for claim in claims[side, path]) > 1",
        ALIGN,
    ),
    Mutation(
        "modules that are called more often are the speed of the machine",
        "comparison/compare.py",
        "return alike and not _differ_in_calls(old, new)",
        "return alike",
        f"{COMPARISON} comparison/test_scale.py",
    ),
    # Ranks.
    Mutation(
        "few steps of a rank show as much as many",
        "job/noise.py",
        "luck = 1 + (4 / steps) ** 2",
        "luck = 1",
        "job/test_noise.py",
    ),
    Mutation(
        "a recording that begins late is matched from its beginning",
        "job/matching.py",
        "        return count, True\n",
        "        return count, False\n",
        WAITING,
    ),
    Mutation(
        "transfers between two ranks are collectives of all",
        "job/matching.py",
        "        if group.calls[call].kind != POINT_TO_POINT:\n",
        "        if True:\n",
        WAITING,
    ),
    Mutation(
        "a clock that runs apart is set the wrong way",
        "job/align.py",
        "    job_times: Ints = times + self.offset_ns + grown\n",
        "    job_times: Ints = times + self.offset_ns - grown\n",
        WAITING,
    ),
    Mutation(
        "the end of a broadcast sets the clocks",
        "job/align.py",
        "call.kind not in ROOTED for call in group.call",
        "True for call in group.call",
        WAITING,
    ),
    Mutation(
        "who leaves a broadcast early waits for the last",
        "job/waiting.py",
        "            if call.kind in ROOTED:\n",
        "            if False:\n",
        WAITING,
    ),
    Mutation(
        "the rank that enters first is the one waited for",
        "job/waiting.py",
        "last = np.array(ranks)[start.argmax(axis=0)]",
        "last = np.array(ranks)[start.argmin(axis=0)]",
        WAITING,
    ),
    Mutation(
        "a rank is one of those that it is compared with",
        "job/scatter.py",
        "medians: Ints = np.where(values <= middle, above, middle)",
        "medians: Ints = middle",
        ANSWER,
    ),
    Mutation(
        "the stages of a pipeline are compared with each other",
        "job/modules.py",
        "    if not any(any(hints.stalled) for hints in ranks.values()):\n",
        "    if True:\n",
        OF_RANKS,
    ),
    Mutation(
        "a stage that waits for another one waits for its data",
        "job/findings/rules.py",
        'data = np.maximum(evidence.phase("data") - evidence.stalled, 0)',
        'data = evidence.phase("data")',
        OF_RANKS,
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, MUTATIONS, "-m", "not slow"))
