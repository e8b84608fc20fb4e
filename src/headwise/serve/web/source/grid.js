// The grid of all heads.

import { bytes, get } from "./api.js";
import { css, dark, ink, KINDS, rgb, shade, table } from "./colours.js";
import { $, el } from "./dom.js";
import { maps, showFigures, showHead } from "./head.js";
import { base, FIGURES, layerOf, now, part, state } from "./state.js";

export const figures = new Map();
const thumbs = new Map();
const sight = new Map(), coming = new Map(); // by layer: its squares that are in sight, its maps that are asked for
let turn = 0, due = 0, small = null;

export function forgetHeads() {
  figures.clear();
  thumbs.clear();
  for (const stop of coming.values()) stop.abort();
  coming.clear();
}

const figureOf = (layer, head, name) => {
  if (name === "moved") return now.moved?.find((row) => row.layer === layer && row.head === head)?.moved ?? null;
  return figures.get(layer)?.find((row) => row.head === head)?.[name] ?? null;
};

export function showGrid() {
  const p = part();
  const names = Object.keys(FIGURES).filter((name) => name !== "moved" || now.beside);
  if (!names.includes(state.colour)) state.colour = "kind";
  $("colour").replaceChildren(...names.map((name) => el("option", { value: name, textContent: name, selected: name === state.colour })));
  $("only").replaceChildren(...["", ...Object.keys(KINDS)].map((name) => el("option", { value: name, textContent: name || "all", selected: name === state.only })));
  $("sort").value = state.sort;
  $("gloss").textContent = FIGURES[state.colour];
  const most = Math.max(...p.layers.map((l) => l.heads.length));
  $("grid").style.setProperty("--columns", most);
  document.querySelector(".halves").classList.toggle("wide", most > 20);
  if (small === null) small = p.layers.length > 16;
  showSmall();
  const lines = p.layers.map((l) => el("div", { role: "row", className: "line", "data-layer": l.layer }, el("span", { role: "rowheader", className: "label", textContent: String(l.layer) }), ...l.heads.map((h) => cell(l.layer, h))));
  $("grid").replaceChildren(el("div", { role: "row", className: "line" }, el("span", { role: "columnheader", className: "label", textContent: "L" , title: "layer"}), ...Array.from({ length: most }, (_, h) => el("span", { role: "columnheader", className: "label", textContent: String(h) }))), ...lines);
  paintThumbs();
  const ticket = ++turn;
  seen.disconnect();
  sight.clear();
  (async () => {
    await Promise.race([maps[0].drawn, new Promise((go) => setTimeout(go, 4000))]); // the map comes first
    if (ticket !== turn) return;
    for (const button of $("grid").querySelectorAll("button")) seen.observe(button); // a sorted grid has no lines to be seen
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
      due ||= requestAnimationFrame(() => ((due = 0), paintCells()));
      if (l.layer === state.layer) showFigures();
    }
    paintCells();
    showFigures();
    document.documentElement.dataset.figures = "yes";
  })();
}

const seen = new IntersectionObserver((entries) => {
  const touched = new Set();
  for (const { isIntersecting, target } of entries) {
    const layer = Number(target.dataset.layer), squares = sight.get(layer) ?? new Set();
    if (isIntersecting) squares.add(target);
    else squares.delete(target);
    sight.set(layer, squares);
    touched.add(layer);
  }
  for (const layer of touched) {
    if (!sight.get(layer).size) {
      coming.get(layer)?.abort();
      coming.delete(layer);
    } else if (!thumbs.has(layer) && !coming.has(layer)) fetchThumbs(layer);
  }
});

async function fetchThumbs(layer) {
  const stop = new AbortController(), of = layerOf(layer);
  coming.set(layer, stop);
  try {
    const { data } = await bytes(`${base()}/${layer}/thumbs`, stop.signal), all = new Uint8Array(data), found = new Map();
    if (stop.signal.aborted) return;
    for (let at = 0, n = 0; at < all.length; n++) {
      const [r, c] = [all[at], all[at + 1]];
      found.set(of.heads[n], { r, c, values: all.subarray(at + 2, at + 2 + r * c) });
      at += 2 + r * c;
    }
    thumbs.set(layer, found);
    for (const button of $("grid").querySelectorAll(`button[data-layer="${layer}"]`)) paintThumb(button);
  } catch {
    // given up, or the server is away: asked for again when it is next seen
  } finally {
    if (coming.get(layer) === stop) coming.delete(layer);
  }
}

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

export function paintCells() {
  const name = state.colour, cells = [...$("grid").querySelectorAll("button")], values = cells.map((c) => (name === "kind" ? 0 : figureOf(Number(c.dataset.layer), Number(c.dataset.head), name)));
  const most = Math.max(1e-9, ...values.map((x) => x ?? 0));
  cells.forEach((button, n) => {
    const layer = Number(button.dataset.layer), head = Number(button.dataset.head), kind = figureOf(layer, head, "kind"), value = values[n], code = button.lastChild;
    const off = state.off.some(([l, h]) => l === layer && h === head);
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
    // What is spoken holds what is seen, letter for letter: so that the square can be called by it.
    const does = kind ? `${kind}, ${KINDS[kind][3]}` : "", said = name === "kind" ? `${code.textContent}, ${does}` : `${name} ${code.textContent || "not known"}${does && `; ${does}`}`;
    button.setAttribute("aria-label", `Layer ${layer}, head ${head}${code.textContent || name !== "kind" ? `: ${said}` : ""}${off ? "; switched off" : ""}`);
    button.title = button.getAttribute("aria-label");
    button.classList.toggle("is-off", off);
  });
  const grid = $("grid");
  for (const line of grid.children) line.hidden = Boolean(state.sort) && !line.querySelector("button:not([hidden])");
  grid.classList.toggle("sorted", Boolean(state.sort));
  if (state.sort) {
    const order = cells.map((c, n) => [c, name === "kind" ? Object.keys(KINDS).indexOf(figureOf(Number(c.dataset.layer), Number(c.dataset.head), "kind")) : -(values[n] ?? -1)]).sort((a, b) => a[1] - b[1]);
    order.forEach(([c], n) => (c.style.order = n));
  } else cells.forEach((c) => (c.style.order = ""));
}

export function toggleSmall() {
  small = !small;
  showSmall();
}

function showSmall() {
  $("grid").classList.toggle("bare", small);
  $("small").setAttribute("aria-pressed", String(small));
}

let colours = null;

function paintThumb(button) {
  const map = thumbs.get(Number(button.dataset.layer))?.get(Number(button.dataset.head));
  if (!map) return;
  if (colours?.dark !== dark()) colours = { dark: dark(), shades: table(false, 1) };
  const canvas = button.firstChild, made = document.createElement("canvas"), wide = 24 * (devicePixelRatio || 1);
  made.width = map.c;
  made.height = map.r;
  const image = made.getContext("2d").createImageData(map.c, map.r), pixels = new Uint32Array(image.data.buffer);
  map.values.forEach((x, n) => (pixels[n] = colours.shades[Math.round((x * 1023) / 255)]));
  made.getContext("2d").putImageData(image, 0, 0);
  canvas.width = canvas.height = wide;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = map.c > canvas.width;
  context.drawImage(made, 0, 0, canvas.width, canvas.height);
}

export function paintThumbs() {
  for (const button of $("grid").querySelectorAll("button")) paintThumb(button);
}

export function choose(layer, head) {
  Object.assign(state, { layer, head });
  for (const button of $("grid").querySelectorAll("button")) {
    const chosen = Number(button.dataset.layer) === layer && Number(button.dataset.head) === head;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
  showHead();
  bring();
}

// On a phone a tap is to show its result: scrolls just so far that the map is seen, and the square still is.
function bring() {
  if (!matchMedia("(max-width: 820px)").matches) return;
  const below = $("maps").getBoundingClientRect().bottom - innerHeight + 8, above = document.querySelector(".cell[aria-selected=true]").getBoundingClientRect().top - 8;
  if (below > 0 && above > 0) scrollBy(0, Math.min(below, above));
}
