// The controls, beginning, and beginning again.

import { get, onState } from "./api.js";
import { dark } from "./colours.js";
import { fromAddress, toAddress } from "./address.js";
import { alone, hold, holdRun, showMoved } from "./beside.js";
import { $, el, say, short } from "./dom.js";
import { paintCells, paintThumbs, showGrid, toggleSmall } from "./grid.js";
import { maps, pick, showHead } from "./head.js";
import { forgetLabels } from "./labels.js";
import { showOff } from "./off.js";
import { base, FIGURES, layerOf, now, state } from "./state.js";
import { open, read } from "./text.js";

$("texts").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("text").value, model = Number($("model").value || 0), go = Math.min(200, Math.max(0, Number($("generate").value) || 0));
  try {
    const found = await read(text, model, go);
    alone();
    Object.assign(state, { text, model, go });
    await open(found);
    await showMoved();
  } catch (error) {
    say(error.message);
  }
});
$("hold").addEventListener("click", () => hold($("text").value, Number($("model").value || 0)).catch((error) => say(error.message)));
$("alone").addEventListener("click", () => {
  alone();
  showOpened();
  showMoved();
});
$("opened").addEventListener("change", async () => {
  try {
    const found = await get(`/api/${$("opened").value}/about`);
    alone();
    state.text = null;
    await open(found);
    showOpened();
    await showMoved();
  } catch (error) {
    say(error.message);
  }
});
$("second").addEventListener("change", async () => {
  try {
    if ($("second").value) return await holdRun($("second").value);
    alone();
    await showMoved();
  } catch (error) {
    say(error.message);
  }
});
$("off").addEventListener("click", () => {
  const at = state.off.findIndex(([l, h]) => l === state.layer && h === state.head);
  if (at < 0) state.off.push([state.layer, state.head]);
  else state.off.splice(at, 1);
  toAddress();
  paintCells();
  showOff();
});
for (const name of ["colour", "sort", "only"])
  $(name).addEventListener("change", () => {
    state[name] = $(name).value;
    $("gloss").textContent = FIGURES[state.colour];
    paintCells();
    toAddress();
  });
$("small").addEventListener("click", () => toggleSmall());
$("contrast").addEventListener("change", () => ((state.contrast = Number($("contrast").value)), showHead()));
$("zoom").addEventListener("click", (event) => event.target.dataset.by && maps[0].zoom(Number(event.target.dataset.by)));
let finds = { text: null, places: [], at: -1 };
$("search").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("find").value.trim();
  if (!text) return;
  try {
    if (finds.text !== `${now.run.id} ${text}`) finds = { text: `${now.run.id} ${text}`, places: (await get(`${base()}/${state.layer}/search/queries?q=${encodeURIComponent(text)}`)).places, at: -1 };
  } catch (error) {
    return ($("found").textContent = error.message);
  }
  if (!finds.places.length) return ($("found").textContent = "not in the text");
  finds.at = (finds.at + 1) % finds.places.length;
  const i = finds.places[finds.at];
  $("found").textContent = `${finds.at + 1} of ${finds.places.length}`;
  pick(i, state.j);
  maps[0].look(i, state.j ?? Math.min(i, layerOf().S - 1));
});
$("copy").addEventListener("click", async () => {
  toAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    $("copy").textContent = "Copied";
  } catch {
    $("copy").textContent = "Copy it from the address bar";
  }
  setTimeout(() => ($("copy").textContent = "Copy link"), 1600);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => now.run && (paintCells(), paintThumbs(), showHead()));
addEventListener("hashchange", () => start().catch((error) => say(error.message)));
onState((what, words) => {
  $("lost").hidden = what === "back";
  $("lost").textContent = words ?? "";
  document.documentElement.dataset.lost = what;
  if (what === "back") start().catch((error) => say(error.message));
});

// What was opened with the server, to be looked at or held beside.
function showOpened() {
  const { runs, models } = now.server, option = (run, chosen) => el("option", { value: run.id, textContent: run.title, selected: run.id === chosen });
  const own = runs.some((run) => run.id === now.run.id) ? [] : [el("option", { value: now.run.id, textContent: `${now.run.title}: ${short(now.run.text ?? "")}`, selected: true })];
  $("openeds").hidden = runs.length + (models.length ? 1 : 0) < 2;
  $("opened").replaceChildren(...own, ...runs.map((run) => option(run, now.run.id)));
  $("second").replaceChildren(el("option", { value: "", textContent: "nothing" }), ...runs.filter((run) => run.id !== now.run.id).map((run) => option(run, state.secondRun)));
  $("second-label").hidden = $("second").options.length < 2;
}

// beginning, and beginning again

async function start() {
  now.server = await get("/api/state");
  fromAddress();
  const can = now.server.models.length > 0;
  $("texts").hidden = !can;
  $("model").replaceChildren(...now.server.models.map((m, n) => el("option", { value: n, textContent: m.name, selected: n === state.model })));
  $("model-label").hidden = now.server.models.length < 2;
  $("generate-label").hidden = !now.server.models.some((m) => m.generates);
  forgetLabels();
  const wanted = new URLSearchParams(location.hash.slice(1));
  let found, gone = "";
  if (can && wanted.has("text")) found = await read(state.text, Math.min(state.model, now.server.models.length - 1), state.go, true);
  else if (wanted.has("run")) found = await get(`/api/${encodeURIComponent(state.run)}/about`).catch((error) => ((gone = error.message), null));
  if (!found && now.server.runs.length) found = await get(`/api/${now.server.runs[0].id}/about`);
  if (!found) {
    state.text = now.server.text;
    found = await read(now.server.text, 0, 0, true);
  }
  if (found.text !== null) {
    $("text").value = state.text = found.text;
    $("generate").value = state.go;
  } else state.text = null;
  const lack = (error) => ((gone = error.message), null);
  now.beside = null;
  if (can && wanted.has("second")) now.beside = await read(state.second, state.secondModel, 0, true).catch(lack);
  else if (state.secondRun) now.beside = await get(`/api/${encodeURIComponent(state.secondRun)}/about`).catch(lack);
  const colour = state.colour;
  now.ready = true;
  await open(found, true);
  showOpened();
  await showMoved();
  if (now.beside && FIGURES[colour] && (colour !== "moved" || now.moved)) {
    state.colour = colour;
    showGrid();
    toAddress();
  }
  if (gone) say(`Not all of this address could be opened: ${gone}.`);
  document.documentElement.dataset.ready = "yes";
}

window.headwise = { maps, state };
start().catch((error) => {
  $("about").textContent = `This could not be opened: ${error.message}`;
});
