// Files: a head's map as vectors for papers, its weights and all heads' figures as CSV.

const escapeXml = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`).replace(/[^\t\n\r -\ud7ff\ue000-\ufffd]/gu, "");

// The map with a title, both axes named and the scale of its colours; always on white.
function svgMap(map, rowLabels, columnLabels, title, note) {
  const width = 520, at = mapLayout(width, map, rowLabels, columnLabels), lines = [], x0 = 20, y0 = 60;
  const text = (x, y, said, rest = "") => lines.push(`<text x="${x.toFixed(2)}" y="${y.toFixed(2)}" ${rest}>${escapeXml(said)}</text>`);
  text(0, 14, title, 'font-size="14" font-weight="600"');
  text(0, 31, note, 'fill="#5b646d"');
  text(x0 + at.left + at.width / 2, y0 - 8, "is attended to (key)", 'text-anchor="middle" fill="#5b646d"');
  const middle = y0 + at.top + at.height / 2;
  text(10, middle, "attends (query)", `text-anchor="middle" fill="#5b646d" transform="rotate(-90 10 ${middle.toFixed(2)})"`);
  lines.push(`<g transform="translate(${x0} ${y0})"><rect x="${at.left}" y="${at.top}" width="${at.width.toFixed(2)}" height="${at.height.toFixed(2)}" fill="${RAMPS.light[0]}" stroke="#d5d4cd"/>`);
  for (let i = 0; i < map.rows; i++)
    for (let j = 0; j < map.columns; j++) {
      const w = map.values[i * map.columns + j];
      if (w < 0.0005) continue;
      const box = [at.left + j * at.dx, at.top + i * at.dy, at.dx, at.dy].map((x) => x.toFixed(2));
      lines.push(`<rect x="${box[0]}" y="${box[1]}" width="${box[2]}" height="${box[3]}" fill="${css(colour(w, "light"))}"/>`);
    }
  if (at.left) rowLabels.forEach((label, i) => text(at.left - 5, at.top + (i + 0.5) * at.dy, cut(label), 'text-anchor="end" dominant-baseline="central"'));
  if (at.top)
    columnLabels.forEach((label, j) => lines.push(`<text transform="translate(${(at.left + (j + 0.5) * at.dx).toFixed(2)} ${at.top - 5}) rotate(-90)" dominant-baseline="central">${escapeXml(cut(label))}</text>`));
  lines.push("</g>");
  const bottom = y0 + at.total + 16, bar = 160, left = x0 + at.left;
  for (let x = 0; x < 40; x++) lines.push(`<rect class="scale" x="${(left + (x * bar) / 40).toFixed(2)}" y="${bottom.toFixed(2)}" width="${(bar / 40 + 0.3).toFixed(2)}" height="10" fill="${css(colour(((x + 0.5) / 40) ** 2, "light"))}"/>`);
  for (const w of SCALE) text(left + Math.sqrt(w) * bar, bottom + 23, String(w), 'text-anchor="middle" fill="#5b646d"');
  text(left + bar + 14, bottom + 9, "weight", 'fill="#5b646d"');
  const height = bottom + 32;
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width + x0} ${height.toFixed(1)}" width="${width + x0}" height="${height.toFixed(1)}" font-family="Helvetica, Arial, sans-serif" font-size="11.5"><title>${escapeXml(title)}</title><rect width="100%" height="100%" fill="#fff"/>${lines.join("")}</svg>`;
}

const SCALE = [0, 0.05, 0.25, 1]; // weights named along the scale

// RFC 4180. A field that a spreadsheet would take for a formula has an apostrophe before it.
function csv(rows) {
  const field = (x) => {
    const text = x === null || x === undefined ? "" : typeof x === "number" ? String(x) : String(x).replace(/^[=+\-@\t\r]/, "'$&");
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

// Every weight that the page has of a head: its query and key by number, from 0, and by name.
function weightsCsv(panel, layer, head, level) {
  const [L, S] = panel.size(level), names = [panel.names("queries", level), panel.names("keys", level)];
  const rows = [["query", "key", "query_text", "key_text", "weight"]];
  const put = (i, j, w) => w > 0 && rows.push([i, j, names[0][i], names[1][j], Number(w.toFixed(6))]);
  const exact = panel.exactHead(layer, head, level);
  if (exact) exact.forEach((w, n) => put(Math.floor(n / S), n % S, w));
  else {
    const there = new Map([...panel.listed(layer, head, level, 0, L, 0, S)].map(([i, j, w]) => [i * S + j, w]));
    for (const n of [...there.keys()].sort((a, b) => a - b)) put(Math.floor(n / S), n % S, there.get(n));
  }
  return csv(rows);
}

function figuresCsv(panels) {
  const rows = panels.flatMap((panel) => panel.rows.map((row) => ({ ...row, part: panel.title })));
  const columns = [...new Set(rows.flatMap(Object.keys))];
  return csv([columns, ...rows.map((row) => columns.map((name) => row[name]))]);
}

function download(text, type, name) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
