// Heads switched off, and what the model does without them.

import { post } from "./api.js";
import { $, el, percent, plain } from "./dom.js";
import { labels } from "./labels.js";
import { now, state } from "./state.js";

export async function showOff() {
  const can = now.run.model !== null && now.run.prompt === null, on = state.off.some(([l, h]) => l === state.layer && h === state.head);
  $("off").hidden = !can;
  $("cannot").textContent = can ? "" : now.run.model === null
    ? `No head can be switched off here: a saved run holds what was computed, not the model that computed it.${now.server.models.length ? " Read a text above with the model." : " Name the model too (headwise serve RUN MODEL), and read the text with it."}`
    : "No head can be switched off in a text that was generated: without it another text would have been written. Set “Go on for” to 0 and read it.";
  $("off").textContent = on ? "Switch on again" : "Switch off";
  $("off").setAttribute("aria-pressed", String(on));
  if (!can || !state.off.length) {
    delete $("effect").dataset.key; // an answer that is still to come is of no use
    return $("effect").replaceChildren();
  }
  const key = JSON.stringify([now.run.id, state.part, state.off]);
  if ($("effect").dataset.key === key && $("effect").childElementCount) return;
  $("effect").dataset.key = key;
  $("effect").textContent = "Running without …";
  const found = await post(`/api/${now.run.id}/off/${encodeURIComponent(state.part)}`, { off: state.off }).catch((error) => ({ error: error.message }));
  if ($("effect").dataset.key !== key) return;
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
