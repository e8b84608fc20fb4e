// One head: its figures, its map, the texts, and what follows from the word that is pointed at.

const SHOWN = 8; // answers listed for a word
const READABLE = 40; // rows of a map whose labels can be read

function showHead() {
  const row = rowOf(state.layer, state.head);
  $("head-title").replaceChildren(
    `Layer ${state.layer} · head ${state.head} `,
    el("span", { className: "kind", textContent: row.kind, style: { "--kind": kindColour(row.kind, theme()) } }),
  );
  const twice = ["induction", "duplicate"].includes(row.kind) && !(row[row.kind] >= 0.4) ? ` (on random tokens said twice ${percent(row[`twice_${row.kind}`])})` : "";
  $("measures").textContent = `${attends(row.kind)}${twice}.${row.mix && row.kind !== "broad" ? ` Its weight here: ${row.mix}.` : ""}`;
  showWalkButton();
  showFigures(row);
  showMap();
  showTexts();
}

const attends = (kind) => `Attends ${["broad", "mixed"].includes(kind) ? "" : "above all "}to ${meta.kinds[kind]}`;

// Every figure of a head beside what it is held against.
function showFigures(row) {
  const rows = Object.keys(meta.nulls).filter((name) => name !== "breadth" && given(row[name]));
  const gloss = (text) => el("span", { className: "quiet", textContent: text });
  const line = (name, meaning, value, null_, against) =>
    el("tr", {}, el("th", { scope: "row" }, `${name} `, gloss(meaning)), el("td", { textContent: value }), el("td", {}, `${null_} `, gloss(against)));
  const share = (name, key, meaning) => line(name, meaning, percent(row[key]), given(row[`${key}_null`]) ? percent(row[`${key}_null`]) : "–", meta.nulls[key.replace("twice_", "")]);
  const offset = row.offset === null ? "" : Math.abs(row.offset) === 0 ? "itself" : `${Math.abs(row.offset)} ${row.offset < 0 ? "before" : "after"}`;
  const twice = ["induction", "duplicate"].filter((name) => given(row[`twice_${name}`]));
  const column = (text) => el("th", { scope: "col", textContent: text });
  $("figures").replaceChildren(
    el("thead", {}, el("tr", {}, column("share of the weight on"), column("here"), column("null"))),
    el(
      "tbody",
      {},
      ...rows.map((name) => share(name, name, name === "positional" ? `the best fixed distance: ${offset}` : meta.kinds[name])),
      ...twice.map((name) => share(name, `twice_${name}`, "on random tokens said twice")),
      line("breadth", "entropy over the largest there can be", number(row.breadth), number(row.breadth_null), meta.nulls.breadth),
    ),
  );
  $("more").textContent = [`entropy ${number(row.entropy)} nats`, `largest weight of a row ${number(row.peak)} on average`, ...(given(row.distance) ? [`distance ${number(row.distance, 1)} tokens on average`] : [])].join("  ·  ");
}

// The part of the map that is shown, {i0, i1, j0, j1}.
const view = () => {
  const [L, S] = panel().size(level());
  return state.view || { i0: 0, i1: L, j0: 0, j1: S };
};

// The view of so many rows and columns around a place, inside the map.
function around(at, rows, columns) {
  const [L, S] = panel().size(level());
  const span = (n, of, size) => {
    const from = Math.min(Math.max(Math.round(n - size / 2), 0), of - size);
    return [from, from + size];
  };
  const [i0, i1] = span(at.i, L, Math.min(rows, L)), [j0, j1] = span(at.j, S, Math.min(columns, S));
  return i1 - i0 === L && j1 - j0 === S ? null : { i0, i1, j0, j1 };
}

// In on what is marked: of a row or column alone, on its largest weight in view.
function zoom(factor, at = null) {
  const v = view(), rows = v.i1 - v.i0, columns = v.j1 - v.j0, m = at || mark() || {};
  const largest = (way, n, from, to) => panel().line(state.layer, state.head, level(), way, n).find(([x]) => x >= from && x < to)?.[0];
  const centre = {
    i: m.i ?? (given(m.j) ? largest("column", m.j, v.i0, v.i1) : null) ?? (v.i0 + v.i1) / 2,
    j: m.j ?? (given(m.i) ? largest("row", m.i, v.j0, v.j1) : null) ?? (v.j0 + v.j1) / 2,
  };
  const least = (n) => Math.max(Math.min(n, 8), Math.round(n * factor));
  state.view = factor === 0 ? null : around(centre, least(rows), least(columns));
  showMap();
  refresh(true);
}

// Moves a view until it holds what is marked.
function follows() {
  const m = mark(), v = state.view;
  if (!v || !m) return false;
  const inside = (n, from, to) => !given(n) || (n >= from && n < to);
  if (inside(m.i, v.i0, v.i1) && inside(m.j, v.j0, v.j1)) return false;
  state.view = around({ i: given(m.i) ? m.i : (v.i0 + v.i1) / 2, j: given(m.j) ? m.j : (v.j0 + v.j1) / 2 }, v.i1 - v.i0, v.j1 - v.j0);
  return true;
}

function showMap() {
  const p = panel(), v = view(), [L, S] = p.size(level());
  const labels = [p.labels("queries", level()).slice(v.i0, v.i1), p.labels("keys", level()).slice(v.j0, v.j1)];
  const map = p.map(state.layer, state.head, level(), 640, state.view);
  mapAt = { map, labels };
  paint();
  const rows = v.i1 - v.i0, columns = v.j1 - v.j0;
  $("map").setAttribute("aria-label", `Map of layer ${state.layer}, head ${state.head}: ${rows} rows that attend, ${columns} columns that are attended to. Arrow keys move from cell to cell, Enter keeps one, + and − zoom, 0 shows all.`);
  const pooled = map.rows < rows || map.columns < columns;
  const notes = [pooled ? `each cell is the largest weight among about ${Math.ceil(rows / map.rows)} × ${Math.ceil(columns / map.columns)} ${level()}` : "a row attends, a column is attended to"];
  if (state.view) notes.push(`rows ${v.i0} to ${v.i1 - 1} of ${L}, columns ${v.j0} to ${v.j1 - 1} of ${S}`);
  if (p.long && (state.view || level() === p.levels[1])) notes.push(`this file holds the ${p.long.k} largest weights of each row and column; smaller ones are left out here, and headwise serve shows all`);
  $("map-note").textContent = notes.join("; ");
  const least = Math.min(rows, columns) <= 8;
  for (const [id, off] of [["zoom-in", least], ["zoom-out", !state.view], ["zoom-all", !state.view]]) $(id).disabled = off;
  $("scale").replaceChildren(
    el("canvas", { width: 120, height: 10 }),
    ...SCALE.map((w) => el("span", { textContent: String(w), style: { left: `${Math.sqrt(w) * 100}%` } })),
  );
  const context = $("scale").firstChild.getContext("2d");
  for (let x = 0; x < 120; x++) {
    context.fillStyle = css(colour((x / 119) ** 2, theme()));
    context.fillRect(x, 0, 1, 10);
  }
}

function paint() {
  const v = view(), at = mark(), from = (n, start) => (given(n) ? n - start : null), p = panel();
  const framed = at && { i: from(at.i, v.i0), j: from(at.j, v.j0) };
  const ends = { i: from(p.generated("queries", level()), v.i0), j: from(p.generated("keys", level()), v.j0) };
  Object.assign(mapAt, drawMap($("map"), mapAt.map, ...mapAt.labels, theme(), framed, ends));
}

function showTexts() {
  const p = panel();
  const text = (side, title, axis) => {
    const begins = p.generated(side, level());
    const told = begins === null ? title : `${title} (generated from the dashed line on)`;
    return el(
      "div",
      { className: "text" },
      el("h3", { textContent: told }),
      el(
        "div",
        { className: "words", "data-side": side, role: "listbox", "aria-label": told },
        ...p.labels(side, level()).map((label, n) => {
          const look = (kept) => () => { state.at = { i: null, j: null, [axis]: n }; refresh(kept); };
          const leave = () => { state.at = null; refresh(); };
          return el("span", {
            role: "option",
            className: begins !== null && n >= begins ? (n === begins ? "word generated begins" : "word generated") : "word",
            textContent: label,
            tabIndex: n === 0 ? 0 : -1,
            "data-n": n,
            onmouseenter: look(false),
            onmouseleave: leave,
            onfocus: (event) => event.target.matches(":focus-visible") && look(true)(),
            onblur: leave,
            onclick: () => {
              const same = state.pinned && state.pinned[axis] === n && state.pinned.i !== state.pinned.j;
              state.pinned = same ? null : { i: null, j: null, [axis]: n };
              if (follows()) showMap();
              refresh(true);
            },
            onkeydown: (event) => {
              const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
              if (event.key === "Escape") { state.pinned = null; refresh(); }
              if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.target.click(); }
              if (!move) return;
              event.preventDefault();
              const next = event.target.parentElement.children[n + move];
              if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
            },
          });
        }),
      ),
    );
  };
  $("texts").replaceChildren(text("queries", "These attend", "i"), text("keys", "These are attended to", "j"));
  refresh(true);
}

// What follows from the word or cell that is pointed at: colours in the other text, the answer in words, the frame on
// the map. scrolls: whether the texts are scrolled to what is marked; not under a pointer that is in them.
function refresh(scrolls = false) {
  const p = panel(), at = mark(), shade = theme();
  const boxes = Object.fromEntries([...$("texts").querySelectorAll(".words")].map((node) => [node.dataset.side, node]));
  for (const node of root.querySelectorAll(".word[style], .word.marked")) {
    node.removeAttribute("style");
    node.classList.remove("marked");
    node.setAttribute("aria-selected", "false");
  }
  const answers = [];
  for (const [axis, way, side, other, verb] of [["i", "row", "queries", "keys", "attends to"], ["j", "column", "keys", "queries", "is attended to by"]]) {
    if (!at || !given(at[axis])) continue;
    const node = boxes[side].children[at[axis]];
    if (!node) continue;
    node.classList.add("marked");
    node.setAttribute("aria-selected", "true");
    const line = p.line(state.layer, state.head, level(), way, at[axis]);
    if (way === "row" || !given(at.i))
      for (const [n, w] of line) {
        const c = colour(w, shade), word = boxes[other].children[n];
        word.style.background = css(c);
        word.style.color = inkOn(c);
      }
    if (scrolls) {
      reveal(node, boxes[side]);
      if (!(given(at.i) && given(at.j)) && line.length) reveal(boxes[other].children[line[0][0]], boxes[other]);
    }
    answers.push(answer(p.names(side, level())[at[axis]], verb, p.names(other, level()), line, way === "row" ? at.j : null));
  }
  const help = el("p", { className: "quiet", textContent: "Point at a word or a cell, or move to one with Tab and the arrow keys; press it to keep it." });
  const cell = at && given(at.i) && given(at.j) ? [exactly(at)] : [];
  $("answer").replaceChildren(...cell, ...(answers.length ? answers.slice(0, 1) : [help]));
  paint();
}

// The cell that is pointed at, by the names of its row and column.
function exactly({ i, j }) {
  const p = panel(), w = p.weight(state.layer, state.head, level(), i, j);
  const said = w !== null ? percent(w) : p.long.k ? "less than those listed" : "not in this file";
  return el(
    "p",
    { className: "exact" },
    el("span", { textContent: p.names("queries", level())[i] }),
    el("span", { textContent: " → ", "aria-hidden": "true" }),
    unseen(" to "),
    el("span", { textContent: p.names("keys", level())[j] }),
    el("b", { textContent: said }),
    el("span", { className: "quiet", textContent: `row ${i}, column ${j}` }),
  );
}

function answer(word, verb, labels, line, wanted) {
  const shown = line.slice(0, SHOWN);
  const extra = given(wanted) ? line.find(([n]) => n === wanted) : null;
  if (extra && !shown.includes(extra)) shown[shown.length - 1] = extra;
  return el(
    "div",
    {},
    el("p", {}, el("strong", { textContent: word }), ` ${verb}`, shown.length ? "" : line.length || !panel().long ? " nothing" : ": too long a text to list; see the map"),
    el("ol", {}, ...shown.map(([n, w]) => el("li", { className: n === wanted ? "bar wanted" : "bar", style: { "--share": w } }, el("span", { textContent: labels[n] }), el("b", { textContent: percent(w) })))),
  );
}

function cellAt(event) {
  const box = $("map").getBoundingClientRect(), v = view();
  const x = event.clientX - box.left - mapAt.left, y = event.clientY - box.top - mapAt.top;
  if (x < 0 || y < 0 || x >= mapAt.width || y >= mapAt.height) return null;
  return { i: v.i0 + Math.floor((y / mapAt.height) * (v.i1 - v.i0)), j: v.j0 + Math.floor((x / mapAt.width) * (v.j1 - v.j0)) };
}

function pointAtMap(event) {
  const at = cellAt(event);
  if (at && state.at && at.i === state.at.i && at.j === state.at.j) return;
  state.at = at;
  refresh(true);
}

function keyOnMap(event) {
  const [L, S] = panel().size(level());
  const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const v = view(), m = mark() || {}, at = { i: given(m.i) ? m.i : v.i0, j: given(m.j) ? m.j : v.j0 };
  if (move) {
    state.at = { i: Math.min(Math.max(at.i + move[0], 0), L - 1), j: Math.min(Math.max(at.j + move[1], 0), S - 1) };
    if (follows()) showMap();
  } else if (event.key === "Enter" || event.key === " ") state.pinned = at;
  else if (event.key === "Escape") state.pinned = state.at = null;
  else if (event.key === "+" || event.key === "=") return zoom(1 / 3);
  else if (event.key === "-") return zoom(3);
  else if (event.key === "0") return zoom(0);
  else return;
  event.preventDefault();
  refresh(true);
}
