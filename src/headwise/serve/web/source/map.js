// One map: tiles under a viewer, tokens along its edges, marks above it.

import OpenSeadragon from "openseadragon";
import { bytes, get } from "./api.js";
import { dark, table } from "./colours.js";
import { plain } from "./dom.js";

const FONT = '12px system-ui, "Segoe UI", Roboto, sans-serif';
const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const cut = (text, most) => ([...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text);

export class MapView {
  constructor(box, name, { onPoint, onPick, onMove, onNote }) {
    Object.assign(this, { box, onPoint, onPick, onMove, onNote, marks: { i: null, j: null }, ready: false, times: [] });
    this.drawn = new Promise((seen) => (this.seen = seen));
    box.innerHTML = '<div class="caption"></div><canvas class="top"></canvas><canvas class="left"></canvas><div class="viewer"></div><canvas class="over"></canvas>';
    for (const part of ["caption", "top", "left", "viewer", "over"]) this[part] = box.querySelector(`.${part}`);
    this.caption.textContent = name;
    this.viewerBox = this.viewer;
    this.osd = OpenSeadragon({
      element: this.viewerBox,
      drawer: "canvas",
      showNavigationControl: false,
      imageSmoothingEnabled: false,
      animationTime: still() ? 0 : 0.35,
      springStiffness: 9,
      blendTime: 0,
      immediateRender: false,
      visibilityRatio: 0.2,
      minZoomImageRatio: 0.6,
      maxZoomPixelRatio: 90,
      imageLoaderLimit: 4,
      maxImageCacheCount: 160,
      gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsTouch: { clickToZoom: false, dblClickToZoom: true },
      gestureSettingsPen: { clickToZoom: false },
    });
    this.osd.innerTracker.keyDownHandler = null;
    this.osd.innerTracker.keyHandler = null;
    for (const event of ["update-viewport", "animation", "resize", "open", "tile-drawn"]) this.osd.addHandler(event, () => this.draw());
    this.osd.addHandler("animation-finish", () => this.ready && this.onMove(this.view()));
    this.osd.addHandler("tile-unloaded", () => (this.forgetDue ??= setTimeout(() => this.forget(), 1000)));
    for (const event of ["canvas-drag", "canvas-scroll", "canvas-pinch", "canvas-double-click"]) this.osd.addHandler(event, () => (this.all = false));
    this.osd.addHandler("after-resize", () => this.ready && this.all && this.whole(true));
    this.osd.addHandler("canvas-key", (event) => (event.preventDefaultAction = true));
    this.osd.addHandler("canvas-click", (event) => event.quick && this.pick(this.place(event.position.x, event.position.y)));
    this.viewerBox.addEventListener("pointermove", (event) => {
      const frame = this.viewerBox.getBoundingClientRect();
      this.point(this.place(event.clientX - frame.left, event.clientY - frame.top));
    });
    this.viewerBox.addEventListener("pointerleave", () => this.point(null));
    const canvas = this.osd.canvas;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  // what is shown: { path, L, S, top, how, beside, contrast, labels: {queries, keys}, prompt, title }
  show(what, view) {
    const same = this.what && this.what.L === what.L && this.what.S === what.S;
    const before = this.ready ? this.view() : null, kept = view || (same && before && before[2] < 0.98 * what.S ? before : null);
    this.what = what;
    this.version = 0;
    this.caption.textContent = this.caption.title = what.title;
    this.osd.canvas.setAttribute("aria-label", `${what.title}: ${what.L} queries down, ${what.S} keys along. Arrows move, plus and minus zoom, Enter picks.`);
    this.shades = table(what.how === "difference", what.how === "difference" ? 2 * what.contrast : what.contrast);
    this.ready = false;
    clearTimeout(this.poll);
    this.osd.close();
    this.osd.open(this.source());
    this.osd.addOnceHandler("open", () => {
      this.ready = true;
      if (kept) this.go(kept, true);
      else this.whole(true);
      this.draw();
    });
    this.osd.world.addOnceHandler("add-item", ({ item }) => item.addOnceHandler("fully-loaded-change", () => (this.first = performance.now())));
  }

  source() {
    const { what, version } = this, map = this;
    return new OpenSeadragon.TileSource({
      width: what.S,
      height: what.L,
      tileSize: 256,
      tileOverlap: 0,
      minLevel: 0,
      maxLevel: what.top,
      ready: true,
      getTileUrl: (level, x, y) => `${what.path}/tile/${what.how}/${what.top - level}/${x}/${y}?v=${version}${what.beside ? `&beside=${what.beside}` : ""}`,
      downloadTileStart(job) {
        const stop = new AbortController(), [, z, x, y] = /\/(\d+)\/(\d+)\/(\d+)\?/.exec(job.src).map(Number);
        job.userData.stop = stop;
        const begun = performance.now();
        bytes(job.src, stop.signal).then(
          ({ data, exact }) => {
            map.seen();
            map.times.push({ z, ms: performance.now() - begun, at: performance.now(), exact });
            if (map.times.length > 2000) map.times.splice(0, 1000);
            if (!exact && map.what === what) map.follow();
            job.finish(map.paint(data, z, x, y, what), null, "context2d");
          },
          (error) => job.fail(String(error.message || error), null),
        );
      },
      downloadTileAbort(job) {
        job.userData.stop?.abort();
      },
    });
  }

  paint(data, z, x, y, what) {
    const side = 2 ** z, wide = Math.min(256, Math.ceil(what.S / side) - 256 * x), high = Math.min(256, Math.ceil(what.L / side) - 256 * y);
    const canvas = document.createElement("canvas"), values = new Uint16Array(data);
    canvas.width = wide;
    canvas.height = high;
    const context = canvas.getContext("2d", { willReadFrequently: true }), image = context.createImageData(wide, high), pixels = new Uint32Array(image.data.buffer);
    for (let n = 0; n < values.length; n++) pixels[n] = this.shades[values[n] >> 6];
    if (what.how === "difference") for (let n = 0; n < values.length; n++) if (values[n] === 0) pixels[n] = (Math.floor(n / wide) + (n % wide)) % 2 ? this.shades[1024] : this.shades[1025];
    context.putImageData(image, 0, 0);
    return context;
  }

  // An overview that is still being read: shown again when more of it has been.
  follow() {
    clearTimeout(this.poll);
    const { what } = this;
    this.poll = setTimeout(async () => {
      try {
        const map = await get(`${what.path}/map`);
        if (this.what !== what) return;
        this.onNote(map.read < 1 ? `The overview shows ${Math.round(100 * map.read)} % of the queries so far, evenly spread; the rest is being read.` : "");
        if (map.version > this.version) {
          this.version = map.version;
          const old = this.osd.world.getItemAt(0);
          this.osd.addTiledImage({
            tileSource: this.source(),
            success: ({ item }) => {
              const swap = () => {
                if (old && this.osd.world.getIndexOfItem(old) >= 0) this.osd.world.removeItem(old);
              };
              if (item.getFullyLoaded()) swap();
              else item.addOnceHandler("fully-loaded-change", swap);
            },
          });
        }
        if (map.read < 1) this.follow();
      } catch {
        // the page says so
      }
    }, 400);
  }

  // OpenSeadragon keeps a record of every tile that was ever near the window, loaded or not; of a long map there are
  // a hundred thousand. Those that are neither loaded nor looked at are made again when they are needed.
  forget() {
    this.forgetDue = undefined;
    const seen = performance.timeOrigin + performance.now() - 3000;
    for (let n = 0; n < this.osd.world.getItemCount(); n++)
      for (const columns of Object.values(this.osd.world.getItemAt(n).tilesMatrix))
        for (const [x, column] of Object.entries(columns)) {
          for (const [y, tile] of Object.entries(column)) if (!tile.loaded && !tile.loading && tile.lastTouchTime < seen) delete column[y];
          if (!Object.keys(column).length) delete columns[x];
        }
  }

  // where things lie

  bounds() {
    const b = this.osd.viewport.getBounds(true), S = this.what.S;
    return { j0: b.x * S, i0: b.y * S, across: b.width * S, down: b.height * S };
  }

  place(x, y) {
    if (!this.ready) return null;
    const b = this.bounds(), i = Math.floor(b.i0 + (y / this.viewerBox.clientHeight) * b.down), j = Math.floor(b.j0 + (x / this.viewerBox.clientWidth) * b.across);
    return i >= 0 && j >= 0 && i < this.what.L && j < this.what.S ? { i, j } : null;
  }

  view() {
    const b = this.osd.viewport.getBounds(false), S = this.what.S;
    return [b.x * S, b.y * S, b.width * S].map((x) => Math.round(x * 100) / 100);
  }

  go([x, y, w], at_once = false) {
    this.all = false;
    const S = this.what.S, ratio = this.viewerBox.clientHeight / Math.max(1, this.viewerBox.clientWidth);
    this.osd.viewport.fitBounds(new OpenSeadragon.Rect(x / S, y / S, w / S, (w * ratio) / S), at_once || still());
  }

  whole(at_once = false) {
    this.all = true;
    this.osd.viewport.goHome(at_once || still());
  }

  zoom(by) {
    if (by === 0) this.whole();
    else this.all = false, this.osd.viewport.zoomBy(by, undefined, still()), this.osd.viewport.applyConstraints();
  }

  // Brings a place to the middle, near enough to be read.
  look(i, j) {
    const b = this.bounds(), w = Math.min(b.across, Math.max(24, this.viewerBox.clientWidth / 16)), ratio = b.down / b.across;
    this.go([j + 0.5 - w / 2, i + 0.5 - (w * ratio) / 2, w]);
  }

  point(place) {
    if (place && this.at && place.i === this.at.i && place.j === this.at.j) return;
    this.at = place;
    this.draw();
    this.onPoint(place);
  }

  pick(place) {
    if (place) this.onPick(place);
  }

  mark(i, j) {
    this.marks = { i, j };
    this.draw();
  }

  key(event) {
    if (!this.ready) return;
    const b = this.bounds(), step = Math.max(1, Math.round(b.across / this.viewerBox.clientWidth) * 4), by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (by && event.shiftKey) this.osd.viewport.panBy(new OpenSeadragon.Point((by[1] * b.across) / 5 / this.what.S, (by[0] * b.down) / 5 / this.what.S), still());
    else if (by) {
      const n = b.across / this.viewerBox.clientWidth < 1 / 5 ? 1 : step, from = this.at || { i: this.marks.i ?? Math.floor(b.i0 + b.down / 2), j: this.marks.j ?? Math.floor(b.j0 + b.across / 2) };
      const limit = (x, most) => Math.min(Math.max(x, 0), most - 1);
      this.point({ i: limit(from.i + by[0] * n, this.what.L), j: limit(from.j + by[1] * n, this.what.S) });
    } else if (event.key === "+" || event.key === "=") this.zoom(2);
    else if (event.key === "-") this.zoom(0.5);
    else if (event.key === "0") this.whole();
    else if (event.key === "Enter" && this.at) this.pick(this.at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // edges and marks

  draw() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => {
      this.due = 0;
      if (this.ready && this.osd.world.getItemCount()) this.paintEdges();
    });
  }

  canvas(canvas) {
    const scale = devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
    if (canvas.width !== Math.round(w * scale) || canvas.height !== Math.round(h * scale)) {
      canvas.width = Math.round(w * scale);
      canvas.height = Math.round(h * scale);
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, w, h);
    return context;
  }

  paintEdges() {
    const b = this.bounds(), { L, S, labels, prompt } = this.what, w = this.viewerBox.clientWidth, h = this.viewerBox.clientHeight;
    const ink = dark() ? "#e6e9ec" : "#1c2126", quiet = dark() ? "#9aa4ae" : "#5b646d", hot = dark() ? "#ffb454" : "#b84500";
    const edge = (context, n, from, span, room, other, side, at) => {
      const px = room / span, step = Math.max(1, Math.ceil(15 / px)), nice = step === 1 ? 1 : 2 ** Math.ceil(Math.log2(step));
      const text = (t) => {
        const label = labels[side].named(t);
        return label === undefined ? String(t) : nice > 1 || px < 13 ? `${t} ${plain(label)}` : plain(label);
      };
      const shown = new Set();
      for (const t of [this.marks[at], this.at?.[at]]) if (t !== null && t !== undefined) shown.add(t);
      const strong = [...shown];
      for (let t = Math.max(0, Math.ceil((from - 0.5) / nice) * nice); t < Math.min(n, from + span - 0.5); t += nice) // its middle is in sight
        if (!strong.some((s) => s !== t && Math.abs(s - t) * px < 14)) shown.add(t);
      const most = Math.floor(other / 6.6);
      for (const t of shown) {
        const y = (t + 0.5 - from) * px;
        if (y < 0 || y > room) continue;
        const marked = strong.includes(t), made = prompt !== null && prompt !== undefined && t >= prompt;
        context.font = `${made ? "italic " : ""}${marked ? "700 " : ""}${FONT}`;
        context.fillStyle = marked ? hot : labels[side].get(t) === undefined ? quiet : ink;
        context.fillText(cut(text(t), most), 0, y);
      }
    };
    const left = this.canvas(this.left), top = this.canvas(this.top), over = this.canvas(this.over);
    left.textAlign = "right";
    left.textBaseline = top.textBaseline = "middle";
    left.translate(this.left.clientWidth - 5, 0);
    edge(left, L, b.i0, b.down, h, this.left.clientWidth - 8, "queries", "i");
    top.translate(0, this.top.clientHeight - 5);
    top.rotate(-Math.PI / 2);
    edge(top, S, b.j0, b.across, w, this.top.clientHeight - 8, "keys", "j");
    const box = (x, y, bw, bh) => over.strokeRect(x, y, bw, bh);
    over.lineWidth = 1.5;
    const px = w / b.across, py = h / b.down, x0 = -b.j0 * px, y0 = -b.i0 * py;
    over.strokeStyle = quiet;
    box(x0 - 0.75, y0 - 0.75, S * px + 1.5, L * py + 1.5);
    if (prompt) {
      over.setLineDash([4, 4]);
      over.beginPath();
      over.moveTo(x0, y0 + prompt * py), over.lineTo(x0 + S * px, y0 + prompt * py), over.moveTo(x0 + prompt * px, y0), over.lineTo(x0 + prompt * px, y0 + L * py);
      over.stroke();
      over.setLineDash([]);
    }
    over.strokeStyle = hot;
    if (this.marks.i !== null) box(x0, y0 + this.marks.i * py, S * px, Math.max(2, py));
    if (this.marks.j !== null) box(x0 + this.marks.j * px, y0, Math.max(2, px), L * py);
    if (this.at) {
      over.strokeStyle = ink;
      box(x0 + this.at.j * px - 1, y0 + this.at.i * py - 1, Math.max(4, px) + 2, Math.max(4, py) + 2);
    }
  }
}
