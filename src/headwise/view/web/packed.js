// The packed data of a page: JSON, and behind it, at `at`, the arrays that the JSON speaks of.

async function packed(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const n = new DataView(buffer).getUint32(0, true);
  return { meta: JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, n))), buffer, at: 4 + n };
}
