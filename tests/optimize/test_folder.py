"""Engine folders: built, moved, run by every way an engine starts, on this machine and on one that is said to be another."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import weakref

import pytest
import yaml

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.config.engine_folder import EngineFolder, Machine, read_engine_folder
from slipstream.costs.hardware import available_cores
from slipstream.engine import folder as of_engine
from slipstream.engine.folder import settled, this_machine
from slipstream.errors import ConfigError
from slipstream.evals.scorer import Scorer
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.optimize.folder import build_folder
from tests.support import forked_ranks, tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=6)
SETTINGS = {
    "quantization": "int8",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "kv_cache_bytes": 8 * 2**20,
}


@pytest.fixture
def packing(monkeypatch):
    """Small models pack their weights, too."""
    monkeypatch.setattr("slipstream.model.load.packed_cache.MIN_BYTES", 0)


@pytest.fixture
def built(tiny_model, tmp_path, packing):
    build_folder(
        EngineArgs(str(tiny_model), device="cpu", num_threads=1, **SETTINGS), tmp_path / "engine"
    )
    return tmp_path / "engine"


def test_a_folder_needs_nothing_else_and_is_not_packed_twice(built, tiny_model, tmp_path, caplog):
    with LLM(str(tiny_model), device="cpu", num_threads=1, **SETTINGS) as llm:
        expected = llm.generate("Hello there", GREEDY)[0].outputs[0].token_ids
        config = llm.config
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.copytree(built, moved)
    shutil.rmtree(built)
    (packed,) = (moved / "packed").iterdir()
    before = packed.stat()
    with LLM(str(moved), device="cpu", num_threads=1) as llm:
        assert llm.generate("Hello there", GREEDY)[0].outputs[0].token_ids == expected
        found = llm.config
    assert (found.model.quantization, found.model.max_model_len, found.scheduling.max_num_seqs) == (
        "int8",
        128,
        3,
    )
    assert found.cache == config.cache
    assert packed.stat().st_mtime_ns == before.st_mtime_ns
    assert list((moved / "packed").iterdir()) == [packed]
    assert not [r for r in caplog.records if "another machine" in r.message]


def test_info_counts_with_the_folders_settings(built, capsys):
    assert main(["info", str(built), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"] == "int8"
    assert found["memory_estimate"]["max_model_len"] == 128


def test_packed_weights_are_read(built, monkeypatch):
    """A start from the folder rounds nothing."""
    real = HostOps.quantize_weight

    def refuse(ops, weight, bias, scheme):
        assert scheme is None, "a weight was rounded"
        return real(ops, weight, bias, scheme)

    monkeypatch.setattr(HostOps, "quantize_weight", refuse)
    LLM(str(built), device="cpu", num_threads=1).shutdown()
    shutil.rmtree(built / "packed")
    with pytest.raises(AssertionError, match="was rounded"):
        LLM(str(built), device="cpu", num_threads=1)


def test_weights_that_were_changed_are_packed_anew(built):
    (packed,) = (built / "packed").iterdir()
    weights = next(built.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    stat = weights.stat()
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with LLM(str(built), device="cpu", num_threads=1) as llm:
        writer = llm.core.executor.runner.model.writer
        assert writer is not None
        writer.join()
    (again,) = (built / "packed").iterdir()
    assert again.name != packed.name


def test_the_users_settings_go_first(built):
    args = settled(EngineArgs(str(built), max_num_seqs=7))
    assert (args.max_num_seqs, args.max_model_len, args.quantization) == (7, 128, "int8")
    (built / "serve.yaml").write_text(yaml.safe_dump({"engine": {"max_num_seqs": 5}}))
    args = settled(EngineArgs(str(built)))
    assert (args.max_num_seqs, args.quantization) == (5, None)


def test_another_machine_runs_it_and_is_told(built, monkeypatch, caplog):
    here = this_machine()
    kept = json.loads((built / "slipstream-engine.json").read_text())
    assert kept["chosen"].keys() == {
        "dtype",
        "block_size",
        "max_num_batched_tokens",
        "max_num_mixed_tokens",
    }
    (built / "tiles.json").write_text("{}")
    monkeypatch.setattr(
        of_engine,
        "this_machine",
        lambda: dataclasses.replace(here, num_cores=96, gpus=("NVIDIA H200",)),
    )
    with caplog.at_level(logging.WARNING):
        args = settled(EngineArgs(str(built)))
    assert args == EngineArgs(
        str(built), **SETTINGS
    )  # nothing that was chosen for the other, and no tiles of it
    (first, *_, last) = [r.message for r in caplog.records if r.name == "slipstream.engine.folder"]
    assert "GPU: none, here NVIDIA H200" in first
    assert "tiles are of none and are not used" in last


def test_tiles_of_the_same_gpu_are_used(built):
    (built / "tiles.json").write_text("{}")
    machine = dataclasses.replace(this_machine(), gpus=("NVIDIA H200",))
    folder = dataclasses.replace(read_engine_folder(built), machine=machine)
    args, notices = folder.settle(EngineArgs(str(built)), machine)
    assert (args.tile_table, notices) == (str(built / "tiles.json"), [])
    other = dataclasses.replace(machine, gpus=("NVIDIA A100",))
    args, notices = folder.settle(EngineArgs(str(built)), other)
    assert args.tile_table == "auto"
    assert any("NVIDIA H200 and are not used" in notice for notice in notices)


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("serve.yaml", "engine: {max_seqs: 3}", "serve.yaml: there is no setting 'max_seqs'"),
        ("serve.yaml", "engine: {device: cpu}", "device is a setting of each start"),
        ("serve.yaml", "port: 80", "must hold engine:"),
        ("serve.yaml", "a: [", "can't be used: serve.yaml: line 1"),
        ("slipstream-engine.json", '{"a":', "can't be used: slipstream-engine.json: "),
        ("slipstream-engine.json", "{}", "'format' is missing"),
        ("slipstream-engine.json", '{"format": 9}', "its format is 9"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(built, file, text, match):
    (built / file).write_text(text)
    with pytest.raises(ConfigError, match=match):
        settled(EngineArgs(str(built)))


def test_the_command_names_the_file_of_a_wrong_setting(built, capsys):
    (built / "serve.yaml").write_text("engine: {kv_cache_dtype: int9}")
    assert main(["info", str(built)]) == 2
    assert capsys.readouterr().err.strip().endswith(f"it is set in {built / 'serve.yaml'}")
    assert main(["info", str(built), "--kv-cache-dtype", "int8"]) == 0
    capsys.readouterr()
    assert main(["info", str(built), "--kv-cache-dtype", "int7"]) == 2
    assert "serve.yaml" not in capsys.readouterr().err


def test_what_cannot_be_built_leaves_nothing(tiny_model, tmp_path):
    args = EngineArgs(str(tiny_model), device="cpu", num_threads=1)
    for given, field in (
        (dataclasses.replace(args, tokenizer="other"), "tokenizer"),
        (dataclasses.replace(args, speculative_model="small"), "speculative_model"),
        (dataclasses.replace(args, max_model_len=10**9), "max_model_len"),
        (dataclasses.replace(args, tensor_parallel_size=3), "tensor_parallel_size"),
        (dataclasses.replace(args, cpu_layers=1), "cpu_layers"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_folder(given, tmp_path / "out")
        assert caught.value.field == field
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ConfigError, match="exists already"):
        build_folder(args, tmp_path / "there")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """Half of its products is wide enough for int8."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    path = tmp_path_factory.mktemp("wide")
    tiny_models.write_with_tokenizer(path, **sizes)
    return path


@pytest.fixture(scope="module")
def of_two(wide_model, tmp_path_factory):
    if available_cores() < 2:
        pytest.skip("two ranks need a core each")
    args = EngineArgs(str(wide_model), device="cpu", tensor_parallel_size=2, **SETTINGS)
    folder = tmp_path_factory.mktemp("of-two") / "two"
    with forked_ranks.used():
        built = build_folder(args, folder, tune=lambda *_: pytest.fail("tiles are of one device"))
    assert (built.packed_bytes, built.folder.graph_sizes) == (0, ())
    return folder


@pytest.mark.usefixtures("forked_ranks")
def test_a_folder_of_two_ranks_starts_them_and_answers_as_one_device(of_two, wide_model):
    with LLM(str(wide_model), device="cpu", num_threads=1, **SETTINGS) as llm:
        expected = llm.generate("Hello there", GREEDY)[0].outputs[0].token_ids
    assert (
        yaml.safe_load((of_two / "serve.yaml").read_text())["engine"]["tensor_parallel_size"] == 2
    )
    with LLM(str(of_two), device="cpu") as llm:
        assert llm.config.parallel.num_ranks == 2
        assert len(llm.core.executor.ledgers) == 2
        assert llm.generate("Hello there", GREEDY)[0].outputs[0].token_ids == expected
        assert llm.config.model.quantization == "int8"


def test_fewer_devices_are_told_where_the_form_stands_and_one_is_enough_to_measure_quality(
    of_two, monkeypatch
):
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.available_cores", lambda: 1)
    with pytest.raises(
        ConfigError,
        match=r"2 ranks need a core each, and there are 1; lower it in .*two/serve.yaml",
    ) as caught:
        LLM(str(of_two), device="cpu")
    assert caught.value.field == "tensor_parallel_size"
    with pytest.raises(ConfigError, match=r"4 ranks .* lower it$"):  # it is the user's
        LLM(str(of_two), device="cpu", tensor_parallel_size=4)
    scorer = Scorer.load(EngineArgs(str(of_two), device="cpu", num_threads=1), context=64)
    assert scorer.settings["quantization"] == "int8"


def test_no_pickle_and_no_program_is_copied(tiny_model, tmp_path):
    source = shutil.copytree(tiny_model, tmp_path / "source")
    for name in ("pytorch_model.bin", "modeling.py", ".hidden.json"):
        (source / name).write_text("{}")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    build_folder(EngineArgs(str(source), device="cpu", num_threads=1), tmp_path / "out")
    names = {
        str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()
    }
    assert "1_Pooling/config.json" in names
    assert not names & {"pytorch_model.bin", "modeling.py", ".hidden.json"}


def test_the_command_writes_a_folder_of_settings_and_weights(tiny_model, tmp_path, capsys, packing):
    out = tmp_path / "out"
    words = [
        "build",
        str(tiny_model),
        f"--out={out}",
        "--device=cpu",
        "--num-threads=1",
        "--quantization=int8",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"quantization": "int8"}
    assert found["packed_bytes"] > 0
    assert found["machine"] == json.loads(json.dumps(dataclasses.asdict(this_machine())))
    again = tmp_path / "again"  # of a folder that is one already
    assert (
        main(
            [
                "build",
                str(out),
                f"--out={again}",
                "--device=cpu",
                "--num-threads=1",
                "--max-num-seqs=2",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["settings"] == {
        "quantization": "int8",
        "max_num_seqs": 2,
    }


def test_differences_are_in_words():
    here = Machine(cpu="A", cpu_features=("AVX2",), num_cores=2, memory_gib=8)
    assert here.differences(here) == []
    assert here.differences(dataclasses.replace(here, cpu_features=())) == [
        "instructions: AVX2, here none"
    ]


def test_what_is_written_in_serve_yaml_goes_before_what_was_chosen_for_the_machine(tmp_path):
    here = Machine(cpu="A", cpu_features=(), num_cores=2, memory_gib=8)
    folder = EngineFolder(
        path=tmp_path,
        machine=here,
        settings={"block_size": 32},
        chosen={"block_size": 16, "max_num_seqs": 4},
        versions={},
        measured={},
    )
    args, notices = folder.settle(EngineArgs(model="m"), here)
    assert (args.block_size, args.max_num_seqs, notices) == (32, 4, [])


def test_no_engine_lives_on_when_it_has_ended(tiny_model, tmp_path, monkeypatch):
    """A surviving engine would hold memory of the GPU, and the process that measures the folder
    would find none."""
    shut_down, ended = LLM.shutdown, []

    def watched(llm):
        executor = weakref.ref(llm.core.executor)
        shut_down(llm)
        ended.append(executor() is None)

    monkeypatch.setattr(LLM, "shutdown", watched)
    build_folder(
        EngineArgs(str(tiny_model), device="cpu", num_threads=1, **SETTINGS), tmp_path / "engine"
    )
    assert ended[:2] == [True, True]
