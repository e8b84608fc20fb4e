// Small things for building the page, and how tokens and figures are written.

import { el } from "../../../view/web/element.js";

export { el };
export const $ = (id) => document.getElementById(id);
export const percent = (w) => (w >= 0.0995 ? `${(100 * w).toFixed(0)} %` : w >= 0.00095 ? `${(100 * w).toFixed(1)} %` : w > 0 ? "< 0.1 %" : "0 %");
// A token as it can be seen: line ends, tabs and blanks by a sign of their own. within: a stretch of text, which keeps its blanks.
export const plain = (text, within = false) => {
  const code = (c) => `⟨${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  let seen = text.replace(/\r?\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\p{Cc}\u202a-\u202e\u2066-\u2069]/gu, code);
  if (/^\p{Cf}+$/u.test(seen)) seen = seen.replace(/./gu, code);
  return within ? seen : seen.replace(/^[\s\u3000]+$/u, (blank) => "␣".repeat(Math.min(blank.length, 8))) || "∅";
};
export const short = (text) => ([...text].length > 70 ? [...text].slice(0, 69).join("") + "…" : text);
export const say = (words) => ($("said").textContent = words);

export function switcher(box, choices, chosen, choose) {
  box.replaceChildren(...choices.map(([value, label, title]) => el("button", { type: "button", textContent: label, title: title ?? "", "aria-pressed": String(value === chosen), onclick: () => choose(value) })));
}
