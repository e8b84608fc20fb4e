// What is chosen (all of it stands in the address), and what is open.


export const FIGURES = {
  kind: "What each head does most. Hover or focus a square for its kind; the two letters under it stand for it.",
  peak: "Peak: the largest weight of a row, on average.",
  entropy: "Entropy of a row, in nats: how widely a query looks.",
  distance: "Distance: how many tokens away a query looks, on average.",
  previous: "Share of the weight on the token before.",
  next: "Share of the weight on the token after.",
  self: "Share of the weight on the token itself.",
  first: "Share of the weight on the first token.",
  separator: "Share of the weight on separators.",
  duplicate: "Share of the weight on the same token elsewhere.",
  induction: "Share of the weight on what followed the same token before.",
  positional: "Share of the weight at the head's best fixed distance.",
  moved: "Moved: how much of its weight a head puts elsewhere in the second text.",
};
export const HOW = { mean: ["Share", "The share of a query's weight that a cell's keys are given"], max: ["Largest", "The largest weight in a cell"] };

const BEGIN = { run: null, text: null, go: 0, model: 0, part: null, layer: null, head: null, how: "max", i: null, j: null, view: null, contrast: 1, colour: "kind", sort: "", only: "", beside: null, second: null, secondRun: null, secondModel: 0, split: "second", off: [] };
export const state = { ...BEGIN };
export const begin = () => Object.assign(state, BEGIN, { off: [] });
export const now = { server: null, run: null, beside: null, moved: null, ready: false };

export const part = (id = now.run.id) => {
  const { parts } = id === now.beside?.id ? now.beside : now.run;
  return parts.find((p) => p.name === state.part) || parts[0];
};
export const layerOf = (n = state.layer, id = now.run.id) => part(id).layers.find((l) => l.layer === n);
export const base = (id = now.run.id) => `/api/${id}/${encodeURIComponent(state.part)}`;
export const path = (id = now.run.id) => `${base(id)}/${state.layer}/${state.head}`;
