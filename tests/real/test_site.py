"""The documentation in a real browser, opened from disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.needs_chromium, pytest.mark.needs_linux]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return built


@pytest.fixture
def page() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=arguments)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(60_000)
        yield context.new_page()
        browser.close()


def test_search_works_from_disk_and_fetches_nothing(site: Path, page: Any) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"file://{site}/index.html")
    page.locator("input.md-search__input").press_sequentially("autoscaling", delay=20)
    page.locator('.md-search-result__link[href*="elastic.html"]').first.wait_for()
    assert [url for url in requests if not url.startswith("file:")] == []


def test_copy_button_copies_commands_only(site: Path, page: Any) -> None:
    page.goto(f"file://{site}/persistent.html")
    page.locator(".language-console .md-code__button").first.click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text)")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert copied[0] == "heliostat up --name lab --cpus-per-node 1" and copied[-1] == "heliostat down lab"
    assert all(line.startswith("heliostat ") for line in copied)
