// A view has an address of its own.

import { begin, FIGURES, HOW, now, state } from "./state.js";

const NUMBERS = ["layer", "head", "i", "j", "go", "model", "contrast", "secondModel"];
let at = null;

export function toAddress() {
  if (!now.ready) return;
  const said = new URLSearchParams();
  if (state.text !== null && state.text.length <= 3000) said.set("text", state.text);
  else if (now.run) said.set("run", now.run.id);
  for (const name of ["part", ...NUMBERS, "how", "colour", "sort", "only", "split"]) {
    const x = state[name];
    if (x !== null && x !== "" && !(x === 0 && ["go", "model", "secondModel"].includes(name)) && !(name === "contrast" && x === 1) && !(name === "colour" && x === "kind") && !(name === "split" && !now.beside)) said.set(name, x);
  }
  if (state.view) said.set("view", state.view.join(","));
  if (state.off.length) said.set("off", state.off.map((p) => p.join(".")).join(","));
  if (now.beside && state.secondRun) said.set("secondRun", state.secondRun);
  else if (now.beside) said.set("second", state.second ?? "");
  const view = `#${said}`, place = JSON.stringify([state.text, now.run?.id, state.part, state.layer, state.head, now.beside?.id]);
  if (view === location.hash) return;
  // Another text or head is a page of its own, to which Back leads; what is picked or zoomed there is not.
  if (at !== null && place !== at) history.pushState(null, "", view);
  else history.replaceState(null, "", view);
  at = place;
}

export function fromAddress() {
  begin();
  at = null;
  const said = new URLSearchParams(location.hash.slice(1));
  for (const name of ["run", "text", "part", "how", "colour", "sort", "only", "second", "secondRun", "split"]) if (said.has(name)) state[name] = said.get(name);
  for (const name of NUMBERS) if (/^\d{1,9}$/.test(said.get(name) ?? "")) state[name] = Number(said.get(name));
  const view = (said.get("view") ?? "").split(",").map(Number);
  state.view = view.length === 3 && view.every(Number.isFinite) && view[2] > 0 ? view : null;
  state.off = [...(said.get("off") ?? "").matchAll(/(\d+)\.(\d+)/g)].map((m) => [Number(m[1]), Number(m[2])]);
  if (!["second", "difference"].includes(state.split)) state.split = "second";
  if (!HOW[state.how]) state.how = "max";
  if (!FIGURES[state.colour]) state.colour = "kind";
  if (![1, 2, 4, 8].includes(state.contrast)) state.contrast = 1;
}
