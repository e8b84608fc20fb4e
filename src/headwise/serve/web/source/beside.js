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
  Object.assign(state, { second: text, secondRun: null, secondModel: model, beside: now.beside.id });
  await showMoved();
}

export async function holdRun(id) {
  now.beside = await get(`/api/${id}/about`);
  Object.assign(state, { second: null, secondRun: id, beside: id });
  await showMoved();
}

export function alone() {
  now.beside = null;
  Object.assign(state, { second: null, secondRun: null, beside: null, colour: state.colour === "moved" ? "kind" : state.colour });
}

// Whether what is held beside has the head that is looked at.
export const hasHead = () => Boolean(now.beside?.parts.find((p) => p.name === state.part)?.layers.find((l) => l.layer === state.layer)?.heads.includes(state.head));

const heads = (one) => JSON.stringify(one.parts.find((p) => p.name === state.part)?.layers.map((l) => [l.layer, l.heads]));
const alike = () => heads(now.run) === heads(now.beside);

export async function showMoved() {
  $("alone").hidden = !now.beside;
  now.moved = null;
  let why = "";
  if (now.beside && !alike()) why = "the two models have other heads";
  else if (now.beside) {
    try {
      now.moved = await get(`/api/${now.run.id}/moved/${now.beside.id}/${encodeURIComponent(state.part)}`);
      if (now.moved.length) state.colour = "moved";
      else [now.moved, why] = [null, "the two have no token in common"];
    } catch (error) {
      why = error.message;
    }
  }
  if (why) {
    state.split = "second";
    if (state.colour === "moved") state.colour = "kind";
  }
  $("moved").replaceChildren();
  if (why) $("moved").append(el("p", { className: "quiet", textContent: `What moved cannot be said: ${why}.` }));
  if (now.moved) {
    const split = el("span", { className: "switch", role: "group", "aria-label": "The second map" });
    const paint = () => switcher(split, [["second", "Second"], ["difference", "Difference"]], state.split, (x) => ((state.split = x), paint(), showHead()));
    paint();
    $("moved").append(el("h2", { textContent: "What moved" }), split, el("ol", {}, ...now.moved.slice(0, 10).map((row) => el("li", {}, el("button", { type: "button", className: "bar", style: { "--share": row.moved / Math.max(now.moved[0].moved, 1e-9) }, onclick: () => { choose(row.layer, row.head); pick(row.most, state.j); } }, el("span", { textContent: `${row.layer}.${row.head}` }), el("small", { textContent: ` most at ${plain(row.label ?? String(row.most))}` }), el("b", { textContent: percent(row.moved) }))))));
  }
  show();
}
