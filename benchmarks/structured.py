"""What a grammar costs: the time a token of a batch with and without JSON schemas, and how soon a new schema has its mask.

    python benchmarks/structured.py --device cpu --num-requests 8
    python benchmarks/structured.py --model benchmarks/configs/llama-3-8b --load-format dummy --made-vocabulary

Requests with random prompts draw at temperature 1 and end at `--tokens`: with a schema whose answers are never complete, and
without one. Both take turns; medians over the rounds. `--made-vocabulary` makes a tokenizer as large as the model's
vocabulary, for a model that is only a config.

The first mask: schemas of `--properties` properties, each asked for once, from the request for its grammar to its mask.
"""

from __future__ import annotations

import dataclasses
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.bench.report import print_table
from slipstream.config import EngineArgs
from slipstream.hub import resolve_model
from slipstream.spec.description import read_spec
from slipstream.types import EngineRequest, ScheduledRequest, StepPlan


def schema(rng: random.Random, num_properties: int) -> dict[str, Any]:
    kinds = ({"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0}, {"enum": ["red", "green", "blue"]})
    names = ["".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(num_properties)]
    properties = {name: rng.choice(kinds) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def made_tokenizer(folder: Path, size: int) -> None:
    """Bytes, and made-up words with and without a space before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng, alphabet = random.Random(0), string.ascii_letters + string.digits + '{}[]":,._- '
    words = dict.fromkeys(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(words) < size:
        words["".join(rng.choices(alphabet, k=rng.randint(2, 9))).replace(" ", "Ġ")] = None
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}')


def first_masks(llm: LLM, num_properties: int, count: int) -> list[float]:
    """Seconds of each of `count` new schemas, once the vocabulary is made."""
    grammars, rng, found = llm.core.grammars, random.Random(1), []
    for i in range(count + 1):
        params = StructuredOutputsParams(json=schema(rng, num_properties))
        sampling = SamplingParams(structured_outputs=params)
        begin = time.perf_counter()
        grammars.begin(EngineRequest(request_id="first", prompt_token_ids=(1,), sampling=sampling, max_tokens=9))
        while grammars.is_compiling:
            time.sleep(0.0002)
            grammars.compiled()
        grammars.masks(StepPlan(step_id=1, scheduled=(ScheduledRequest("first", 1, 1, 1),)))
        if i:
            found.append(time.perf_counter() - begin)
        grammars.forget(["first"])
    return sorted(found)


def main() -> None:
    parser = common.parser(__doc__, "structured")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--made-vocabulary", action="store_true")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--properties", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    vocab = read_spec(resolve_model(args.model)).spec.vocab_size
    folder = tempfile.TemporaryDirectory()
    if args.made_vocabulary:
        made_tokenizer(Path(folder.name), vocab)
    more = {"tokenizer": folder.name} if args.made_vocabulary else {}
    fields = dict(device=args.device, dtype=args.dtype, load_format=args.load_format, max_num_seqs=args.num_requests)
    llm = LLM.from_engine_args(EngineArgs(model=args.model, max_model_len=2048, **fields, **more))
    one = schema(random.Random(0), args.properties)
    endless = StructuredOutputsParams(json={"type": "array", "items": one, "minItems": 10_000})
    plain = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=0)
    kinds = {"without": plain, "with": dataclasses.replace(plain, structured_outputs=endless)}
    given = common.prompts([args.prompt_len] * args.num_requests, vocab)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_ in range(args.rounds + 1):  # the first warms up
        for kind, sampling in kinds.items():
            begin = time.perf_counter()
            answers = llm.generate(given, sampling, progress=False)
            took = time.perf_counter() - begin
            assert all(len(a.outputs[0].token_ids) == args.tokens for a in answers)
            if round_:
                seconds[kind].append(took)
    first = first_masks(llm, args.properties, 200)
    steps = {kind: common.median(each) / args.tokens * 1e3 for kind, each in seconds.items()}
    rows = [(kind, f"{ms:.3f}", f"{ms / steps['without']:.3f} ×") for kind, ms in steps.items()]
    print_table(f"{args.num_requests} sequences, {vocab:,} tokens", ("schemas", "ms a token", "beside without"), rows)
    p50, p99 = first[len(first) // 2] * 1e3, first[int(len(first) * 0.99)] * 1e3
    print(f"first mask of a new schema: median {p50:.2f} ms, 99th percentile {p99:.2f} ms")
    results = {"ms_per_token": steps, "ratio": steps["with"] / steps["without"], "first_mask_ms": {"p50": p50, "p99": p99}}
    common.save(args.output, "structured", workload=vars(args), seconds=seconds, results=results)


if __name__ == "__main__":
    main()
