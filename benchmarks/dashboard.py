"""How fast the page of a sweep opens in headless Chromium: seconds from asking for the file to the end of its load event,
by which the first view is drawn, and of each view after a click.

    python benchmarks/dashboard.py [--rows 5000] [--rounds 5]

The rows have a formula for figures, and no two are repetitions of one case: the most points that a page can have. It needs
Chromium and its driver (apt-get install chromium chromium-driver).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import common

sys.path.insert(0, str(common.HERE.parent))

from tests.bench.test_dashboard import META, VIEWS, rows
from tests.browser import Browser

from slipstream.bench.sweep.dashboard import SweepRun, render


def main() -> None:
    parser = common.parser(__doc__, "dashboard")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    page = render([SweepRun(name="rows", rows=rows(args.rows, repeats=1), meta=META)])
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder, Browser.start(Path(folder)) as browser:
        (Path(folder) / "page.html").write_text(page, encoding="utf-8")
        (Path(folder) / "blank.html").write_text("<title>blank</title>")
        for width in (1280, 390):
            opened = []
            for _ in range(args.rounds):
                browser.open(Path(folder) / "blank.html", width=width, height=844)
                opened.append(browser.open(Path(folder) / "page.html", width=width, height=844))
            click = (
                "const t = performance.now(); document.querySelector(`[data-view=${arguments[0]}]`).click();"
                "document.body.offsetHeight; return (performance.now() - t) / 1e3"
            )
            views = {view: browser.run(click, view) for view in VIEWS}
            found[str(width)] = {
                "open_s": common.median(opened),
                "rounds_s": opened,
                "views_s": views,
            }
            print(
                f"{width} px: opens in {common.median(opened):.2f} s; views {views}; errors {browser.errors()}"
            )
    common.save(
        args.output, "dashboard", num_rows=args.rows, page_bytes=len(page.encode()), results=found
    )


if __name__ == "__main__":
    main()
