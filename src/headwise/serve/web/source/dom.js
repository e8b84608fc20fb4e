// Small things for building the page, and how tokens and figures are written.

import { el } from "../../../view/web/element.js";

export { el };
export const $ = (id) => document.getElementById(id);
export const percent = (w) => (w >= 0.0995 ? `${(100 * w).toFixed(0)} %` : w >= 0.00095 ? `${(100 * w).toFixed(1)} %` : w > 0 ? "< 0.1 %" : "0 %");
export const plain = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, "␣") || "∅";
export const short = (text) => ([...text].length > 70 ? [...text].slice(0, 69).join("") + "…" : text);
export const say = (words) => ($("said").textContent = words);

export function switcher(box, choices, chosen, choose) {
  box.replaceChildren(...choices.map(([value, label, title]) => el("button", { type: "button", textContent: label, title: title ?? "", "aria-pressed": String(value === chosen), onclick: () => choose(value) })));
}
