"""`coserve status` against servers that answer well, badly or not at all."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO

import pytest
from rich.console import Console

from vllm_coserve.api.messages import Status
from vllm_coserve.console import status as status_module
from vllm_coserve.console.main import main
from vllm_coserve.console.status import Look, parse, render

_STATUS = {
    "version": "0.1.0",
    "state": "active",
    "model": "some/rollout-model",
    "generation": 3,
    "step": 7,
    "pages": {
        "pool": 100,
        "free": 30,
        "serving": 40,
        "serving_cached": 15,
        "rollout": 30,
        "rollout_max": 44,
        "budget": 50,
        "headroom": 20,
        "page_bytes": 2097152,
    },
    "reclaims": {"count": 2, "pages": 9, "cuts": 1, "ms_p50": 4.0, "ms_p99": 12.5, "aborted_requests": 3},
    "gate": {
        "policy": "dual",
        "open": False,
        "grants": 10,
        "denials": 5,
        "overruns": 0,
        "slack_ms": 17.25,
        "handover_ms": 0.6,
        "serving_steps": 50,
        "serving_busy_s": 1.0,
        "rollout_busy_s": 2.0,
        "faults": 0,
    },
    "rollout": {
        "running": 8,
        "waiting": 2,
        "tokens": 1000,
        "steps": 90,
        "stalled_requests": 0,
        "prefix_query_tokens": 200,
        "prefix_hit_tokens": 150,
    },
    "aborts": {"reclaimed": 3, "stalled": 0, "deactivated": 1, "too_large": 0},
    "weights": {"version": "step-7", "number": 4, "loaded": True, "load_ms": 48.0},
    "registration": {"job": "grpo-1", "since_s": 1.0, "expires_in_s": 20.0},
    "of_a_newer_version": {"more": 1},
}


class _Server:
    """Answers each request with the next of `answers`: (HTTP status, body, seconds to wait)."""

    def __init__(self, answers):
        seen = self.seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                seen.append((self.path, self.headers.get("Authorization")))
                code, body, wait_s = answers[min(len(seen), len(answers)) - 1]
                time.sleep(wait_s)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(*answers):
        servers.append(_Server([(*a, 0.0) if len(a) == 2 else a for a in answers]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def _draw(view, width=100):
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(view)
    return out.getvalue()


def test_once_shows_pages_gate_and_rollout(serve, capsys):
    server = serve((200, _STATUS))
    assert main(["status", "--once", "--url", server.url + "/", "--api-key", "sesame"]) == 0
    assert server.seen == [("/coserve/v1/status", "Bearer sesame")]
    text = capsys.readouterr().out
    for part in ("active", "some/rollout-model", "restarts 2", "'step-7'", "grpo-1", "rollout 30", "headroom 20"):
        assert part in text
    for part in ("17.2 ms", "8, 2", "75%", "12.5 ms", "by slack"):
        assert part in text


def test_json_is_the_answer_itself(serve, capsys):
    assert main(["status", "--json", "--url", serve((200, _STATUS)).url]) == 0
    assert json.loads(capsys.readouterr().out) == _STATUS


def test_rates_come_from_two_looks():
    later = json.loads(json.dumps(_STATUS))
    later["rollout"]["tokens"] += 500
    later["gate"]["serving_busy_s"] += 0.5
    text = _draw(
        render("u", Look(10.0, Status.model_validate(_STATUS)), Look(12.0, Status.model_validate(later)), None)
    )
    assert "250" in text and "25%" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_every_width_shows_the_bar_in_proportion(width):
    text = _draw(render("http://x", None, Look(0.0, parse(_STATUS)), None), width)
    bar = next(line for line in text.splitlines() if line.count("░") > 3)
    cells = {sign: bar.count(sign) for sign in "█▓░"}
    whole = sum(cells.values())
    assert abs(cells["░"] / whole - 0.30) < 0.1 and abs(cells["▓"] / whole - 0.15) < 0.1
    assert all(len(line) <= width for line in text.splitlines())


def test_a_pool_without_pages_and_counters_that_start_anew():
    empty = json.loads(json.dumps(_STATUS))
    empty["pages"] |= {"pool": 0, "free": 0, "serving": 0, "serving_cached": 0, "rollout": 0}
    empty["rollout"]["tokens"] = 0
    empty["reclaims"]["ms_p99"] = None
    text = _draw(render("u", Look(1.0, parse(_STATUS)), Look(2.0, parse(empty)), None))
    assert "rollout 0" in text and "-" not in text.split("rollout tokens/s")[1][:20]


def test_while_the_sidecar_restarts_the_last_state_stays(serve, monkeypatch, capsys):
    server = serve((200, _STATUS), (503, b""), (200, _STATUS))
    looks = []

    def stop_after_three(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_module.time, "sleep", stop_after_three)
    # The server's own sleep is the same function; it is called with 0.
    monkeypatch.setattr(time, "sleep", lambda s: stop_after_three(s) if s else None)
    assert main(["status", "--interval", "0.5", "--url", server.url]) == 130
    text = capsys.readouterr().out
    assert "not reachable, retrying" in text and text.count("some/rollout-model") == 3


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ((401, b"{}"), 2, "--api-key"),
        ((404, b"{}"), 2, "--coserve-rollout-port"),
        ((500, b"{}"), 1, "HTTP 500"),
        ((200, b"not json"), 1, "cannot be reached"),
        ((200, [1]), 1, "something else"),
        ((200, {"version": "9"}), 1, "not a status"),
    ],
    ids=["key", "other server", "error", "garbage", "list", "other version"],
)
def test_bad_answers(serve, capsys, answer, code, says):
    assert main(["status", "--once", "--url", serve(answer).url]) == code
    assert says in capsys.readouterr().err


def test_nobody_listens(capsys):
    assert main(["status", "--once", "--url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_a_server_that_hangs(serve, capsys, monkeypatch):
    monkeypatch.setattr(status_module, "_TIMEOUT_S", 0.1)
    assert main(["status", "--once", "--url", serve((200, _STATUS, 0.5)).url]) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [[], ["status", "--interval", "0"], ["status", "--interval", "nan"], ["status", "--interval", "x"]]
    + [["status", "--url", u] for u in ("", "localhost:8100", "ftp://x", "http://", "http://x:99999")],
    ids=str,
)  # fmt: skip
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
