// The details of one module: its costs and what they are spent on, its steps, nodes and kernels, and
// the label to search for in a trace viewer.

function makeDetails(model, box, change, say) {
  const per = (ns, decimals) => milliseconds(ns, decimals);

  function draw(row) {
    box.hidden = !row;
    if (!row) return;
    const around = model.around(row);
    const parts = [
      make("div", { class: "details-head" },
        make("h3", {}, make("code", {}, row.shown)),
        make("button", { type: "button", class: "quiet close", onclick: () => change({ open: false }), "aria-label": "Close the details" }, "✕")),
      make("p", { class: "muted" }, [
        row.group ? `${counted(row.group.length, "module")}, ${row.cls}` : row.isModule ? row.cls : "owned by no module",
        row.isModule && `${perStep(row.calls)} ${row.calls === 1 ? "call" : "calls"} per ${model.per}`,
      ].filter(Boolean).join(" · "), around && around.id >= 0 ? " · in " : "",
        around && around.id >= 0 ? link(around) : ""),
      findings(row), label(row), costs(row), spentOn(row), steps(row), nodes(row), lines(row), kernels(row), within(row),
    ];
    box.replaceChildren(...parts.filter(Boolean));
  }

  const link = (row) =>
    make("button", { type: "button", class: "name", onclick: () => change({ chosen: row }) }, make("code", {}, row.shown));

  function findings(row) {
    const keys = (row.group || [row]).map((one) => (one.isModule ? one.id : one.path));
    const found = model.findings.filter(({ places }) => keys.some((key) => places.has(key)));
    if (!found.length) return null;
    const here = ({ cost, places }) =>
      row.group || places.get(keys[0]) === cost ? cost : `${places.get(keys[0])} of ${cost}`;
    return make("ul", { class: "found-here" }, ...found.map((one) =>
      make("li", {}, make("b", {}, one.title), " ", make("span", { class: "muted" }, here(one)),
        make("p", { class: "small" }, one.remedy))));
  }

  function label(row) {
    if (!row.isModule || row.group) return null;
    const button = make("button", { type: "button", class: "quiet" }, "Copy");
    button.addEventListener("click", async () => {
      const done = await copy(row.label);
      button.textContent = done ? "Copied" : "Press Ctrl+C";
      say(done ? `Copied ${row.label}` : "Could not copy: the label is selected");
      if (!done) select(code);
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    const code = make("code", { class: "to-search" }, row.label);
    return make("div", { class: "search-for" },
      make("p", { class: "small muted" }, model.labelled
        ? "Search a trace viewer for" : "After backspot show -o labelled.json.gz, search a trace viewer for"),
      make("div", { class: "copy" }, code, button));
  }

  // What a module has of another amount than time: all of it, and what else is known of it.
  function amountLines(row, { key, of, details }, whole) {
    const known = row.amounts[key];
    if (!known) return [];
    return details.filter(([field]) => field === of || known[field])
      .map(([field, text]) => line([text, megabytes(known[field]),
        whole ? (field === of ? megabytes(row.total[key]) : "") : null]));
  }

  function costs(row) {
    const whole = row.children.length > 0;
    const { decimals } = model;
    const kinds = [["wall", "wall"], model.gpu && ["gpu", "GPU"], ["cpu", "CPU"], ["forward", "forward"],
      row.total.recompute > 0 && ["recompute", "recompute"]].filter(Boolean);
    const ratio = (cost) => times(measured(cost, "ratio"));
    const saved = (ns) => (ns === null ? "–" : per(ns, decimals));
    return make("table", { class: "small-table" },
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, `ms per ${model.per}`),
        make("th", { scope: "col", class: "n" }, whole ? "own" : "time"),
        whole ? make("th", { scope: "col", class: "n" }, "total") : null)),
      make("tbody", {}, ...kinds.map(([key, name]) => line([name, per(row.own[key], decimals),
        whole ? per(row.total[key], decimals) : null])),
      model.saves && (row.isModule || row.saves[0] !== null) ? line(["saves", saved(row.saves[0]), whole ? saved(row.saves[1]) : null]) : null,
      ...(model.saves ? Object.keys({ ...row.savedBy?.[0], ...row.savedBy?.[1] }).map((part) => line([`of it ${part}`,
        per(row.savedBy[0][part] || 0, decimals), whole ? per(row.savedBy[1][part] || 0, decimals) : null])) : []),
      row.isModule ? line(["backward ÷ forward", ratio(row.own), whole ? ratio(row.total) : null]) : null,
      ...model.amounts.flatMap((one) => amountLines(row, one, whole)),
      row.limit && row.limit.of_peak !== null ? line([`of the peak, bound by ${row.limit.bound}`, percent(row.limit.of_peak), whole ? "" : null]) : null,
      row.limit && row.limit.headroom_ns !== null ? line(["headroom", per(row.limit.headroom_ns, decimals), whole ? "" : null]) : null,
      row.split ? line(["known without splitting kernels", percent(1 - row.split / row.own.wall), whole ? "" : null]) : null));
  }

  function spentOn(row) {
    const known = row.own.on.reduce((sum, value) => sum + value, 0);
    if (!model.gpu || !known) return null;
    const rows = KINDS.map((kind, index) => [kind, row.own.on[index]]).filter(([, ns]) => ns > 0);
    return section("What its wall time is spent on", mix(row.own.on, row.own.wall, 1),
      make("ul", { class: "legend column" }, ...rows.map(([kind, ns]) =>
        make("li", {}, make("i", { class: `k-${kind}`, "aria-hidden": "true" }), KIND_NAMES[kind], " ",
          make("b", {}, duration(ns)), " ", make("span", { class: "muted" }, percent(ns / known))))));
  }

  function steps(row) {
    if (row.steps.length < 2 || !row.own.wall) return null;
    const [least, most] = row.spread;
    const rest = model.steps - row.steps.length;
    const text = `${duration(least)} to ${duration(most)} over ` +
      counted(model.steps, model.per, model.per === "pass" ? "passes" : "steps") +
      (rest > 0 ? `; the first ${row.steps.length} are drawn` : "");
    return section(`Spread over ${model.per === "pass" ? "passes" : "steps"}`,
      make("div", { class: "steps", role: "img", "aria-label": text }, ...row.steps.map((ns) =>
        make("i", { style: { height: `${most ? (100 * ns) / most : 0}%` }, title: duration(ns) }))),
      make("p", { class: "small muted" }, text));
  }

  function nodes(row) {
    if (!row.nodes.length) return section("Autograd nodes", make("p", { class: "muted small" }, "None ran in the backward."));
    const { decimals } = model;
    return section("Autograd nodes", table(["node", `per ${model.per}`, "wall", model.gpu && "GPU", "CPU"],
      row.nodes.map((node) => [node.name, perStep(node.count), per(node.spent[0], decimals),
        model.gpu && per(node.spent[1], decimals), per(node.spent[2], decimals)])));
  }

  function lines(row) {
    if (!row.lines.length) return null;
    return section("Source lines of the forward", make("ul", { class: "lines" }, ...row.lines.map((at) =>
      make("li", {},
        make("div", { class: "apart" }, make("code", {}, at.place), make("b", {}, duration(at.wall))),
        at.source ? make("pre", {}, at.source) : null,
        make("p", { class: "small muted" }, at.exact ? at.node : `${at.node}, in code that this line calls`)))));
  }

  function kernels(row) {
    if (!row.kernels.length) return null;
    const { decimals } = model;
    return section(model.gpu ? "Kernels and copies" : "Operators", table([model.gpu ? "kernel" : "operator", `per ${model.per}`, model.gpu ? "GPU" : "CPU"], row.kernels.map((kernel) =>
      [kernel.name, perStep(kernel.count), per(kernel.gpu, decimals)])));
  }

  function within(row) {
    const inside = (row.group || row.children).filter((child) => child.total.wall > 0);
    inside.sort((a, b) => b.total.wall - a.total.wall).splice(12);
    if (!inside.length) return null;
    const { decimals } = model;
    return section(row.group ? "Its modules" : "Modules inside", make("ul", { class: "within" }, ...inside.map((child) =>
      make("li", {}, link(child), " ", make("b", {}, per(child.total.wall, decimals))))));
  }

  const section = (title, ...children) => make("section", {}, make("h4", {}, title), ...children);

  function table(heads, rows) {
    const kept = heads.map((head) => Boolean(head));
    return make("table", { class: "small-table" },
      make("thead", {}, make("tr", {}, ...heads.filter(Boolean).map((head, index) =>
        make("th", { scope: "col", class: index ? "n" : null }, head)))),
      make("tbody", {}, ...rows.map((cells) => line(cells.filter((_, index) => kept[index]), true))));
  }

  const line = (cells, code) => make("tr", {}, ...cells.map((cell, index) => {
    if (cell === null) return null;
    if (index) return make("td", { class: "n" }, cell);
    return make("th", { scope: "row", title: code ? cell : null }, code ? make("code", {}, cell) : cell);
  }));

  return { draw };
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function select(element) {
  const range = document.createRange();
  range.selectNodeContents(element);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}
