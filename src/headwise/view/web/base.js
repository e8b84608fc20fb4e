// What both pages are built with.

const root = document.querySelector(".page");
const $ = (id) => root.querySelector(`#${id}`);

// What a sandboxed frame may not do (keep a choice, name a head in its address) is left undone.
function perhaps(act) {
  try {
    return act();
  } catch {
    return null;
  }
}

// "auto", "light" or "dark", as it was chosen on any page before.
function keptTheme() {
  const kept = perhaps(() => localStorage.getItem("headwise-theme"));
  return ["light", "dark"].includes(kept) ? kept : "auto";
}
const dark = matchMedia("(prefers-color-scheme: dark)");

// A label as it can be seen: spaces and ends of lines by a sign.
const SIGNS = { "\n": "↵", "\r": "↵", "\t": "⇥", "\u2028": "↵", "\u2029": "↵" };

function visible(label) {
  if (label === "") return "∅";
  const shown = label.replace(/[\n\r\t\u2028\u2029]/g, (c) => SIGNS[c]);
  return shown.trim() === "" ? shown.replace(/\s/g, "␣") : shown;
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

// The packed data of a page: JSON, and behind it, at `at`, the arrays that the JSON speaks of.
async function packed(text) {
  const buffer = await inflate(text), n = new DataView(buffer).getUint32(0, true);
  return { meta: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, n))), buffer, at: 4 + n };
}
