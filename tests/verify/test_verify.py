"""`slipstream verify` against a real server of a tiny model, and what servers refuse."""

import json

import httpx
import pytest

from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.verify.checks import Verification
from slipstream.verify.reference import Reference
from slipstream.verify.seen import VerifyPlan
from slipstream.verify.served import NotOfferedError, Served
from tests.server.conftest import *  # noqa: F403 - the tiny server
from tests.server.conftest import serving
from tests.support import tiny_models

PLAN = VerifyPlan(answers=64, turn=8, max_tokens=8, long_lines=4)
ONE_THREAD = ("--device", "cpu", "--num-threads", "1")  # more would spin over a tiny model's sums


@pytest.fixture(scope="module")
def reference(tiny_path):
    args = EngineArgs(model=str(tiny_path), dtype="float32", device="cpu", num_threads=1)
    return Reference.load(args, context=512)


def outcomes(findings):
    return {f.check: f.outcome for f in findings}


def test_a_server_of_the_model_is_sound(tiny_server, reference):
    verification = Verification(Served.connect(tiny_server.url), reference, PLAN)
    found = outcomes(verification.run())
    scores = verification.counts()["scores"]
    agreed = scores["likeliest tokens agree"]
    assert 0.98 < agreed["value"] <= agreed["high"] <= 1
    assert agreed["low"] > 0.9
    assert scores["greedy answers agree"]["value"] > 0.9
    assert found["prompt"] == found["distribution"] == found["long context"] == "pass"
    assert found["temperature 0"] == found["top_k"] == found["top_p"] == "pass"
    assert "fault" not in found.values()


@pytest.mark.parametrize("refused", [("min_p",), ("logprobs",), ("min_p", "logprobs")])
def test_a_server_that_refuses_fields_is_asked_without_them(tiny_server, reference, refused):
    class Refusing(httpx.HTTPTransport):
        def handle_request(self, request):
            body = json.loads(request.content or "{}")
            if any(name in body for name in refused):
                return httpx.Response(400, json={"error": "no such field"})
            return super().handle_request(request)

    served = Served.connect(tiny_server.url, transport=Refusing(), model="smollm2")
    (found,) = [f for f in Verification(served, reference, PLAN).run() if f.check == "distribution"]
    assert "logprobs" in refused or found.outcome == "pass"  # its texts are no characters
    assert ("no log-probabilities" in found.why) == ("logprobs" in refused)


def test_random_weights_are_called_other_weights_and_nothing_else(tmp_path):
    """The server names five tokens of a flat distribution; the model's is sharp."""
    folder = tmp_path / "sharp"
    tiny_models.write_sharp(folder, max_position_embeddings=1024)
    settings = {"model": str(folder), "dtype": "float32", "device": "cpu", "num_threads": 1}
    reference = Reference.load(EngineArgs(**settings), context=512)
    args = EngineArgs(**settings, load_format="dummy", max_model_len=1024, kv_cache_bytes=2**24)
    with serving(start=lambda: AsyncLLM.start(args)) as server:
        findings = Verification(Served.connect(server.url), reference, PLAN).run()
    found = outcomes(findings)
    assert (found["prompt"], found["distribution"]) == ("pass", "fault")
    assert [f.why.split(": ")[1] for f in findings if f.outcome == "fault"] == ["other weights"]


def test_no_server_and_no_model_are_named():
    with pytest.raises(SlipstreamError, match="no server at"):
        Served.connect("http://127.0.0.1:9")
    empty = httpx.MockTransport(lambda request: httpx.Response(200, json={"data": []}))
    with pytest.raises(ConfigError, match="lists no models; name one with --model"):
        Served.connect("http://127.0.0.1:9", transport=empty)
    other = httpx.MockTransport(lambda request: httpx.Response(200, json={"answer": 42}))
    with pytest.raises(SlipstreamError, match="another shape"):
        Served.connect("http://x", model="m", transport=other).ask([])
    refusing = httpx.MockTransport(lambda request: httpx.Response(422, text="no"))
    with pytest.raises(NotOfferedError):
        Served.connect("http://x", model="m", transport=refusing).ask([])


def test_the_command_prints_findings_and_leaves_a_page(tiny_server, tiny_path, tmp_path, capsys):
    page = tmp_path / "page.html"
    words = ["verify", tiny_server.url, "--against", str(tiny_path), "--answers", "8"]
    words += ["--dtype", "float32", *ONE_THREAD, "--long", "0", "--page", str(page)]
    assert main([*words, "--json"]) == 4  # 8 answers of a tiny model decide no temperature
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "undecided"
    assert found["rates"] == {"alpha": 0.001, "beta": 0.01}
    assert {f["check"] for f in found["findings"]} >= {"prompt", "distribution", "schema"}
    assert "<td>distribution</td>" in page.read_text()
    assert "<td>likeliest tokens agree</td>" in page.read_text()
    agreed = found["scores"]["likeliest tokens agree"]
    assert agreed["low"] <= agreed["value"] <= agreed["high"]


def test_the_record_of_a_model_with_a_short_context_is_made(tmp_path, capsys):
    model, record = tmp_path / "short", tmp_path / "record.json"
    tiny_models.write_with_tokenizer(model, max_position_embeddings=256)
    words = ["verify", "--against", str(model), "--dtype", "float32", *ONE_THREAD]
    assert main([*words, "--record", str(record)]) == 0, capsys.readouterr().err
    assert json.loads(record.read_text())["sequences"]


def test_a_long_conversation_that_the_model_has_no_room_for_is_named(
    tiny_server, tiny_path, capsys
):
    words = ["verify", tiny_server.url, "--against", str(tiny_path), *ONE_THREAD]
    assert main([*words, "--long", "90"]) == 2
    assert "--long 90 needs 2,968 tokens" in capsys.readouterr().err


def test_a_server_that_refuses_long_conversations_offers_no_needles(tiny_server, reference):
    class Short(httpx.HTTPTransport):
        def handle_request(self, request):
            if len(request.content or b"") > 600:
                return httpx.Response(400, json={"error": "the context is too long"})
            return super().handle_request(request)

    served = Served.connect(tiny_server.url, transport=Short(), model="smollm2")
    found = {f.check: f for f in Verification(served, reference, PLAN).run()}
    for check in ("long context", "needle"):
        assert found[check].outcome == "not offered"
        assert "too long" in found[check].why
    assert found["temperature 0"].outcome == "pass"
