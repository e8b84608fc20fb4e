// The page: what is chosen, and what follows from it.

const root = document.getElementById("headwise");
const $ = (id) => root.querySelector(`#${id}`);
const SHOWN = 8; // answers listed for a word

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const percent = (w) => (w >= 0.0995 ? `${(100 * w).toFixed(0)} %` : w >= 0.00095 ? `${(100 * w).toFixed(1)} %` : "< 0.1 %");
const number = (x, digits = 2) => (x === null || x === undefined ? "–" : x.toFixed(digits));
const small = (x) => x.toExponential(0).replace("e-", " × 10⁻").replace("e+0", "").replace(/⁻(\d+)/, (_, d) => "⁻" + [...d].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join(""));

const state = { panel: 0, layer: 0, head: 0, level: "words", only: null, pinned: null, at: null, theme: "auto" };
let meta, panels, mapAt, thumbnailsDue = 0;

const panel = () => panels[state.panel];
const theme = () => (state.theme === "auto" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : state.theme);
const rowOf = (layer, head) => panel().rowOf.get(`${layer}.${head}`) || { kind: "mixed" };
const level = () => (panel().levels.includes(state.level) ? state.level : panel().levels[0]);
const mark = () => state.at || state.pinned;

function switcher(box, choices, chosen, choose) {
  box.replaceChildren(
    ...choices.map(([value, label]) =>
      el("button", { type: "button", textContent: label, "aria-pressed": String(value === chosen), onclick: () => choose(value) }),
    ),
  );
  box.hidden = choices.length < 2;
}

function show() {
  root.dataset.theme = theme();
  switcher($("parts"), panels.map((p, n) => [n, p.title]), state.panel, (n) => {
    Object.assign(state, { panel: n, at: null, pinned: null, only: null });
    open(...best(panels[n]));
  });
  switcher($("levels"), panel().levels.map((name) => [name, name === "words" ? "Words" : "Tokens"]), level(), (name) => {
    Object.assign(state, { level: name, at: null, pinned: null });
    show();
  });
  switcher($("themes"), [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], state.theme, (name) => {
    state.theme = name;
    show();
  });
  showGrid();
  showLegend();
  showLinks();
  showHead();
}

// the grid

function showGrid() {
  const p = panel(), most = Math.max(...p.layers.map(([, n]) => n));
  const head = el("div", { role: "row", className: "line" }, el("span", { className: "corner", role: "columnheader", "aria-label": "layer" }));
  for (let h = 0; h < most; h++) head.append(el("span", { role: "columnheader", className: "label", textContent: String(h) }));
  const lines = p.layers.map(([layer, n]) => {
    const line = el("div", { role: "row", className: "line" }, el("span", { role: "rowheader", className: "label", textContent: String(layer) }));
    for (let h = 0; h < n; h++) line.append(cell(layer, h));
    return line;
  });
  $("grid").replaceChildren(head, ...lines);
  $("grid").style.setProperty("--columns", most);
  const ticket = ++thumbnailsDue, todo = [...$("grid").querySelectorAll("button")], shade = theme();
  (function some() {
    if (ticket !== thumbnailsDue) return;
    for (const button of todo.splice(0, 48)) {
      const [layer, head] = button.dataset.head.split(".").map(Number);
      drawThumbnail(button.firstChild, p.map(layer, head, level(), 52), rowOf(layer, head).kind, shade);
    }
    if (todo.length) requestAnimationFrame(some);
  })();
}

function cell(layer, head) {
  const { kind } = rowOf(layer, head), chosen = layer === state.layer && head === state.head;
  return el(
    "button",
    {
      type: "button",
      role: "gridcell",
      className: "cell",
      tabIndex: chosen ? 0 : -1,
      "data-head": `${layer}.${head}`,
      "aria-selected": String(chosen),
      "aria-label": `Layer ${layer}, head ${head}: ${kind}`,
      title: `${layer}.${head} ${kind}`,
      style: { "--kind": kindColour(kind, theme()), ...(state.only && state.only !== kind ? { opacity: "0.18" } : {}) },
      onclick: () => open(layer, head),
      onkeydown: (event) => {
        const p = panel(), y = p.layers.findIndex(([l]) => l === layer);
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -head], End: [0, p.layers[y][1] - 1 - head] }[event.key];
        if (!step) return;
        event.preventDefault();
        const line = p.layers[Math.min(Math.max(y + step[0], 0), p.layers.length - 1)];
        open(line[0], Math.min(Math.max(head + step[1], 0), line[1] - 1), true);
      },
    },
    el("canvas", { width: 26, height: 26, "aria-hidden": "true" }),
  );
}

function open(layer, head, focus = false) {
  const moved = layer !== state.layer || head !== state.head;
  Object.assign(state, { layer, head });
  if (moved) history.replaceState(null, "", `#${layer}.${head}`);
  if ($("grid").querySelector(`[data-head="${layer}.${head}"]`) && root.dataset.panel === String(state.panel)) {
    for (const button of $("grid").querySelectorAll("button")) {
      const chosen = button.dataset.head === `${layer}.${head}`;
      button.tabIndex = chosen ? 0 : -1;
      button.setAttribute("aria-selected", String(chosen));
      if (chosen && focus) button.focus();
    }
    showLinks();
    showHead();
  } else {
    root.dataset.panel = state.panel;
    show();
  }
}

function showLegend() {
  const count = {};
  for (const row of panel().rows) count[row.kind] = (count[row.kind] || 0) + 1;
  $("legend").replaceChildren(
    ...Object.keys(KINDS)
      .filter((kind) => count[kind])
      .map((kind) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(state.only === kind),
            title: `attends above all to ${KINDS[kind][2]}`,
            style: { "--kind": kindColour(kind, theme()) },
            onclick: () => {
              state.only = state.only === kind ? null : kind;
              showGrid();
              showLegend();
            },
          },
          el("i"),
          el("span", { textContent: kind }),
          el("b", { textContent: String(count[kind]) }),
        ),
      ),
  );
}

function showLinks() {
  const { links } = panel();
  const box = $("links");
  if (!links.length) return box.replaceChildren();
  box.replaceChildren(
    el("h2", { textContent: "Links" }),
    el("p", { className: "quiet", textContent: "The heads that carry each link best, and the share of the first word's weight they give it." }),
    ...links.map((link) => {
      const best = link.ranking.filter((entry) => entry[2] > 0).slice(0, 5);
      return el(
        "div",
        { className: "link" },
        el("h3", {}, link.source, el("span", { textContent: " → ", "aria-label": " to " }), link.target),
        best.length
          ? el("ol", {}, ...best.map(([layer, head, weight]) =>
              el("li", {}, el(
                "button",
                {
                  type: "button",
                  className: "bar",
                  "aria-pressed": String(layer === state.layer && head === state.head),
                  style: { "--share": weight, "--kind": kindColour(rowOf(layer, head).kind, theme()) },
                  onclick: () => {
                    state.level = "words";
                    state.pinned = { i: link.sourceWord, j: level() === "words" || panel().levels.length === 1 ? link.targetWord : null };
                    state.at = null;
                    root.dataset.panel = "";
                    open(layer, head);
                  },
                },
                el("span", { textContent: `${layer}.${head}` }),
                el("span", { className: "quiet", textContent: rowOf(layer, head).kind }),
                el("b", { textContent: percent(weight) }),
              )),
            ))
          : el("p", { className: "quiet", textContent: "No head can look there." }),
      );
    }),
  );
}

// one head

function showHead() {
  const row = rowOf(state.layer, state.head);
  $("head-title").replaceChildren(
    `Layer ${state.layer} · head ${state.head} `,
    el("span", { className: "kind", textContent: row.kind, title: `attends above all to ${(KINDS[row.kind] || KINDS.mixed)[2]}`, style: { "--kind": kindColour(row.kind, theme()) } }),
  );
  const said = [["previous", "before"], ["self", "itself"], ["next", "after"], ["first", "first token"], ["separator", "separators"], ["duplicate", "duplicates"], ["induction", "induction"]]
    .filter(([name]) => row[name] !== null && row[name] !== undefined)
    .map(([name, label]) => `${label} ${percent(row[name])}`);
  $("measures").textContent = [`entropy ${number(row.entropy)} nats`, ...(row.distance === null || row.distance === undefined ? [] : [`distance ${number(row.distance, 1)} tokens`]), ...said].join("  ·  ");
  showMap();
  showTexts();
}

function showMap() {
  const p = panel(), labels = [p.labels("queries", level()), p.labels("keys", level())];
  const map = p.map(state.layer, state.head, level(), 640);
  mapAt = { ...drawMap($("map"), map, ...labels, theme(), mark()), map, labels };
  const [L, S] = p.size(level());
  const pooled = map.rows < L || map.columns < S;
  $("map").setAttribute("aria-label", `Map of layer ${state.layer}, head ${state.head}: ${L} rows that attend, ${S} columns that are attended to. Choose a word in the text beside it to have its weights read out.`);
  $("map-note").textContent = pooled
    ? `each cell is the largest weight among about ${Math.ceil(L / map.rows)} × ${Math.ceil(S / map.columns)} ${level()}`
    : "a row attends, a column is attended to";
  $("scale").replaceChildren(
    el("canvas", { width: 120, height: 10 }),
    ...[0, 0.05, 0.25, 1].map((w) => el("span", { textContent: String(w), style: { left: `${Math.sqrt(w) * 100}%` } })),
  );
  const context = $("scale").firstChild.getContext("2d");
  for (let x = 0; x < 120; x++) {
    context.fillStyle = css(colour((x / 119) ** 2, theme()));
    context.fillRect(x, 0, 1, 10);
  }
}

function showTexts() {
  const p = panel();
  const text = (side, title, axis) =>
    el(
      "div",
      { className: "text" },
      el("h3", { textContent: title }),
      el(
        "div",
        { className: "words", "data-side": side, role: "listbox", "aria-label": title },
        ...p.labels(side, level()).map((label, n) => {
          const set = (where) => () => { state[where] = { i: null, j: null, [axis]: n }; refresh(); };
          return el("span", {
            role: "option",
            className: "word",
            textContent: label,
            tabIndex: n === 0 ? 0 : -1,
            "data-n": n,
            onmouseenter: set("at"),
            onmouseleave: () => { state.at = null; refresh(); },
            onfocus: set("at"),
            onblur: () => { state.at = null; refresh(); },
            onclick: () => {
              const same = state.pinned && state.pinned[axis] === n && state.pinned.i !== state.pinned.j;
              state.pinned = same ? null : { i: null, j: null, [axis]: n };
              refresh();
            },
            onkeydown: (event) => {
              const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
              if (event.key === "Escape") { state.pinned = null; refresh(); }
              if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.target.click(); }
              if (!move) return;
              event.preventDefault();
              const next = event.target.parentElement.children[n + move];
              if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
            },
          });
        }),
      ),
    );
  $("texts").replaceChildren(text("queries", "These attend", "i"), text("keys", "These are attended to", "j"));
  refresh();
}

// What follows from the word that is pointed at: colours in the other text, the answer in words, the mark on the map.
function refresh() {
  const p = panel(), at = mark(), shade = theme();
  const texts = Object.fromEntries([...$("texts").querySelectorAll(".words")].map((node) => [node.dataset.side, node.children]));
  const clear = (nodes) => { for (const node of nodes) { node.style.background = node.style.color = ""; node.classList.remove("marked"); node.setAttribute("aria-selected", "false"); } };
  clear(texts.queries);
  clear(texts.keys);
  const answers = [];
  for (const [axis, way, side, other, verb] of [["i", "row", "queries", "keys", "attends to"], ["j", "column", "keys", "queries", "is attended to by"]]) {
    if (!at || at[axis] === null || at[axis] === undefined) continue;
    const node = texts[side][at[axis]];
    if (!node) continue;
    node.classList.add("marked");
    node.setAttribute("aria-selected", "true");
    const line = p.line(state.layer, state.head, level(), way, at[axis]);
    if (way === "row" || at.i === null || at.i === undefined)
      for (const [n, w] of line) {
        const c = colour(w, shade);
        texts[other][n].style.background = css(c);
        texts[other][n].style.color = isDark(c) ? "#fff" : "#16191d";
      }
    answers.push(answer(p.labels(side, level())[at[axis]], verb, p.labels(other, level()), line, way === "row" ? at.j : null));
  }
  const help = el("p", { className: "quiet", textContent: "Point at a word, or move to one with Tab and the arrow keys; press it to keep it." });
  $("answer").replaceChildren(...(answers.length ? answers.slice(0, 1) : [help]));
  drawMap($("map"), mapAt.map, ...mapAt.labels, shade, at);
}

function answer(word, verb, labels, line, wanted) {
  const shown = line.slice(0, SHOWN);
  const extra = wanted === null || wanted === undefined ? null : line.find(([n]) => n === wanted);
  if (extra && !shown.includes(extra)) shown[shown.length - 1] = extra;
  return el(
    "div",
    {},
    el("p", {}, el("strong", { textContent: word }), ` ${verb}`, shown.length ? "" : line.length || !panel().long ? " nothing" : ": too long a text to list; see the map"),
    el("ol", {}, ...shown.map(([n, w]) => el("li", { className: n === wanted ? "bar wanted" : "bar", style: { "--share": w } }, el("span", { textContent: labels[n] }), el("b", { textContent: percent(w) })))),
  );
}

function pointAtMap(event) {
  const box = $("map").getBoundingClientRect();
  const x = event.clientX - box.left - mapAt.left, y = event.clientY - box.top - mapAt.top;
  const [L, S] = panel().size(level());
  const inside = x >= 0 && y >= 0 && x < mapAt.width && y < mapAt.height;
  const at = inside ? { i: Math.floor((y / mapAt.height) * L), j: Math.floor((x / mapAt.width) * S) } : null;
  if (at && state.at && at.i === state.at.i && at.j === state.at.j) return;
  state.at = at;
  refresh();
}

function trust() {
  const { check } = meta;
  const stored = panels.map((p) => {
    const n = p.layers.reduce((sum, [, heads]) => sum + heads, 0), name = panels.length > 1 ? `${p.title}: ` : "";
    if (!p.long) return `${name}all ${n} heads, every weight, to ± ${small(0.5 / meta.step)}.`;
    const k = p.long.k, lines = p.levels.join(" and ");
    return `${name}all ${n} heads as maps of at most ${p.long.grid} × ${p.long.grid} cells (the largest weight in each, to ± 0.004)` + (k ? `; for each of the ${lines}, its ${k === 1 ? "largest weight" : `${k} largest weights`} in both directions, to ± ${small(0.5 / meta.step)}.` : ".");
  });
  const output = check.output === null ? "" : ` The layers' outputs rebuilt from these weights equal the model's own within ${small(check.output)} (rounding explains ${small(check.tolerance)}).`;
  const empty = check.empty ? ` ${check.empty} rows have nothing to attend to.` : "";
  $("trust").replaceChildren(
    el("p", {}, el("strong", { textContent: check.ok ? "How far to trust this. " : "Do not trust this: the check failed. " }), `The weights of every row sum to 1 within ${small(check.rows)}.${output}${empty}`),
    el("p", { textContent: `On this page: ${stored.join(" ")} A word's weight is the sum over its tokens where it is attended to, and their mean where it attends.` }),
  );
}

function best(p) {
  const link = p.links.find((l) => l.ranking.length && l.ranking[0][2] > 0);
  if (link) return link.ranking[0].slice(0, 2);
  const named = p.rows.find((row) => row.kind !== "mixed" && row.kind !== "broad") || p.rows[0];
  return [named.layer, named.head];
}

function save() {
  const name = `layer ${state.layer}, head ${state.head}`;
  const svg = svgMap(panel().map(state.layer, state.head, level(), 160), ...mapAt.labels, `${meta.title}, ${name}`);
  const url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  el("a", { href: url, download: `head-${state.layer}.${state.head}.svg` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

async function start() {
  ({ meta, panels } = await unpack(document.getElementById("headwise-data").textContent));
  const first = panels.findIndex((p) => p.links.length);
  state.panel = Math.max(first, 0);
  const p = panel(), [L, S] = p.size("tokens"), heads = p.layers.reduce((sum, [, n]) => sum + n, 0);
  $("title").textContent = meta.title;
  $("about").textContent = `${p.layers.length} layers, ${heads} heads, ${L === S ? `${L} tokens` : `${L} queries over ${S} keys`}. Which token looks at which, head by head.`;
  trust();
  const wanted = /^#(\d+)\.(\d+)$/.exec(location.hash), asked = wanted && [Number(wanted[1]), Number(wanted[2])];
  const link = p.links.find((l) => l.ranking.length && l.ranking[0][2] > 0);
  if (link) state.pinned = { i: link.sourceWord, j: link.targetWord };
  open(...(asked && p.rowOf.has(asked.join(".")) ? asked : best(p)));
  $("save").addEventListener("click", save);
  $("map").addEventListener("mousemove", pointAtMap);
  $("map").addEventListener("mouseleave", () => { state.at = null; refresh(); });
  $("map").addEventListener("click", () => { state.pinned = state.at; refresh(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.theme === "auto" && show());
  let width = 0;
  new ResizeObserver(() => {
    const now = $("map").parentElement.clientWidth;
    if (now && now !== width) { width = now; showMap(); }
  }).observe($("map").parentElement);
  root.dataset.ready = "yes";
}

start().catch((error) => {
  $("title").textContent = "This page could not be read";
  $("about").textContent = `${error}. It needs a browser of 2023 or newer, and the whole file.`;
  throw error;
});
