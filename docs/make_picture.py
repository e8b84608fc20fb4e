"""Draws docs/look.png, the picture of the README: a screenshot of the page that `headwise look` really writes.

python docs/make_picture.py        (needs Chromium)
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).with_name("look.png")
WIDTH, HEIGHT = 1280, 900


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("make_picture.py: needs Chromium; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "heads.html")
        subprocess.run([sys.executable, "-m", "headwise", "look", "-o", str(page)], check=True)
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--force-device-scale-factor=1.5",
                f"--window-size={WIDTH},{HEIGHT}",
                "--virtual-time-budget=3000",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(PICTURE, f"{PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
