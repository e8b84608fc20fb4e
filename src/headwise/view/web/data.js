// The packed data and what can be asked of it. A weight is a number from 0 to 1; i counts queries, j keys.

async function unpack(text) {
  const { meta, buffer, at } = await packed(text);
  return { meta, panels: meta.panels.map((panel) => new Panel(panel, buffer, at, meta.step)) };
}

class Panel {
  constructor(meta, buffer, base, step) {
    Object.assign(this, meta, { buffer, base, step, cache: new Map(), once: new Map() });
    this.rowOf = new Map(meta.rows.map((row) => [`${row.layer}.${row.head}`, row]));
  }

  get levels() {
    const same = (side) => side.words.length === side.tokens.length && side.words.every((word, n) => word === side.tokens[n]);
    if (this.long) return Object.keys(this.long.levels);
    return same(this.queries) && same(this.keys) ? ["tokens"] : ["words", "tokens"];
  }

  // What is shown of each token or word: spaces and ends of lines by a sign, for they would not be seen.
  labels(side, level) {
    return this.kept(`labels ${side} ${level}`, () => this[side][level].map(visible));
  }

  // The same, where a label is there more than once with its place among them, as --link takes it: "the#2".
  names(side, level) {
    return this.kept(`names ${side} ${level}`, () => {
      const labels = this.labels(side, level), count = new Map(), nth = new Map();
      for (const label of labels) count.set(label, (count.get(label) || 0) + 1);
      return labels.map((label) => {
        nth.set(label, (nth.get(label) || 0) + 1);
        return count.get(label) > 1 ? `${label}#${nth.get(label)}` : label;
      });
    });
  }

  // The first token or word that was generated; null where there is none.
  generated(side, level) {
    const { generated, starts } = this[side];
    if (generated === null || generated === undefined) return null;
    if (level === "tokens") return generated;
    const at = starts.findIndex((start) => start >= generated);
    return at < 0 ? null : at;
  }

  kept(name, make) {
    if (!this.once.has(name)) this.once.set(name, make());
    return this.once.get(name);
  }

  size(level) {
    return [this.queries[level].length, this.keys[level].length];
  }

  u8(at, n) {
    return new Uint8Array(this.buffer, this.base + at, n);
  }

  u16(at, n) {
    return new Uint16Array(this.buffer, this.base + at, n);
  }

  // Every weight of a head at a level, row after row; null for a long text.
  exactHead(layer, head, level) {
    if (this.long) return null;
    const key = `${layer}.${head}.${level}`;
    if (this.cache.has(key)) return this.cache.get(key);
    const [L, S] = this.size("tokens");
    const raw = this.u16(this.exact[layer] + 2 * head * L * S, L * S);
    const values = Float32Array.from(raw, (x) => x / this.step);
    const found = level === "tokens" ? values : this.toWords(values, layer, head);
    if (this.cache.size > 400) this.cache.clear();
    this.cache.set(key, found);
    return found;
  }

  // To a word the weights are summed, from a word averaged over its tokens that attend to something.
  toWords(values, layer, head) {
    const [L, S] = this.size("tokens");
    const [l, s] = this.size("words");
    const wordOf = (side, n) => {
      const words = new Int32Array(n);
      side.starts.forEach((start, w) => words.fill(w, start));
      return words;
    };
    const row = wordOf(this.queries, L), column = wordOf(this.keys, S);
    const empty = this.empty[layer] === undefined ? null : this.u8(this.empty[layer] + head * L, L);
    const out = new Float32Array(l * s), count = new Float32Array(l);
    for (let i = 0; i < L; i++) {
      if (empty && empty[i]) continue;
      count[row[i]] += 1;
      for (let j = 0; j < S; j++) out[row[i] * s + column[j]] += values[i * S + j];
    }
    for (let i = 0; i < l; i++) for (let j = 0; j < s; j++) out[i * s + j] /= Math.max(count[i], 1);
    return out;
  }

  // A picture of a head: {rows, columns, values}, at most `most` cells along an axis, each the largest weight in it.
  // view: {i0, i1, j0, j1}, the part to show, all by default; of a long text then only what its lists hold.
  map(layer, head, level, most, view = null) {
    const [L, S] = this.size(level);
    if (view) return this.part(layer, head, level, view, most);
    const [, second] = this.levels;
    if (this.long && level === second) return this.part(layer, head, level, { i0: 0, i1: L, j0: 0, j1: S }, Math.min(most, this.long.grid));
    if (this.long) {
      const at = this.long.levels[level][layer];
      const r = Math.min(this.long.grid, L), c = Math.min(this.long.grid, S);
      const values = Float32Array.from(this.u8(at.grid + head * r * c, r * c), (x) => (x / 255) ** 2);
      return shrink({ rows: r, columns: c, values }, most);
    }
    return shrink({ rows: L, columns: S, values: this.exactHead(layer, head, level) }, most);
  }

  part(layer, head, level, { i0, i1, j0, j1 }, most) {
    const exact = this.exactHead(layer, head, level), S = this.size(level)[1];
    const rows = Math.min(i1 - i0, most), columns = Math.min(j1 - j0, most), values = new Float32Array(rows * columns);
    const put = (i, j, w) => {
      const cell = Math.floor(((i - i0) * rows) / (i1 - i0)) * columns + Math.floor(((j - j0) * columns) / (j1 - j0));
      if (w > values[cell]) values[cell] = w;
    };
    if (exact) for (let i = i0; i < i1; i++) for (let j = j0; j < j1; j++) put(i, j, exact[i * S + j]);
    else for (const [i, j, w] of this.listed(layer, head, level, i0, i1, j0, j1)) put(i, j, w);
    return { rows, columns, values };
  }

  // The weights that a long text's lists hold of some rows and columns, [i, j, weight]; some of them twice.
  *listed(layer, head, level, i0, i1, j0, j1) {
    for (let i = i0; i < i1; i++) for (const [j, w] of this.line(layer, head, level, "row", i)) if (j >= j0 && j < j1) yield [i, j, w];
    for (let j = j0; j < j1; j++) for (const [i, w] of this.line(layer, head, level, "column", j)) if (i >= i0 && i < i1) yield [i, j, w];
  }

  // One weight; null where a long text's lists do not hold it.
  weight(layer, head, level, i, j) {
    const exact = this.exactHead(layer, head, level);
    if (exact) return exact[i * this.size(level)[1] + j];
    const found = this.line(layer, head, level, "row", i).find(([n]) => n === j) || this.line(layer, head, level, "column", j).find(([n]) => n === i);
    return found ? found[1] : null;
  }

  // The weights of one query ("row") or to one key ("column"): [[place, weight], ...], largest first.
  line(layer, head, level, way, n) {
    const [L, S] = this.size(level);
    const exact = this.exactHead(layer, head, level);
    let found = [];
    if (exact) {
      if (way === "row") for (let j = 0; j < S; j++) found.push([j, exact[n * S + j]]);
      else for (let i = 0; i < L; i++) found.push([i, exact[i * S + n]]);
    } else {
      const at = this.long.levels[level][layer], k = Math.min(this.long.k, L, S), length = way === "row" ? L : S;
      if (k === 0) return [];
      const from = 2 * (head * length + n) * k;
      const places = this.u16(at[`${way}Places`] + from, k), weights = this.u16(at[`${way}Weights`] + from, k);
      found = Array.from(places, (place, x) => [place, weights[x] / this.long.step]);
    }
    return found.filter((entry) => entry[1] > 0).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  }
}

function shrink(map, most) {
  if (map.rows <= most && map.columns <= most) return map;
  const r = Math.min(map.rows, most), c = Math.min(map.columns, most), values = new Float32Array(r * c);
  for (let i = 0; i < map.rows; i++) {
    const y = Math.floor((i * r) / map.rows) * c;
    for (let j = 0; j < map.columns; j++) {
      const cell = y + Math.floor((j * c) / map.columns), x = map.values[i * map.columns + j];
      if (x > values[cell]) values[cell] = x;
    }
  }
  return { rows: r, columns: c, values };
}
