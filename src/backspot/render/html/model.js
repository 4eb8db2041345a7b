"use strict";
// The data of the page as modules with parents and children, and the formatting of numbers, which is
// the same as in formatting.py.

const KINDS = []; // what wall time is spent on; the names are in KIND_NAMES
const KIND_NAMES = {};
const MEASURES = {
  wall: "wall time", gpu: "GPU time", cpu: "CPU time", ratio: "backward ÷ forward",
  headroom: "headroom",
};
const COSTS = ["wall", "gpu", "cpu", "forward", "recompute", "headroom"];
const AMOUNTS = new Map(); // measures of parts, in bytes

// The data is JSON, deflated and in base64.
async function readData(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text(),
    (_, value) => (typeof value === "string" ? visible(value) : value));
}

// Unprintable characters as escapes, as in formatting.py.
const visible = (text) => text.replace(/(?! )[\p{C}\p{Z}]/gu, (character) => {
  const code = character.codePointAt(0).toString(16);
  const [letter, digits] = code.length <= 2 ? ["x", 2] : code.length <= 4 ? ["u", 4] : ["U", 8];
  return { "\n": "\\n", "\r": "\\r", "\t": "\\t" }[character] || `\\${letter}${code.padStart(digits, "0")}`;
});

const LONGEST = 160; // characters of a kernel's name or a source line; template names can have thousands
const shortened = (text) => (text.length <= LONGEST ? text : `${text.slice(0, LONGEST - 1)}…`);
const nodeName = (name) => name.replace(/^torch::autograd::/, "");

function readModel(data) {
  Object.assign(KIND_NAMES, data.kinds);
  KINDS.push(...Object.keys(KIND_NAMES));
  for (const one of data.amounts) {
    MEASURES[one.key] = one.title;
    COSTS.push(one.key);
    AMOUNTS.set(one.key, one);
  }
  const ofAmounts = (value) => Object.fromEntries(data.amounts.map((one) => [one.key, value(one)]));
  const rows = data.rows.map(({ row, parent, label, limit, spread }, id) => {
    const around = data.rows[parent]?.row.path;
    return {
      id,
      parent,
      path: row.path,
      name: around ? row.path.slice(around.length + 1) : row.path,
      cls: row.class_name,
      isModule: row.is_module,
      root: row.root,
      calls: row.calls,
      own: {
        wall: row.wall_ns, gpu: row.gpu_ns, cpu: row.cpu_ns, forward: row.forward_ns,
        recompute: row.recompute_ns, on: KINDS.map((kind) => row.wall_on[`${kind}_ns`]),
        headroom: limit?.headroom_ns || 0, ...ofAmounts((one) => row[one.field]?.[one.of] || 0),
      },
      split: row.split_ns,
      amounts: ofAmounts((one) => row[one.field] || null),
      limit,
      // How much less time a step would take without the module, and without all modules in it; or null.
      saves: [row.saves, row.total_saves].map((saving) => saving && saving.ns),
      savedBy: [row.saves, row.total_saves].map((saving) => saving?.parts || {}),
      spread, // the smallest and the largest time of all steps
      steps: row.wall_ns_by_step, // the first ones
      nodes: row.nodes.map((node) => ({
        name: nodeName(node.name), count: node.count, spent: [node.wall_ns, node.gpu_ns, node.cpu_ns],
      })),
      kernels: row.kernels.map((kernel) => ({
        name: shortened(kernel.name), count: kernel.count, gpu: kernel.spent_ns,
      })),
      lines: row.lines.map((line) => ({
        place: `${line.file}:${line.line}`, source: shortened(line.text.trim()), node: nodeName(line.node),
        wall: line.wall_ns, exact: line.exact,
      })),
      label,
      children: [],
    };
  });
  const top = [];
  for (const row of rows) {
    const around = rows[row.parent];
    (around ? around.children : top).push(row);
  }
  const finish = (row, around, level) => {
    row.level = level;
    row.shown = row.path || row.cls || "(root)";
    // A number alone, as modules have in a Sequential, tells nothing.
    const numbered = row.cls && /^[\d.]+$/.test(row.name);
    row.short = numbered ? `${row.cls} ${row.name}` : row.name || row.cls || "(root)";
    row.title =
      row.isModule && row.cls && row.cls !== row.shown ? `${row.shown} (${row.cls})` : row.shown;
    // Only modules that were called make a level, and the root.
    const below = !around ? 1 : around.depth + (around.path === around.root || around.calls > 0);
    row.depth = !row.isModule || row.path === row.root ? 0 : below;
    row.total = { ...row.own, on: [...row.own.on] };
    row.inside = 1;
    for (const child of row.children) {
      finish(child, row, level + 1);
      addTo(row.total, child.total);
      row.inside += child.inside;
    }
    row.children.sort((a, b) => b.total.wall - a.total.wall || (a.path < b.path ? -1 : 1));
  };
  for (const row of top) finish(row, null, 1);
  top.sort((a, b) => b.isModule - a.isModule || b.total.wall - a.total.wall);
  const whole = {
    id: -1, level: 0, depth: -1, parent: null, path: "", name: "", cls: "", root: "", calls: 0,
    shown: "the whole backward", short: "the whole backward", title: "the whole backward",
    isModule: false, amounts: {}, limit: null, split: 0,
    own: zero(), total: zero(), saves: [null, null], spread: [], steps: [], nodes: [], kernels: [], lines: [],
    children: top,
  };
  for (const row of top) addTo(whole.total, row.total);
  const [wall, gpu, cpu] = data.whole;
  const sums = { wall, gpu, cpu, headroom: whole.total.headroom, ...ofAmounts((one) => one.whole) };
  Object.assign(whole.total, sums);
  const ofGroups = new Map();
  for (const [by, groups] of Object.entries(data.groups)) {
    for (const [path, cls, limit, saving] of groups) ofGroups.set(keyOf(by, cls, path), { limit, saving });
  }
  return {
    ...data,
    rows,
    whole,
    sums,
    deepest: rows.reduce((deepest, row) => Math.max(deepest, row.depth), 0),
    around: (row) => (row.id < 0 ? null : rows[row.parent] || whole),
    ofGroups,
    groups: new Map(), // the groups that were made, which stay the same
    findings: data.findings.map((finding) => ({ ...finding, places: new Map(finding.places) })),
  };
}

const keyOf = (by, cls, path) => JSON.stringify([by, cls, path]);

const zero = () => ({ on: [0, 0, 0, 0, 0], ...Object.fromEntries(COSTS.map((key) => [key, 0])) });

function addTo(sum, more) {
  for (const key of COSTS) sum[key] += more[key];
  sum.on = sum.on.map((value, index) => value + more.on[index]);
}

// The rows of the table: the modules, or groups of them, by their class or the pattern of their paths.
function tableLines(model, { depth, by }) {
  const lines = folded(model, depth);
  if (by === "path") return lines;
  const many = new Map();
  const pattern = (line) => keyOf("", line.cls, numberless(line.shown));
  for (const line of lines) {
    if (line.isModule) many.set(pattern(line), (many.get(pattern(line)) || 0) + 1);
  }
  const groups = new Map();
  const others = [];
  for (const line of lines) {
    if (!line.isModule || !line.row) others.push(line);
    else {
      const name = by === "class" ? line.cls || line.shown
        : many.get(pattern(line)) > 1 ? numberless(line.shown) : line.shown;
      const key = keyOf(by, line.cls, name);
      if (!groups.has(key)) groups.set(key, { name, lines: [] });
      groups.get(key).lines.push(line);
    }
  }
  return [...[...groups].map(([key, group]) => grouped(model, depth, by, key, group)), ...others];
}

const numberless = (path) =>
  path.split(".").map((part) => (/^\p{Nd}+$/u.test(part) ? "*" : part)).join(".");

function grouped(model, depth, by, key, { name, lines }) {
  if (lines.length === 1 && name === lines[0].shown) return { ...lines[0], count: 1 };
  const known = `${depth} ${key}`;
  const { limit, saving } = (depth >= model.deepest && model.ofGroups.get(key)) || {};
  if (!model.groups.has(known)) model.groups.set(known, groupOf(name, lines, saving));
  const row = model.groups.get(known);
  const [node, spent] = heaviestOf(row.nodes);
  return {
    row, isModule: true, cost: row.own, node, spent, saves: row.saves[0], shown: name,
    cls: row.cls, calls: row.calls, count: lines.length,
    limit: limit || null,
  };
}

// A group of modules, as a row whose details can be shown.
function groupOf(name, lines, saving) {
  const cost = zero();
  for (const line of lines) addTo(cost, line.cost);
  const rows = lines.map((line) => line.row);
  const summed = (key) => {
    const known = rows.map((row) => row.amounts[key]).filter(Boolean);
    const add = (field) => known.reduce((all, one) => all + one[field], 0);
    return known.length ? Object.fromEntries(AMOUNTS.get(key).summed.map((field) => [field, add(field)])) : null;
  };
  return {
    id: -2, parent: null, path: name, name, cls: lines[0].cls, isModule: true, root: "",
    group: rows, children: [], level: 0, depth: 0,
    calls: lines.reduce((all, line) => all + (line.calls || 0), 0),
    own: cost, total: cost, split: rows.reduce((all, row) => all + row.split, 0),
    amounts: Object.fromEntries([...AMOUNTS.keys()].map((key) => [key, summed(key)])),
    limit: null,
    saves: [saving?.ns ?? null, null], savedBy: [saving?.parts || {}, {}], spread: [], steps: [], label: "",
    nodes: added(rows, "nodes", (node) => node.name, (a, b) => ({
      ...a, count: a.count + b.count, spent: a.spent.map((value, index) => value + b.spent[index]),
    })).sort((a, b) => b.spent[0] - a.spent[0]),
    kernels: added(rows, "kernels", (kernel) => kernel.name, (a, b) => ({
      ...a, count: a.count + b.count, gpu: a.gpu + b.gpu,
    })).sort((a, b) => b.gpu - a.gpu),
    lines: added(rows, "lines", (line) => JSON.stringify([line.place, line.node]), (a, b) => ({
      ...a, wall: a.wall + b.wall,
    })).sort((a, b) => b.wall - a.wall),
    shown: name, short: name, title: `${lines.length} × ${name}`,
  };
}

function added(rows, list, key, add) {
  const sums = new Map();
  for (const one of rows.flatMap((row) => row[list])) {
    const known = sums.get(key(one));
    sums.set(key(one), known ? add(known, one) : one);
  }
  return [...sums.values()];
}

const heaviestOf = ([first]) => (first ? [first.name, first.spent[0]] : ["", 0]);

// Modules deeper than `depth` are added up in their ancestor at that depth.
function folded(model, depth) {
  const lines = new Map();
  for (const row of model.rows) {
    const deeper = row.isModule && row.depth > depth;
    const path = deeper ? ancestor(model, row, depth) : row.path;
    const key = row.isModule ? `${row.root}\n${path}` : row.id;
    if (!lines.has(key)) lines.set(key, { path, row: null, cost: zero(), taken: 0, heaviest: new Map() });
    const line = lines.get(key);
    if (!deeper) line.row = row;
    addTo(line.cost, row.own);
    line.taken += 1;
    for (const node of row.nodes) {
      line.heaviest.set(node.name, (line.heaviest.get(node.name) || 0) + node.spent[0]);
    }
  }
  return [...lines.values()].map((line) => {
    const { row, path, cost } = line;
    const [node, spent] = [...line.heaviest].reduce(
      (best, one) => (one[1] > best[1] ? one : best), ["", 0]);
    const isModule = row ? row.isModule : true;
    const named = row && isModule;
    // Savings do not add up: that of a part of the modules inside is not known.
    const saves = !row ? null : line.taken === 1 ? row.saves[0] : line.taken === row.inside ? row.saves[1] : null;
    return {
      row, isModule, cost, node, spent, saves,
      shown: row ? row.shown : path || "(root)",
      cls: named ? row.cls : "",
      calls: named ? row.calls : null,
      limit: line.taken === 1 && row ? row.limit : null,
    };
  });
}

function ancestor(model, row, depth) {
  let outer = row;
  while (outer.id >= 0 && outer.depth > depth) outer = model.around(outer);
  return outer.id < 0 ? row.root : outer.path;
}

// The cost of a row by a measure; a ratio to no forward time is NaN.
function measured(cost, measure) {
  if (measure !== "ratio") return cost[measure];
  return cost.forward > 0 ? cost.wall / cost.forward : NaN;
}

function duration(ns) {
  if (ns >= 9.995e9) return `${(ns / 1e9).toFixed(1)} s`;
  const ms = ns / 1e6;
  if (ms >= 99.95) return `${ms.toFixed(0)} ms`;
  if (ms >= 0.995) return `${ms.toFixed(1)} ms`;
  if (ms >= 0.0995) return `${ms.toFixed(2)} ms`;
  if (ns >= 995) return `${(ns / 1e3).toFixed(0)} µs`;
  return ns ? `${ns.toFixed(0)} ns` : "0 ms";
}

function decimalsFor(largest) {
  const ms = largest / 1e6;
  return ms >= 1000 ? 0 : ms >= 100 ? 1 : ms >= 1 ? 2 : 3;
}

function milliseconds(ns, decimals) {
  const shown = (ns / 1e6).toFixed(decimals);
  return !ns ? "0" : shown === "0" ? "0.0" : shown;
}

function percent(share) {
  const hundredths = share * 100;
  if (!(hundredths > 0)) return "0%";
  if (hundredths < 0.1) return "<0.1%";
  if (hundredths < 9.95) return `${hundredths.toFixed(1)}%`;
  if (hundredths >= 99 && hundredths < 100) return `${Math.min(hundredths, 99.9).toFixed(1)}%`;
  return `${hundredths.toFixed(0)}%`;
}

function size(bytes) {
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= 0.9995 * unit) {
      const amount = bytes / unit;
      const decimals = amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0;
      return `${amount.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })} ${name}`;
    }
  }
  return counted(bytes, "byte");
}

// What a table says in MB.
function megabytes(bytes) {
  const decimals = bytes / 1e6 >= 100 ? 0 : 1;
  return (bytes / 1e6).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

const amount = (value, measure) => (AMOUNTS.has(measure) ? size(value) : duration(value));

const times = (ratio) =>
  Number.isFinite(ratio) ? `${ratio.toFixed(ratio < 10 ? 1 : 0)}×` : "–";

const counted = (number, thing, things = `${thing}s`) =>
  `${number.toLocaleString("en")} ${number === 1 ? thing : things}`;

// An element with attributes and children; text stays text.
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style") setStyle(element, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function setStyle(element, style) {
  for (const [name, value] of Object.entries(style)) element.style.setProperty(name, value);
}

// A bar coloured by what a time is spent on; `part` (0 to 1) is its length.
function mix(on, whole, part) {
  const known = on.reduce((sum, value) => sum + value, 0);
  const kinds = known > 0 ? KINDS.map((kind, index) => [kind, on[index]]) : [["unknown", whole]];
  return make(
    "span",
    { class: "mix", style: { "--part": part }, "aria-hidden": "true" },
    ...kinds.filter(([, value]) => value > 0).map(([kind, value]) =>
      make("i", { class: `k-${kind}`, style: { "flex-grow": value } })),
  );
}
