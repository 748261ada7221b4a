"""`coserve status` against servers that answer well, badly or not at all."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint, entry_points
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from vllm_coserve.api.messages import Status
from vllm_coserve.console import main as main_module
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
        "from_weights": 0,
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
    "weights": {"version": "step-7", "number": 4, "loaded": True, "load_ms": 48.0, "parked_bytes": 0, "park_ms": 0.0},
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
                if code is None:  # the body is the whole answer, status line and headers included
                    self.wfile.write(body)
                    return
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", body.decode())
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
    for part in ("17.2 ms", "8, 2", "75%", "12.5 ms", "closed", "generation 3", "budget 50", "dual"):
        assert part in text


def test_json_is_the_answer_itself(serve, capsys):
    assert main(["status", "--json", "--url", serve((200, _STATUS)).url]) == 0
    assert json.loads(capsys.readouterr().out) == _STATUS


def test_rates_come_from_two_looks():
    later = json.loads(json.dumps(_STATUS))
    later["rollout"]["tokens"] += 500
    later["gate"]["serving_busy_s"] += 0.5
    later["gate"]["rollout_busy_s"] += 1.2
    later["gate"] |= {"grants": 90, "denials": 25, "overruns": 1}
    later["reclaims"]["count"] += 3
    text = _draw(
        render("u", Look(10.0, Status.model_validate(_STATUS)), Look(12.0, Status.model_validate(later)), None)
    )
    assert _value(text, "rollout tokens/s") == "250"
    assert (_value(text, "serving on device"), _value(text, "rollout on device")) == ("25%", "60%")
    assert [_value(text, f"{n}/s") for n in ("grants", "denials", "overruns", "reclaims")] == ["40", "10", "0.5", "1.5"]


def _value(text, name):
    return re.search(rf"(?<!\S){re.escape(name)} +(\S+)", text).group(1)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_every_width_shows_the_bar_in_proportion(width):
    text = _draw(render("http://x", None, Look(0.0, parse(_STATUS)), None, watched_s=75.0), width)
    at, bar = next((i, line) for i, line in enumerate(text.splitlines()) if line.count("░") > 3)
    cells = {sign: bar.count(sign) for sign in "█▓▒░"}
    whole = sum(cells.values())
    shares = {"█": 0.25, "▓": 0.15, "▒": 0.30, "░": 0.30}
    assert all(abs(cells[sign] / whole - share) <= 1 / whole for sign, share in shares.items())
    mark = text.splitlines()[at + 1].index("▲") - bar.index("█")
    assert abs(mark / whole - 0.80) <= 1.5 / whole
    assert all(len(line) <= width for line in text.splitlines())
    assert "1:15 min" in " ".join(text.replace("│", " ").split())


def test_sixty_columns_lose_no_figure():
    text = _draw(render("http://127.0.0.1:8100", None, Look(0.0, parse(_STATUS)), None), 60)
    assert "…" not in text and "█ serving 25  ▓ its cache 15  ▒ rollout 30  ░ free 30" in text
    for name in ("serving on device", "running, waiting", "overruns/s", "hand-over", "faults", "policy"):
        assert _value(text, name)


def test_a_status_of_another_version_is_shown_as_far_as_it_goes():
    old = {"state": "paused", "pages": {"pool": 10, "free": 4, "rollout": "many"}, "gate": {"open": True}}
    text = _draw(render("u", Look(0.0, parse(old)), Look(1.0, parse(_STATUS)), None))
    assert "some/rollout-model" in text and _value(text, "rollout tokens/s") == "-"
    text = _draw(render("u", Look(0.0, parse(_STATUS)), Look(1.0, parse(old)), None))
    assert "paused" in text and "free 4" in text and "rollout -" in text and _value(text, "gate") == "open"
    assert {
        _value(text, name) for name in ("slack", "faults", "ended early", "policy", "grants/s", "prefix cache hits")
    } == {"-"}


def test_a_whole_status_is_parsed_as_the_server_meant_it():
    assert parse(_STATUS) == Status.model_validate(_STATUS)
    assert parse(_STATUS | {"registration": None}).registration is None


def test_a_pool_without_pages_and_counters_that_start_anew():
    empty = json.loads(json.dumps(_STATUS))
    empty["pages"] |= {"pool": 0, "free": 0, "serving": 0, "serving_cached": 0, "rollout": 0}
    empty["rollout"]["tokens"] = 0
    empty["reclaims"]["ms_p99"] = None
    text = _draw(render("u", Look(1.0, parse(_STATUS)), Look(2.0, parse(empty)), None))
    assert "rollout 0" in text and "-" not in text.split("rollout tokens/s")[1][:20]


def _stop_after(monkeypatch, looks):
    """Ctrl-C in the wait behind so many looks. The scripted server's own waits are left alone."""
    main_thread, done, sleep = threading.current_thread(), [], time.sleep

    def wait(seconds):
        if threading.current_thread() is not main_thread:
            return sleep(seconds)
        done.append(seconds)
        if len(done) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", wait)


def test_while_the_sidecar_restarts_the_last_state_stays(serve, monkeypatch, capsys):
    server = serve((200, _STATUS), (503, b""), (200, b"<html>"), (200, _STATUS))
    _stop_after(monkeypatch, 4)
    assert main(["status", "--interval", "0.5", "--url", server.url]) == 130
    text = capsys.readouterr().out
    assert text.count("not reachable, retrying") == 2 and text.count("some/rollout-model") == 4
    assert text.count("was active") == 2


def test_a_server_that_is_not_up_yet_is_waited_for(monkeypatch, capsys):
    _stop_after(monkeypatch, 2)
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 130
    assert capsys.readouterr().out.count("not reachable, retrying") == 2


def test_a_key_that_is_refused_ends_the_view(serve, capsys):
    assert main(["status", "--url", serve((401, b"")).url, "--api-key", "old"]) == 2
    assert "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ((401, b"{}"), 2, "--api-key"),
        ((404, b"{}"), 2, "--coserve-rollout-port"),
        ((500, b"{}"), 1, "HTTP 500"),
        ((200, b"not json"), 1, "something else"),
        ((200, b"[" * 100_000), 1, "something else"),
        ((200, b"\xff\xfe"), 1, "something else"),
        ((None, b"SSH-2.0-OpenSSH_9.2\r\n"), 1, "cannot be reached"),
        ((None, b"HTTP/1.0 200 OK\r\nContent-Length: 99\r\n\r\n{"), 1, "something else"),
        ((None, b""), 1, "cannot be reached"),
        ((307, b"http://127.0.0.1:9/"), 1, "HTTP 307"),
        ((200, [1]), 1, "something else"),
        ((200, {"version": "9"}), 1, "not a status"),
    ],
    ids=[
        "key",
        "other server",
        "error",
        "garbage",
        "deep",
        "not text",
        "not HTTP",
        "cut off",
        "hangs up",
        "redirect",
        "list",
        "other version",
    ],
)
def test_bad_answers(serve, capsys, answer, code, says):
    server = serve(answer)
    assert main(["status", "--once", "--url", server.url]) == code
    text = capsys.readouterr().err
    assert says in text and server.url in text


def test_a_key_goes_nowhere_else(serve, capsys):
    other = serve((200, _STATUS))
    first = serve((302, f"{other.url}/coserve/v1/status".encode()))
    assert main(["status", "--once", "--url", first.url, "--api-key", "sesame"]) == 1
    assert not other.seen
    assert main(["status", "--once", "--url", other.url, "--api-key", "sesame\n"]) == 2
    text = capsys.readouterr().err
    assert "--api-key" in text and "sesame" not in text and not other.seen


def test_a_proxy_is_not_asked_for_this_machine(serve, monkeypatch, capsys):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert main(["status", "--once", "--url", serve((200, _STATUS)).url]) == 0


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
    + [["status", "--url", u] for u in ("", "localhost:8100", "ftp://x", "http://", "http://x:99999")]
    + [["status", "--url", u] for u in ("http://[", "http://x y", "http://a:b@x", "http://x/?a", "http://x\n")],
    ids=str,
)  # fmt: skip
def test_bad_arguments(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


def test_another_package_may_add_a_command(monkeypatch, capsys):
    point = EntryPoint("train", "other_package.cli:train", "coserve.commands")
    monkeypatch.setattr(main_module, "entry_points", lambda group: [point] if group == point.group else [])
    with pytest.raises(SystemExit) as ended:
        main(["--help"])  # lists the command without loading it
    assert ended.value.code == 0 and "train" in capsys.readouterr().out
    train = SimpleNamespace(train=lambda arguments: 7 if arguments == ["--steps", "3"] else 1)
    monkeypatch.setitem(sys.modules, "other_package", SimpleNamespace(cli=train))
    monkeypatch.setitem(sys.modules, "other_package.cli", train)
    assert main(["train", "--steps", "3"]) == 7


def test_the_command_is_installed():
    (point,) = [p for p in entry_points(group="console_scripts") if p.name == "coserve"]
    assert point.load() is main


def _in_terminal(argv, until, interrupt, **env):
    """Run the command in a terminal of 60 columns; interrupted once `until` was written. (exit code, output)"""
    master, slave = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "60", "LINES": "30", **env}
    command = [sys.executable, "-m", "vllm_coserve.console.main", *argv]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=variables,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    os.close(slave)
    text, deadline = b"", time.monotonic() + 30
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.1)[0]:
                text += os.read(master, 65536)
            if interrupt and until in text:
                process.send_signal(signal.SIGINT)
                interrupt = False
    code = process.wait(5)
    os.close(master)
    return code, text.decode(errors="replace")  # Ctrl-C may cut a sign in two


def test_ctrl_c_gives_the_terminal_back(serve):
    server = serve((200, _STATUS))
    code, text = _in_terminal(["status", "--interval", "0.1", "--url", server.url], b"policy", interrupt=True)
    assert code == 130 and "Traceback" not in text
    assert text.rindex("\x1b[?1049l") > text.index("\x1b[?1049h"), "back from the alternate screen"
    assert text.rindex("\x1b[?25h") > text.index("\x1b[?25l"), "the cursor is shown again"


def test_a_dumb_terminal_gets_plain_frames(serve):
    argv = ["status", "--interval", "0.1", "--url", serve((200, _STATUS)).url]
    code, text = _in_terminal(argv, b"watched for", interrupt=True, TERM="dumb")
    assert code == 130 and "some/rollout-model" in text and "\x1b" not in text


def test_a_terminal_without_utf8_and_a_reader_that_leaves(serve):
    url = serve((200, _STATUS)).url
    command = [sys.executable, "-m", "vllm_coserve.console.main", "status", "--url", url]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    run = subprocess.run([*command, "--once"], env=ascii_only, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0 and "Traceback" not in run.stderr
    assert "%%%%%%" in run.stdout and "?" not in run.stdout
    for more in ("--json", "--interval=0.1"):
        process = subprocess.Popen([*command, more], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        assert process.wait(30) == 1 and b"Traceback" not in process.stderr.read()
        process.stderr.close()
