// The text around the place that was picked, shaded by what its query looks at.

import { css, ink, shade } from "./colours.js";
import { $, el, percent, plain } from "./dom.js";
import { maps, pick, rowWeights } from "./head.js";
import { labels } from "./labels.js";
import { layerOf, now, part, state } from "./state.js";

const AROUND = 160;
export function showWords() {
  if (!now.run || !part()) return;
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
      const query = t === state.i && (side === "queries" || sides.length === 1), key = t === state.j && side === "keys", made = now.run.prompt !== null && t >= now.run.prompt;
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
