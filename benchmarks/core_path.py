"""The files that a request of a plain Llama passes, from `AsyncLLM` to the kernels' call, and their lines.

    python benchmarks/core_path.py                       # a step is one C++ program
    python benchmarks/core_path.py --kernels torch       # op by op, by way of the decoder's layers
    python benchmarks/core_path.py --device cuda --most 10

A tiny model with random weights answers three requests, once by `AsyncLLM` and once in this process (by `LLM`, which
does not count), where the engine's and the worker's calls are seen. `called` counts the lines of functions that ran after
the start, and `lines` all lines of their files. Target: at most 10,000 lines called.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import slipstream
from slipstream.config import EngineArgs

SOURCE = Path(slipstream.__file__).parent
TINY = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
)
PROMPTS: list[Any] = [{"prompt_token_ids": [3 + i] * (20 + 30 * i)} for i in range(3)]
IN_ENGINE_PROCESS = (
    "engine/process/core_loop.py",
    "engine/process/core_messages.py",
)  # counted whole
ONLY_HERE = (
    "engine/llm.py",
    "engine/offline_engine.py",
    "engine/progress.py",
)  # how the engine runs in this process


class Calls:
    """The code that runs, in all threads that begin after it was made."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            self.codes.add(frame.f_code)

    def by_file(self) -> dict[str, int]:
        """Lines of the functions that ran, by file."""
        lines: dict[str, set[int]] = defaultdict(set)
        for code in self.codes:
            path = Path(code.co_filename)
            if path.is_relative_to(SOURCE) and code.co_name != "<module>":
                own = [number for *_, number in code.co_lines() if number]
                lines[str(path.relative_to(SOURCE))] |= {*range(min(own), max(own) + 1)}
        return {name: len(own) for name, own in lines.items()}


def run(calls: Calls, settings: dict[str, Any]) -> None:
    sampling = slipstream.SamplingParams(temperature=0.7, max_tokens=24, ignore_eos=True)
    with slipstream.LLM(**settings) as llm:
        calls.codes.clear()  # the start is another path
        llm.generate(PROMPTS, sampling, progress=False)
    seen = set(calls.codes)

    async def answer() -> None:
        llm = await slipstream.AsyncLLM.start(EngineArgs(**settings))
        calls.codes.clear()

        async def one(prompt: Any) -> None:
            async for _ in llm.generate(prompt, sampling):
                pass

        await asyncio.gather(*map(one, PROMPTS))
        seen.update(calls.codes)
        await llm.shutdown()

    asyncio.run(answer())
    calls.codes = seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--most", type=int, default=1000, help="files to show, those with most lines called"
    )
    args = parser.parse_args()
    shape = Path(__file__).parent / "configs" / "llama-3.2-1b" / "config.json"
    calls = Calls()
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(shape.read_text()) | TINY
        (Path(folder) / "config.json").write_text(json.dumps(config))
        how = dict(model=folder, device=args.device, kernels=args.kernels, load_format="dummy")
        run(calls, how | dict(skip_tokenizer_init=True, max_model_len=256, kv_cache_bytes=2**22))
    sys.setprofile(None)
    called = {name: n for name, n in calls.by_file().items() if name not in ONLY_HERE}
    for name in IN_ENGINE_PROCESS:
        called.setdefault(name, len((SOURCE / name).read_text().splitlines()))
    rows = sorted(((n, name) for name, n in called.items()), reverse=True)
    sizes = {name: len((SOURCE / name).read_text().splitlines()) for name in called}
    for n, name in rows[: args.most]:
        print(f"{n:6} of {sizes[name]:5}  {name}")
    print(f"{sum(called.values()):6,} of {sum(sizes.values()):6,}  in {len(called)} files")


if __name__ == "__main__":
    main()
