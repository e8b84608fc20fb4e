"""Who may ask, and that nothing that is asked makes the server fail."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from serve.conftest import SENTENCE, serving

import headwise as hw
from headwise.arrays import to_numpy


@pytest.fixture(scope="module")
def server(minilm: Any) -> Iterator[Any]:
    from headwise.serve.opened import Opened

    opened = Opened([minilm])
    opened.make(SENTENCE)
    with serving(opened, SENTENCE) as started:
        yield started


def ask(
    server: Any, path: str, method: str = "GET", body: Any = None, **headers: str | None
) -> tuple[int, dict[str, str], bytes]:
    """Asks as the page does; headers given as None are left out."""
    inner = server.server
    sent: dict[str, str | None] = {"Host": f"127.0.0.1:{inner.port}", "X-Token": inner.token}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if body is not None:
        sent["Content-Type"] = "application/json"
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", inner.port, timeout=60)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def run(server: Any) -> tuple[str, str]:
    opened = server.server.opened
    id = next(id for id, one in opened.runs.items() if one.text == SENTENCE)
    return id, next(name for name, part in opened.runs[id].heads.parts.items() if part.kept)


def test_what_it_answers_is_what_the_weights_are(server: Any) -> None:
    id, part = run(server)
    w = to_numpy(server.server.opened.runs[id].heads[5, 10][0].detach())
    status, _, body = ask(server, f"/api/{id}/{part}/5/10/cell?i=8&j=3")
    found = json.loads(body)
    assert status == 200 and abs(found["weight"] - w[8, 3]) < 1e-6
    assert (found["query"]["token"], found["key"]["token"]) == ("solved", "thanked")
    row = json.loads(ask(server, f"/api/{id}/{part}/5/10/row?i=8")[2])
    assert row["places"] == np.lexsort((np.arange(len(w)), -w[8])).tolist()
    np.testing.assert_allclose(row["weights"], np.sort(w[8])[::-1], atol=1e-6)
    readers = json.loads(ask(server, f"/api/{id}/{part}/5/10/row?j=3")[2])
    np.testing.assert_allclose(readers["weights"], np.sort(w[:, 3])[::-1], atol=1e-6)
    status, headers, body = ask(server, f"/api/{id}/{part}/5/10/tile/max/0/0/0")
    assert status == 200 and headers["x-exact"] == "1"
    np.testing.assert_allclose((np.frombuffer(body, "<u2").reshape(w.shape) / 65535) ** 2, w, atol=2e-5)


def test_a_text_is_read_and_held_against_another(server: Any) -> None:
    id, part = run(server)
    status, _, body = ask(server, "/api/run", "POST", {"text": SENTENCE.replace("she", "he")})
    other = json.loads(body)["id"]
    assert status == 200 and other != id
    status, _, body = ask(server, f"/api/{id}/moved/{other}/{part}")
    rows = json.loads(body)
    assert len(rows) == 72 and all(0 <= row["moved"] <= 1 for row in rows)
    opened = server.server.opened
    a, b = (np.stack([to_numpy(opened.runs[x].heads[5][0].detach())]) for x in (id, other))
    moved = np.abs(b - a).sum(3).mean(2)[0] / 2  # all tokens stand where they stood
    found = {row["head"]: row["moved"] for row in rows if row["layer"] == 5}
    np.testing.assert_allclose([found[h] for h in range(12)], moved, atol=1e-5)
    body = ask(server, f"/api/{other}/{part}/5/8/tile/difference/0/0/0?beside={id}")[2]
    d = np.frombuffer(body, "<u2").reshape(b.shape[2:]).astype(float) - 32768
    np.testing.assert_allclose(np.sign(d) * (d / 32767) ** 2, (b - a)[0, 8], atol=1e-3)
    assert ask(server, f"/api/{id}/moved/{id}/nothing")[0] == 422


def test_a_head_is_switched_off(server: Any, minilm: Any) -> None:
    import torch

    id, part = run(server)
    found = json.loads(ask(server, f"/api/{id}/off/{part}", "POST", {"off": [[5, 10]]})[2])
    inputs = minilm.encode(SENTENCE)
    with torch.no_grad():
        x = minilm.model(**inputs).last_hidden_state[0]
        with hw.ablate(minilm.model, [(5, 10)]):
            y = minilm.model(**inputs).last_hidden_state[0]
    np.testing.assert_allclose(found["change"], (y - x).norm(dim=1) / x.norm(dim=1), rtol=1e-3)
    assert ask(server, f"/api/{id}/off/{part}", "POST", {"off": [[99, 0]]})[0] == 422


def test_only_its_own_page_may_ask(server: Any) -> None:
    port, token = server.server.port, server.server.token
    assert ask(server, "/api/state")[0] == 200
    assert ask(server, "/api/state", X_Token=None)[0] == 403
    assert ask(server, "/api/state", X_Token=token[:-1])[0] == 403
    assert ask(server, "/api/state", Host=f"evil.example:{port}")[0] == 421
    assert ask(server, "/api/state", Host=None)[0] == 400
    assert ask(server, "/api/state", Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/state", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(server, "/api/state", Sec_Fetch_Site="cross-site")[0] == 403
    status, headers, _ = ask(server, f"/?token={token}", X_Token=None)
    said = headers["set-cookie"].lower()
    assert status == 303 and "httponly" in said and "samesite=strict" in said
    cookie = headers["set-cookie"].partition(";")[0]
    status, headers, _ = ask(server, "/", X_Token=None, Cookie=cookie)
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert "access-control-allow-origin" not in headers
    assert server._socket.getsockname()[0] == "127.0.0.1"


BODIES = [
    *(b"", b"{", b"[]", b'{"text": NaN}', b"\xff\xfe", b"[" * 50_000, b'{"text": 5}', b'{"text": ""}', b"1" * 5000),
    *(b'{"text": "a", "model": 1e3}', b'{"text": "a", "model": 7}', b'{"text": "a", "generate": -1}'),
    *(b'{"text": "\\ud800"}', b'{"text": "a", "model": true}'),
]
OFF = [
    *(b'{"off": []}', b'{"off": [[1]]}', b'{"off": [[1e9, 0]]}', b'{"off": [[-1, 0]]}', b'{"off": [[0, true]]}'),
    *(b'{"off": [[99999999999999999999, 0]]}', b'{"off": {"a": 1}}'),
]


def test_a_thousand_bad_requests_are_all_refused(server: Any) -> None:
    """Wrong tokens and names, tricks with paths, huge and odd numbers, broken bodies: 4xx, and the server goes on."""
    rng = random.Random(0)
    id, part = run(server)
    port = server.server.port
    odd = ["NaN", "-1", "1e9", "inf", "", "9" * 30, "0x1", "1.5", "%00", "..", "%2e%2e%2f", "null", "''"]
    at = f"/api/{id}/{part}"
    word = "".join

    def junk() -> str:
        return word(rng.choice("abcXYZ019-_.~%2f") for _ in range(rng.randint(1, 40))).replace("%", "%25")

    def number() -> str:
        return rng.choice([*odd, str(rng.randrange(10**6, 10**18))]) or "x"

    def tile() -> tuple[str, str, Any, dict[str, str | None]]:
        values = [rng.choice(["5", number()]), rng.choice(["3", number()])]
        values += [rng.choice(["max", "mean", junk(), "difference"]), number(), rng.choice(["0", number()]), number()]
        return f"{at}/{values[0]}/{values[1]}/tile/{'/'.join(values[2:])}", "GET", None, {}

    def text(*some: Any) -> Any:
        return rng.choice(some)

    typed = {"Content-Type": "text/plain"}
    hosts = "localhost", f"127.0.0.1:{port + 1}", "127.0.0.1", "nobody.example", f"[::1]:{port}"
    origins = "null", "http://127.0.0.1:1", f"https://127.0.0.1:{port}"
    paths = "../page.html", "..%2f..%2fapp.py", "%2e%2e/app.py", "page.js%00", "source/page.js", "node_modules"
    kinds: list[Any] = [
        tile,
        lambda: (f"{at}/5/10/cell?i={number()}&j={number()}", "GET", None, {}),
        lambda: (f"{at}/5/10/row?{text(*'ijk')}={number()}", "GET", None, {}),
        lambda: (f"{at}/5/10/row?i=1&j=1", "GET", None, {}),
        lambda: (f"/{text('web', 'api', '..', 'etc')}/{junk()}", "GET", None, {}),
        lambda: (f"/web/{text(*paths)}", "GET", None, {}),
        lambda: (f"{at}/5/tokens/{text('keys', 'queries', junk())}/{number()}x", "GET", None, {}),
        lambda: (f"{at}/5/search/keys?q={'a' * rng.randint(201, 3000)}", "GET", None, {}),
        lambda: (f"/api/state?{'a' * 5000}", "GET", None, {}),
        lambda: (f"/api/{junk()}/about", "GET", None, {}),
        lambda: ("/api/state", "GET", None, {"X-Token": junk()}),
        lambda: ("/api/state", "GET", None, {"Host": text(*hosts)}),
        lambda: ("/api/state", "GET", None, {"Origin": text(*origins)}),
        lambda: ("/api/state", text("POST", "PUT", "DELETE", "PATCH", "BREW"), b"{}", {}),
        lambda: ("/api/run", "POST", text(*BODIES), {}),
        lambda: ("/api/run", "POST", b'{"text": "a"}', typed),
        lambda: (f"/api/{id}/off/{part}", "POST", text(*OFF), {}),
    ]
    statuses = []
    for n in range(1000):
        path, method, body, headers = kinds[n % len(kinds)]()
        status, _, said = ask(server, path, method, body, **{k.replace("-", "_"): v for k, v in headers.items()})
        assert 400 <= status < 500, (status, method, path, body and body[:80], headers, said[:200])
        statuses.append(status)
    assert len(set(statuses)) >= 7
    large = b'{"text": "' + b"a " * 900_000 + b'"}'
    assert ask(server, "/api/run", "POST", large)[0] == 413
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"\x00\x01 nothing of the kind\r\n\r\n")
        assert raw.recv(200).startswith(b"HTTP/1.1 400")
    assert ask(server, "/api/state")[0] == 200
