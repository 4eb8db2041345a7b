// The page: its state, and what is drawn again when the state changes.

(async () => {
  const element = (id) => document.getElementById(id);

  if (!element("explorer")) return;
  const model = readModel(await readData(element("report").textContent));
  if (!model.rows.length) return;
  const narrow = matchMedia("(max-width: 1079px)");
  const state = {
    measure: "wall", by: "path", depth: model.deepest, query: "", sort: "wall", descending: true,
    zoom: model.whole, chosen: null, open: !narrow.matches, matches: null, hits: () => true,
  };
  // The row that the answer is about is open at first.
  if (model.answer) {
    const [path, isGroup] = model.answer;
    if (isGroup) state.by = "pattern";
    const found = tableLines(model, state).find((line) => line.row && line.row.path === path);
    state.chosen = found ? found.row : null;
  }

  const say = (text) => { element("status").textContent = text; };
  const icicle = makeIcicle(model, element("icicle"), element("icicle-note"), change);
  const table = makeTable(model, element("table-box"), change);
  const details = makeDetails(model, element("details"), change, say);

  function change(next) {
    Object.assign(state, next);
    if (next.chosen) state.open = true;
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    state.hits = (...names) => words.every((word) => names.some((name) => name.toLowerCase().includes(word)));
    state.matches = words.length ? (row) => state.hits(row.shown, row.cls) : null;
    const { found, of, spent, idle } = table.draw(state);
    icicle.draw(state);
    details.draw(state.open ? state.chosen : null);
    trail();
    legend();
    // On narrow screens the details cover the page: they take the focus and give it back.
    if (next.chosen && narrow.matches) element("details").focus();
    else if (next.open === false && narrow.matches) table.focus(state.chosen);
    element("idle").textContent = idle
      ? `${counted(idle, "more module")} ${idle === 1 ? "takes" : "take"} no time in the backward.` : "";
    const share = percent(spent / (model.sums.wall || Infinity));
    if ("query" in next || "depth" in next) {
      const cost = `${duration(spent)} (${share}) of the backward`;
      say(`${found.toLocaleString("en")} of ${counted(of, "row")}: ${cost}`);
      element("found").textContent = state.query ? element("status").textContent : "";
    } else if (next.chosen) say(`${next.chosen.title}: details shown`);
    else if (next.zoom) say(`Zoomed to ${next.zoom.title}`);
    else if (next.sort) say(`Sorted by ${state.sort}, ${state.descending ? "descending" : "ascending"}`);
  }

  // The path from the whole backward to the block that the tree is zoomed to.
  function trail() {
    const way = [];
    for (let row = state.zoom; row; row = model.around(row)) way.unshift(row);
    element("trail").replaceChildren(...way.flatMap((row, index) => {
      const last = index === way.length - 1;
      const step = last
        ? make("span", { "aria-current": "location" }, row.short)
        : make("button", { type: "button", class: "name", onclick: () => change({ zoom: row }) }, row.short);
      return index ? [make("span", { class: "muted", "aria-hidden": "true" }, " › "), step] : [step];
    }));
  }

  function legend() {
    const entries = state.measure === "ratio"
      ? [["r-usual", "up to 3×"], ["r-high", "3 to 6×"], ["r-very", "over 6×"], ["r-none", "no forward recorded"]]
      : KINDS.filter((_, index) => model.whole.total.on[index] > 0).map((kind) => [`k-${kind}`, KIND_NAMES[kind]]);
    const shown = (model.gpu && !AMOUNTS.has(state.measure)) || state.measure === "ratio" ? entries : [];
    element("legend").replaceChildren(...shown.map(([kind, text]) =>
      make("li", {}, make("i", { class: kind, "aria-hidden": "true" }), text)));
  }

  // A group is not a row of other tables: its first module is, and a module is in a group.
  function shownInstead(by) {
    const first = state.chosen && (state.chosen.group ? state.chosen.group[0] : state.chosen);
    const line = first && tableLines(model, { depth: state.depth, by })
      .find((one) => one.row === first || one.row?.group?.includes(first));
    return line ? { chosen: line.row } : {};
  }

  function controls() {
    for (const { key, name } of model.amounts) {
      const radio = make("input", { type: "radio", name: "measure", value: key });
      document.querySelector("input[value=headroom]").closest("label")
        .before(make("label", {}, radio, make("span", {}, name)));
    }
    for (const radio of document.querySelectorAll("input[name=measure]")) {
      const known = { gpu: model.gpu, headroom: model.limits };
      if (known[radio.value] === false) radio.closest("label").remove();
      radio.addEventListener("change", () =>
        change({ measure: radio.value, sort: radio.value, descending: true }));
    }
    for (const radio of document.querySelectorAll("input[name=by]")) {
      radio.checked = radio.value === state.by;
      radio.addEventListener("change", () => change({ by: radio.value, ...shownInstead(radio.value) }));
    }
    const filter = element("filter");
    filter.addEventListener("input", () => change({ query: filter.value }));
    filter.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && filter.value) {
        filter.value = "";
        change({ query: "" });
      }
    });
    const depth = element("depth");
    depth.max = depth.value = model.deepest;
    const tell = () => {
      const text = Number(depth.value) === model.deepest ? "all" : depth.value;
      element("depth-shown").textContent = text;
      depth.setAttribute("aria-valuetext", text === "all" ? "all levels" : text);
    };
    depth.addEventListener("input", () => {
      tell();
      change({ depth: Number(depth.value), zoom: state.zoom.depth > depth.value ? model.whole : state.zoom });
    });
    tell();
    element("depth-field").hidden = model.deepest === 0;
    document.addEventListener("keydown", (event) => {
      const inDetails = element("details").contains(document.activeElement);
      if (event.key === "Escape" && state.open && (narrow.matches || inDetails)) {
        if (!element("icicle").contains(document.activeElement)) change({ open: false });
      }
    });
  }

  // Makes the places in findings links to their modules.
  function places() {
    const known = new Map();
    for (const row of model.rows) {
      if (row.isModule || !known.has(row.path)) known.set(row.path, row);
    }
    for (const code of document.querySelectorAll("code[data-path]")) {
      const row = known.get(code.dataset.path);
      if (!row) continue;
      const button = make("button", { type: "button", class: "name", onclick: () => {
        change({ chosen: row });
        element("modules").scrollIntoView();
      } });
      code.replaceWith(button);
      button.append(code);
    }
  }

  // What the step takes without the ticked findings: some can save the same time, so between the largest
  // of them alone and all of them added up. A saving at best can be nothing.
  function fixes() {
    const boxes = [...document.querySelectorAll(".fix input")];
    const told = element("together");
    const draw = () => {
      const ticked = boxes.filter((box) => box.checked).map((box) => box.dataset);
      const step = Number(told.dataset.ns);
      const sum = ticked.reduce((before, one) => before + Number(one.ns), 0);
      const sure = Math.max(0, ...ticked.filter((one) => one.best === "0").map((one) => Number(one.ns)));
      const [least, most] = [Math.max(0, step - sum), step - Math.min(step, sure)].map(duration);
      told.hidden = !ticked.length;
      told.textContent = `Without what ${counted(ticked.length, "finding names", "findings name")}, ` +
        `a ${model.per} would take ` +
        `${least === most ? least : `${least} to ${most}`} instead of ${duration(step)}.`;
    };
    for (const box of boxes) {
      box.closest("label").hidden = false;
      box.addEventListener("change", draw);
    }
  }

  function folding() {
    const kept = model.rows.filter((row) => row.isModule).length;
    if (kept === model.modules) return;
    element("folded").textContent =
      `This page shows the ${kept.toLocaleString("en")} most expensive of ${counted(model.modules, "module")}. ` +
      `The others are added up in the modules around them. ` +
      "The JSON report has all of them.";
  }

  element("explorer").hidden = false;
  document.documentElement.classList.add("scripted");
  controls();
  places();
  fixes();
  folding();
  change({});
})();
