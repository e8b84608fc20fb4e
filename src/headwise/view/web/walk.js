// One layer as one diagram. Every number knows which numbers made it; h is a head, i counts queries, j keys, d widths.

const MINUS = "\u2212", FEW = 7, HUES = ["#0072b2", "#c1440e", "#00795a", "#8a4f9e", "#7a6200", "#4a5560"];
function say(x) {
  if (x === -Infinity) return MINUS + "∞";
  if (!Number.isFinite(x)) return String(x);
  const size = Math.abs(x);
  let text = Number.isInteger(x) && size < 1e5 ? String(x) : size >= 1e5 || size < 1e-12 ? x.toExponential(1) : size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 0.01 ? x.toFixed(2) : size >= 0.001 ? x.toFixed(3) : x.toExponential(1);
  if (size < 1e-12) text = "0";
  return text.replace(/^-(?=0(\.0*)?$)/, "").replace(/-/g, MINUS);
}
const inner = (x) => (x < 0 ? `(${say(x)})` : say(x));

// W_Q and Kᵀ with real subscripts and superscripts.
function symbols(text) {
  return text.split(/(_[A-Z]|ᵀ)/).filter(Boolean).map((part) => (/^_[A-Z]$/.test(part) ? el("sub", { textContent: part[1] }) : part === "ᵀ" ? el("sup", { textContent: "T" }) : document.createTextNode(part)));
}

async function unpack(text) {
  const { meta, buffer, at: start } = await packed(text);
  const arrays = new Map();
  for (const [name, [rows, columns, at]] of Object.entries(meta.arrays)) {
    const data = new Float32Array(buffer, start + 4 * at, rows * columns);
    arrays.set(name, { rows, columns, at: (i, j) => data[i * columns + j], data });
  }
  return { meta, arrays };
}

function made(rows, columns, at) {
  const data = Float32Array.from({ length: rows * columns }, (_, n) => at(Math.floor(n / columns), n % columns));
  return { rows, columns, at: (i, j) => data[i * columns + j], data };
}

class Walk {
  constructor(meta, arrays) {
    Object.assign(this, { meta, arrays, cells: new Map(), pinned: null });
    const { heads } = meta;
    for (const h of heads) this.follow(h);
    this.Dv = arrays.get(`o${heads[0]}`).columns;
    this.whole = arrays.has("y"); // else it ends with the heads' outputs
    if (this.whole) {
      this.joined("cat", (h) => `o${h}`, 1);
      this.joined("wo", (h) => `wo${h}`, 0);
      arrays.set("sum", arrays.get("y"));
    }
    this.keysFrom = arrays.has("c") ? "c" : "x";
    this.valuesFrom = arrays.has("u") ? "u" : this.keysFrom;
    const sizes = [...arrays].filter(([name]) => !name.startsWith("l")).map(([, m]) => m.columns);
    this.small = Math.max(...sizes, meta.queries.length, meta.keys.length) <= 8;
    this.most = { token: this.small ? 8 : 16, width: this.small ? 8 : 6 };
    this.start = new Map();
    const asked = Number(root.dataset.head ?? NaN);
    this.shown = heads.includes(asked) ? [asked] : heads.length <= 3 ? [...heads] : meta.order.slice(0, 2).sort((a, b) => a - b);
  }

  // What a page may leave out, for it follows from the rest: a head's weights from its scores, its output from these.
  follow(h) {
    const { arrays } = this, s = arrays.get(`s${h}`), l = arrays.get(`l${h}`), v = arrays.get(`v${h}`);
    if (!arrays.has(`a${h}`)) arrays.set(`a${h}`, made(s.rows, s.columns, (i, j) => (l.at(i, 0) === -Infinity ? 0 : Math.exp(s.at(i, j) - l.at(i, 0)))));
    const a = arrays.get(`a${h}`);
    if (!arrays.has(`o${h}`)) arrays.set(`o${h}`, made(a.rows, v.columns, (i, d) => Array.from({ length: a.columns }, (_, j) => a.at(i, j) * v.at(j, d)).reduce((x, y) => x + y, 0)));
  }

  // The heads' matrices beside each other (axis 1) or below each other (axis 0), as one.
  joined(name, of, axis) {
    const parts = this.meta.heads.map((h) => this.arrays.get(of(h))), n = axis ? parts[0].columns : parts[0].rows;
    const at = axis ? (i, c) => parts[Math.floor(c / n)].at(i, c % n) : (c, e) => parts[Math.floor(c / n)].at(c % n, e);
    this.arrays.set(name, { rows: axis ? parts[0].rows : n * parts.length, columns: axis ? n * parts.length : parts[0].columns, at });
  }

  get(name) {
    return this.arrays.get(name);
  }

  // How much of an axis is drawn: [first, after the last].
  window(axis) {
    const alone = this.shown.length === 1 && !this.small ? 4 : 0; // a head by itself has more room
    const n = this.length(axis), most = ["L", "S"].includes(axis) ? this.most.token : this.most.width + alone;
    const start = Math.min(this.start.get(axis) ?? 0, Math.max(0, n - most));
    return [start, Math.min(n, start + most)];
  }

  length(axis) {
    const h = this.meta.heads[0], of = { L: [`q${h}`, 0], S: [`k${h}`, 0], E: ["x", 1], Ec: ["c", 1], Ev: ["u", 1], D: [`q${h}`, 1], Dv: [`v${h}`, 1], C: ["cat", 1], Eo: ["y", 1] }[axis];
    const m = this.get(of[0]);
    return m ? m[of[1] ? "columns" : "rows"] : 0;
  }

  token(axis, n) {
    return visible((axis === "L" ? this.meta.queries : this.meta.keys)[n] ?? "added");
  }

  place(axis, n) {
    return this.meta.places[axis === "L" ? 0 : 1][n] ?? n;
  }
}

// Which numbers made a number: {what, meaning, terms, ...}. left and right are [array, row, column] lists.

function sources(w, name, i, j) {
  const { meta } = w, found = /^([a-z]+)(\d*)$/.exec(name), kind = found[1], h = found[2], value = w.get(name).at(i, j);
  const q = () => `“${w.token("L", i)}” (row ${w.place("L", i)})`, key = (n) => `“${w.token("S", n)}” (row ${w.place("S", n)})`;
  const head = h === "" ? "" : `Head ${h} · `;
  const dot = (a, ai, b, bj, transposed = false) => {
    const A = w.get(a), B = w.get(b), n = A.columns;
    return Array.from({ length: n }, (_, x) => ({ l: [a, ai, x], r: transposed ? [b, bj, x] : [b, x, bj], a: A.at(ai, x), b: transposed ? B.at(bj, x) : B.at(x, bj) }));
  };
  const bias = (b, column) => (w.get(b) ? w.get(b).at(0, column) : null);
  const project = (letter, from, axis) => {
    const about = { q: "what it looks for", k: "what it offers to be found by", v: "what it hands over" }[letter];
    const what = `${head}${{ q: "query", k: "key", v: "value" }[letter]} of ${axis === "L" ? q() : key(i)}, number ${j}`;
    const turned = w.get(`r${letter}${h}`);
    if (turned && kind.length === 1)
      return { what, value, left: Array.from({ length: turned.columns }, (_, x) => [`r${letter}${h}`, i, x]), right: [], text: `the row before, after ${meta.between.join(" and ")}`, meaning: meta.between.includes("rotary") ? "The row is turned by where the token stands; its length stays." : "" };
    if (!w.get(from) || !w.get(`w${letter}${h}`)) return { what, value, left: [], right: [], text: "as the layer computed it; its matrix is not known here", meaning: "" };
    if (i >= w.get(from).rows) return { what, value, left: [], right: [], text: "a number that the layer adds by itself", meaning: "" };
    return { what, value, terms: dot(from, i, `w${letter}${h}`, j), bias: bias(`b${letter}${h}`, j), meaning: `A row of ${from === "x" ? "X" : "C"} times a column of W_${letter.toUpperCase()}: ${about}.` };
  };
  switch (kind) {
    case "x": return { what: `X · ${q()}, number ${j}`, value, left: [], right: [], text: "given", meaning: "One token is one row of X. All heads read the same X." };
    case "c": case "u": return { what: `What ${kind === "c" ? "keys" : "values"} are made of · ${key(i)}, number ${j}`, value, left: [], right: [], text: "given", meaning: "" };
    case "wq": case "wk": case "wv": case "wo": return { what: `${head}W_${kind[1].toUpperCase()}, row ${i}, column ${j}`, value, left: [], right: [], text: "learned", meaning: "The same for every token and every text." };
    case "bo": return { what: `Bias of W_O, column ${j}`, value, left: [], right: [], text: "learned", meaning: "" };
    case "rest": return { what: `What the ${meta.left} other heads add to ${q()}, column ${j}`, value, left: [], right: [], text: "not drawn here", meaning: "" };
    case "q": case "rq": return project("q", "x", "L");
    case "k": case "rk": return project("k", w.keysFrom, "S");
    case "v": return project("v", w.valuesFrom, "S");
    case "s": {
      const terms = dot(`q${h}`, i, `k${h}`, j, true), plain = terms.reduce((sum, t) => sum + t.a * t.b, 0) * meta.scale;
      const then = meta.changes.length ? ` = ${say(plain)}, then ${meta.changes.join(", ")}` : "";
      return { what: `${head}score: ${q()} for ${key(j)}`, value, terms, factor: meta.scale, then, total: plain / meta.scale, meaning: value === -Infinity ? "Masked: this query may not look at this key." : "A row of Q times a column of Kᵀ (a row of K), scaled: how well the query fits the key." };
    }
    case "a": return softmax(w, h, i, j, `${head}weight: ${q()} looks at ${key(j)}`, value);
    case "o": return { what: `${head}output for ${q()}, number ${j}`, value, terms: dot(`a${h}`, i, `v${h}`, j), factor: meta.gated ? "gate" : null, hidden: meta.hidden, meaning: "A weighted sum of values: each token's value counts as much as its weight." };
    case "cat": {
      const n = Math.floor(j / w.Dv), from = meta.heads[n];
      return { what: `Concatenation · ${q()}, column ${from * w.Dv + (j % w.Dv)}`, value, left: [[`o${from}`, i, j % w.Dv]], right: [], text: `number ${j % w.Dv} of head ${from}'s output`, meaning: "Nothing is computed here: the heads' outputs are set side by side." };
    }
    case "y": return { what: `Output · ${q()}, column ${j}`, value, terms: dot("cat", i, "wo", j), bias: bias("bo", j), rest: w.get("rest") ? w.get("rest").at(i, j) : null, meaning: "A row of the concatenation times a column of W_O: here the heads are mixed." };
    case "p": return { what: `${head}adds to ${q()}, column ${j}`, value, terms: dot(`o${h}`, i, `wo${h}`, j), meaning: "Its part of the concatenation times its own rows of W_O." };
    case "sum": {
      const parts = meta.heads.map((n) => [`p${n}`, i, j]), extra = [w.get("rest") ? ["rest", i, j] : null, w.get("bo") ? ["bo", 0, j] : null].filter(Boolean);
      return { what: `Output · ${q()}, column ${j}`, value, left: [...parts, ...extra], right: [], parts: [...parts, ...extra].map(([a, x, y]) => [a === "bo" ? "bias" : a === "rest" ? `${meta.left} other heads` : `head ${a.slice(1)}`, w.get(a).at(x, y)]), meaning: "The same output once more: what the heads add, added up." };
    }
  }
  return null;
}

function softmax(w, h, i, j, what, value) {
  const s = w.get(`s${h}`), n = s.columns, found = { what, value, left: [[`s${h}`, i, j]], right: [], meaning: "Softmax of the row: e to the score, over the sum along the row. A row of weights sums to 1." };
  for (let x = 0; x < n; x++) if (x !== j) found.right.push([`s${h}`, i, x]);
  const lse = w.get(`l${h}`).at(i, 0);
  if (lse === -Infinity) return { ...found, text: "nothing to look at: the whole row is masked" };
  if (s.at(i, j) === -Infinity) return { ...found, text: "masked: e to the minus infinity is 0" };
  const seen = Array.from({ length: n }, (_, x) => x).filter((x) => s.at(i, x) !== -Infinity);
  const top = Math.max(...seen.map((x) => s.at(i, x))), shift = Math.abs(top) > 20 ? top : 0;
  const power = (x) => ({ score: s.at(i, x), mine: x === j, value: Math.exp(s.at(i, x) - shift) });
  let list = seen;
  if (seen.length > FEW) list = [j, ...seen.filter((x) => x !== j).sort((a, b) => s.at(i, b) - s.at(i, a)).slice(0, FEW - 2)].sort((a, b) => a - b);
  const all = Math.exp(lse - shift), shown = list.map(power), sink = w.meta.sinks ? w.meta.sinks[h] : null;
  const rest = seen.length - list.length + w.meta.hidden;
  const left = all - shown.reduce((sum, p) => sum + p.value, 0) - (sink === null ? 0 : Math.exp(sink - shift));
  return { ...found, powers: { shown, shift, sink, rest, left, all, mine: power(j) } };
}

// The equation as elements.

function equation(w, s) {
  const out = [], push = (text) => out.push(document.createTextNode(text));
  const mark = (side, text) => out.push(el("span", { className: side, textContent: text }));
  if (s.powers) {
    const p = s.powers, less = p.shift ? ` ${MINUS} ${say(p.shift)}` : "", power = (x) => `e^${less || x < 0 ? `(${say(x)}${less})` : say(x)}`;
    mark("left", power(p.mine.score)), push(" ÷ ( ");
    p.shown.forEach((x, n) => (n && push(" + "), mark(x.mine ? "left" : "right", power(x.score))));
    if (p.rest) push(` + ${p.rest} more: ${inner(p.left)}`);
    if (p.sink !== null) push(` + sink ${power(p.sink)}`);
    push(` ) = ${say(p.mine.value)} ÷ ${say(p.all)}`);
  } else if (s.parts) {
    s.parts.forEach(([name, x], n) => (n && push(" + "), mark("left", inner(x)), push(` (${name})`)));
  } else if (s.terms) {
    const terms = s.terms, total = s.total ?? null, size = (t) => Math.abs(t.a * t.b);
    const shown = terms.length > FEW ? [...terms].sort((a, b) => size(b) - size(a)).slice(0, FEW - 1).sort((a, b) => terms.indexOf(a) - terms.indexOf(b)) : terms;
    if (s.factor !== null && s.factor !== undefined) push("( ");
    shown.forEach((t, n) => (n && push(" + "), mark("left", n ? inner(t.a) : say(t.a)), push(" × "), mark("right", inner(t.b))));
    const count = terms.length - shown.length + (s.hidden || 0);
    if (count) {
      const made = shown.reduce((sum, t) => sum + t.a * t.b, 0), whole = total ?? (s.factor ? null : s.value - (s.bias ?? 0) - (s.rest ?? 0));
      push(whole === null ? ` + ${count} more` : ` + ${count} more: ${inner(whole - made)}`);
    }
    if (s.factor !== null && s.factor !== undefined) push(s.factor === "gate" ? " ) × gate" : ` ) × ${say(s.factor)}${s.then}`);
    if (s.rest !== null && s.rest !== undefined) push(` + other heads: ${inner(s.rest)}`);
    if (s.bias !== null && s.bias !== undefined) push(` + bias ${inner(s.bias)}`);
  } else push(s.text);
  push(" = ");
  out.push(el("span", { className: "value", textContent: say(s.value) }));
  return out;
}

// Drawing.

function scaleOf(w, name) {
  const kind = name.replace(/\d+$/, "");
  if (kind === "a") return 1;
  let most = 0;
  for (const [other, m] of w.arrays)
    if (other.replace(/\d+$/, "") === kind && m.data) for (const x of m.data) if (Number.isFinite(x) && Math.abs(x) > most) most = Math.abs(x);
  return most || 1;
}

// Where only colour tells a number at a glance, small ones are drawn stronger than they are.
const strength = (w, part) => (w.small ? part : Math.sqrt(part));

// A matrix. rows and columns name axes; given transposed it is drawn on its side, and its numbers keep their places.
function matrix(w, name, label, rows, columns, { result = false, transposed = false, headsAlong = null, plain = false } = {}) {
  const m = w.get(name), kind = name.replace(/\d+$/, "");
  w.scales ??= new Map();
  const shared = kind === "cat" ? "o" : kind === "sum" ? "y" : kind;
  if (!w.scales.has(shared)) w.scales.set(shared, scaleOf(w, shared + (shared === kind ? name.slice(kind.length) : w.meta.heads[0])));
  const most = w.scales.get(shared);
  const inRange = (axis, n) => { const [a, b] = axis ? w.window(axis) : [0, n]; return Array.from({ length: Math.max(0, Math.min(b, n) - a) }, (_, x) => a + x); };
  const R = inRange(rows, transposed ? m.columns : m.rows), C = inRange(columns, transposed ? m.rows : m.columns);
  const table = el("table", { ...(result && { className: "result", tabindex: 0 }), role: "grid", "aria-label": `${label}${/\d$/.test(name) ? ` of head ${/\d+$/.exec(name)[0]}` : ""}` });
  const words = (axis) => axis === "L" || axis === "S";
  if (words(columns) || headsAlong) {
    const line = el("tr", { role: "row" }, words(rows) || headsAlong === "rows" ? el("td", { className: "gap", role: "presentation" }) : null);
    for (const c of C) line.append(el("th", { scope: "col", textContent: headsAlong === "columns" ? `h${w.meta.heads[Math.floor(c / w.Dv)]}` : headsAlong ? "" : w.token(columns, c), title: words(columns) ? w.token(columns, c) : "" }));
    if (headsAlong !== "rows") table.append(el("thead", {}, line));
  }
  const body = el("tbody");
  for (const r of R) {
    const line = el("tr", { role: "row" });
    if (words(rows) && !plain) line.append(el("th", { scope: "row", textContent: w.token(rows, r), title: w.token(rows, r) }));
    if (headsAlong === "rows") line.append(el("th", { scope: "row", textContent: `h${w.meta.heads[Math.floor(r / w.Dv)]}` }));
    for (const c of C) {
      const [i, j] = transposed ? [c, r] : [r, c], x = m.at(i, j);
      const cell = el("td", { role: "gridcell", textContent: say(x), title: w.small ? "" : say(x) });
      cell.style.setProperty("--part", x === -Infinity ? 0 : strength(w, Math.min(1, Math.abs(x) / most)).toFixed(3));
      if (x < 0) cell.style.setProperty("--tone", "var(--minus)");
      cell.at = [name, i, j];
      const at = `${name}:${i}:${j}`;
      if (!w.cells.has(at)) w.cells.set(at, []);
      w.cells.get(at).push(cell);
      line.append(cell);
    }
    body.append(line);
  }
  table.append(body);
  const shape = transposed ? [m.columns, m.rows] : [m.rows, m.columns];
  const caption = el("figcaption", {}, el("b", {}, ...symbols(label)), el("span", { textContent: ` ${shape.join(" × ")}` }));
  return el("figure", {}, caption, table);
}

const op = (text, small) => el("span", { className: "op", textContent: text }, small ? el("small", { textContent: small }) : null);
// What follows the last operator stays beside it where a chain is broken.
function chain(...parts) {
  const there = parts.filter(Boolean), last = there.length > 2 && there.at(-2).className === "op" ? el("div", { className: "last" }, ...there.splice(-2)) : null;
  return el("div", { className: "chain" }, ...there, last);
}

function column(w, h, ...children) {
  const box = el("div", { className: "column down" }, el("h3", { textContent: `Head ${h}` }), ...children);
  box.style.setProperty("--hue", HUES[w.meta.heads.indexOf(h) % HUES.length]);
  return box;
}

function bands(w) {
  const { meta } = w, s = meta.sizes, B = s.B ? "B, " : "", kv = s.Hkv ? "Hkv" : "H", E = s.Eo ? "Eo" : "E", eo = s.Eo ?? s.E, cross = w.keysFrom === "c" && w.get("c").rows !== w.get("x")?.rows;
  const shape = (letters, ...n) => [letters, (s.B ? [s.B, ...n] : n).join(" × ")];
  const made = [], each = (build) => el("div", { className: "columns" }, ...w.shown.map((h) => column(w, h, ...[build(h)].flat())));
  const width = `√D = √${s.D}`, usual = Math.abs(meta.scale - s.D ** -0.5) < 1e-6 * meta.scale;
  const project = (h, letter, from, fromLabel, rows, ends, width) => {
    const raw = w.get(`r${letter}${h}`), name = raw ? `r${letter}${h}` : `${letter}${h}`, L = letter.toUpperCase(), matrixThere = w.get(from) && w.get(`w${letter}${h}`);
    const first = matrixThere ? [matrix(w, from, fromLabel, rows, ends, { plain: !w.small }), op("·"), matrix(w, `w${letter}${h}`, `W_${L}`, ends, width), op("=", w.get(`b${letter}${h}`) ? "+ bias" : "")] : [];
    const parts = [chain(...first, matrix(w, name, L, rows, width, { result: true }))];
    if (raw) parts.push(chain(op("↻", meta.between.join(", ")), matrix(w, `${letter}${h}`, `${L} ${meta.between.includes("rotary") ? "turned" : `after ${meta.between.join(", ")}`}`, rows, width, { result: true })));
    return parts;
  };
  if (w.get("x")) {
    const equal = equalRows(w);
    made.push({ id: "x", short: "X", title: "The tokens", formula: "X", shape: shape(`[${B}L, E]`, s.L, s.E), says: ["One row for each token, made of numbers. Every head reads this same X.", equal], body: [chain(matrix(w, "x", "X", "L", "E", { result: true }), w.get("c") && cross ? matrix(w, "c", "C", "S", "Ec", { result: true }) : null)], fork: true });
  }
  const turned = meta.between.length ? `Then ${meta.between.join(" and ")}${meta.between.includes("rotary") ? ": q and k are turned by where their token stands" : ""}.` : null;
  const source = w.keysFrom === "c" ? "C" : "X", valueSource = w.valuesFrom === "u" ? "U" : source;
  made.push({ id: "qkv", short: "Q, K, V", title: "Queries, keys, values", formula: `Q = X·W_Q\nK = ${source}·W_K\nV = ${valueSource}·W_V`, shape: shape(`[${B}H, L, D]`, s.H, s.L, s.D), says: ["Each head has its own three matrices. A query says what a token looks for, a key what it can be found by, a value what it hands over.", s.Hkv ? `Keys and values are shared: ${s.H} heads read ${s.Hkv} (${kv} = ${s.Hkv}).` : null, turned, w.whole ? null : "They stand here as the scores are made of them: after norms and positions, where the layer has them."], body: each((h) => w.whole ? [...project(h, "q", "x", "X", "L", "E", "D"), ...project(h, "k", w.keysFrom, source, "S", w.keysFrom === "c" ? "Ec" : "E", "D"), ...project(h, "v", w.valuesFrom, valueSource, "S", { x: "E", c: "Ec", u: "Ev" }[w.valuesFrom], "Dv")] : chain(matrix(w, `q${h}`, "Q", "L", "D", { result: true }), matrix(w, `k${h}`, "K", "S", "D", { result: true }), matrix(w, `v${h}`, "V", "S", "Dv", { result: true }))) });
  made.push({ id: "scores", short: "Scores", title: "Scores", formula: usual ? "S = Q·Kᵀ / √D" : `S = Q·Kᵀ × ${say(meta.scale)}`, shape: shape(`[${B}H, L, S]`, s.H, s.L, s.S), says: ["Each query meets each key: the better they fit, the larger the score.", usual ? `Divided by ${width}, so that wide heads do not get large scores.` : null, meta.changes.length ? `Then ${meta.changes.join(", ")}${meta.changes.includes("mask") ? ` (${MINUS}∞: may not be looked at)` : ""}.` : null], body: each((h) => chain(matrix(w, `q${h}`, "Q", "L", "D"), op("·"), matrix(w, `k${h}`, "Kᵀ", "D", "S", { transposed: true }), op(`× ${say(meta.scale)} =`, meta.changes.join(", ")), matrix(w, `s${h}`, "S", "L", "S", { result: true }))) });
  made.push({ id: "weights", short: "Weights", title: "Weights", formula: "A = softmax(S), row by row", shape: shape(`[${B}H, L, S]`, s.H, s.L, s.S), says: ["Softmax makes each row of scores into shares: none below 0, together 1. This is what each token looks at, and it differs from head to head.", meta.sinks ? "A learned sink takes a share of its own." : null], body: each((h) => chain(matrix(w, `s${h}`, "S", "L", "S"), op("→", "softmax"), matrix(w, `a${h}`, "A", "L", "S", { result: true }))) });
  made.push({ id: "out", short: "Head outputs", title: "Each head's output", formula: "O = A·V", shape: shape(`[${B}H, L, Dv]`, s.H, s.L, s.Dv), says: ["The mean of the values, weighted by the row of A.", meta.gated ? "Then times the head's gate." : null, meta.hidden ? `${meta.hidden} keys are not drawn; they count all the same.` : null], body: each((h) => chain(matrix(w, `a${h}`, "A", "L", "S"), op("·"), matrix(w, `v${h}`, "V", "S", "Dv"), op("=", meta.gated ? "× gate" : ""), matrix(w, `o${h}`, "O", "L", "Dv", { result: true }))) });
  if (!w.whole) {
    made.at(-1).says.push(`Then the heads' outputs are set side by side, and W_O mixes them. X and the layer's matrices are not in this page: ${root.dataset.layer ? `headwise learn TEXT --layer ${root.dataset.layer} --head ${w.shown[0]}` : "headwise learn TEXT"} writes the whole walk.`);
    return made;
  }
  const wide = s.H * s.Dv, along = { headsAlong: "columns" };
  made.push({ id: "concat", join: true, short: "Concatenation", title: "Concatenation", formula: `[${meta.left || meta.heads.length > 3 ? "O₀ O₁ …" : meta.heads.map((h) => `O${"₀₁₂₃₄₅₆₇₈₉"[h] ?? h}`).join(" ")}]`, shape: shape(`[${B}L, H·Dv]`, s.L, wide), says: ["The heads' outputs side by side; h0, h1 … say whose column it is.", wide > s.E ? `It is wider than X: ${s.L} × ${wide} beside ${s.L} × ${s.E}. W_O brings it back.` : null, meta.left ? `${meta.left} of the ${s.H} heads are not on this page.` : null], body: [chain(matrix(w, "cat", "concat", "L", "C", { result: true, ...along }))] });
  made.push({ id: "output", short: "Output", title: "Output", formula: `Y = concat·W_O${w.get("bo") ? " + bias" : ""}`, shape: shape(`[${B}L, ${E}]`, s.L, eo), says: ["W_O mixes what the heads found, for each token, into one row again."], body: [chain(matrix(w, "cat", "concat", "L", "C", along), op("·"), matrix(w, "wo", "W_O", "C", "Eo", { headsAlong: "rows" }), op("=", w.get("bo") ? "+ bias" : ""), matrix(w, "y", "Y", "L", "Eo", { result: true }))] });
  const sum = [];
  w.shown.forEach((h, n) => sum.push(n ? op("+") : null, matrix(w, `p${h}`, `head ${h}`, "L", "Eo")));
  if (w.shown.length < meta.heads.length) sum.push(op("+ …", `${meta.heads.length - w.shown.length} more heads`));
  if (w.get("rest")) sum.push(op("+"), matrix(w, "rest", "other heads", "L", "Eo"));
  if (w.get("bo")) sum.push(op("+"), matrix(w, "bo", "bias", null, "Eo"));
  sum.push(op("="), matrix(w, "sum", "Y", "L", "Eo", { result: true }));
  made.push({ id: "adds", short: "What each adds", title: "What each head adds", formula: "Y = O₀·W_O[0] + O₁·W_O[1] + …", shape: shape(`[${B}H, L, ${E}]`, s.H, s.L, eo), says: ["The same output, seen the other way: each head's output times its own rows of W_O. The parts add up to Y."], body: [each((h) => chain(matrix(w, `o${h}`, "O", "L", "Dv"), op("·"), matrix(w, `wo${h}`, `W_O[${h}]`, "Dv", "Eo"), op("="), matrix(w, `p${h}`, `head ${h} adds`, "L", "Eo", { result: true }))), chain(...sum)] });
  return made;
}

// A remark where two tokens have the same row: without positions they get the same output.
function equalRows(w) {
  const x = w.get("x"), n = Math.min(x.rows, 64);
  for (let a = 0; a < n; a++)
    for (let b = a + 1; b < n; b++) {
      let same = true;
      for (let e = 0; e < x.columns && same; e++) same = x.at(a, e) === x.at(b, e);
      if (same && !w.meta.between.includes("rotary") && !w.meta.changes.length)
        return `Rows ${w.place("L", a)} and ${w.place("L", b)} are equal, and so are these rows of every step: attention by itself does not know where a token stands.`;
    }
  return null;
}

function fork(n, join) {
  const NS = "http://www.w3.org/2000/svg", svg = document.createElementNS(NS, "svg");
  for (const [name, value] of Object.entries({ class: "flow", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (let h = 0; h < n; h++) {
    const x = ((h + 0.5) / n) * 100, path = document.createElementNS(NS, "path");
    path.setAttribute("d", join ? `M${x} 0 C${x} 22 9 8 9 30` : `M9 0 C9 22 ${x} 8 ${x} 30`);
    svg.append(path);
  }
  return svg;
}

function draw(w) {
  const focused = document.activeElement?.getAttribute?.("aria-label");
  w.cells.clear();
  const main = $("bands"), steps = $("steps");
  main.replaceChildren(), steps.replaceChildren();
  bands(w).forEach((band, n) => {
    const said = el("div", { className: "said" }, el("h2", {}, el("i", { textContent: String(n + 1) }), band.title), ...band.formula.split("\n").map((text) => el("p", { className: "formula" }, ...symbols(text))));
    said.append(el("p", { className: "shape" }, el("code", { textContent: band.shape[0] }), ` = ${band.shape[1]}`));
    band.says.filter(Boolean).forEach((text, x) => said.append(el("p", { className: x ? "note" : "" }, ...symbols(text))));
    const section = el("section", { className: "band", id: `step-${band.id}`, "aria-label": band.title }, said, el("div", {}, ...[band.body].flat()));
    if (band.join && w.shown.length > 1) main.append(fork(w.shown.length, true));
    main.append(section);
    if (band.fork && w.shown.length > 1) main.append(fork(w.shown.length, false));
    const button = el("button", { type: "button", textContent: band.short }, el("small", { textContent: band.shape[1] }));
    button.addEventListener("click", () => section.scrollIntoView({ behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" }));
    if (n) steps.append(el("span", { textContent: "→", "aria-hidden": "true" }));
    steps.append(button);
  });
  tools(w);
  if (focused) [...document.querySelectorAll("table[tabindex]")].find((t) => t.getAttribute("aria-label") === focused)?.focus({ preventScroll: true });
  show(w, w.pinned);
}

function tools(w) {
  const box = $("tools");
  box.replaceChildren();
  if (w.meta.heads.length > 3) {
    const group = el("div", { role: "group", "aria-label": "Heads side by side" }, el("b", { textContent: "Heads side by side" }));
    for (const h of w.meta.heads) {
      const button = el("button", { type: "button", textContent: String(h), "aria-label": `Head ${h}`, "aria-pressed": String(w.shown.includes(h)) });
      button.addEventListener("click", () => {
        const rest = w.shown.filter((n) => n !== h);
        if (rest.length === w.shown.length) w.shown = [...rest.slice(-3), h].sort((a, b) => a - b);
        else if (rest.length) w.shown = rest;
        draw(w);
        [...box.querySelectorAll("button")].find((b) => b.getAttribute("aria-label") === `Head ${h}`)?.focus();
      });
      group.append(button);
    }
    box.append(group);
  }
  const names = { L: "Tokens, queries", S: "Tokens, keys", E: "Columns of X", Ec: "Columns of C", Ev: "Columns of U", D: "Columns of Q, K", Dv: "Columns of V, O", C: "Columns of concat", Eo: "Columns of Y" };
  for (const [axis, name] of Object.entries(names)) {
    const n = w.length(axis), [a, b] = w.window(axis);
    if (b - a >= n) continue;
    const step = (way) => {
      const button = el("button", { type: "button", textContent: way < 0 ? "‹" : "›", "aria-label": `${name}: ${way < 0 ? "back" : "on"}`, disabled: way < 0 ? a === 0 : b === n });
      button.addEventListener("click", () => {
        w.start.set(axis, Math.max(0, Math.min(n - (b - a), a + way * (b - a))));
        draw(w);
        [...box.querySelectorAll("button:not(:disabled)")].find((x) => x.getAttribute("aria-label").startsWith(`${name}:`))?.focus();
      });
      return button;
    };
    box.append(el("div", { role: "group", "aria-label": name }, el("b", { textContent: name }), step(-1), el("output", { textContent: `${a}–${b - 1} of ${n}` }), step(1)));
  }
}

let lit = [];
function show(w, at) {
  for (const cell of lit) cell.classList.remove("left", "right", "target");
  lit = [];
  if (!at) return;
  const found = sources(w, ...at);
  const light = (places, side) => places.forEach(([name, i, j]) => (w.cells.get(`${name}:${i}:${j}`) ?? []).forEach((cell) => (cell.classList.add(side), lit.push(cell))));
  if (found.terms) light(found.terms.map((t) => t.l), "left"), light(found.terms.map((t) => t.r), "right");
  else light(found.right, "right"), light(found.left, "left");
  light([at], "target");
  $("what").textContent = found.what;
  $("equation").replaceChildren(...equation(w, found));
  $("meaning").replaceChildren(...symbols(found.meaning));
}

function pin(w, at, { tell = false } = {}) {
  w.pinned = at;
  show(w, at);
  if (tell) $("live").textContent = `${$("what").textContent}: ${$("equation").textContent}`;
}

// The number beside, in the direction of the screen; the axis moves along where it is longer than what is drawn.
function beside(w, down, right) {
  if (!w.pinned) return;
  const [name, i, j] = w.pinned, mine = w.cells.get(`${name}:${i}:${j}`) ?? [], cell = mine.find((c) => c.closest("table.result")) ?? mine[0];
  if (!cell) return;
  const line = cell.parentElement, cells = [...line.querySelectorAll("[role=gridcell]")], lines = [...line.parentElement.children];
  const next = lines[lines.indexOf(line) + down]?.querySelectorAll("[role=gridcell]")[cells.indexOf(cell) + right];
  if (next) pin(w, next.at, { tell: true });
}

// The largest weight that is drawn and not a token's own.
function strongest(w, h) {
  const a = w.get(`a${h}`), [[i0, i1], [j0, j1]] = [w.window("L"), w.window("S")];
  let best = [i0, j0];
  for (let i = i0; i < i1; i++) for (let j = j0; j < j1; j++) if (w.place("L", i) !== w.place("S", j) && a.at(i, j) > a.at(...best)) best = [i, j];
  return best;
}

// The weight that the page around this one asks for, by its tokens' numbers; null where it is not drawn.
function askedFor(w) {
  const at = (root.dataset.at ?? "").split(" ").map(Number), [i, j] = at.map((n, axis) => w.meta.places[axis]?.indexOf(n) ?? -1);
  return i >= 0 && j >= 0 ? [i, j] : null;
}

async function start() {
  const { meta, arrays } = await unpack(document.getElementById("data").textContent);
  const w = new Walk(meta, arrays);
  const words = meta.queries.join(" ");
  $("title").textContent = `${meta.title}: attention step by step`;
  $("about").textContent = `${meta.sizes.H} head${meta.sizes.H > 1 ? "s" : ""}, ${meta.sizes.L} tokens${words.length < 90 && meta.kind ? `: ${words}` : ""}. Point at any number, tap it, or step to it with the Tab and arrow keys: below stands which numbers made it, and they are framed where they stand.`;
  root.dataset.theme = root.dataset.theme || (keptTheme() === "auto" ? (dark.matches ? "dark" : "light") : keptTheme());
  const small = !w.whole ? "" : meta.error < 1e-15 ? "exactly" : `within ${meta.error.toExponential(0)} of the largest`;
  $("trust").textContent = `These are the layer's own numbers; heads, rows and columns count from 0. ${w.whole ? `What the heads add sums to the output ${small}. ` : ""}Blue is above 0, orange below; the stronger, the larger${w.small ? "" : " (strength goes with the square root)"}.`;
  $("bands").className = w.small ? "" : "wide";
  draw(w);
  const first = w.shown[0], asked = askedFor(w), most = asked ?? strongest(w, first);
  pin(w, w.small && !asked ? [`s${first}`, Math.min(1, w.length("L") - 1), 0] : [`a${first}`, ...most]);
  const main = $("bands");
  main.addEventListener("pointerover", (event) => event.pointerType !== "touch" && event.target.at && show(w, event.target.at));
  main.addEventListener("pointerleave", () => show(w, w.pinned));
  main.addEventListener("click", (event) => event.target.at && pin(w, event.target.at, { tell: true }));
  main.addEventListener("focusin", (event) => {
    const first = event.target.matches?.("table") && event.target.querySelector("[role=gridcell]");
    if (first && w.pinned?.[0] !== first.at[0]) pin(w, first.at, { tell: true });
  });
  root.addEventListener("keydown", (event) => event.key === "Escape" && parent !== window && parent.postMessage("close", "*"));
  const ways = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  main.addEventListener("keydown", (event) => {
    if (!ways[event.key] || !event.target.matches("table")) return;
    event.preventDefault();
    beside(w, ...ways[event.key]);
  });
  for (const [key, text] of [["ArrowUp", "↑"], ["ArrowLeft", "←"], ["ArrowDown", "↓"], ["ArrowRight", "→"]]) {
    const button = el("button", { type: "button", textContent: text, "aria-label": `The number ${{ ArrowUp: "above", ArrowLeft: "to the left", ArrowDown: "below", ArrowRight: "to the right" }[key]}` });
    button.addEventListener("click", () => beside(w, ...ways[key]));
    $("pad").append(button);
  }
  root.dataset.ready = "yes";
}

start().catch((error) => {
  $("title").textContent = "This page could not be read";
  $("about").textContent = `${error.message}; write it again with headwise learn.`;
  console.error(error);
});
