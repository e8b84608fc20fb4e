// The packed data and what can be asked of it. A weight is a number from 0 to 1; i counts queries, j keys.

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const n = new DataView(buffer).getUint32(0, true);
  const meta = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, n)));
  return { meta, panels: meta.panels.map((panel) => new Panel(panel, buffer, 4 + n, meta.step)) };
}

class Panel {
  constructor(meta, buffer, base, step) {
    Object.assign(this, meta, { buffer, base, step, cache: new Map() });
    this.rowOf = new Map(meta.rows.map((row) => [`${row.layer}.${row.head}`, row]));
  }

  get levels() {
    const same = (side) => side.words.length === side.tokens.length && side.words.every((word, n) => word === side.tokens[n]);
    if (this.long) return Object.keys(this.long.levels);
    return same(this.queries) && same(this.keys) ? ["tokens"] : ["words", "tokens"];
  }

  labels(side, level) {
    return this[side][level];
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
  map(layer, head, level, most) {
    const [L, S] = this.size(level);
    if (this.long) {
      const at = this.long.levels[level][layer];
      const r = Math.min(this.long.grid, L), c = Math.min(this.long.grid, S);
      const values = Float32Array.from(this.u8(at.grid + head * r * c, r * c), (x) => (x / 255) ** 2);
      return shrink({ rows: r, columns: c, values }, most);
    }
    return shrink({ rows: L, columns: S, values: this.exactHead(layer, head, level) }, most);
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
      found = Array.from(places, (place, x) => [place, weights[x] / this.step]);
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
