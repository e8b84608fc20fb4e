// Colours. A weight w is shown at sqrt(w) along the scale, so that small weights can be told apart.

export const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const RAMPS = {
  light: ["#f6f5f1", "#d3e2ea", "#94bdd6", "#4c8dbd", "#1a5a92", "#08264a"],
  dark: ["#16191d", "#1d3850", "#2a6489", "#479dbd", "#97d3d4", "#f6f8df"],
};
const BOTH = { light: ["#9a3412", "#e8a87c", "#f6f5f1", "#94bdd6", "#1a5a92"], dark: ["#ffb27d", "#a3552a", "#16191d", "#2a6489", "#9bd7f0"] };

// What a kind means, and its colours on light and on dark.
export const KINDS = {
  previous: ["#0072b2", "#4aa8e0", "pr", "the token before"],
  next: ["#23709f", "#8fd0f5", "ne", "the token after"],
  self: ["#00765a", "#2fbd94", "se", "itself"],
  first: ["#b84e00", "#f0863c", "fi", "the first token"],
  separator: ["#8a5f00", "#e8b23c", "sp", "a separator"],
  duplicate: ["#a3407a", "#e08cc0", "du", "the same token elsewhere"],
  induction: ["#882255", "#d1588f", "in", "what followed the same token before"],
  positional: ["#6a4fb3", "#a48ff0", "po", "a fixed distance"],
  broad: ["#66665f", "#a9a9a0", "br", "nearly everything alike"],
  mixed: ["#55606b", "#8996a3", "mi", "no one thing"],
};

export const rgb = (hex) => [1, 3, 5].map((n) => parseInt(hex.slice(n, n + 2), 16));
const blend = (ramp, t) => {
  const at = Math.min(Math.max(t, 0), 1) * (ramp.length - 1), n = Math.min(Math.floor(at), ramp.length - 2);
  return rgb(ramp[n]).map((x, c) => Math.round(x + (rgb(ramp[n + 1])[c] - x) * (at - n)));
};
export const shade = (t) => blend(RAMPS[dark() ? "dark" : "light"], t);
// Black or white, whichever can be read on a colour: one of them always has a contrast of 4.5.
export const ink = (c) => {
  const [r, g, b] = c.map((x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.179 ? "#ffffff" : "#000000";
};
export const css = (c) => `rgb(${c.join(",")})`;

// 1024 colours as words of pixels, for t from 0 to 1 (or from all less to all more); then two greys.
export function table(signed, contrast) {
  const ramp = (signed ? BOTH : RAMPS)[dark() ? "dark" : "light"], found = new Uint32Array(1026), word = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  for (let n = 0; n < 1024; n++) {
    const x = n / 1023, t = signed ? 0.5 + (x - 0.5) * contrast : x * contrast, c = blend(ramp, t);
    found[n] = word(c);
  }
  found[1024] = word(rgb(dark() ? "#4a525b" : "#c9c6bb")); // the two of what is in one text alone
  found[1025] = word(rgb(dark() ? "#2b3138" : "#e4e2da"));
  return found;
}
