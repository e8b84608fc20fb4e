"""The page that is shipped is the one its sources make."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

WEB = Path(__file__).parents[2] / "src" / "headwise" / "serve" / "web"


def test_it_was_built_after_the_last_change() -> None:
    sources = [f"source/{path.name}" for path in (WEB / "source").iterdir()]
    sources += ["../../view/web/element.js", "build.mjs", "package-lock.json"]
    found = hashlib.sha256(b"".join((WEB / name).read_bytes() for name in sorted(sources))).hexdigest()
    said = re.search("from sources ([0-9a-f]{64})", (WEB / "page.js").read_text()[:300])
    assert said is not None and said[1] == found, "npm ci && npm run build, in src/headwise/serve/web"


def test_the_lock_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text()
