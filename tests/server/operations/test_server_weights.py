"""Routes that change weights, as vLLM and SGLang have them, over a real engine."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.server.http.keys import Key, changing, new_secret
from slipstream.server.state import ServerSettings
from tests.server.conftest import serving
from tests.support import tiny_models
from tests.worker.test_weight_transport import Trainer, free_port, told

BODY = {
    "model": "policy",
    "prompt": "hello there",
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}
USER = "0123456789ab"
SETTINGS = dict(dtype="float32", device="cpu", max_num_seqs=4, max_model_len=1024, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`old` is served; `new` is another checkpoint of the model, `other` one of another model."""
    parent = tmp_path_factory.mktemp("weights")
    for seed, name in enumerate(("old", "new")):
        tiny_models.write_with_tokenizer(parent / name, seed=seed, max_position_embeddings=1024)
    tiny_models.write_with_tokenizer(
        parent / "other", intermediate_size=96, max_position_embeddings=1024
    )
    return parent


@pytest.fixture(scope="module")
def server(folder):
    from slipstream.engine.async_llm import AsyncLLM

    args = EngineArgs(model=str(folder / "old"), **SETTINGS)
    with changing(folder / "keys.json", may_create=True) as keys:
        secret, salt, digest = new_secret(USER)
        keys[USER] = Key(id=USER, salt=salt, digest=digest)
    how = dict(
        enable_weight_updates=True,
        weights_folder=str(folder),
        api_keys=("secret",),
        keys_file=str(folder / "keys.json"),
        served_model_names=("policy",),
    )
    with serving(start=lambda: AsyncLLM.start(args), **how) as running:
        running.users_key = secret
        yield running


@pytest.fixture
def http(server):
    with server.http(headers={"authorization": "Bearer secret"}) as http:
        yield http


def post(http, path, body=None, status=200):
    answer = http.post(path, json=body) if body is not None else http.post(path)
    assert answer.status_code == status, answer.text
    return answer.json()


def asked(http):
    choice = post(http, "/v1/completions", BODY)["choices"][0]
    return choice["text"], choice["weight_versions"]


def test_there_are_no_such_routes_unless_asked_for(shared):
    with shared.http() as http:
        for path in ("/update_weights", "/pause", "/weights", "/update_weights_from_disk"):
            assert http.post(path, json={}).status_code == 404


def test_the_setting_asks_for_keys():
    with pytest.raises(ConfigError, match="set keys_file") as error:
        ServerSettings(enable_weight_updates=True, api_keys=("secret",))
    assert error.value.field == "enable_weight_updates"
    with pytest.raises(ConfigError, match="only with enable_weight_updates"):
        ServerSettings(weights_folder="x")


def test_an_admins_key_is_needed(server, http):
    with server.http() as other:
        assert other.post("/pause").status_code == 401
        assert other.get("/weights").status_code == 401
    with server.http(headers={"authorization": f"Bearer {server.users_key}"}) as users:
        for path in ("/pause", "/update_weights", "/finish_weight_update"):
            assert users.post(path, json={}).status_code == 403
        assert users.get("/weights").status_code == 403
        assert users.get("/is_paused").status_code == 200
        assert users.get("/get_weight_version").status_code == 200


def test_a_link_in_a_folder_that_leads_out_is_refused(http, folder, tmp_path):
    linked = folder / "linked"
    shutil.copytree(folder / "new", linked)
    shutil.copy(folder / "new" / "model.safetensors", tmp_path / "secret.safetensors")
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    error = post(http, "/update_weights_from_disk", {"model_path": "linked"}, status=400)["error"]
    assert error["param"] == "model_path"
    shutil.rmtree(linked)


def test_every_route_that_changes_something_is_an_admins(server):
    from slipstream.server.http.auth import ADMIN_ROUTES
    from slipstream.server.operations.weights import WeightRoutes

    routes = WeightRoutes(server.state).routes()
    assert {r.path for r in routes} - ADMIN_ROUTES == {"/is_paused", "/get_weight_version"}


def test_vllms_calls_change_the_weights(http, folder):
    before = asked(http)
    first = http.get("/get_weight_version").json()["weight_version"]
    assert before[1] == [[first, 6]]
    assert post(http, "/init_weight_transfer_engine", {"init_info": {}})["success"]
    assert post(http, "/pause?mode=keep")["is_paused"]
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert post(http, "/start_weight_update")["is_updating"]
    post(http, "/update_weights", {"update_info": {"path": "new/model.safetensors"}})
    done = post(http, "/finish_weight_update", {"weight_version": "vllm-1"})
    assert (done["weight_version"], done["is_updating"]) == ("vllm-1", False)
    assert not post(http, "/resume")["is_paused"]
    after = asked(http)
    assert after[0] != before[0]
    assert after[1] == [["vllm-1", 6]]
    sums = http.get("/weights?checksums=true").json()
    assert sums["checksum"] == done["checksum"]
    assert "layers.0.attention.qkv.parts.0.data" in sums["checksums"]


def test_sglangs_calls_change_the_weights(http, folder):
    done = post(
        http, "/update_weights_from_disk", {"model_path": "old", "weight_version": "sglang-1"}
    )
    old = asked(http)
    assert old[1] == [["sglang-1", 6]]
    assert post(http, "/pause_generation", {"mode": "retract"})["is_paused"]
    post(http, "/update_weights_from_disk", {"model_path": "new"})
    post(http, "/continue_generation")
    assert asked(http)[0] != old[0]
    again = post(
        http, "/update_weights_from_disk", {"model_path": "old", "abort_all_requests": True}
    )
    assert again["checksum"] == done["checksum"]
    assert asked(http)[0] == old[0]
    post(http, "/flush_cache")
    assert not http.get("/is_paused").json()["is_paused"]


def test_streams_tell_the_versions_in_their_last_event(http, folder):
    shutil.copytree(folder / "old", folder / "copy", dirs_exist_ok=True)
    post(http, "/update_weights_from_disk", {"model_path": "copy", "weight_version": "s1"})
    messages = [{"role": "user", "content": "hello"}]
    long = {"stream": True, "max_tokens": 700, "ignore_eos": True, "temperature": 0}
    for path, body in (
        ("/v1/completions", {"model": "policy", "prompt": "hello", **long}),
        ("/v1/chat/completions", {"model": "policy", "messages": messages, **long}),
    ):
        events, begun = [], False
        first = http.get("/get_weight_version").json()["weight_version"]
        with http.stream("POST", path, json=body) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))
                    if not begun and len(events) > 3:
                        begun = True
                        new = post(http, "/update_weights_from_disk", {"model_path": "new"})
        choices = [c for event in events for c in event["choices"]]
        (versions,) = [c["weight_versions"] for c in choices if "weight_versions" in c]
        assert choices[-1]["finish_reason"] == "length"
        assert [v for v, _ in versions] == [first, new["weight_version"]]
        assert sum(n for _, n in versions) == 700
        post(http, "/update_weights_from_disk", {"model_path": "old"})


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/update_weights_from_disk", {"model_path": "../.."}, "model_path"),
    ("/update_weights_from_disk", {"model_path": "nowhere"}, None),
    ("/update_weights_from_disk", {"model_path": "other"}, "layers"),
    ("/update_weights_from_disk", {"path": "old"}, None),
    ("/pause?mode=sleep", None, "mode"),
    ("/pause?mode=keep&clear_cache=true", None, "clear_cache"),
    ("/pause?level=1", None, "level"),
    ("/update_weights", None, None),
    ("/update_weights", {"update_info": {"tensors": {}}}, "tensors"),
    ("/update_weights", {"update_info": {"path": "/etc/x.safetensors"}}, "path"),
    ("/update_weights", {"update_info": {"names": ["x"]}}, "dtype_names"),
    ("/update_weights", {"update_info": {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]],
        "ipc_handles": [{"GPU": "?"}]}}, "ipc_handles"),
    ("/pause", {"mode": "sleep"}, "mode"),
    ("/pause?mode=keep", {"mode": "keep"}, "mode"),
    ("/init_weights_update_group", {"master_address": "x", "master_port": 1}, None),
])  # fmt: skip
def test_what_is_wrong_is_named_and_leaves_nothing_under_way(http, path, body, param):
    before = http.get("/weights").json()
    error = post(http, path, body, status=400)["error"]
    if param is not None:
        assert error["param"] == param
    assert http.get("/weights").json() == before


def test_a_pause_takes_its_mode_from_the_body_and_is_seen(http):
    assert post(http, "/pause", {"mode": "keep"})["is_paused"]
    assert 'slipstream:engine_paused{model_name="policy"} 1.0' in http.get("/metrics").text
    version = http.get("/get_weight_version").json()["weight_version"]
    assert f'weight_version_info{{model_name="policy",weight_version="{version}"}}' in (
        http.get("/metrics").text
    )
    assert http.get("/status.json").json()["replicas"][0]["state"] == "paused"
    post(http, "/resume")
    assert http.get("/status.json").json()["replicas"][0]["state"] == "ready"
    metrics = http.get("/metrics").text
    assert 'route="/pause"' in metrics
    assert 'route="/resume"' in metrics


def test_unknown_parameters_of_the_query_are_named(http):
    for path in ("/weights?checksum=true", "/is_paused?checksum=true"):
        answer = http.get(path)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "checksum"


def test_what_does_not_fit_what_is_under_way_is_a_conflict(http):
    assert post(http, "/finish_weight_update", {}, 409)["error"]["code"] == "conflict"
    post(http, "/start_weight_update")
    assert post(http, "/start_weight_update", status=409)["error"]["code"] == "conflict"
    post(http, "/abort_weight_update")


def test_the_routes_are_described_where_they_are(server, http, shared):
    from slipstream.server.http.record import ROUTES
    from slipstream.server.operations.weights import WeightRoutes

    routes = {r.path for r in WeightRoutes(server.state).routes()}
    assert routes <= ROUTES
    assert routes <= http.get("/openapi.json").json()["paths"].keys()
    assert "/update_weights_from_disk" in http.get("/docs").text
    with shared.http() as other:
        assert not routes & other.get("/openapi.json").json()["paths"].keys()


def test_nan_is_refused_before_anything_is_written(http, folder):
    import numpy as np
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "old" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, folder / "nan.safetensors")
    before = http.get("/weights").json()
    post(http, "/start_weight_update")
    post(http, "/update_weights", {"update_info": {"path": "nan.safetensors"}})
    error = post(http, "/finish_weight_update", status=400)["error"]
    assert "not finite" in error["message"]
    assert error["param"].startswith("layers.1.")
    post(http, "/abort_weight_update")
    assert http.get("/weights").json() == before


@pytest.mark.parametrize("version", ["", "a\nb", "x" * 201])
def test_versions_are_printable_and_short(http, version):
    body = {"model_path": "old", "weight_version": version}
    error = post(http, "/update_weights_from_disk", body, 400)["error"]
    assert error["param"] == "weight_version"


def test_a_trainer_broadcasts_by_sglangs_routes(http, folder):
    post(http, "/update_weights_from_disk", {"model_path": "new"})
    expected = asked(http)[0]
    post(http, "/update_weights_from_disk", {"model_path": "old"})
    assert asked(http)[0] != expected
    tensors = load_file(folder / "new" / "model.safetensors")
    port = free_port()
    trainer = Trainer(tensors, port, 2)
    group = dict(master_address="127.0.0.1", master_port=port, world_size=2, backend="gloo")
    post(http, "/init_weights_update_group", group)
    names = list(tensors)
    for some, is_last in ((names[:5], False), (names[5:], True)):
        piece = told({n: tensors[n] for n in some})
        piece["dtypes"] = piece.pop("dtype_names")
        post(http, "/update_weights_from_distributed", {**piece, "flush_cache": is_last})
    trainer.join()
    assert asked(http)[0] == expected
    post(http, "/destroy_weights_update_group", {})
    for flush in (True, False):  # the group is gone
        error = post(http, "/update_weights_from_distributed", {**piece, "flush_cache": flush}, 400)
        assert error["error"]["param"] == "group_name"
        assert not http.get("/weights").json()["is_updating"]


def test_what_trls_client_asks_is_there(http):
    """`examples/trl/slipstream_client.py` sends these bodies."""
    assert http.get("/get_world_size").json() == {"world_size": 1}
    info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["weight_transfer_config"] is not None
    assert post(http, "/reset_prefix_cache")["success"]
    neutral = {
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "max_tokens": 4, "n": 2}
    body = {"model": "policy", "prompt": [[5, 6], [7]], "logprobs": 0, **neutral, **ids}
    choices = post(http, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6], [5, 6], [7], [7]]
    for choice in choices:
        told = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
        assert told == choice["token_ids"]
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **neutral, **ids}
    chat = post(http, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 0})
    assert chat["prompt_token_ids"]
    assert all(choice["token_ids"] for choice in chat["choices"])
    scored = {"model": "policy", "prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 5}
    (choice,) = post(http, "/v1/completions", scored)["choices"]
    assert len(choice["prompt_logprobs"]) == 3


def test_streams_go_on_until_a_trainer_listens(server, http):
    """Joining begins when there is somebody to join, so that it holds up no step."""
    from concurrent.futures import ThreadPoolExecutor

    port = free_port()
    group = dict(master_address="127.0.0.1", master_port=port, world_size=2, backend="gloo")
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(post, http, "/init_weight_transfer_engine", {"init_info": group})
        with server.http(headers={"authorization": "Bearer secret"}) as other:
            asked(other)  # is answered while nobody listens
            assert not joining.done()
            trainer = Trainer({}, port, 2)
            assert joining.result()["success"]
        trainer.join()
    post(http, "/destroy_weights_update_group", {})


def test_a_trainer_that_never_listens_is_an_error(http, monkeypatch):
    from slipstream.engine.process import weight_operations

    monkeypatch.setattr(weight_operations, "JOIN_S", 0.3)
    group = dict(master_address="127.0.0.1", master_port=free_port(), world_size=2, backend="gloo")
    answer = http.post("/init_weight_transfer_engine", json={"init_info": group})
    assert answer.status_code >= 500
    assert "no trainer of the group 'weights' listened" in answer.text
    assert http.get("/weights").json()["is_updating"] is False
