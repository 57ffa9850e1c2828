"""Rude clients on bare sockets: pipelining, half-closes, bodies that nobody reads, heads that never end."""

from __future__ import annotations

import json
import re
import shutil
import socket
import struct
import subprocess
import time

import pytest

from slipstream.server.http import connection
from tests.server.fake_engine import FakeEngine
from tests.support.waiting import PATIENCE_S

COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 400}
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
SLOW = 0.5  # s a token: 400 tokens are 200 s, longer than any of these tests waits


def post(body, *, path="/v1/completions", version="1.1", headers=""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: localhost\r\n{headers}content-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(server):
    return socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_S
    )


def read_all(sock):
    answer = b""
    while part := sock.recv(65536):
        answer += part
    return answer


def cut_off(sock):
    """Whether the connection ends without an answer."""
    try:
        return read_all(sock) == b""
    except ConnectionResetError:
        return True


def num_taken(sock, block, limit):
    """How often a block can be sent before the connection ends."""
    for i in range(limit):
        try:
            sock.sendall(block)
        except (ConnectionResetError, BrokenPipeError):
            return i
        time.sleep(0.001)
    return limit


def leave(sock, *, reset):
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


BIG = post({**COMPLETION, "prompt": "a" * 200_000})


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "behind", [b"", LIVE, LIVE * 100, LIVE * 100 + post(COMPLETION), BIG, BIG[:150_000], LIVE[:10]]
)
def test_whatever_is_pipelined_a_client_that_leaves_is_noticed(serve, behind, reset):
    server = serve(FakeEngine(delay_s=SLOW))
    sock = connect(server)
    sock.sendall(post(COMPLETION))
    server.wait_for(lambda: server.engine.running == 1, "it did not start")
    sock.sendall(behind)
    time.sleep(0.05)
    leave(sock, reset=reset)
    server.wait_for(
        lambda: not server.state.in_flight and not server.engine.running, "it was not freed"
    )
    assert server.engine.started == 1
    assert server.engine.generation_tokens < 200


def test_two_hundred_such_clients_leave_nothing_running(serve):
    server = serve(FakeEngine(delay_s=SLOW), max_concurrent_requests=1000)
    socks = [connect(server) for _ in range(200)]
    for i, sock in enumerate(socks):
        sock.sendall(
            post({**COMPLETION, "stream": i % 3 == 0}) + (LIVE, b"", post(COMPLETION))[i % 3]
        )
    server.wait_for(lambda: server.engine.running == 200, "they did not start")
    for i, sock in enumerate(socks):
        leave(sock, reset=i % 2 == 0)
    server.wait_for(
        lambda: not server.state.in_flight and not server.engine.running, "not all were freed"
    )
    assert server.engine.started == 200
    with server.http() as http:
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=COMPLETION | {"max_tokens": 2}).status_code == 200


def test_pipelined_requests_are_answered_in_their_order(serve):
    server = serve()
    with connect(server) as sock:
        sock.sendall(
            post(COMPLETION | {"max_tokens": 3}) + LIVE + post(COMPLETION | {"max_tokens": 2})
        )
        sock.sendall(b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = read_all(sock)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"200", b"404"]
    assert [answer.index(text) for text in (b'"hih"', b"alive", b'"hi"')] == sorted(
        answer.index(text) for text in (b'"hih"', b"alive", b'"hi"')
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"", LIVE])
def test_a_half_closed_socket_gets_its_answers(serve, stream, behind):
    server = serve(FakeEngine(delay_s=0.05))
    with connect(server) as sock:
        sock.sendall(post(COMPLETION | {"max_tokens": 10, "stream": stream}) + behind)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert b"[DONE]" in answer if stream else b'"hihihihihi"' in answer
    assert (b"alive" in answer) == bool(behind)


def test_half_closed_without_a_whole_request_is_gone(serve):
    server = serve()
    with connect(server) as sock:
        sock.sendall(post(COMPLETION)[:-5])
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b""


def test_http_1_0_gets_no_interim_answer(serve):
    server = serve(FakeEngine(delay_s=0.02))
    with connect(server) as sock:
        sock.sendall(post(COMPLETION | {"max_tokens": 3}, version="1.0"))
        assert read_all(sock).startswith(b"HTTP/1.1 200")
    with connect(server) as sock:
        sock.sendall(post(COMPLETION, version="1.0"))
        server.wait_for(lambda: server.engine.running == 1, "it did not start")
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b""
    server.wait_idle()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("status", "settings"), [(413, {"max_body_bytes": 1000}), (401, {"api_keys": ("secret",)})]
)
def test_a_body_that_nobody_reads_is_not_waited_for(serve, monkeypatch, chunked, status, settings):
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    server = serve(**settings)
    with connect(server) as sock:
        how = "transfer-encoding: chunked" if chunked else f"content-length: {10**9}"
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{how}\r\n\r\n".encode())
        block = b"10000\r\n" + b"a" * 65536 + b"\r\n" if chunked else b"a" * 65536
        assert num_taken(sock, block, 2000) < 1000
    monkeypatch.setattr(connection, "LINGER_S", PATIENCE_S)
    with connect(server) as sock:  # who reads in time gets the answer
        sock.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{how}\r\n\r\n".encode()
            + block * 20
        )
        answer = read_all(sock)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert b"connection: close" in answer.lower()


def test_a_small_body_without_a_key_keeps_the_connection(serve):
    server = serve(api_keys=("secret",))
    with connect(server) as sock:
        sock.sendall(post(COMPLETION))
        assert b" 401 " in sock.recv(10_000)
        sock.sendall(
            post(
                COMPLETION | {"max_tokens": 1},
                headers="authorization: Bearer secret\r\nconnection: close\r\n",
            )
        )
        assert read_all(sock).startswith(b"HTTP/1.1 200")


def test_a_head_has_a_time(serve, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 1.0)
    server = serve()
    for begin in (b"", b"GET /live HT", LIVE + b"GET"):
        with connect(server) as sock:
            sock.sendall(begin)
            answer = b""
            until = time.monotonic() + PATIENCE_S
            sock.settimeout(0.05)
            while time.monotonic() < until:  # a byte now and then does not help
                try:
                    part = sock.recv(1000)
                    if not part:
                        break
                    answer += part
                except TimeoutError:
                    if begin:
                        sock.sendall(b"a")
                except ConnectionResetError:
                    break
            assert time.monotonic() < until
            assert (b"alive" in answer) == begin.startswith(LIVE)


def test_nonsense_behind_a_request_ends_the_connection(serve):
    server = serve(FakeEngine(delay_s=SLOW))
    with connect(server) as sock:
        sock.sendall(post(COMPLETION) + b"nonsense\r\n\r\n")
        assert cut_off(sock)
    server.wait_idle()


UPGRADES = [
    "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    "cOnNeCtIoN: keep-alive , uPGRADE\r\nuPgRaDe: anything\r\n",
    "Connection: keep-alive\r\nConnection: Upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n",
    "Upgrade: anything\r\n",
]
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


def statuses(answer):
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


def closing(body, headers, *, chunked):
    """A POST to /tokenize, and behind it a GET after which the server closes."""
    if chunked:
        framing = "transfer-encoding: chunked\r\n"
        data = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:7], body[7:])) + b"0\r\n\r\n"
    else:
        framing, data = f"content-length: {len(body)}\r\n", body
    head = f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n{headers}{framing}\r\n".encode()
    return head, data, LIVE.replace(b"host:", b"connection: close\r\nhost:")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("headers", UPGRADES)
def test_an_upgrade_is_ignored_in_any_packetisation(serve, headers, chunked):
    server = serve()
    body = json.dumps({"model": "fake", "prompt": "hi"}).encode()
    head, data, last = closing(body, headers, chunked=chunked)
    whole = head + data + head + data + last
    for at in (len(head), *range(1, len(head + data) + 1, 9), len(whole)):
        with connect(server) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(whole[:at])
            time.sleep(0.002)
            sock.sendall(whole[at:])
            answer = read_all(sock)
        assert statuses(answer) == [200] * 3, (at, answer)
        assert answer.count(b'"tokens":[') == 2


@pytest.mark.parametrize("headers", UPGRADES)
def test_a_body_behind_an_upgrade_is_never_a_request(serve, headers):
    head, data, last = closing(HIDDEN, headers, chunked=False)
    with connect(serve()) as sock:
        sock.sendall(head)
        time.sleep(0.05)
        sock.sendall(data + last)
        answer = read_all(sock)
    assert statuses(answer) == [400, 200]
    assert b'"object":"list"' not in answer


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 3\r\n",
        b"content-length: 3\r\ncontent-length: 3\r\n",
        b"content-length: 3\r\ncontent-length: 4\r\n",
        b"content-length: +3\r\n",
        b"content-length : 3\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"content-length: 3\n",
    ],
)
@pytest.mark.parametrize("upgrade", [b"", b"connection: upgrade\r\nupgrade: x\r\n"])
def test_an_ambiguous_length_is_refused_and_the_connection_ended(serve, head, upgrade):
    with connect(serve()) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\n" + upgrade + head + b"\r\n")
        time.sleep(0.02)
        sock.sendall(b"0\r\n\r\n" + HIDDEN)
        answer = read_all(sock)
    assert statuses(answer) == [400]
    assert b"invalid_http" in answer


@pytest.mark.parametrize("target", [b"a:80", b"/"])
def test_connect_is_refused(serve, target):
    with connect(serve()) as sock:
        sock.sendall(b"CONNECT " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n" + HIDDEN)
        assert statuses(read_all(sock)) == [400]


def test_a_key_in_a_trailer_does_not_authenticate(serve):
    data = json.dumps({"model": "fake", "prompt": "hi"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\nauthorization: Bearer secret\r\n\r\n" % (len(data), data)
    with connect(serve(api_keys=("secret",))) as sock:
        sock.sendall(head + body)
        assert statuses(read_all(sock)) == [401]


@pytest.mark.parametrize(
    "body", [b"-5\r\nhello\r\n", b"f" * 17 + b"\r\n", b"5\nhello\r\n", b"zz\r\n"]
)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("before", [b"", LIVE])
def test_a_malformed_chunk_is_answered_with_400(serve, body, apart, before):
    server = serve()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(before + head + (b"" if apart else body))
        if apart:
            time.sleep(0.05)
            sock.sendall(body)
        answer = read_all(sock)
    assert statuses(answer) == [200] * bool(before) + [400]
    assert b"invalid_http" in answer
    server.wait_for(lambda: server.engine.running == 0, "it runs on")


def test_too_many_pipelined_requests_are_answered_up_to_the_limit_then_400(serve):
    with connect(serve()) as sock:
        sock.sendall(LIVE * 400)
        answer = read_all(sock)
    assert statuses(answer) == [200] * (connection.MAX_PIPELINED + 1) + [400]


JAVA = """
import java.net.URI; import java.net.http.*; import java.net.http.HttpResponse.BodyHandlers;
public class Client { public static void main(String[] a) throws Exception {
  HttpClient client = HttpClient.newHttpClient();
  for (String stream : new String[]{"false", "true"}) {
    String body = "{\\"model\\":\\"fake\\",\\"prompt\\":\\"hi\\",\\"max_tokens\\":3,\\"stream\\":" + stream + "}";
    HttpRequest r = HttpRequest.newBuilder(URI.create(a[0] + "/v1/completions"))
      .header("Content-Type", "application/json").POST(HttpRequest.BodyPublishers.ofString(body)).build();
    System.out.println(client.send(r, BodyHandlers.ofString()).statusCode());
    System.out.println(client.sendAsync(r, BodyHandlers.ofLines()).join().body().anyMatch(l -> l.contains("choices")));
  } System.exit(0); } }
"""


def test_the_jdk_client_works_with_its_defaults(serve, tmp_path):
    if shutil.which("javac") is None:
        pytest.skip("needs a JDK (apt-get install default-jdk-headless)")
    (tmp_path / "Client.java").write_text(JAVA)
    command = ["java", str(tmp_path / "Client.java"), serve().url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.stdout.split() == ["200", "true"] * 2, ran
