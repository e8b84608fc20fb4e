// Two texts or two models beside each other.

import { get } from "./api.js";
import { $, el, percent, plain, say, switcher } from "./dom.js";
import { choose } from "./grid.js";
import { pick, showHead } from "./head.js";
import { now, state } from "./state.js";
import { read, show } from "./text.js";

export async function hold(text, model) {
  say("Reading …");
  now.beside = await read(text, model, 0);
  Object.assign(state, { second: text, secondModel: model, beside: now.beside.id });
  await showMoved();
}

export async function showMoved() {
  $("alone").hidden = !now.beside;
  now.moved = null;
  if (now.beside) {
    try {
      now.moved = await get(`/api/${now.run.id}/moved/${now.beside.id}/${encodeURIComponent(state.part)}`);
      state.colour = "moved";
    } catch (error) {
      say(error.message);
      if (!now.beside.parts.some((p) => p.name === state.part && p.layers.some((l) => l.layer === state.layer && l.heads.includes(state.head)))) now.beside = null;
    }
  }
  $("moved").replaceChildren();
  if (now.moved) {
    const split = el("span", { className: "switch", role: "group", "aria-label": "The second map" });
    const paint = () => switcher(split, [["second", "Second"], ["difference", "Difference"]], state.split, (x) => ((state.split = x), paint(), showHead()));
    paint();
    $("moved").append(el("h2", { textContent: "What moved" }), split, el("ol", {}, ...now.moved.slice(0, 10).map((row) => el("li", {}, el("button", { type: "button", className: "bar", style: { "--share": row.moved / Math.max(now.moved[0].moved, 1e-9) }, onclick: () => { choose(row.layer, row.head); pick(row.most, state.j); } }, el("span", { textContent: `${row.layer}.${row.head}` }), el("small", { textContent: ` most at ${plain(row.label ?? String(row.most))}` }), el("b", { textContent: percent(row.moved) }))))));
  }
  show();
}
