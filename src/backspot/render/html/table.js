// The ranked table below the tree: sorted by any column, filtered, folded at a depth.

const AT_ONCE = 100;
const LEAST_SHARE = 0.005; // below this share of the backward a ratio is noise

function makeTable(model, box, change) {
  let limit = AT_ONCE;
  let last = "";

  function columns({ measure, by, depth }) {
    const time = (key, head) => ({ key, head, number: true, value: (line) => line.cost[key] });
    const asked = model.amounts.length > 0 || model.limits; // what somebody had recorded in addition
    const limit = (key, head, field, more) => model.limits && ({
      key, head, number: true, limit: true, value: (line) => (line.limit ? line.limit[field] : null), ...more,
    });
    // A column of dashes gives way to all others.
    const known = tableLines(model, { by, depth }).some((line) => line.isModule && line.saves !== null);
    const list = [
      { key: "name", head: by === "class" ? "class" : "module", text: true, value: (line) => line.shown },
      by !== "class" && { key: "class", head: "class", text: true, optional: asked ? 4 : 2, value: (line) => line.cls },
      by !== "path" && { key: "count", head: "modules", number: true, optional: 2, value: (line) => line.count || 1 },
      time("wall", "wall"),
      model.saves && { key: "saves", head: "saves", number: true, optional: known ? 1 : 5, value: (line) => line.saves },
      model.gpu && time("gpu", "GPU"),
      time("cpu", "CPU"),
      ...model.amounts.map((one) => ({ ...time(one.key, one.head), amount: true, optional: 2 })),
      limit("tflops", "TFLOP/s", "tflops", { optional: measure === "headroom" ? 2 : 4 }),
      limit("share of peak", "of peak", "of_peak", { optional: 2 }),
      limit("headroom", "headroom", "headroom_ns", { optional: 4 }),
      { ...time("forward", "forward"), optional: asked ? 5 : 4 },
      { key: "ratio", head: "bwd ÷ fwd", number: true, optional: asked ? 5 : by === "path" ? 3 : 4,
        value: (line) => measured(line.cost, "ratio") },
      { key: "calls", head: "calls", number: true, optional: asked ? 5 : 4, value: (line) => line.calls },
      { key: "node", head: "slowest node", text: true, optional: asked ? 5 : 4, value: (line) => line.node },
    ].filter(Boolean);
    for (const column of list) {
      if (column.key === measure) delete column.optional;
      else if (["wall", "gpu", "cpu"].includes(column.key)) {
        column.optional = measure !== "wall" ? 1 : !asked ? 2 : column.key === "cpu" ? 4 : 3;
      }
    }
    const at = list.findIndex((column) => column.key === measure);
    list.splice(at + 1, 0, { key: "share", head: measure === "ratio" ? "" : "share", bar: true });
    return list;
  }

  function order(lines, state, column) {
    const way = state.descending ? -1 : 1;
    const rank = (line) => {
      if (column.key !== "ratio") return 0;
      if (!Number.isFinite(column.value(line))) return 2;
      return line.cost.wall < LEAST_SHARE * model.sums.wall ? 1 : 0;
    };
    return [...lines].sort((a, b) => {
      const [left, right] = [column.value(a), column.value(b)];
      const apart = column.text
        ? String(left).localeCompare(String(right), "en", { numeric: true })
        : (left ?? -1) - (right ?? -1) || 0;
      return rank(a) - rank(b) || way * apart || b.cost.wall - a.cost.wall;
    });
  }

  function draw(state) {
    const list = columns(state);
    const column = list.find((one) => one.key === state.sort) || list.find((one) => one.key === "wall");
    const all = tableLines(model, state);
    const costs = (line) => line.cost.wall || line.cost.gpu || line.cost.cpu ||
      (AMOUNTS.has(state.measure) && line.cost[state.measure]);
    const modules = all.filter((line) => line.isModule);
    // Modules without any cost are only shown when somebody searches for them.
    const found = modules.filter((line) =>
      (state.query ? state.hits(line.shown, line.cls) : costs(line)));
    const ranked = order(found, state, column);
    const unowned = order(all.filter((line) => !line.isModule && costs(line)), state, column);
    const change = JSON.stringify([state.query, state.depth, state.by, state.sort, state.measure, state.descending]);
    if (change !== last) limit = AT_ONCE;
    last = change;
    const ratio = state.measure === "ratio";
    const worth = (line) => !ratio || line.cost.wall >= LEAST_SHARE * model.sums.wall;
    const value = (line) => measured(line.cost, state.measure) || 0;
    const longest = Math.max(...all.filter(worth).map(value).filter(Number.isFinite), 0) || 1;
    const decimals = decimalsFor(Math.max(...all.map((line) => line.cost.wall), 0));
    model.decimals = decimals; // the details show the same numbers
    const view = { list, state, longest, decimals };
    const table = make("table", { class: "ranked live" }, head(list, state, column));
    table.append(make("tbody", {}, ...ranked.slice(0, limit).map((line, index) => cells(line, index + 1, view))));
    if (unowned.length && !state.query) {
      const heading = make("th", { scope: "rowgroup", colspan: list.length + 1 }, "owned by no module:");
      table.append(make("tbody", { class: "unowned" }, make("tr", {}, heading),
        ...unowned.map((line) => cells(line, "", view))));
    }
    const kept = document.activeElement && document.activeElement.dataset.key;
    const more = ranked.length > limit && make("button", {
      type: "button", class: "quiet more", "data-key": "more",
      onclick: () => { limit += AT_ONCE; draw(state); },
    }, `Show ${Math.min(AT_ONCE, ranked.length - limit)} more of ${ranked.length.toLocaleString("en")}`);
    box.replaceChildren(table, ...(more ? [more] : []));
    const again = kept && [...box.querySelectorAll("[data-key]")].find((one) => one.dataset.key === kept);
    if (again) again.focus();
    const spent = found.reduce((sum, line) => sum + line.cost.wall, 0);
    return { found: found.length, of: modules.length, spent, idle: state.query ? 0 : modules.length - found.length };
  }

  function head(list, state, sorted) {
    const titles = list.map((column) => {
      if (column.bar) {
        const title = make("span", { class: column.head ? "share" : "unseen" }, column.head || "drawn");
        return make("th", { scope: "col", class: "b" }, title);
      }
      const active = column === sorted;
      const way = active ? (state.descending ? "descending" : "ascending") : null;
      return make("th", { scope: "col", class: classes(column, state), "aria-sort": way },
        make("button", {
          type: "button", "data-key": `sort ${column.key}`,
          onclick: () => change({
            sort: column.key, descending: active ? !state.descending : Boolean(column.number),
          }),
        }, column.head, make("span", { class: "arrow", "aria-hidden": "true" },
          active ? (state.descending ? "↓" : "↑") : "")));
    });
    return make("thead", {}, make("tr", {}, make("th", { scope: "col", class: "n rank" }, "#"), ...titles));
  }

  const classes = (column, state) =>
    [column.number ? "n" : "", column.optional ? `o${column.optional}` : "",
      column.key === state.measure ? "main" : ""].filter(Boolean).join(" ") || null;

  function cells(line, rank, { list, state, longest, decimals }) {
    const chosen = line.row && line.row === state.chosen;
    const shown = list.map((column) => {
      const kind = classes(column, state);
      if (column.key === "name") return name(line, chosen);
      if (column.key === "class") return make("td", { class: `class ${kind || ""}`, title: line.cls }, line.cls);
      if (column.bar) return bar(line, state, longest);
      if (column.key === "ratio") {
        const noise = line.cost.wall < LEAST_SHARE * model.sums.wall ? " muted" : "";
        return make("td", { class: `${kind}${noise}` }, line.isModule ? times(column.value(line)) : "");
      }
      if (column.key === "saves") {
        const saved = line.saves === null ? (line.isModule ? "–" : "") : milliseconds(line.saves, decimals);
        return make("td", { class: kind }, saved);
      }
      if (column.amount) {
        const cost = line.cost[column.key];
        const isKnown = line.row ? line.row.amounts[column.key] || cost : cost;
        return make("td", { class: kind }, isKnown ? megabytes(cost) : "");
      }
      if (column.limit) return make("td", { class: kind }, limitText(column, line, decimals));
      if (column.key === "count") return make("td", { class: kind }, line.isModule ? String(line.count || 1) : "");
      if (column.key === "calls") {
        const calls = line.calls === null ? "" : perStep(line.calls);
        return make("td", { class: kind }, calls);
      }
      if (column.key === "forward" && !line.isModule) return make("td", { class: kind });
      if (column.key === "node") {
        const spent = line.node ? milliseconds(line.spent, decimals) : "";
        return make("td", { class: `node ${kind}`, title: line.node },
          make("span", { class: "node-cost" }, make("code", {}, line.node), " ", make("span", {}, spent)));
      }
      return make("td", { class: kind }, milliseconds(column.value(line), decimals));
    });
    const row = make("tr", { class: chosen ? "chosen" : null },
      make("td", { class: "n muted rank" }, String(rank)), ...shown);
    if (line.row) row.addEventListener("click", () => change({ chosen: line.row }));
    return row;
  }

  function limitText(column, line, decimals) {
    const value = column.value(line);
    if (value === null) return "";
    if (column.key === "tflops") return value.toFixed(1);
    return column.key === "share of peak" ? percent(value) : milliseconds(value, decimals);
  }

  function name(line, chosen) {
    // Set from right to left, a long path loses its start: its end identifies it.
    const text = make("code", { class: "path" }, make("bdi", { dir: "ltr" }, line.shown));
    if (!line.row) return make("th", { scope: "row" }, text);
    const button = make("button", {
      type: "button", class: "name", "data-key": `row ${keyOfRow(line.row)}`, "aria-pressed": String(Boolean(chosen)),
    }, text);
    return make("th", { scope: "row", title: line.shown }, button);
  }

  function bar(line, state, longest) {
    const value = measured(line.cost, state.measure);
    const part = Number.isFinite(value) ? Math.min(1, value / longest) : 0;
    const parts = state.measure === "wall" && model.gpu ? line.cost.on : [];
    const share = state.measure === "ratio" ? "" : percent(value / (model.sums[state.measure] || Infinity));
    return make("td", { class: "b" }, make("span", { class: "share" }, share),
      value > 0 ? mix(parts, value, part) : null);
  }

  const keyOfRow = (row) => (row.group ? row.shown : row.id);
  const focus = (row) => row && [...box.querySelectorAll("[data-key]")]
    .find((one) => one.dataset.key === `row ${keyOfRow(row)}`)?.focus();

  return { draw, focus };
}

const perStep = (number) =>
  Number.isInteger(number) ? number.toLocaleString("en") : number.toFixed(1);
