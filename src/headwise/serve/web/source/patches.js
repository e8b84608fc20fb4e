// A picture's patches under a query's weights.

import { $ } from "./dom.js";
import { rgb, shade } from "./colours.js";
import { labels } from "./labels.js";
import { layerOf, now, state } from "./state.js";

export function patches(found) {
  const { S } = layerOf(), tokens = labels().keys, n = [S, S - 1, S - 2].map((x) => Math.sqrt(x)).find(Number.isInteger);
  const box = $("patches");
  box.hidden = tokens.known || !n || n < 3;
  if (box.hidden) return;
  const lead = S - n * n, canvas = $("patch-map"), context = canvas.getContext("2d"), side = canvas.width / n, most = Math.max(...found.weights, 1e-9);
  canvas.setAttribute("aria-label", `The weights of query ${state.i} over ${n} x ${n} patches`);
  const paint = (image) => {
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (image) context.drawImage(image, 0, 0, canvas.width, canvas.height);
    for (let p = 0; p < n * n; p++) {
      const w = found.places.indexOf(p + lead), t = w < 0 ? 0 : Math.sqrt(found.weights[w] / most), [r, g, b] = shade(t);
      context.fillStyle = image ? `rgba(255,120,0,${0.75 * t})` : `rgb(${r},${g},${b})`;
      context.fillRect((p % n) * side, Math.floor(p / n) * side, side, side);
    }
  };
  if (!now.server.image) return paint(null);
  const image = new Image();
  image.onload = () => paint(image);
  image.src = "/image";
}
