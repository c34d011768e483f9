"""Files of models on Hugging Face: from the cache, and fetched from a server of this test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from capture_planner.codec import hub
from capture_planner.errors import CapturePlannerError
from support.commands import Run

pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")

from huggingface_hub import constants

FILES = {"/acme/one/resolve/main/config.json": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 777}}
FILES |= {"/acme/gated/resolve/main/other.json": {}}


class _Server(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if "/resolve/" in self.path:
            self.server.asked.append(self.path)  # type: ignore[attr-defined]
        content = json.dumps(FILES.get(self.path)).encode()
        self.send_response(200 if self.path in FILES else 404)
        for name, value in (("ETag", '"abc"'), ("X-Repo-Commit", "c" * 40), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        if self.path not in FILES:
            known = any(path.startswith("/".join(self.path.split("/")[:3])) for path in FILES)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """Serve ``FILES`` where huggingface_hub looks, with a cache of its own."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    served.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=served.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{served.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.shutdown()
    served.server_close()


def test_a_file_is_fetched_only_where_that_is_asked_for(server: ThreadingHTTPServer) -> None:
    """Once; then it is in the cache. Nothing else is fetched."""
    assert hub.find("acme/one", "config.json") is None
    assert server.asked == []  # type: ignore[attr-defined]
    with hub.fetching():
        path = hub.find("acme/one", "config.json")
        assert path is not None
        assert json.loads(path.read_text())["max_position_embeddings"] == 777
        assert hub.find("acme/one", "hf_quant_config.json") is None
    assert hub.find("acme/one", "config.json") == path
    assert {name.rpartition("/")[2] for name in server.asked} == {"config.json", "hf_quant_config.json"}  # type: ignore[attr-defined]


def test_what_cannot_be_fetched_is_said(server: ThreadingHTTPServer) -> None:
    """A model that is not there; a text that is no name is looked up nowhere."""
    with hub.fetching():
        with pytest.raises(CapturePlannerError, match=r"--download: config\.json of acme/none cannot be fetched"):
            hub.find("acme/none", "config.json")
        assert hub.find("/models/one", "config.json") is None
        assert hub.find("acme/gated", "config.json") is None


def test_download_makes_an_answer_exact(server: ThreadingHTTPServer, call: Run) -> None:
    """The finding about the unknown model is gone when its fix is followed."""
    words = ("--engine", "vllm", "acme/one", "--environment", "h100", "--format", "json")
    before = call("check", *words).document(2)
    (finding,) = [each for each in before["findings"] if each["code"] == "EN007"]
    assert "--download" in json.dumps(finding)
    after = json.loads(call("check", *words, "--download").out)
    assert after["assumptions"] == []
    assert "EN007" not in {each["code"] for each in after["findings"]}
