// What tokens read like, fetched where they are looked at.

import { get } from "./api.js";
import { maps, showTitles } from "./head.js";
import { base, layerOf, now, state } from "./state.js";
import { showWords } from "./words.js";

class Labels {
  constructor(at, side, changed) {
    Object.assign(this, { at, side, changed, pages: new Map(), known: true });
  }

  get(n) {
    const page = this.page(Math.floor(n / 16384));
    return page ? page.labels[n % 16384] : undefined;
  }

  // What it reads like; nothing where there are no words, or they have not come yet.
  named(n) {
    const label = this.get(n);
    return this.known ? label : undefined;
  }

  starts(n) {
    const page = this.page(Math.floor(n / 16384));
    return page ? Boolean(page.starts[n % 16384]) : true;
  }

  page(k) {
    if (!this.pages.has(k)) {
      this.pages.set(k, null);
      get(`${this.at}/tokens/${this.side}/${k}`).then(
        (found) => {
          this.pages.set(k, found);
          this.known = found.known;
          this.changed();
        },
        () => setTimeout(() => this.pages.delete(k), 1000),
      );
    }
    return this.pages.get(k);
  }
}

const stores = new Map();
export const forgetLabels = () => stores.clear();

export function labels(id = now.run.id) {
  const same = layerOf(state.layer, id)?.same ?? state.layer, key = `${id}/${state.part}/${same}`; // layers of the same tokens share them
  if (!stores.has(key)) {
    if (stores.size > 8) stores.clear();
    const changed = () => (maps.forEach((map) => map.draw()), showWords(), showTitles());
    stores.set(key, { queries: new Labels(`${base(id)}/${same}`, "queries", changed), keys: new Labels(`${base(id)}/${same}`, "keys", changed) });
  }
  return stores.get(key);
}
