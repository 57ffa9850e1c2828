"""Adapters on a GPU: the op at real sizes, and graphs with adapters against the op-by-op loop.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.weights.adapters import LoRAWeights, tokens_of
from slipstream.kernels.weights.quantize import quantize_rows
from tests.support import adapters, tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("inputs", [None, "fp8", "int8", "fp8-block"])
@pytest.mark.parametrize("num_tokens", [1, 64, 700])
def test_the_op_equals_the_reference(inputs, num_tokens):
    from slipstream.kernels.triton import TritonOps

    torch.manual_seed(0)
    device = torch.device("cuda")
    down = torch.randn(8, 48, 4096, device=device, dtype=torch.bfloat16) / 64
    up = torch.randn(8, 6144, 16, device=device, dtype=torch.bfloat16)
    w = LoRAWeights(down, up, (0, 4096, 5120), (0, 2))
    up[:, 4096:5120] = 0  # of a part that no adapter has
    slots = torch.randint(-1, 8, (num_tokens,)).tolist()
    x, y = (torch.randn(num_tokens, n, device=device, dtype=torch.bfloat16) for n in (4096, 6144))
    rows = x if inputs is None else quantize_rows(x, inputs)
    tokens = tokens_of(slots, device)
    expected = ReferenceOps().lora(y.clone(), rows, w, tokens)
    torch.testing.assert_close(
        TritonOps().lora(y.clone(), rows, w, tokens), expected, rtol=2e-2, atol=5e-2
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    hf = tiny_models.build_with_tokenizer(folder / "base", hidden_size=64, intermediate_size=128)
    for n in (1, 2, 3):
        hf = adapters.write(hf, folder / f"lora{n}", seed=n).unload()
    return folder


def answers(made, eager, **settings):
    more = dict(
        device="cuda:0", dtype="float32", max_model_len=128, max_num_seqs=16, kv_cache_bytes=2**26
    )
    llm = LLM(
        str(made / "base"),
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
        enforce_eager=eager,
        **more,
        **settings,
    )
    prompts = [
        {"prompt_token_ids": [(7 * i + s) % 250 + 3 for i in range(5 + s)]} for s in range(12)
    ]
    found = []
    for _ in range(3):  # later rounds have their graphs
        wanted = [
            LoRARequest(f"a{s % 4}", s % 4, made / f"lora{s % 4}") if s % 4 else None
            for s in range(12)
        ]
        outputs = llm.generate(prompts, GREEDY, lora_request=wanted, progress=False)
        found.append([o.outputs[0].token_ids for o in outputs])
    graphs = llm.core.executor.runner.adapter_graphs
    assert eager or graphs._captured
    return found


def test_graphs_change_no_answer_with_adapters(made):
    eager = answers(made, True)
    assert eager[0] == eager[1] == eager[2]
    assert answers(made, False) == eager
    assert len({str(tokens) for tokens in eager[0]}) == 12


def test_answers_are_those_of_transformers(made):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(made / "base", dtype=torch.float32).eval()
    ours = answers(made, False)[0]
    for s in (1, 2, 3):
        prompt = [(7 * i + s) % 250 + 3 for i in range(5 + s)]
        assert ours[s] == adapters.greedy(
            PeftModel.from_pretrained(hf, made / f"lora{s}"), prompt, 24
        )
