from __future__ import annotations

import pytest


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report's page; nothing may be said on the console, and nothing asked for."""
    contexts = []

    def open_page(of, **more):
        path = of.save(tmp_path / f"{len(contexts)}.html")
        context = browser.open(path, **more)
        page = context.__enter__()
        contexts.append((context, page))
        return page.page

    yield open_page
    for context, page in contexts:
        context.__exit__(None, None, None)
        assert page.said == []
        assert len(set(page.asked)) == 1
