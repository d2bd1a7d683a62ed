"""Looks at the built site in a browser: `python docs/check_site.py [SITE [PICTURES]]`.

`nox -s site` builds it first. Every page is opened at the width of a desktop and of a phone, light
and dark. A page fails if the browser's console has an error, if anything comes from another host (the
site is read on trains too), if it is wider than the window, if an image doesn't load or has no text, or
if axe finds that someone can't read or use it (contrast among the rest). The search has to find public
names. With PICTURES, a folder, pictures of all pages are left there.
"""

import contextlib
import functools as ft
import http.server
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import BrowserContext, Page, TimeoutError, sync_playwright

SITE = Path(__file__).parent.parent / "site"
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = {"light": "default", "dark": "slate"}
SEARCHES = ("checkpointed_layer", "run_stack", "assert_peak_below", "offload")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
# For axe: all rules of WCAG 2 AA, and in the dark those that depend on colours.
LIGHT = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa"]},
    "rules": {"scrollable-region-focusable": {"enabled": False}},  # browsers see to that themselves
    "resultTypes": ["violations"],
}
DARK = {
    "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]},
    "resultTypes": ["violations"],
}
# Colours must not be read while they fade from light to dark.
STILL = "*, *::before, *::after { transition: none !important; animation: none !important }"
# What is too wide, but for what scrolls inside itself.
TOO_WIDE = """() => {
  const width = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth <= width) return []
  const scrolls = e => e && (['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)
    || scrolls(e.parentElement))
  return [...document.querySelectorAll('main *')]
    .filter(e => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement))
    .map(e => e.outerHTML.slice(0, 100)).slice(0, 3).concat('the page')
}"""
BAD_IMAGES = """() => [...document.images]
  .filter(i => i.offsetParent !== null)  // the other scheme's plots are not shown
  .flatMap(i => (i.alt.trim() ? [] : [i.src + ' has no text'])
    .concat(i.complete && i.naturalWidth ? [] : [i.src + ' does not load']))"""


def find_browser() -> str | None:
    """Path of a Chromium: the environment variable `CHROMIUM`, or the first on the path."""
    found = [os.environ.get("CHROMIUM"), *map(shutil.which, BROWSERS)]
    return next((f for f in found if f), None)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = ft.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class Visit:
    """One browser window of some width, and what is wrong with the pages seen in it."""

    def __init__(self, context: BrowserContext, root: str, title: str) -> None:
        self.problems: list[str] = []
        self._root, self._title, self._path, self._scheme = root, title, "", ""
        context.set_default_timeout(60_000)
        self._page: Page = context.new_page()
        context.route("**/*", self._only_here)
        self._page.on("console", lambda m: m.type == "error" and self._blame(f"console: {m.text}"))
        self._page.on("pageerror", lambda error: self._blame(f"script: {error}"))

    def _blame(self, what: str) -> None:
        where = f"{self._title} {self._scheme}".strip()
        self.problems.append(f"{where} /{self._path}: {what}")
        print(f"- {self.problems[-1]}", flush=True)

    def _only_here(self, route: Any) -> None:
        if route.request.url.startswith((self._root, "data:", "blob:")):
            route.continue_()
        else:
            self._blame(f"asks another host: {route.request.url}")
            route.abort()

    def obeys_the_system(self) -> None:
        """Whoever has set the system to dark gets a dark page."""
        for scheme, name in SCHEMES.items():
            self._page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
            self._page.goto(f"{self._root}/")
            self._page.evaluate("localStorage.clear()")  # where the first visit's scheme is kept
            self._page.reload()
            found = self._page.evaluate("document.body.dataset.mdColorScheme")
            if found != name:
                self._blame(f"shows {found} when the system asks for {scheme}")
        self._page.emulate_media(color_scheme="light")

    def look(self, path: str, pictures: Path | None = None) -> None:
        """Opens a page and finds what is wrong with it, light and dark."""
        self._path = path
        self._page.goto(f"{self._root}/{path}")
        self._page.add_style_tag(content=STILL)
        for self._scheme, name in SCHEMES.items():
            self._page.evaluate(f"document.body.dataset.mdColorScheme = '{name}'")
            for image in self._page.locator("main img:visible").all():
                image.scroll_into_view_if_needed()  # those that load lazily
                image.evaluate("i => i.decode().catch(() => {})")
            for element in self._page.evaluate(TOO_WIDE):
                self._blame(f"wider than the window: {element}")
            for image in self._page.evaluate(BAD_IMAGES):
                self._blame(image)
            options = LIGHT if self._scheme == "light" else DARK
            for found in Axe().run(self._page, options=options).response["violations"]:
                for node in found["nodes"][:3]:
                    self._blame(f"{found['id']}: {node['html'][:120]} {node['failureSummary']}")
            if pictures is not None:
                name = f"{path.replace('/', '_').removesuffix('_') or 'home'}"
                to = pictures / f"{name}-{self._title}-{self._scheme}.png"
                self._page.screenshot(path=to, full_page=True)

    def search(self, words: str) -> None:
        """Types into the search and expects results that hold the words."""
        self._path, self._scheme = f"?q={words}", ""
        self._page.goto(f"{self._root}/")
        if self._title == "phone":
            self._page.locator("label.md-header__button[for=__search]").click()
        else:
            self._page.locator("input.md-search__input").click()
        self._page.locator("input.md-search__input").fill(words)
        self._page.keyboard.press("End")  # the page looks at what is typed when a key is let go
        try:
            self._page.locator(".md-search-result__item").first.wait_for()
        except TimeoutError:
            return self._blame("the search finds nothing")
        if words not in self._page.locator(".md-search-result__list").inner_text():
            self._blame("the search finds something else")


def check(site: Path, browser: str, pictures: Path | None = None) -> list[str]:
    """All that is wrong with the site. With `pictures`, a folder, also takes pictures of all pages."""
    pages = sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html"))
    pages = [p.removesuffix("index.html") for p in pages]
    problems: list[str] = []
    with (
        served(site) as root,
        tempfile.TemporaryDirectory() as home,
        sync_playwright() as playwright,
    ):
        for width, (x, y) in WIDTHS.items():
            context = playwright.chromium.launch_persistent_context(
                f"{home}/{width}",
                executable_path=browser,
                args=list(FLAGS),
                viewport={"width": x, "height": y},
            )
            visit = Visit(context, root, width)
            visit.obeys_the_system()
            for page in pages:
                visit.look(page, pictures)
            for words in SEARCHES:
                visit.search(words)
            problems += visit.problems
            context.close()
    print(f"{len(pages)} pages, {' and '.join(WIDTHS)}, {' and '.join(SCHEMES)}: "
          f"{len(problems)} problems")  # fmt: skip
    return problems


def main() -> int:
    """Prints what is wrong; 1 if anything is."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE
    pictures = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    if not (site / "index.html").is_file():
        print(f"There is no site in {site}: build it with `nox -s docs`.", file=sys.stderr)
        return 1
    browser = find_browser()
    if browser is None:
        print(f"None of {', '.join(BROWSERS)} is on the path: install one, or set CHROMIUM to it.",
              file=sys.stderr)  # fmt: skip
        return 1
    return 1 if check(site, browser, pictures) else 0


if __name__ == "__main__":
    sys.exit(main())
