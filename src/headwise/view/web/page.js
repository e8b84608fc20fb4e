// The page: what is chosen, and what follows from it.

const state = { panel: 0, layer: 0, head: 0, level: "words", only: null, link: null, pinned: null, at: null, view: null, theme: "auto" };
let meta, panels, mapAt, thumbnailsDue = 0;

const panel = () => panels[state.panel];
const theme = () => (state.theme === "auto" ? (dark.matches ? "dark" : "light") : state.theme);
const rowOf = (layer, head) => panel().rowOf.get(`${layer}.${head}`) || { kind: "mixed" };
const level = () => (panel().levels.includes(state.level) ? state.level : panel().levels[0]);
const mark = () => state.at || state.pinned;

function switcher(box, choices, chosen, choose) {
  box.replaceChildren(
    ...choices.map(([value, label]) =>
      el("button", {
        type: "button",
        textContent: label,
        "aria-pressed": String(value === chosen),
        onclick: () => {
          choose(value);
          box.querySelector("[aria-pressed=true]").focus();
        },
      }),
    ),
  );
  box.hidden = choices.length < 2;
}

function show() {
  root.dataset.theme = theme();
  switcher($("parts"), panels.map((p, n) => [n, p.title]), state.panel, (n) => {
    const same = panels[n].rowOf.has(`${state.layer}.${state.head}`) && panels[n].text !== panel().text;
    const chosen = same ? [state.layer, state.head] : best(panels[n]);
    Object.assign(state, { panel: n, at: null, view: null, only: null, ...linked(panels[n], same ? state.link : null) });
    open(...chosen);
  });
  switcher($("levels"), panel().levels.map((name) => [name, name === "words" ? "Words" : "Tokens"]), level(), (name) => {
    Object.assign(state, { level: name, at: null, pinned: null, view: null });
    show();
  });
  switcher($("themes"), [["auto", "Auto"], ["light", "Light"], ["dark", "Dark"]], state.theme, (name) => {
    state.theme = name;
    perhaps(() => localStorage.setItem("headwise-theme", name));
    show();
  });
  showTitle();
  showGrid();
  showLegend();
  showLinks();
  showHead();
}

function showTitle() {
  const p = panel(), [L, S] = p.size("tokens"), heads = p.layers.reduce((sum, [, n]) => sum + n, 0);
  const text = [...(p.text || "")], shown = text.length > 100 ? `${text.slice(0, 100).join("").trimEnd()}…` : text.join("");
  $("title").textContent = shown || meta.title;
  $("title").title = text.length > 100 ? text.slice(0, 2000).join("") : "";
  $("about").textContent = `${shown ? `${meta.title}: ` : ""}${p.layers.length} layers, ${heads} heads, ${L === S ? `${L} tokens` : `${L} queries over ${S} keys`}. Which token looks at which, head by head.`;
}

function open(layer, head, focus = false) {
  const moved = layer !== state.layer || head !== state.head;
  Object.assign(state, { layer, head });
  if (moved) perhaps(() => history.replaceState(null, "", `#${layer}.${head}`));
  if ($("grid").querySelector(`[data-head="${layer}.${head}"]`) && root.dataset.panel === String(state.panel)) {
    for (const button of $("grid").querySelectorAll("button")) {
      const chosen = button.dataset.head === `${layer}.${head}`;
      button.tabIndex = chosen ? 0 : -1;
      button.setAttribute("aria-selected", String(chosen));
      if (chosen && focus) button.focus({ preventScroll: true });
      if (chosen) reveal(button, $("grid").parentElement);
    }
    showLinks();
    showHead();
  } else {
    root.dataset.panel = state.panel;
    show();
  }
}

function trust() {
  const { check } = meta;
  const stored = panels.map((p) => {
    const n = p.layers.reduce((sum, [, heads]) => sum + heads, 0), name = panels.length > 1 ? `${p.title}: ` : "";
    if (!p.long) return `${name}all ${n} heads, every weight, to ± ${small(0.5 / meta.step)}.`;
    const k = p.long.k, lines = p.levels.join(" and ");
    return `${name}all ${n} heads as maps of at most ${p.long.grid} × ${p.long.grid} cells over ${p.levels[0]} (the largest weight in each, to ± 0.004)` + (k ? `; for each of the ${lines}, its ${k === 1 ? "largest weight" : `${k} largest weights`} in both directions, to ± ${small(0.5 / p.long.step)}.` : ".");
  });
  const output = check.output === null ? "" : ` The layers' outputs rebuilt from these weights equal the model's own within ${small(check.output)} (rounding explains ${small(check.tolerance)}).`;
  const empty = check.empty ? ` ${check.empty} rows have nothing to attend to.` : "";
  $("trust").replaceChildren(
    el("p", {}, el("strong", { textContent: check.ok ? "How far to trust this. " : "Do not trust this: the check failed. " }), `The weights of every row sum to 1 within ${small(check.rows)}.${output}${empty}`),
    el("p", { textContent: `On this page: ${stored.join(" ")} A word's weight is the sum over its tokens where it is attended to, and their mean where it attends.` }),
  );
}

const firstLink = (p) => p.links.findIndex((link) => link.ranking.length && link.ranking[0][2] > 0);

// A link of a part, with its words marked; the first one where none is named.
function linked(p, n = null) {
  const at = given(n) && p.links[n] ? n : firstLink(p);
  return at < 0 ? { link: null, pinned: null } : { link: at, pinned: { i: p.links[at].sourceWord, j: p.links[at].targetWord } };
}

function best(p) {
  const n = firstLink(p);
  if (n >= 0) return p.links[n].ranking[0].slice(0, 2);
  const named = p.rows.find((row) => row.kind !== "mixed" && row.kind !== "broad") || p.rows[0];
  return [named.layer, named.head];
}

function save(what) {
  const { layer, head } = state, name = `layer ${layer}, head ${head}`, v = view(), p = panel();
  if (what === "svg") {
    const note = `${rowOf(layer, head).kind}; ${level()}; ${$("map-note").textContent}`;
    const svg = svgMap(p.map(layer, head, level(), 160, state.view), ...mapAt.labels, `${meta.title}, ${name}`, [...note].slice(0, 110).join(""));
    download(svg, "image/svg+xml", `head-${layer}.${head}.svg`);
  } else if (what === "weights") download(weightsCsv(p, layer, head, level()), "text/csv", `head-${layer}.${head}.csv`);
  else download(figuresCsv(panels), "text/csv", "heads.csv");
}

async function start() {
  ({ meta, panels } = await unpack(document.getElementById("data").textContent));
  state.theme = keptTheme();
  state.panel = Math.max(panels.findIndex((p) => p.links.length), 0);
  const p = panel();
  trust();
  const wanted = /^#(\d+)\.(\d+)$/.exec(location.hash), asked = wanted && [Number(wanted[1]), Number(wanted[2])];
  Object.assign(state, linked(p));
  open(...(asked && p.rowOf.has(asked.join(".")) ? asked : best(p)));
  for (const button of $("saves").querySelectorAll("button")) button.addEventListener("click", () => save(button.dataset.save));
  $("zoom-in").addEventListener("click", () => zoom(1 / 3));
  $("zoom-out").addEventListener("click", () => zoom(3));
  $("zoom-all").addEventListener("click", () => zoom(0));
  $("map").addEventListener("mousemove", pointAtMap);
  $("map").addEventListener("mouseleave", () => { state.at = null; refresh(); });
  $("map").addEventListener("click", (event) => { state.pinned = cellAt(event); refresh(true); bring($("answer"), $("map")); });
  $("map").addEventListener("dblclick", (event) => zoom(1 / 3, cellAt(event)));
  $("map").addEventListener("keydown", keyOnMap);
  $("map").addEventListener("blur", () => { state.at = null; refresh(); });
  dark.addEventListener("change", () => state.theme === "auto" && show());
  let width = 0;
  new ResizeObserver(() => {
    arrange();
    const now = $("map").parentElement.clientWidth;
    if (now && now !== width) { width = now; showMap(); }
  }).observe(root);
  startWalks();
  root.dataset.ready = "yes";
}

start().catch((error) => {
  $("title").textContent = "This page could not be read";
  $("about").textContent = `${error}. It needs a browser of 2023 or newer, and the whole file.`;
  throw error;
});
