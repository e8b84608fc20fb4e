// One head: its map, what is pointed at, what a query looks at and who reads a key.

import { get } from "./api.js";
import { KINDS } from "./colours.js";
import { MapView } from "./map.js";
import { figures } from "./grid.js";
import { hasHead } from "./beside.js";
import { toAddress } from "./address.js";
import { $, el, percent, plain, short, switcher } from "./dom.js";
import { labels } from "./labels.js";
import { showOff } from "./off.js";
import { patches } from "./patches.js";
import { HOW, now, path, state } from "./state.js";
import { showWords } from "./words.js";

export const maps = ["a", "b"].map((name, n) => new MapView($(`map-${name}`), "", {
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
    if (!now.beside || $("map-b").hidden || !other.ready) return;
    if (maps[n].all) {
      if (!other.all) other.whole(true);
    } else if (other.view().some((x, k) => Math.abs(x - view[k]) > Math.max(0.02, view[2] / 200))) other.go(view, true);
  },
  onNote: (words) => ($("note").textContent = words),
}));

export async function showHead(view = null) {
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
  $("point").replaceChildren();
  const what = { path: here, L: at.L, S: at.S, top: at.top, how: state.how, contrast: state.contrast, labels: labels(), prompt: now.run.prompt, title: now.beside ? `First: ${named(now.run)}` : `${state.how === "max" ? "Largest weight" : "Share of the weight"} · queries down, keys along` };
  maps[0].show(what, view);
  const two = hasHead();
  $("map-b").hidden = !two;
  $("maps").classList.toggle("two", two);
  if (now.beside && !two) $("note").textContent = `${now.beside.title} has no head ${layer}.${head} to hold beside this one.`;
  if (two) {
    const there = path(now.beside.id), second = await get(`${there}/map`).catch(() => null);
    if (second && here === path()) {
      const difference = state.split === "difference";
      maps[1].show({ ...what, path: there, L: second.L, S: second.S, top: second.top, how: difference ? "difference" : state.how, beside: difference ? now.run.id : null, labels: labels(now.beside.id), prompt: now.beside.prompt, title: difference ? "Second less first: blue more, orange less, grey not in both" : `Second: ${named(now.beside)}` }, view);
    }
  }
  const fit = (x, n) => (x === null ? null : Math.min(x, n - 1));
  pick(fit(state.i, at.L), fit(state.j, at.S), false);
}

// What is held beside each other, by what they differ in.
function named(one) {
  const text = one.text === null ? one.title : short(one.text);
  return one.text !== null && now.run.model !== now.beside.model ? `${one.title} · ${text}` : text;
}

export function showFigures() {
  const row = figures.get(state.layer)?.find((r) => r.head === state.head);
  if (!row) return ($("figures").textContent = "");
  const mix = row.kind === "mixed" && row.mix ? `: ${row.mix}` : "";
  const said = ["peak", "previous", "next", "self", "first", "separator", "duplicate", "induction", "positional"].filter((name) => row[name] !== null && row[name] !== undefined).map((name) => `${name} ${percent(row[name])}${row[`${name}_null`] != null ? ` (null ${percent(row[`${name}_null`])})` : ""}`);
  $("figures").replaceChildren(el("b", { textContent: `${row.kind}` }), ` (${KINDS[row.kind]?.[3] ?? ""}${mix}): ${said.join(", ")}; entropy ${row.entropy?.toFixed(2) ?? "–"} nats.`);
}

let asked = 0, waiting;
function point(place, n) {
  const ticket = ++asked;
  clearTimeout(waiting);
  if (!place) return;
  waiting = setTimeout(async () => {
    if (n && !now.beside) return;
    const first = n && state.split === "difference" ? `&beside=${now.run.id}` : "";
    const found = await get(`${path(n ? now.beside.id : now.run.id)}/cell?i=${place.i}&j=${place.j}${first}`).catch(() => null);
    if (!found || ticket !== asked) return;
    const exact = (x) => (x === null ? "not a number" : x.toPrecision(4)), both = found.before !== undefined && found.before !== null && found.weight !== null;
    const signed = (x) => `${x < 0 ? "−" : "+"}${exact(Math.abs(x))}`;
    const end = (name, x, at) => el("div", {}, el("span", { className: "quiet", textContent: `${name} ${at}${x ? ": " : ""}` }), x ? el("span", { dir: "auto" }, `… ${plain(x.before, true)}${x.glued ? "" : " "}`, el("mark", { textContent: plain(x.token) }), `${plain(x.after, true)} …`) : "");
    $("point").replaceChildren(el("div", { className: "weight" }, el("b", { textContent: both ? signed(found.weight - found.before) : exact(found.weight) }), ...(both ? [el("small", { textContent: `${exact(found.before)} in the first, ${exact(found.weight)} in the second` })] : found.before === null ? [el("small", { textContent: "the first has no such place" })] : [])), end("query", found.query, found.i), end("key", found.key, found.j));
    $("point").dataset.at = `${found.i},${found.j}`;
  }, 60);
}

export async function pick(i, j, tell = true) {
  Object.assign(state, { i, j });
  maps.forEach((map) => map.mark(i, j));
  if (tell) toAddress();
  const here = path();
  showWords();
  showTitles();
  rowWeights = null;
  if (i === null) $("keys").replaceChildren();
  if (j === null) $("readers").replaceChildren();
  await Promise.all([
    i !== null && get(`${here}/row?i=${i}`).then((found) => here === path() && state.i === i && (list($("keys"), found, "key"), (rowWeights = found.all ? new Map(found.all.entries()) : new Map(found.places.map((p, n) => [p, found.weights[n]]))), showWords(), patches(rowWeights)), () => {}),
    j !== null && get(`${here}/row?j=${j}`).then((found) => here === path() && state.j === j && list($("readers"), found, "query"), () => {}),
  ]);
  document.documentElement.dataset.picked = `${i},${j}`;
}

export function showTitles() {
  const named = (side, n) => {
    const label = labels()[side].named(n);
    return label === undefined ? String(n) : `${n} “${plain(label)}”`;
  };
  $("keys-title").textContent = state.i === null ? "A query's keys: pick a place in the map" : `What query ${named("queries", state.i)} looks at`;
  $("readers-title").textContent = state.j === null ? "A key's readers" : `Who reads key ${named("keys", state.j)}`;
}

export let rowWeights = null;
function list(box, found, side) {
  box.replaceChildren(
    ...found.places.slice(0, 10).map((place, n) =>
      el("li", {}, el("button", { type: "button", className: "bar", style: { "--share": Math.min(1, found.weights[n] / Math.max(found.weights[0], 1e-9)) }, onclick: () => {
        if (side === "key") pick(state.i, place);
        else pick(place, state.j);
        maps[0].look(state.i ?? 0, state.j ?? 0);
      } }, ...(found.labels ? [el("span", { textContent: plain(found.labels[n]) }), el("small", { textContent: ` ${place}` })] : [el("span", { textContent: String(place) })]), el("b", { textContent: percent(found.weights[n]) }))),
    ),
  );
}
