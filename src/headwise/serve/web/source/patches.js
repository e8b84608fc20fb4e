// A picture's patches under a query's weights: what it looks at stays as bright as it is, the rest fades.

import { $, percent } from "./dom.js";
import { dark, rgb, shade } from "./colours.js";
import { pick } from "./head.js";
import { layerOf, now, part, state } from "./state.js";

let picture = null, laid = null;

// How many patches stand beside each other, and how many places come before the first.
function grid(S) {
  for (const lead of [0, 1, 2, 5]) if (Number.isInteger(Math.sqrt(S - lead)) && S - lead >= 9) return { lead, n: Math.sqrt(S - lead) };
  return null;
}

async function image() {
  if (!now.server.image) return null;
  picture ??= new Promise((go) => {
    const made = new Image();
    made.onload = () => go(made);
    made.onerror = () => go(null);
    made.src = "/image";
  });
  return picture;
}

export async function patches(weights) {
  const layer = layerOf(), found = layer.patches ? grid(layer.S) : null, box = $("patches");
  box.hidden = !found;
  laid = found && { ...found, weights };
  if (!found) return;
  const { n, lead } = found, under = await image();
  if (laid?.weights !== weights) return;
  const canvas = $("patch-map"), scale = devicePixelRatio || 1, wide = 320, high = under ? Math.min(640, Math.round((320 * under.height) / under.width)) : 320;
  Object.assign(canvas, { width: wide * scale, height: high * scale });
  canvas.style.aspectRatio = `${wide} / ${high}`;
  const context = canvas.getContext("2d"), at = Array.from({ length: n * n }, (_, p) => weights.get(p + lead) ?? 0), most = Math.max(...at, 1e-9), best = at.indexOf(Math.max(...at));
  context.scale(scale, scale);
  if (under) context.drawImage(under, 0, 0, wide, high);
  const paper = rgb(dark() ? "#101316" : "#ffffff"), edge = (k, room) => Math.round((k * room) / n);
  at.forEach((w, p) => {
    const x = edge(p % n, wide), y = edge(Math.floor(p / n), high), t = Math.sqrt(w / most);
    context.fillStyle = under ? `rgba(${paper.join(",")},${0.92 * (1 - t)})` : `rgb(${shade(t).join(",")})`;
    context.fillRect(x, y, edge((p % n) + 1, wide) - x, edge(Math.floor(p / n) + 1, high) - y);
  });
  const outline = (p, colour, dash) => {
    if (p < 0 || p >= n * n) return;
    const x = edge(p % n, wide), y = edge(Math.floor(p / n), high), w = edge((p % n) + 1, wide) - x, h = edge(Math.floor(p / n) + 1, high) - y;
    for (const [width, style] of [[4, paper.length && `rgb(${paper.join(",")})`], [2, colour]]) {
      Object.assign(context, { lineWidth: width, strokeStyle: style });
      context.setLineDash(dash);
      context.strokeRect(x + 1, y + 1, w - 2, h - 2);
    }
  };
  outline(best, dark() ? "#ffffff" : "#000000", [4, 3]);
  const own = !part().cross && state.i >= lead; // the query is a patch itself
  if (own) outline(state.i - lead, dark() ? "#ffb454" : "#b84500", []);
  const place = (p) => `row ${Math.floor(p / n)}, column ${p % n}`, rest = Array.from({ length: lead }, (_, k) => weights.get(k) ?? 0).reduce((a, b) => a + b, 0);
  const said = `Of query ${state.i}${own ? ` (${place(state.i - lead)})` : ""}: most on the patch in ${place(best)}, ${percent(at[best])}${lead ? `; ${percent(rest)} on the ${lead === 1 ? "place" : `${lead} places`} before the patches` : ""}.`;
  canvas.setAttribute("aria-label", `${n} by ${n} patches. ${said}`);
  $("patches-said").textContent = `${said} ${own ? "Solid frame: the query; dashed" : "Dashed frame"}: where most lies.`;
}

const patchAt = (event) => {
  const b = $("patch-map").getBoundingClientRect(), k = (x, room) => Math.min(laid.n - 1, Math.max(0, Math.floor((x / room) * laid.n)));
  return k(event.clientY - b.top, b.height) * laid.n + k(event.clientX - b.left, b.width);
};
$("patch-map").addEventListener("pointermove", (event) => {
  if (!laid) return;
  const p = patchAt(event);
  $("patch-map").title = `Row ${Math.floor(p / laid.n)}, column ${p % laid.n} (place ${p + laid.lead}): ${percent(laid.weights.get(p + laid.lead) ?? 0)}. Click to make it the ${part().cross ? "key" : "query"}.`;
});
$("patch-map").addEventListener("click", (event) => {
  if (!laid) return;
  const place = patchAt(event) + laid.lead;
  if (part().cross) pick(state.i, place);
  else pick(place, state.j);
});
