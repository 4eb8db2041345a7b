// The module tree: the width of a block is its total cost, with everything inside it. Its colour is
// what most of that time is spent on, and the strip below the name shows all of it.

const LEVEL = 28; // pixels
const LEVELS = 14;
const NARROWEST = 4; // pixels; narrower blocks are drawn as one

function makeIcicle(model, box, note, change) {
  const known = new Map();
  let drawn = [];
  let state = null;
  let focused = -1;

  // What time is spent on says nothing about another amount.
  const coloured = () => model.gpu && !AMOUNTS.has(state.measure);
  const wholeName = () => (AMOUNTS.has(state.measure) ? MEASURES[state.measure] : model.whole.short);
  const width = (row) => row.total[state.measure === "ratio" ? "wall" : state.measure];

  function layOut(zoom) {
    const pixels = box.clientWidth || 1000;
    const parts = zoom.children.reduce((sum, child) => sum + width(child), 0);
    const room = Math.max(width(zoom), parts);
    const scale = room > 0 ? pixels / room : 0;
    const blocks = [];
    let cut = 0;
    const place = (row, level, x, parent) => {
      const length = row === zoom ? room : width(row);
      const block = { row, level, x, size: length * scale, parent, children: [] };
      blocks.push(block);
      if (parent) parent.children.push(block);
      const inside = row.children.filter((child) => child.depth <= state.depth);
      if (level + 1 >= LEVELS) {
        cut += inside.length ? 1 : 0;
        return;
      }
      const ranked = [...inside].sort((a, b) => width(b) - width(a));
      let at = x;
      const small = [];
      for (const child of ranked) {
        if (width(child) * scale >= NARROWEST) {
          place(child, level + 1, at, block);
          at += width(child) * scale;
        } else small.push(child);
      }
      const size = small.reduce((sum, child) => sum + width(child), 0) * scale;
      if (size >= 1) {
        blocks.push({ level: level + 1, x: at, size, parent: block, small: small.length });
      }
    };
    place(zoom, 0, 0, null);
    return { blocks, pixels, cut };
  }

  function colour(row) {
    if (state.measure === "ratio") {
      const ratio = measured(row.total, "ratio");
      if (!Number.isFinite(ratio)) return "r-none";
      return ratio > 6 ? "r-very" : ratio > 3 ? "r-high" : "r-usual";
    }
    if (!coloured()) return "k-unknown";
    const most = Math.max(...row.total.on);
    return most > 0 ? `k-${KINDS[row.total.on.indexOf(most)]}` : "k-unknown";
  }

  function describe(row) {
    const cost = width(row);
    const whole = width(model.whole);
    const words = [`${amount(cost, state.measure)}, ${percent(whole ? cost / whole : 0)}`];
    if (state.measure === "ratio") {
      words.push(`backward takes ${times(measured(row.total, "ratio"))} the forward`);
    } else if (coloured() && Math.max(...row.total.on) > 0) {
      words.push(`mostly: ${KIND_NAMES[colour(row).slice(2)]}`);
    }
    return words;
  }

  function element(block, pixels) {
    const { row } = block;
    let made = known.get(row.id);
    if (!made) {
      made = make("div", { role: "treeitem", tabindex: -1 },
        make("span", { class: "label" }), make("span", { class: "strip" }));
      made.addEventListener("click", () => pick(row));
      known.set(row.id, made);
    }
    const words = describe(row);
    const [label, strip] = made.children;
    const name = row === model.whole ? wholeName() : row.short;
    const time = block.size > 150 ? `${name}\u2002${words[0]}` : name;
    label.textContent = block.size > 24 ? time : "";
    strip.replaceChildren(...(state.measure !== "ratio" && coloured()
      ? mix(row.total.on, row.total.wall, 1).children : []));
    made.className = `block ${colour(row)}`;
    made.classList.toggle("dim", Boolean(state.matches) && !inside(row));
    const chosen = state.chosen === row || Boolean(state.chosen?.group?.includes(row));
    made.classList.toggle("chosen", chosen);
    const title = row === model.whole ? wholeName() : row.title;
    made.setAttribute("aria-label", [title, ...words].join(", "));
    made.setAttribute("aria-level", block.level + 1);
    made.setAttribute("aria-selected", String(chosen));
    made.title = [title, ...words].join("\n");
    stand(made, block, pixels);
    return made;
  }

  function stand(made, block, pixels) {
    made.style.left = `${(100 * block.x) / pixels}%`;
    made.style.width = `${(100 * block.size) / pixels}%`;
    made.style.top = `${block.level * LEVEL}px`;
  }

  const inside = (row) => state.matches(row) || row.children.some(inside);

  function pick(row) {
    focused = row.id;
    const next = row.id >= 0 ? { chosen: row } : {};
    if (row.id === state.zoom.id) next.zoom = model.around(row) || row;
    else if (row.children.length) next.zoom = row;
    change(next);
  }

  function draw(next) {
    state = next;
    const { blocks, pixels, cut } = layOut(state.zoom);
    drawn = blocks.filter((block) => block.row);
    const siblings = (block) => (block.parent ? block.parent.children : [block]);
    const elements = blocks.map((block) => {
      if (block.small) {
        const text = counted(block.small, "smaller module");
        const rest = make("div", { class: "block rest", title: text, "aria-hidden": "true" });
        stand(rest, block, pixels);
        return rest;
      }
      const made = element(block, pixels);
      made.setAttribute("aria-setsize", siblings(block).length);
      made.setAttribute("aria-posinset", siblings(block).indexOf(block) + 1);
      if (block.children.length) made.setAttribute("aria-expanded", "true");
      else made.removeAttribute("aria-expanded");
      return made;
    });
    const had = box.contains(document.activeElement);
    box.replaceChildren(...elements);
    box.style.height = `${(1 + Math.max(...blocks.map((block) => block.level))) * LEVEL}px`;
    if (!drawn.some((block) => block.row.id === focused)) focused = state.zoom.id;
    for (const block of drawn) {
      known.get(block.row.id).tabIndex = block.row.id === focused ? 0 : -1;
    }
    if (had) known.get(focused).focus();
    const empty = width(state.zoom) > 0 ? "" : `Nothing here has any ${MEASURES[state.measure]}.`;
    note.textContent = empty || (cut ? "Zoom in to see deeper modules." : "");
  }

  function beside(block, step) {
    const level = drawn.filter((other) => other.level === block.level);
    level.sort((a, b) => a.x - b.x);
    return level[level.indexOf(block) + step];
  }

  box.addEventListener("keydown", (event) => {
    const block = drawn.find((one) => one.row.id === focused);
    if (!block || event.ctrlKey || event.altKey || event.metaKey) return;
    const moves = {
      ArrowDown: () => block.children[0],
      ArrowUp: () => block.parent,
      ArrowLeft: () => beside(block, -1),
      ArrowRight: () => beside(block, 1),
      Home: () => drawn[0],
    };
    if (event.key in moves) {
      const to = moves[event.key]();
      if (to) {
        known.get(focused).tabIndex = -1;
        focused = to.row.id;
        known.get(focused).tabIndex = 0;
        known.get(focused).focus();
      }
    } else if (event.key === "Enter") pick(block.row);
    else if (event.key === " ") {
      if (block.row.id >= 0) change({ chosen: block.row });
    } else if (event.key === "Escape" || event.key === "Backspace") {
      const out = model.around(state.zoom);
      if (!out) return;
      focused = state.zoom.id;
      change({ zoom: out });
    } else return;
    event.preventDefault();
  });
  new ResizeObserver(() => state && draw(state)).observe(box);
  return { draw };
}
