// The page: what is chosen, where that stands in the address, and what follows from it.

import { bytes, get, onState, post } from "./api.js";
import { KINDS, css, dark, ink, rgb, shade } from "./colours.js";
import { MapView } from "./map.js";

const $ = (id) => document.getElementById(id);
const FIGURES = {
  kind: "What each head does most. Hover or focus a square for its kind; the two letters under it stand for it.",
  peak: "Peak: the largest weight of a row, on average.",
  entropy: "Entropy of a row, in nats: how widely a query looks.",
  distance: "Distance: how many tokens away a query looks, on average.",
  previous: "Share of the weight on the token before.",
  next: "Share of the weight on the token after.",
  self: "Share of the weight on the token itself.",
  first: "Share of the weight on the first token.",
  separator: "Share of the weight on separators.",
  duplicate: "Share of the weight on the same token elsewhere.",
  induction: "Share of the weight on what followed the same token before.",
  positional: "Share of the weight at the head's best fixed distance.",
  moved: "Moved: how much of its weight a head puts elsewhere in the second text.",
};
const HOW = { mean: ["Share", "The share of a query's weight that a cell's keys are given"], max: ["Largest", "The largest weight in a cell"] };

const state = { run: null, text: null, go: 0, model: 0, part: null, layer: null, head: null, how: "max", i: null, j: null, view: null, contrast: 1, colour: "kind", sort: "", only: "", beside: null, second: null, secondModel: 0, split: "second", off: [] };
let server, run, beside, ready = false;
const figures = new Map(), thumbs = new Map(), labelStores = new Map();
let moved = null, turn = 0, small = null;

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

const percent = (w) => (w >= 0.0995 ? `${(100 * w).toFixed(0)} %` : w >= 0.00095 ? `${(100 * w).toFixed(1)} %` : w > 0 ? "< 0.1 %" : "0 %");
const plain = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, "␣") || "∅";
const part = () => run.parts.find((p) => p.name === state.part) || run.parts[0];
const layerOf = (n = state.layer) => part().layers.find((l) => l.layer === n);
const base = (id = run.id) => `/api/${id}/${encodeURIComponent(state.part)}`;
const path = (id = run.id) => `${base(id)}/${state.layer}/${state.head}`;

// what tokens read like, fetched where they are looked at

class Labels {
  constructor(at, side, changed) {
    Object.assign(this, { at, side, changed, pages: new Map(), known: true });
  }

  get(n) {
    const page = this.page(Math.floor(n / 16384));
    return page ? page.labels[n % 16384] : undefined;
  }

  starts(n) {
    const page = this.page(Math.floor(n / 16384));
    return page ? Boolean(page.starts[n % 16384]) : true;
  }

  page(k) {
    if (!this.pages.has(k)) {
      this.pages.set(k, null);
      get(`${this.at}/tokens/${this.side}/${k}`).then(
        (found) => {
          this.pages.set(k, found);
          this.known = found.known;
          this.changed();
        },
        () => setTimeout(() => this.pages.delete(k), 1000),
      );
    }
    return this.pages.get(k);
  }
}

function labels(id = run.id) {
  const key = `${id}/${state.part}`;
  if (!labelStores.has(key)) {
    if (labelStores.size > 8) labelStores.clear();
    const changed = () => (maps.forEach((map) => map.draw()), showWords());
    labelStores.set(key, { queries: new Labels(base(id), "queries", changed), keys: new Labels(base(id), "keys", changed) });
  }
  return labelStores.get(key);
}

// the address

const NUMBERS = ["layer", "head", "i", "j", "go", "model", "contrast", "secondModel"];
function toAddress() {
  if (!ready) return;
  const said = new URLSearchParams();
  if (state.text !== null && state.text.length <= 3000) said.set("text", state.text);
  else if (run) said.set("run", run.id);
  for (const name of ["part", ...NUMBERS, "how", "colour", "sort", "only", "split"]) {
    const x = state[name];
    if (x !== null && x !== "" && !(x === 0 && ["go", "model", "secondModel"].includes(name)) && !(name === "contrast" && x === 1) && !(name === "colour" && x === "kind") && !(name === "split" && !beside)) said.set(name, x);
  }
  if (state.view) said.set("view", state.view.join(","));
  if (state.off.length) said.set("off", state.off.map((p) => p.join(".")).join(","));
  if (beside) said.set("second", state.second ?? "");
  history.replaceState(null, "", `#${said}`);
}

function fromAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of ["run", "text", "part", "how", "colour", "sort", "only", "second", "split"]) if (said.has(name)) state[name] = said.get(name);
  for (const name of NUMBERS) if (/^\d{1,9}$/.test(said.get(name) ?? "")) state[name] = Number(said.get(name));
  const view = (said.get("view") ?? "").split(",").map(Number);
  state.view = view.length === 3 && view.every(Number.isFinite) && view[2] > 0 ? view : null;
  state.off = [...(said.get("off") ?? "").matchAll(/(\d+)\.(\d+)/g)].map((m) => [Number(m[1]), Number(m[2])]);
  if (!HOW[state.how]) state.how = "max";
  if (!FIGURES[state.colour]) state.colour = "kind";
  if (![1, 2, 4, 8].includes(state.contrast)) state.contrast = 1;
}

// opening a text

const say = (words) => ($("said").textContent = words);

async function read(text, model, go, quiet = false) {
  if (!quiet) say("Reading …");
  const found = await post("/api/run", { text, model, generate: go });
  say("");
  return found;
}

async function open(found, keep = false) {
  run = found;
  state.run = run.id;
  figures.clear();
  thumbs.clear();
  moved = null;
  if (!run.parts.some((p) => p.name === state.part)) state.part = run.parts[0].name;
  if (!layerOf() || !layerOf().heads.includes(state.head)) {
    const last = part().layers[part().layers.length - 1];
    Object.assign(state, { layer: last.layer, head: last.heads[Math.min(10, last.heads.length - 1)], view: null });
  }
  if (!keep) Object.assign(state, { i: null, j: null, view: null, off: [] });
  if (beside && !beside.parts.some((p) => p.name === state.part)) beside = null;
  document.title = `${run.title}: headwise`;
  $("title").textContent = run.title;
  show();
}

function show() {
  const p = part(), heads = p.layers.reduce((n, l) => n + l.heads.length, 0), { L, S } = layerOf();
  const size = L === S ? `${L.toLocaleString("en")} tokens` : `${L.toLocaleString("en")} queries over ${S.toLocaleString("en")} keys`;
  $("about").textContent = `${p.layers.length} layers, ${heads} heads, ${size}${run.prompt ? `, ${run.prompt} of them the prompt and the rest generated` : ""}.`;
  switcher($("parts"), run.parts.map((q) => [q.name, q.title]), state.part, (name) => {
    state.part = name;
    open(run);
  });
  $("parts").hidden = run.parts.length < 2;
  showGrid();
  showHead(state.view);
}

function switcher(box, choices, chosen, choose) {
  box.replaceChildren(...choices.map(([value, label, title]) => el("button", { type: "button", textContent: label, title: title ?? "", "aria-pressed": String(value === chosen), onclick: () => choose(value) })));
}

// the grid

const figureOf = (layer, head, name) => {
  if (name === "moved") return moved?.find((row) => row.layer === layer && row.head === head)?.moved ?? null;
  return figures.get(layer)?.find((row) => row.head === head)?.[name] ?? null;
};

function showGrid() {
  const p = part();
  const names = Object.keys(FIGURES).filter((name) => name !== "moved" || beside);
  if (!names.includes(state.colour)) state.colour = "kind";
  $("colour").replaceChildren(...names.map((name) => el("option", { value: name, textContent: name, selected: name === state.colour })));
  $("only").replaceChildren(...["", ...Object.keys(KINDS)].map((name) => el("option", { value: name, textContent: name || "all", selected: name === state.only })));
  $("sort").value = state.sort;
  $("gloss").textContent = FIGURES[state.colour];
  const most = Math.max(...p.layers.map((l) => l.heads.length));
  $("grid").style.setProperty("--columns", most);
  document.querySelector("main").classList.toggle("wide", most > 20);
  if (small === null) small = p.layers.length > 16;
  showSmall();
  const lines = p.layers.map((l) => el("div", { role: "row", className: "line", "data-layer": l.layer }, el("span", { role: "rowheader", className: "label", textContent: String(l.layer) }), ...l.heads.map((h) => cell(l.layer, h))));
  $("grid").replaceChildren(el("div", { role: "row", className: "line" }, el("span", { role: "columnheader", className: "label", textContent: "L" , title: "layer"}), ...Array.from({ length: most }, (_, h) => el("span", { role: "columnheader", className: "label", textContent: String(h) }))), ...lines);
  const ticket = ++turn;
  seen.disconnect();
  (async () => {
    await Promise.race([maps[0].drawn, new Promise((go) => setTimeout(go, 4000))]); // the map comes first
    if (ticket !== turn) return;
    lines.forEach((line) => seen.observe(line));
    for (const l of [...p.layers].sort((a, b) => (b.layer === state.layer) - (a.layer === state.layer))) {
      if (ticket !== turn) return;
      if (!figures.has(l.layer)) {
        try {
          const found = await get(`${base()}/${l.layer}/figures`);
          if (ticket !== turn) return;
          figures.set(l.layer, found);
          if (!found.length) $("gloss").textContent = "No kinds and figures: they look at every weight, and the text is too long for that.";
        } catch {
          break;
        }
      }
      paintCells();
      if (l.layer === state.layer) showFigures();
    }
    paintCells();
    showFigures();
    document.documentElement.dataset.figures = "yes";
  })();
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const layer = Number(target.dataset.layer);
    if (!isIntersecting) {
      target.stop?.abort();
      continue;
    }
    if (thumbs.has(layer)) continue;
    target.stop = new AbortController();
    const id = run.id, of = layerOf(layer);
    bytes(`${base()}/${layer}/thumbs`, target.stop.signal).then(
      ({ data }) => {
        if (run.id !== id) return;
        const all = new Uint8Array(data), found = new Map();
        for (let at = 0, n = 0; at < all.length; n++) {
          const [r, c] = [all[at], all[at + 1]];
          found.set(of.heads[n], { r, c, values: all.subarray(at + 2, at + 2 + r * c) });
          at += 2 + r * c;
        }
        thumbs.set(layer, found);
        for (const button of target.querySelectorAll("button")) paintThumb(button);
      },
      () => {},
    );
  }
});

function cell(layer, head) {
  const chosen = layer === state.layer && head === state.head;
  return el(
    "button",
    {
      type: "button", role: "gridcell", className: "cell", tabIndex: chosen ? 0 : -1, "data-layer": layer, "data-head": head, "aria-selected": String(chosen),
      onclick: () => choose(layer, head),
      onkeydown: (event) => {
        const all = [...$("grid").querySelectorAll("button:not([hidden])")], n = all.indexOf(event.currentTarget), wide = state.sort ? 1 : layerOf(layer).heads.length;
        const to = { ArrowLeft: n - 1, ArrowRight: n + 1, ArrowUp: n - wide, ArrowDown: n + wide, Home: 0, End: all.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        const next = all[Math.min(Math.max(to, 0), all.length - 1)];
        choose(Number(next.dataset.layer), Number(next.dataset.head));
        next.focus();
      },
    },
    el("canvas", { width: 24, height: 24, "aria-hidden": "true" }),
    el("span", { className: "code", "aria-hidden": "true" }),
  );
}

function paintCells() {
  const name = state.colour, cells = [...$("grid").querySelectorAll("button")], values = cells.map((c) => (name === "kind" ? 0 : figureOf(Number(c.dataset.layer), Number(c.dataset.head), name)));
  const most = Math.max(1e-9, ...values.map((x) => x ?? 0));
  cells.forEach((button, n) => {
    const layer = Number(button.dataset.layer), head = Number(button.dataset.head), kind = figureOf(layer, head, "kind"), value = values[n], code = button.lastChild;
    const off = state.off.some(([l, h]) => l === layer && h === head), said = name === "kind" ? kind : value === null ? null : `${name} ${value.toFixed(2)}`;
    button.setAttribute("aria-label", `Layer ${layer}, head ${head}${kind ? `: ${kind}, ${KINDS[kind][3]}` : ""}${name !== "kind" && said ? `; ${said}` : ""}${off ? "; switched off" : ""}`);
    button.title = button.getAttribute("aria-label");
    button.classList.toggle("is-off", off);
    button.hidden = Boolean(state.only) && kind !== state.only;
    if (name === "kind") {
      code.textContent = kind ? KINDS[kind][2] : "";
      code.style.background = kind ? KINDS[kind][dark() ? 1 : 0] : "none";
      code.style.color = kind ? ink(rgb(KINDS[kind][dark() ? 1 : 0])) : "";
    } else {
      const t = value === null ? 0 : Math.max(0, value / most);
      code.textContent = value === null ? "" : value >= 9.95 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2).replace(/^0/, "");
      const c = shade(t);
      code.style.background = css(c);
      code.style.color = ink(c);
    }
    paintThumb(button);
  });
  const grid = $("grid");
  grid.classList.toggle("sorted", Boolean(state.sort));
  if (state.sort) {
    const order = cells.map((c, n) => [c, name === "kind" ? Object.keys(KINDS).indexOf(figureOf(Number(c.dataset.layer), Number(c.dataset.head), "kind")) : -(values[n] ?? -1)]).sort((a, b) => a[1] - b[1]);
    order.forEach(([c], n) => (c.style.order = n));
  } else cells.forEach((c) => (c.style.order = ""));
}

function showSmall() {
  $("grid").classList.toggle("bare", small);
  $("small").setAttribute("aria-pressed", String(small));
}

function paintThumb(button) {
  const map = thumbs.get(Number(button.dataset.layer))?.get(Number(button.dataset.head));
  if (!map) return;
  const canvas = button.firstChild, small = document.createElement("canvas");
  small.width = map.c;
  small.height = map.r;
  const image = small.getContext("2d").createImageData(map.c, map.r);
  map.values.forEach((x, n) => image.data.set([...shade(x / 255), 255], 4 * n));
  small.getContext("2d").putImageData(image, 0, 0);
  canvas.width = canvas.height = 24 * (devicePixelRatio || 1);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = map.c > canvas.width;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
}

function choose(layer, head) {
  Object.assign(state, { layer, head });
  for (const button of $("grid").querySelectorAll("button")) {
    const chosen = Number(button.dataset.layer) === layer && Number(button.dataset.head) === head;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
  showHead();
}

// the head

const maps = ["a", "b"].map((name, n) => new MapView($(`map-${name}`), "", {
  onPoint: (place) => {
    maps[1 - n].at = place && maps[1 - n].what && place.i < maps[1 - n].what.L && place.j < maps[1 - n].what.S ? place : null;
    maps[1 - n].draw();
    point(place, n);
  },
  onPick: ({ i, j }) => pick(i, j),
  onMove: (view) => {
    if (n === 0) {
      state.view = view[2] < 0.98 * maps[0].what.S ? view : null;
      toAddress();
    }
    const other = maps[1 - n];
    if (beside && !$("map-b").hidden && other.ready && other.view().some((x, k) => Math.abs(x - view[k]) > Math.max(0.02, view[2] / 200))) other.go(view, true);
  },
  onNote: (words) => ($("note").textContent = words),
}));

async function showHead(view = null) {
  toAddress();
  const { layer, head } = state, here = path();
  $("head-title").textContent = `Layer ${layer} · head ${head}`;
  switcher($("how"), Object.entries(HOW).map(([name, [label, title]]) => [name, label, title]), state.how, (how) => {
    state.how = how;
    showHead();
  });
  $("contrast").value = String(state.contrast);
  showFigures();
  showOff();
  const at = await get(`${here}/map`).catch(() => null);
  if (!at || here !== path()) return;
  $("note").textContent = "";
  const what = { path: here, L: at.L, S: at.S, top: at.top, how: state.how, contrast: state.contrast, labels: labels(), prompt: run.prompt, title: beside ? `First: ${run.text === null ? run.title : short(run.text)}` : `${state.how === "max" ? "Largest weight" : "Share of the weight"} · queries down, keys along` };
  maps[0].show(what, view);
  $("map-b").hidden = !beside;
  $("maps").classList.toggle("two", Boolean(beside));
  if (beside) {
    const there = path(beside.id), second = await get(`${there}/map`).catch(() => null);
    if (second && here === path()) {
      const difference = state.split === "difference";
      maps[1].show({ ...what, path: there, L: second.L, S: second.S, top: second.top, how: difference ? "difference" : state.how, beside: difference ? run.id : null, labels: labels(beside.id), prompt: beside.prompt, title: difference ? "Second less first: blue more, orange less" : `Second: ${beside.text === null ? beside.title : short(beside.text)}` }, view);
    }
  }
  const fit = (x, n) => (x === null ? null : Math.min(x, n - 1));
  pick(fit(state.i, at.L), fit(state.j, at.S), false);
}

const short = (text) => ([...text].length > 70 ? [...text].slice(0, 69).join("") + "…" : text);

function showFigures() {
  const row = figures.get(state.layer)?.find((r) => r.head === state.head);
  if (!row) return ($("figures").textContent = "");
  const said = ["peak", "previous", "next", "self", "first", "separator", "duplicate", "induction", "positional"].filter((name) => row[name] !== null && row[name] !== undefined).map((name) => `${name} ${percent(row[name])}${row[`${name}_null`] != null ? ` (null ${percent(row[`${name}_null`])})` : ""}`);
  $("figures").replaceChildren(el("b", { textContent: `${row.kind}` }), ` (${KINDS[row.kind]?.[3] ?? ""}): ${said.join(", ")}; entropy ${row.entropy?.toFixed(2) ?? "–"} nats.`);
}

let asked = 0, waiting;
function point(place, n) {
  const ticket = ++asked;
  clearTimeout(waiting);
  if (!place) return;
  waiting = setTimeout(async () => {
    if (n && !beside) return;
    const found = await get(`${path(n ? beside.id : run.id)}/cell?i=${place.i}&j=${place.j}`).catch(() => null);
    if (!found || ticket !== asked) return;
    const end = (name, x, at) => el("div", {}, el("span", { className: "quiet", textContent: `${name} ${at}: ` }), x ? el("span", {}, `… ${plain(x.before)} `, el("mark", { textContent: plain(x.token) }), ` ${plain(x.after)} …`) : el("span", { textContent: `number ${at}` }));
    $("point").replaceChildren(el("b", { className: "weight", textContent: found.weight === null ? "not a number" : `${found.weight.toPrecision(4)}` }), end("query", found.query, found.i), end("key", found.key, found.j));
    $("point").dataset.at = `${found.i},${found.j}`;
  }, 60);
}

async function pick(i, j, tell = true) {
  Object.assign(state, { i, j });
  maps.forEach((map) => map.mark(i, j));
  if (tell) toAddress();
  const here = path();
  showWords();
  $("keys-title").textContent = i === null ? "A query's keys: pick a place in the map" : `What query ${i} “${plain(labels().queries.get(i) ?? String(i))}” looks at`;
  $("readers-title").textContent = j === null ? "A key's readers" : `Who reads key ${j} “${plain(labels().keys.get(j) ?? String(j))}”`;
  rowWeights = null;
  if (i === null) $("keys").replaceChildren();
  if (j === null) $("readers").replaceChildren();
  await Promise.all([
    i !== null && get(`${here}/row?i=${i}`).then((found) => here === path() && state.i === i && (list($("keys"), found, "key"), (rowWeights = new Map(found.places.map((p, n) => [p, found.weights[n]]))), showWords(), patches(found)), () => {}),
    j !== null && get(`${here}/row?j=${j}`).then((found) => here === path() && state.j === j && list($("readers"), found, "query"), () => {}),
  ]);
  document.documentElement.dataset.picked = `${i},${j}`;
}

let rowWeights = null;
function list(box, found, side) {
  box.replaceChildren(
    ...found.places.slice(0, 10).map((place, n) =>
      el("li", {}, el("button", { type: "button", className: "bar", style: { "--share": Math.min(1, found.weights[n] / Math.max(found.weights[0], 1e-9)) }, onclick: () => {
        if (side === "key") pick(state.i, place);
        else pick(place, state.j);
        maps[0].look(state.i ?? 0, state.j ?? 0);
      } }, el("span", { textContent: `${plain(found.labels ? found.labels[n] : String(place))}` }), el("small", { textContent: ` ${place}` }), el("b", { textContent: percent(found.weights[n]) }))),
    ),
  );
}

const AROUND = 160;
function showWords() {
  if (!run || !part()) return;
  const { L, S } = layerOf(), store = labels(), cross = part().cross;
  const centre = state.i ?? state.j ?? 0, box = $("words");
  const sides = cross || L !== S ? [["queries", L, state.i ?? 0], ["keys", S, state.j ?? 0]] : [["keys", S, centre]];
  const nodes = [];
  for (const [side, n, at] of sides) {
    const from = Math.max(0, at - AROUND), to = Math.min(n, at + AROUND + 1), line = el("p", { className: "line-of-words" });
    if (sides.length > 1) line.append(el("b", { textContent: side === "queries" ? "Queries " : "Keys " }));
    if (from) line.append(el("span", { className: "quiet", textContent: `… from ${from} ` }));
    for (let t = from; t < to; t++) {
      const label = store[side].get(t), w = side === "keys" ? rowWeights?.get(t) : undefined, c = w === undefined ? null : shade(Math.sqrt(w));
      const query = t === state.i && (side === "queries" || sides.length === 1), key = t === state.j && side === "keys", made = run.prompt !== null && t >= run.prompt;
      const said = `${plain(label ?? String(t))}${w !== undefined ? `, ${percent(w)}` : ""}${query ? ", the query" : ""}${key ? ", the key" : ""}${made ? ", generated" : ""}`;
      line.append(el("button", { type: "button", tabIndex: query || (state.i === null && t === from) ? 0 : -1, className: `word${query ? " query" : ""}${key ? " key" : ""}${made ? " made" : ""}${store[side].starts(t) ? "" : " glued"}`, title: said, "aria-label": said, textContent: plain(label ?? String(t)), "data-n": t, "data-side": side, style: c ? { background: css(c), color: ink(c) } : {} }));
    }
    if (to < n) line.append(el("span", { className: "quiet", textContent: ` … to ${n - 1}` }));
    nodes.push(line);
  }
  const focus = document.activeElement?.closest?.(".word")?.dataset;
  const kept = focus && [focus.side, focus.n];
  box.replaceChildren(...nodes);
  if (kept) box.querySelector(`[data-side="${kept[0]}"][data-n="${kept[1]}"]`)?.focus({ preventScroll: true });
}

$("words").addEventListener("click", (event) => {
  const word = event.target.closest(".word");
  if (!word) return;
  const n = Number(word.dataset.n), { L, S } = layerOf();
  if (event.shiftKey || (word.dataset.side === "keys" && L !== S)) pick(state.i, n);
  else pick(n, state.j);
  maps[0].look(state.i ?? 0, state.j ?? (state.i ?? 0));
});
$("words").addEventListener("keydown", (event) => {
  const word = event.target.closest(".word"), to = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!word || !to) return;
  const all = [...$("words").querySelectorAll(".word")], next = all[all.indexOf(word) + to];
  event.preventDefault();
  if (next) next.tabIndex = 0, next.focus();
});

// a picture's patches

function patches(found) {
  const { S } = layerOf(), tokens = labels().keys, n = [S, S - 1, S - 2].map((x) => Math.sqrt(x)).find(Number.isInteger);
  const box = $("patches");
  box.hidden = tokens.known || !n || n < 3;
  if (box.hidden) return;
  const lead = S - n * n, canvas = $("patch-map"), context = canvas.getContext("2d"), side = canvas.width / n, most = Math.max(...found.weights, 1e-9);
  canvas.setAttribute("aria-label", `The weights of query ${state.i} over ${n} x ${n} patches`);
  const paint = (image) => {
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (image) context.drawImage(image, 0, 0, canvas.width, canvas.height);
    for (let p = 0; p < n * n; p++) {
      const w = found.places.indexOf(p + lead), t = w < 0 ? 0 : Math.sqrt(found.weights[w] / most), [r, g, b] = shade(t);
      context.fillStyle = image ? `rgba(255,120,0,${0.75 * t})` : `rgb(${r},${g},${b})`;
      context.fillRect((p % n) * side, Math.floor(p / n) * side, side, side);
    }
  };
  if (!server.image) return paint(null);
  const image = new Image();
  image.onload = () => paint(image);
  image.src = "/image";
}

// switching heads off

let offTicket = 0;
async function showOff() {
  const can = run.model !== null && run.prompt === null, on = state.off.some(([l, h]) => l === state.layer && h === state.head), ticket = ++offTicket;
  $("off").hidden = !can;
  $("off").textContent = on ? "Switch on again" : "Switch off";
  $("off").setAttribute("aria-pressed", String(on));
  if (!can || !state.off.length) return $("effect").replaceChildren();
  const key = JSON.stringify([run.id, state.part, state.off]);
  if ($("effect").dataset.key === key && $("effect").childElementCount) return;
  $("effect").dataset.key = key;
  $("effect").textContent = "Running without …";
  const found = await post(`/api/${run.id}/off/${encodeURIComponent(state.part)}`, { off: state.off }).catch((error) => ({ error: error.message }));
  if (ticket !== offTicket && $("effect").dataset.key !== key) return;
  if (found.error) return ($("effect").textContent = found.error);
  const names = state.off.map((p) => p.join(".")).join(", "), nodes = [el("h3", { textContent: `Without ${names}` })];
  if (found.next) {
    const most = Math.max(...found.next.before, ...found.next.after);
    nodes.push(el("p", { className: "quiet", textContent: found.next.masked ? "What stands at the mask, before and after" : "The next token, before and after" }));
    nodes.push(el("ol", { className: "next" }, ...found.next.tokens.map((token, n) => el("li", {}, el("span", { className: "token", textContent: plain(token) }), el("span", { className: "bar", style: { "--share": found.next.before[n] / most } }, el("b", { textContent: percent(found.next.before[n]) })), el("span", { className: "bar after", style: { "--share": found.next.after[n] / most } }, el("b", { textContent: percent(found.next.after[n]) }))))));
  }
  if (found.change) {
    const order = found.change.map((c, n) => [c, n]).sort((a, b) => b[0] - a[0]).slice(0, 6);
    nodes.push(el("p", {}, `Of the model's ${found.what}, these tokens' changed most: `, ...order.flatMap(([c, n], k) => [k ? ", " : "", el("b", { textContent: plain(labels().queries.get(n) ?? String(n)) }), ` ${percent(c)}`]), `. The mean of all keeps a cosine of ${found.alike}.`));
  }
  $("effect").replaceChildren(...nodes);
}

// two beside each other

async function hold(text, model) {
  say("Reading …");
  beside = await read(text, model, 0);
  Object.assign(state, { second: text, secondModel: model, beside: beside.id });
  await showMoved();
}

async function showMoved() {
  $("alone").hidden = !beside;
  moved = null;
  if (beside) {
    try {
      moved = await get(`/api/${run.id}/moved/${beside.id}/${encodeURIComponent(state.part)}`);
      state.colour = "moved";
    } catch (error) {
      say(error.message);
      if (!beside.parts.some((p) => p.name === state.part && p.layers.some((l) => l.layer === state.layer && l.heads.includes(state.head)))) beside = null;
    }
  }
  $("moved").replaceChildren();
  if (moved) {
    const split = el("span", { className: "switch", role: "group", "aria-label": "The second map" });
    const paint = () => switcher(split, [["second", "Second"], ["difference", "Difference"]], state.split, (x) => ((state.split = x), paint(), showHead()));
    paint();
    $("moved").append(el("h2", { textContent: "What moved" }), split, el("ol", {}, ...moved.slice(0, 10).map((row) => el("li", {}, el("button", { type: "button", className: "bar", style: { "--share": row.moved / Math.max(moved[0].moved, 1e-9) }, onclick: () => { choose(row.layer, row.head); pick(row.most, state.j); } }, el("span", { textContent: `${row.layer}.${row.head}` }), el("small", { textContent: ` most at ${plain(row.label ?? String(row.most))}` }), el("b", { textContent: percent(row.moved) }))))));
  }
  show();
}

// what the controls do

$("texts").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value, model = Number($("model").value || 0), go = Math.min(200, Math.max(0, Number($("generate").value) || 0));
  try {
    const found = await read(text, model, go);
    Object.assign(state, { text, model, go });
    beside = null;
    await open(found);
    await showMoved();
  } catch (error) {
    say(error.message);
  }
});
$("hold").addEventListener("click", () => hold($("text").value, Number($("model").value || 0)).catch((error) => say(error.message)));
$("alone").addEventListener("click", () => {
  beside = null;
  Object.assign(state, { second: null, beside: null, colour: "kind" });
  showMoved();
});
$("off").addEventListener("click", () => {
  const at = state.off.findIndex(([l, h]) => l === state.layer && h === state.head);
  if (at < 0) state.off.push([state.layer, state.head]);
  else state.off.splice(at, 1);
  toAddress();
  paintCells();
  showOff();
});
for (const name of ["colour", "sort", "only"])
  $(name).addEventListener("change", () => {
    state[name] = $(name).value;
    $("gloss").textContent = FIGURES[state.colour];
    paintCells();
    toAddress();
  });
$("small").addEventListener("click", () => ((small = !small), showSmall()));
$("contrast").addEventListener("change", () => ((state.contrast = Number($("contrast").value)), showHead()));
$("zoom").addEventListener("click", (event) => event.target.dataset.by && maps[0].zoom(Number(event.target.dataset.by)));
let finds = { text: null, places: [], at: -1 };
$("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("find").value.trim();
  if (!text) return;
  try {
    if (finds.text !== `${run.id} ${text}`) finds = { text: `${run.id} ${text}`, places: (await get(`${base()}/search/queries?q=${encodeURIComponent(text)}`)).places, at: -1 };
  } catch (error) {
    return ($("found").textContent = error.message);
  }
  if (!finds.places.length) return ($("found").textContent = "not in the text");
  finds.at = (finds.at + 1) % finds.places.length;
  const i = finds.places[finds.at];
  $("found").textContent = `${finds.at + 1} of ${finds.places.length}`;
  pick(i, state.j);
  maps[0].look(i, state.j ?? Math.min(i, layerOf().S - 1));
});
$("copy").addEventListener("click", async () => {
  toAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    $("copy").textContent = "Copied";
  } catch {
    $("copy").textContent = "Copy it from the address bar";
  }
  setTimeout(() => ($("copy").textContent = "Copy link"), 1600);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => run && (paintCells(), showHead()));
addEventListener("hashchange", () => start().catch((error) => say(error.message)));
onState((what, words) => {
  $("lost").hidden = what === "back";
  $("lost").textContent = words ?? "";
  document.documentElement.dataset.lost = what;
  if (what === "back") start().catch((error) => say(error.message));
});

// beginning, and beginning again

async function start() {
  server = await get("/api/state");
  fromAddress();
  const can = server.models.length > 0;
  $("texts").hidden = !can;
  $("model").replaceChildren(...server.models.map((m, n) => el("option", { value: n, textContent: m.name, selected: n === state.model })));
  $("model-label").hidden = server.models.length < 2;
  $("generate-label").hidden = !server.models.some((m) => m.generates);
  labelStores.clear();
  const wanted = new URLSearchParams(location.hash.slice(1));
  let found;
  if (can && wanted.has("text")) found = await read(state.text, Math.min(state.model, server.models.length - 1), state.go, true);
  else if (wanted.has("run")) found = await get(`/api/${encodeURIComponent(state.run)}/about`).catch(() => null);
  if (!found && server.runs.length) found = await get(`/api/${server.runs[0].id}/about`);
  if (!found) {
    state.text = server.text;
    found = await read(server.text, 0, 0, true);
  }
  if (found.text !== null) {
    $("text").value = state.text = found.text;
    $("generate").value = state.go;
  } else state.text = null;
  beside = null;
  if (can && wanted.has("second")) beside = await read(state.second, state.secondModel, 0, true).catch(() => null);
  const colour = state.colour;
  ready = true;
  await open(found, true);
  if (beside) {
    await showMoved();
    state.colour = colour;
    paintCells();
  }
  document.documentElement.dataset.ready = "yes";
}

window.headwise = { maps, state };
start().catch((error) => {
  $("about").textContent = `This could not be opened: ${error.message}`;
});
