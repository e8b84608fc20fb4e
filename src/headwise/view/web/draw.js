// Colours and pictures. A weight w is shown at sqrt(w) along the scale, so that small weights can be told apart.

const RAMPS = {
  light: ["#f6f5f1", "#d3e2ea", "#94bdd6", "#4c8dbd", "#1a5a92", "#08264a"],
  dark: ["#16191d", "#1d3850", "#2a6489", "#479dbd", "#97d3d4", "#f6f8df"],
};

const KINDS = { // colour on light and on dark, and a letter, for colours alone tell nobody who does not see them
  previous: ["#0072b2", "#4aa8e0", "p"],
  next: ["#3f9fd8", "#8fd0f5", "n"],
  self: ["#00855f", "#2fbd94", "s"],
  first: ["#d55e00", "#f0863c", "f"],
  separator: ["#b87d00", "#e8b23c", "e"],
  duplicate: ["#b8558f", "#e08cc0", "d"],
  induction: ["#882255", "#d1588f", "i"],
  positional: ["#6a4fb3", "#a48ff0", "o"],
  broad: ["#7a6a3a", "#c3b077", "b"],
  mixed: ["#55606b", "#8996a3", "m"],
};

const rgb = (hex) => [1, 3, 5].map((n) => parseInt(hex.slice(n, n + 2), 16));
const css = (c) => `rgb(${c.map(Math.round).join(",")})`;
const blend = (a, b, t) => a.map((x, n) => x + (b[n] - x) * t);

function colour(weight, theme) {
  const ramp = RAMPS[theme], t = Math.sqrt(Math.min(Math.max(weight, 0), 1)) * (ramp.length - 1);
  const n = Math.min(Math.floor(t), ramp.length - 2);
  return blend(rgb(ramp[n]), rgb(ramp[n + 1]), t - n);
}

// Black or white, whichever stands out more on a colour; one of the two always has a contrast of 4.5 (WCAG 2).
function inkOn(c) {
  const [r, g, b] = c.map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

function kindColour(kind, theme) {
  return (KINDS[kind] || KINDS.mixed)[theme === "dark" ? 1 : 0];
}

function image(map, paint) {
  const canvas = document.createElement("canvas");
  canvas.width = map.columns;
  canvas.height = map.rows;
  const context = canvas.getContext("2d"), data = context.createImageData(map.columns, map.rows);
  for (let n = 0; n < map.values.length; n++) data.data.set([...paint(map.values[n]), 255], 4 * n);
  context.putImageData(data, 0, 0);
  return canvas;
}

function drawThumbnail(canvas, map, kind, theme, pixels) {
  const paper = rgb(theme === "dark" ? "#16191d" : "#ffffff"), ink = rgb(kindColour(kind, theme));
  const scale = window.devicePixelRatio || 1, size = Math.round(pixels * scale);
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = map.rows > size;
  context.drawImage(image(map, (w) => blend(paper, ink, Math.sqrt(w))), 0, 0, size, size);
}

// Where things lie on the large map, in CSS pixels. Labels are drawn while they can be read.
function mapLayout(width, map, rowLabels, columnLabels) {
  const context = document.createElement("canvas").getContext("2d");
  context.font = MAP_FONT;
  const widest = (labels) => Math.min(110, Math.max(...labels.map((label) => context.measureText(cut(label)).width)) + 8);
  let left = 0, top = 0;
  const readable = (n) => n <= 44;
  if (readable(rowLabels.length) && rowLabels.length === map.rows) left = widest(rowLabels);
  if (readable(columnLabels.length) && columnLabels.length === map.columns) top = widest(columnLabels);
  const room = width - left - 1, cell = room / map.columns;
  const tall = Math.min(cell * map.rows, Math.max(room * 1.4, 120));
  if (tall / map.rows < 10.5) left = 0;
  if (cell < 10.5) top = 0;
  const across = width - left - 1, height = Math.min((across / map.columns) * map.rows, Math.max(across * 1.4, 120));
  return { left, top, width: across, height, total: height + top + 1, dx: across / map.columns, dy: height / map.rows };
}

const MAP_FONT = '11.5px system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif';
const cut = (label) => ([...label].length > 16 ? [...label].slice(0, 15).join("") + "…" : label);

// mark: {i, j}, the row and column to frame; ends: {i, j}, where what was generated begins.
function drawMap(canvas, map, rowLabels, columnLabels, theme, mark, ends) {
  const width = canvas.parentElement.clientWidth, at = mapLayout(width, map, rowLabels, columnLabels);
  const scale = window.devicePixelRatio || 1, text = theme === "dark" ? "#c9ced4" : "#33383e";
  canvas.style.width = `${width}px`;
  canvas.style.height = `${at.total}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(at.total * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.imageSmoothingEnabled = false;
  context.drawImage(image(map, (w) => colour(w, theme)), at.left, at.top, at.width, at.height);
  context.strokeStyle = theme === "dark" ? "#3a4149" : "#d5d4cd";
  context.strokeRect(at.left + 0.5, at.top + 0.5, at.width - 0.5, at.height - 0.5);
  context.setLineDash([5, 3]);
  context.strokeStyle = theme === "dark" ? "#e6e9ec" : "#1c2126";
  for (const [n, of, x, y] of [[ends.i, rowLabels.length, 1, 0], [ends.j, columnLabels.length, 0, 1]]) {
    if (n === null || n <= 0 || n >= of) continue;
    const from = [at.left + (y * n * at.width) / of, at.top + (x * n * at.height) / of];
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(from[0] + x * at.width, from[1] + y * at.height);
    context.stroke();
  }
  context.setLineDash([]);
  context.font = MAP_FONT;
  context.textBaseline = "middle";
  const strong = (yes) => {
    context.fillStyle = yes ? (theme === "dark" ? "#ffffff" : "#000000") : text;
    context.font = (yes ? "600 " : "") + MAP_FONT;
  };
  if (at.left) {
    context.textAlign = "right";
    rowLabels.forEach((label, i) => {
      strong(mark && mark.i === i);
      context.fillText(cut(label), at.left - 5, at.top + (i + 0.5) * at.dy);
    });
  }
  if (at.top) {
    context.textAlign = "left";
    columnLabels.forEach((label, j) => {
      strong(mark && mark.j === j);
      context.save();
      context.translate(at.left + (j + 0.5) * at.dx, at.top - 5);
      context.rotate(-Math.PI / 2);
      context.fillText(cut(label), 0, 0);
      context.restore();
    });
  }
  if (mark) {
    context.strokeStyle = theme === "dark" ? "#ffb454" : "#d55e00";
    context.lineWidth = 1.5;
    const cell = (n, of, cells) => (n === null || n === undefined || n < 0 || n >= of ? null : Math.floor((n * cells) / of));
    const y = cell(mark.i, rowLabels.length, map.rows), x = cell(mark.j, columnLabels.length, map.columns);
    if (y !== null) context.strokeRect(at.left + 0.75, at.top + y * at.dy + 0.75, at.width - 1.5, Math.max(at.dy - 1.5, 1));
    if (x !== null) context.strokeRect(at.left + x * at.dx + 0.75, at.top + 0.75, Math.max(at.dx - 1.5, 1), at.height - 1.5);
  }
  return at;
}

