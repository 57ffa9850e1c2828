"""`slipstream tune` on a GPU: it ends in time, and what it writes is taken at the next start.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import json

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.cli.main import main
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize(
    "words",
    [[], ["--quantization=fp8", "--kv-cache-dtype=fp8"], ["--quantization=int4-g32"]],
    ids=str,
)
def test_tune_and_start(words, tmp_path, monkeypatch, capsys):
    tiny_models.write(
        tmp_path / "model", "llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2
    )
    table = tmp_path / "table.json"
    options = [
        *words,
        "--max-num-seqs=16",
        "--max-model-len=192",
        "--seconds=60",
        f"--out={table}",
        "--json",
    ]
    assert main(["tune", str(tmp_path / "model"), *options]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_measured"] > 0
    settings = {w[2:].split("=")[0].replace("-", "_"): w.split("=")[1] for w in words}
    prompt = {"prompt_token_ids": list(range(5, 60))}
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = []
    for _ in range(2):
        model = str(tmp_path / "model")
        sizes = dict(
            max_num_seqs=16, max_model_len=192, kv_cache_bytes=2**26, skip_tokenizer_init=True
        )
        with LLM(model, tile_table=str(table), **sizes, **settings) as llm:
            num_found = len(
                said["found"]
            )  # none, if no tile was clearly better than the heuristics'
            assert (
                f"({num_found} tiles)" if num_found else "none: heuristics"
            ) in llm.core.executor.tiles
            answers.append(llm.generate([prompt], greedy)[0].outputs[0].token_ids)
    assert answers[0] == answers[1]
