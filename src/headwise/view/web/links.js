// The links that were asked for, and two readings of a word against each other.

function showLinks() {
  const { links, contrasts } = panel();
  const box = $("links");
  if (!links.length) return box.replaceChildren();
  box.replaceChildren(
    el("h2", { textContent: "Links" }),
    el("p", {
      className: "quiet",
      textContent: "The share of the first word's weight that goes to the second, and beside it what all other rows give that second word on average (the small mark). Heads are ranked by the difference, their lift: a head that looks at a word from everywhere says nothing of this link.",
    }),
    ...links.map(showLink),
    ...contrasts.map(showContrast),
  );
}

function showLink(link, n) {
  const best = link.ranking.filter((entry) => entry[2] > 0).slice(0, 5);
  return el(
    "div",
    { className: "link" },
    el("h3", {}, link.source, el("span", { textContent: " → ", "aria-hidden": "true" }), unseen(" to "), link.target),
    best.length
      ? el("ol", {}, ...best.map(([layer, head, weight, others]) =>
          el("li", {}, el(
            "button",
            {
              type: "button",
              className: "bar",
              "aria-pressed": String(state.link === n && layer === state.layer && head === state.head),
              style: { "--share": weight, "--others": others || 0, "--kind": kindColour(rowOf(layer, head).kind, theme()) },
              onclick: () => follow(layer, head, n, link.sourceWord, link.targetWord),
            },
            el("span", { textContent: `${layer}.${head}` }),
            el("span", { className: "quiet", textContent: rowOf(layer, head).kind }),
            el("b", { textContent: percent(weight) }),
            el("span", { className: "quiet others", textContent: given(others) ? `elsewhere ${percent(others)}` : "no other rows" }),
          )),
        ))
      : el("p", { className: "quiet", textContent: "No head can look there." }),
  );
}

// Opens a head with a link's words marked.
function follow(layer, head, link, i, j) {
  state.level = "words";
  Object.assign(state, { link, pinned: { i, j: level() === "words" || panel().levels.length === 1 ? j : null }, at: null });
  root.dataset.panel = "";
  open(layer, head);
}

function showContrast(contrast) {
  const links = panel().links, n = links.findIndex((link) => link.source === contrast.source && link.target === contrast.first);
  const elsewhere = panels
    .filter((p) => p !== panel())
    .map((p) => [p, p.contrasts.find((c) => c.source === contrast.source && c.first === contrast.first && c.second === contrast.second)])
    .filter(([, found]) => found)
    .map(([p, found]) => [p.title, new Map(found.heads.map(([layer, head, first, second]) => [`${layer}.${head}`, first - second]))]);
  const column = (text) => el("th", { scope: "col", textContent: text });
  return el(
    "div",
    { className: "link contrast" },
    el("h3", { textContent: `${contrast.source}: ${contrast.first} or ${contrast.second}?` }),
    el("div", { className: "wide" }, el(
      "table",
      {},
      el("thead", {}, el("tr", {}, column("head"), column(contrast.first), column(contrast.second), column("less"), column("elsewhere"), ...elsewhere.map(([title]) => column(`“${title}”`)))),
      el("tbody", {}, ...contrast.heads.slice(0, 5).map(([layer, head, first, second, others]) =>
        el(
          "tr",
          {},
          el("td", {}, el("button", { type: "button", textContent: `${layer}.${head}`, onclick: () => follow(layer, head, null, links[n].sourceWord, null) })),
          ...[percent(first), percent(second), points(first - second), points(others), ...elsewhere.map(([, found]) => points(found.get(`${layer}.${head}`) ?? 0))].map((text) => el("td", { textContent: text })),
        ),
      )),
    )),
    el("p", {
      className: "quiet",
      textContent: `Less: ${contrast.first} less ${contrast.second}, in points of a hundred; elsewhere: the same of what all other rows give the two${elsewhere.length ? "; last: the same in the other text" : ""}. This is where heads look, not what the model takes “${contrast.source}” to mean.`,
    }),
  );
}
