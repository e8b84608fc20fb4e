"""Draws docs/look.png and docs/walk.png: screenshots of the pages that `headwise look` and `learn` really write.

python docs/make_picture.py        (needs Chromium)
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = (("look", Path(__file__).with_name("look.png"), 900), ("learn", Path(__file__).with_name("walk.png"), 1440))
WIDTH = 1280


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("make_picture.py: needs Chromium; on Debian: apt-get install chromium")
    for command, picture, height in PICTURES:
        draw(chromium, command, picture, height)


def draw(chromium: str, command: str, picture: Path, height: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        subprocess.run([sys.executable, "-m", "headwise", command, "-o", str(page)], check=True)
        subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--hide-scrollbars",
                "--force-device-scale-factor=1.5",
                f"--window-size={WIDTH},{height}",
                "--virtual-time-budget=3000",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={picture}",
                page.as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(picture, f"{picture.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
