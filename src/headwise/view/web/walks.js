// The walk through the chosen head, number by number: a page of its own, in a frame over this one.

// Where its numbers are: those from X to the output, else those from q, k and v on; null where there was no room.
function walkOf(n, layer, head) {
  const all = [...document.querySelectorAll(`script.walk-data[data-panel="${n}"][data-layer="${layer}"]`)];
  const own = all.filter((data) => data.dataset.heads.split(" ").includes(String(head)));
  return own.find((data) => data.dataset.whole === "True") || own[0] || null;
}

function showWalkButton() {
  const there = Boolean(walkOf(state.panel, state.layer, state.head));
  $("walk-open").hidden = !there;
  $("walk-none").textContent = there ? "" : `There was no room for this head's numbers: headwise learn TEXT --layer ${state.layer} --head ${state.head} writes its walk.`;
}

async function openWalk() {
  const { layer, head } = state, data = walkOf(state.panel, layer, head);
  const shell = new TextDecoder().decode(await inflate(document.getElementById("walk-page").textContent));
  const token = (side, n) => (level() === "words" ? panel()[side].starts[n] : n), at = state.pinned ? `${token("queries", state.pinned.i)} ${token("keys", state.pinned.j)}` : "";
  const name = `Layer ${layer} · head ${head}, step by step`;
  $("walk-title").textContent = name;
  $("walk-frame").title = name;
  $("walk-frame").srcdoc = shell
    .replace('class="page walk"', `class="page walk" data-theme="${theme()}" data-head="${head}" data-layer="${layer}" data-at="${at}"`)
    .replace('id="data"><\/script>', () => `id="data">${data.textContent}<\/script>`);
  $("walk").showModal();
}

function startWalks() {
  $("walk-open").addEventListener("click", openWalk);
  $("walk-close").addEventListener("click", () => $("walk").close());
  $("walk").addEventListener("close", () => $("walk-frame").removeAttribute("srcdoc"));
  window.addEventListener("message", (event) => event.source === $("walk-frame").contentWindow && event.data === "close" && $("walk").close());
}
