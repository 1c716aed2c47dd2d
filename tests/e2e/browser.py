"""A real Chromium, driven by playwright."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, Page, sync_playwright

from tests.e2e.programs import CHROMIUM, path_of


@dataclass
class Seen:
    """What a page said and asked for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def until(self, expression: str, polls_max: int = 300) -> None:
        """Look again and again until an expression holds.

        Playwright's own way of waiting evaluates text within the page, which the page forbids.
        """
        for _ in range(polls_max):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise TimeoutError(f"did not hold: {expression}")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        # Chromium's own sandbox cannot be had by root in a container; only our pages are opened.
        started = driver.chromium.launch(executable_path=path_of(CHROMIUM), args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    started: Browser, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light"
) -> Iterator[Seen]:
    context = started.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    seen = Seen(context.new_page())
    seen.page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    seen.page.on("request", lambda request: seen.addresses.append(request.url))
    seen.page.set_default_timeout(15_000)
    seen.page.goto(url)
    try:
        yield seen
    finally:
        context.close()
