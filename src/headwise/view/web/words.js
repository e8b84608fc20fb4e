// How figures are written, and what is scrolled to.

const given = (x) => x !== null && x !== undefined;
const percent = (w) => (w >= 0.0995 ? `${(100 * w).toFixed(0)} %` : w >= 0.00095 ? `${(100 * w).toFixed(1)} %` : "< 0.1 %");
const points = (w) => `${w < 0 ? "−" : "+"}${(100 * Math.abs(w)).toFixed(Math.abs(w) < 0.0995 ? 1 : 0)}`;
const number = (x, digits = 2) => (given(x) ? x.toFixed(digits) : "–");
const small = (x) => x.toExponential(0).replace("e-", " × 10⁻").replace("e+0", "").replace(/⁻(\d+)/, (_, d) => "⁻" + [...d].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join(""));
const unseen = (text) => el("span", { className: "unseen", textContent: text }); // for those who have the page read to them

// Where the page is one column: scrolls it just so far that a result is seen, and what was pressed still is.
function bring(result, pressed) {
  if (!root.classList.contains("narrow")) return;
  const below = result.getBoundingClientRect().bottom - window.innerHeight + 8, above = pressed.getBoundingClientRect().top - 8;
  if (below > 0 && above > 0) window.scrollBy(0, Math.min(below, above));
}

// Scrolls a box of its own, never the page, until a node in it is seen.
function reveal(node, box) {
  if (!node || !box) return;
  const a = node.getBoundingClientRect(), b = box.getBoundingClientRect();
  if (a.top < b.top || a.bottom > b.bottom) box.scrollTop += a.top - b.top - (b.height - a.height) / 2;
  if (a.left < b.left || a.right > b.right) box.scrollLeft += a.left - b.left - (b.width - a.width) / 2;
}
