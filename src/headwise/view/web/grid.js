// The heads: a square each, and the kinds there are.

function showGrid() {
  const p = panel(), most = Math.max(...p.layers.map(([, n]) => n));
  const corner = el("span", { className: "corner", role: "columnheader" }, unseen("layer"));
  const head = el("div", { role: "row", className: "line" }, corner);
  for (let h = 0; h < most; h++) head.append(el("span", { role: "columnheader", className: "label", textContent: String(h) }));
  const lines = p.layers.map(([layer, n]) => {
    const line = el("div", { role: "row", className: "line" }, el("span", { role: "rowheader", className: "label", textContent: String(layer) }));
    for (let h = 0; h < n; h++) line.append(cell(layer, h));
    return line;
  });
  $("grid").replaceChildren(head, ...lines);
  $("grid").style.setProperty("--columns", most);
  root.classList.toggle("many", p.layers.length > 16 || most > 16); // smaller squares, so that all are seen at once
  arrange();
  const ticket = ++thumbnailsDue, todo = [...$("grid").querySelectorAll("button")], shade = theme();
  (function some() {
    if (ticket !== thumbnailsDue) return;
    for (const button of todo.splice(0, 48)) {
      const [layer, head] = button.dataset.head.split(".").map(Number);
      drawThumbnail(button.querySelector("canvas"), p.map(layer, head, level(), 52), rowOf(layer, head).kind, shade, 26);
    }
    if (todo.length) requestAnimationFrame(some);
  })();
  reveal($("grid").querySelector("[aria-selected=true]"), $("grid").parentElement);
}

// Beside the grid where there is room for a map, else the map right under it.
function arrange() {
  const needs = $("grid").scrollWidth + 420;
  root.classList.toggle("narrow", root.clientWidth < Math.max(760, needs));
}

function cell(layer, head) {
  const { kind } = rowOf(layer, head), chosen = layer === state.layer && head === state.head;
  return el(
    "button",
    {
      type: "button",
      role: "gridcell",
      className: state.only && state.only !== kind ? "cell other" : "cell",
      tabIndex: chosen ? 0 : -1,
      "data-head": `${layer}.${head}`,
      "aria-selected": String(chosen),
      "aria-label": `Layer ${layer}, head ${head}: ${kind}`,
      title: `${layer}.${head} ${kind}: ${meta.kinds[kind]}`,
      style: { "--kind": kindColour(kind, theme()) },
      onclick: () => { state.link = null; open(layer, head); bring($("map"), $("grid").parentElement); },
      onkeydown: (event) => {
        const p = panel(), y = p.layers.findIndex(([l]) => l === layer);
        const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -head], End: [0, p.layers[y][1] - 1 - head] }[event.key];
        if (!step) return;
        event.preventDefault();
        const line = p.layers[Math.min(Math.max(y + step[0], 0), p.layers.length - 1)];
        state.link = null;
        open(line[0], Math.min(Math.max(head + step[1], 0), line[1] - 1), true);
      },
    },
    el("canvas", { width: 26, height: 26, "aria-hidden": "true" }),
    el("i", { textContent: KINDS[kind][2], "aria-hidden": "true" }),
  );
}

function showLegend() {
  const count = {};
  for (const row of panel().rows) count[row.kind] = (count[row.kind] || 0) + 1;
  $("legend").replaceChildren(
    ...Object.keys(KINDS)
      .filter((kind) => count[kind])
      .map((kind) =>
        el(
          "button",
          {
            type: "button",
            "aria-pressed": String(state.only === kind),
            title: attends(kind),
            style: { "--kind": kindColour(kind, theme()) },
            onclick: () => {
              state.only = state.only === kind ? null : kind;
              for (const button of $("grid").querySelectorAll("button")) {
                const [layer, head] = button.dataset.head.split(".").map(Number);
                button.classList.toggle("other", Boolean(state.only) && rowOf(layer, head).kind !== state.only);
              }
              for (const button of $("legend").children) button.setAttribute("aria-pressed", String(button.dataset.kind === state.only));
              $("meaning").textContent = state.only ? attends(state.only) : "";
            },
            "data-kind": kind,
          },
          el("i", { textContent: KINDS[kind][2], "aria-hidden": "true" }),
          el("span", { textContent: kind }),
          el("b", { textContent: String(count[kind]) }),
        ),
      ),
  );
  $("meaning").textContent = state.only ? attends(state.only) : "";
}
