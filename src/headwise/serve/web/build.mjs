// Builds page.js from source/ and what it takes from npm, with the licences of both.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";

// The page allows no style element; OpenSeadragon makes one that hides the focus on phones, which we want seen.
const seadragon = {
  name: "seadragon",
  setup: ({ onLoad }) =>
    onLoad({ filter: /openseadragon\.js$/ }, ({ path }) => {
      const text = readFileSync(path, "utf8"), wanted = "document.head.appendChild(style);";
      if (text.split(wanted).length !== 2) throw new Error(`${path} no longer has one place ${wanted}`);
      return { contents: text.replace(wanted, ""), loader: "js" };
    }),
};

// The other pages are put together from plain scripts; this one takes a helper of theirs as a module.
const shared = {
  name: "shared",
  setup: ({ onLoad }) =>
    onLoad({ filter: /view\/web\/element\.js$/ }, ({ path }) => ({ contents: `${readFileSync(path, "utf8")}export { el };`, loader: "js" })),
};

// What page.js was built from, so that a test can tell whether it was built again after a change.
const sources = [...readdirSync("source").map((name) => `source/${name}`), "../../view/web/element.js", "build.mjs", "package-lock.json"].sort();
const sum = createHash("sha256");
for (const path of sources) sum.update(readFileSync(path));

await build({
  plugins: [seadragon, shared],
  entryPoints: ["source/page.js"],
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  legalComments: "none",
  outfile: "page.js",
  banner: { js: `/* headwise, Apache-2.0; with OpenSeadragon, BSD-3-Clause: see LICENSES.txt; from sources ${sum.digest("hex")} */` },
});
const { version } = JSON.parse(readFileSync("node_modules/openseadragon/package.json", "utf8"));
writeFileSync("LICENSES.txt", `page.js holds OpenSeadragon ${version}:\n\n${readFileSync("node_modules/openseadragon/LICENSE.txt", "utf8")}`);
