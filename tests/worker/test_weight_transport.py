"""How a trainer's weights reach an engine: broadcasts over gloo, ranks, and handles of GPU memory."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from slipstream import LLM, SamplingParams
from slipstream.engine.weight_calls import joining, piece_of
from slipstream.errors import CheckpointError, EngineError, RequestError
from slipstream.messages.weight_ops import IpcPiece, TensorInfo, WeightsOp
from slipstream.platform import platform_of
from slipstream.worker.weights.group import WeightGroup
from slipstream.worker.weights.ipc import Handle, opened, own_handle
from tests.support import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = dict(device="cpu", max_model_len=64, max_num_seqs=4, num_threads=1, kv_cache_bytes=2**20)


@pytest.fixture
def two(tmp_path):
    for seed, name in enumerate(("old", "new")):
        tiny_models.write_with_tokenizer(tmp_path / name, seed=seed)
    return tmp_path / "old", tmp_path / "new"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answer(llm):
    return llm.generate("hello", GREEDY, progress=False)[0].outputs[0].token_ids


def told(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(x.dtype).removeprefix("torch.") for x in tensors.values()],
        "shapes": [list(x.shape) for x in tensors.values()],
    }


class Trainer:
    """Rank 0 of a group, which sends tensors from another thread, as a trainer's process would."""

    def __init__(self, tensors, port, world_size):
        self.tensors, self.errors = tensors, []
        self.thread = threading.Thread(target=self._run, args=(port, world_size), daemon=True)
        self.thread.start()

    def _run(self, port, world_size):
        try:
            group = WeightGroup("127.0.0.1", port, 0, world_size, timeout_s=50)
            for tensor in self.tensors.values():
                group.broadcast(tensor)
        except Exception as error:
            self.errors.append(error)

    def join(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert not self.errors


def broadcast(llm, tensors, world_size):
    port = free_port()
    trainer = Trainer(tensors, port, world_size)
    how = dict(master_address="127.0.0.1", master_port=port, backend="gloo")
    llm.init_weight_transfer_engine({"init_info": {**how, "world_size": world_size}})
    llm.start_weight_update({"update_info": told(tensors)})
    names = list(tensors)
    for some in (names[:5], names[5:]):
        llm.update_weights({"update_info": told({n: tensors[n] for n in some})})
    trainer.join()
    return llm.finish_weight_update()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_broadcast_equals_a_fresh_load(two, kernels):
    old, new = two
    tensors = {n: x.bfloat16() for n, x in load_file(new / "model.safetensors").items()}
    how = dict(dtype="bfloat16", kernels=kernels, **SIZES)
    with LLM(str(new), **how) as llm:
        expected, sums = answer(llm), llm.weights(checksums=True).checksums
    with LLM(str(old), **how) as llm:
        assert answer(llm) != expected
        broadcast(llm, tensors, world_size=2)
        assert answer(llm) == expected
        assert llm.weights(checksums=True).checksums == sums
        how = dict(master_port=1, world_size=2, backend="gloo")
        with pytest.raises(RequestError, match="joined already"):
            llm.init_weight_transfer_engine({"init_info": how})


@pytest.mark.slow
def test_two_ranks_get_all_and_agree(two):
    old, new = two
    tensors = load_file(new / "model.safetensors")
    how = dict(dtype="float32", tensor_parallel_size=2, **SIZES)
    with LLM(str(new), **how) as llm:
        expected, sums = answer(llm), llm.weights(checksums=True)
    with LLM(str(old), **how) as llm:
        first = answer(llm)
        assert first != expected
        broadcast(llm, tensors, world_size=3)
        assert answer(llm) == expected
        assert llm.weights(checksums=True).checksums == sums.checksums
        assert {name.partition(".")[0] for name in sums.checksums} == {"rank0", "rank1"}
        llm.start_weight_update()
        llm.update_weights({"tensors": load_file(old / "model.safetensors")})
        assert llm.finish_weight_update().weight_version == "2"
        assert answer(llm) == first
        llm.start_weight_update()
        llm.update_weights({"path": str(new)})
        with pytest.raises(RequestError, match="finish the update"):
            llm.update_weights({"path": str(new)})
        llm.finish_weight_update()
        assert answer(llm) == expected
        missing = {n: x for n, x in tensors.items() if not n.endswith("norm.weight")}
        with pytest.raises(CheckpointError, match="lacks"):
            llm.start_weight_update(told(missing))
        assert llm.start_weight_update().is_updating  # no rank kept the one before


def test_another_size_than_expected_is_refused_before_it_is_received(two):
    port, old = free_port(), two[0]
    trainer = Trainer({"x": torch.zeros(1000)}, port, 2)
    how = dict(master_address="127.0.0.1", master_port=port, backend="gloo", world_size=2)
    with LLM(str(old), dtype="float32", **SIZES) as llm:
        llm.init_weight_transfer_engine(how)
        llm.start_weight_update()
        for wrong, match in (
            (dict(names=["x"], shapes=[[10**14]]), "numbers together"),
            (dict(names=["x"], shapes=[[4]], source=1), "no other member"),
            (dict(names=["x", "x"], shapes=[[4], [4]]), "there twice"),
            (dict(names=["x"], shapes=[[10]]), "4000 bytes of float32 where 40"),
            (dict(names=["x"], shapes=[[10]]), "no group"),
        ):
            with pytest.raises(RequestError, match=match):
                llm.update_weights({**wrong, "dtypes": ["float32"] * len(wrong["names"])})
    trainer.thread.join(60)


def test_a_member_that_never_comes_is_an_error():
    port = free_port()
    with pytest.raises(EngineError, match="was not joined by all 2 in 1 s"):
        WeightGroup("127.0.0.1", port, 0, 2, timeout_s=1)
    with pytest.raises(EngineError, match="was not joined by all 2 in 1 s"):
        WeightGroup("127.0.0.1", free_port(), 1, 2, timeout_s=1)
    with pytest.raises(RequestError, match="rank 3 is not one of 2"):
        WeightGroup("127.0.0.1", port, 3, 2)
    with pytest.raises(RequestError, match="gloo or nccl"):
        WeightGroup("127.0.0.1", port, 0, 2, backend="mpi")


def test_an_init_info_is_a_group_or_nothing():
    group = joining({"init_info": dict(master_address="h", master_port=1, world_size=3)})
    assert (group.name, group.backend, group.rank_offset, group.world_size) == (
        *("weights", "nccl"),
        *(1, 3),
    )
    assert joining({"init_info": {}}) is None
    assert joining({"backend": "ipc"}) is None
    for info, field in (
        ({"backend": "mpi"}, "backend"),
        ({"backend": "gloo", "world_size": 2}, "master_port"),
        ({"backend": "gloo", "master_port": "x", "world_size": 2}, "master_port"),
        ({"port": 1}, "port"),
        ({"master_port": 70000, "world_size": 2}, "master_port"),
        ({"master_port": 1, "world_size": 2**40}, "world_size"),
        ({"master_port": 1, "world_size": 2, "rank_offset": 2}, "rank_offset"),
        (
            {"backend": "gloo", "master_port": 1, "world_size": 2, "master_address": 5},
            "master_address",
        ),
    ):
        with pytest.raises(RequestError) as error:
            joining({"init_info": info})
        assert error.value.field == field


def test_ipc_handles_are_messages_without_pickles():
    """Opening needs a GPU; what travels does not."""
    handle = Handle(b"s" * 64, 4096, 0, b"c", 8, b"e", True, 16)
    info = TensorInfo("w", "bfloat16", (2, 4))
    handles = {"GPU-a": msgspec.msgpack.encode(handle)}
    piece = piece_of(
        {
            "names": ["w"],
            "dtype_names": ["torch.bfloat16"],
            "shapes": [[2, 4]],
            "ipc_handles": [handles],
        }
    )
    assert piece == IpcPiece((info,), (handles,))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(piece), type=WeightsOp)
    assert sent == piece
    assert own_handle(info, sent.handles[0], "GPU-a") == handle
    with pytest.raises(RequestError, match="the engine runs on GPU-b"):
        own_handle(info, handles, "GPU-b")
    with pytest.raises(RequestError, match="can't be read"):
        own_handle(info, {"GPU-a": b"\x80\x04pickle"}, "GPU-a")
    with pytest.raises(RequestError, match="on a GPU"):
        list(opened(piece, platform_of(torch.device("cpu"))))
    for handles, match in (([], "an entry for each"), ([{"GPU-a": "text"}], "bytes by a GPU")):
        with pytest.raises(RequestError, match=match):
            piece_of(
                {**dict(names=["w"], dtypes=["float32"], shapes=[[1]]), "ipc_handles": handles}
            )
