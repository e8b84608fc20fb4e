// Reading a text, and showing what was read.

import { post } from "./api.js";
import { $, say, switcher } from "./dom.js";
import { forgetHeads, showGrid } from "./grid.js";
import { showHead } from "./head.js";
import { layerOf, now, part, state } from "./state.js";

export async function read(text, model, go, quiet = false) {
  if (!quiet) say("Reading …");
  const found = await post("/api/run", { text, model, generate: go });
  say("");
  return found;
}

export async function open(found, keep = false) {
  now.run = found;
  state.run = now.run.id;
  forgetHeads();
  now.moved = null;
  if (!now.run.parts.some((p) => p.name === state.part)) state.part = now.run.parts[0].name;
  if (!layerOf() || !layerOf().heads.includes(state.head)) {
    const last = part().layers[part().layers.length - 1];
    Object.assign(state, { layer: last.layer, head: last.heads[Math.min(10, last.heads.length - 1)], view: null });
  }
  if (!keep) Object.assign(state, { i: null, j: null, view: null, off: [] });
  document.title = `${now.run.title}: headwise`;
  $("title").textContent = now.run.title;
  show();
}

export function show() {
  const p = part(), heads = p.layers.reduce((n, l) => n + l.heads.length, 0), { L, S } = layerOf();
  const size = L === S ? `${L.toLocaleString("en")} tokens` : `${L.toLocaleString("en")} queries over ${S.toLocaleString("en")} keys`;
  $("about").textContent = `${p.layers.length} layers, ${heads} heads, ${size}${now.run.prompt ? `, ${now.run.prompt} of them the prompt and the rest generated` : ""}.`;
  switcher($("parts"), now.run.parts.map((q) => [q.name, q.title]), state.part, (name) => {
    state.part = name;
    open(now.run);
  });
  $("parts").hidden = now.run.parts.length < 2;
  showGrid();
  showHead(state.view);
}
