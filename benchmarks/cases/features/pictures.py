r"""Pictures a second: slipstream against transformers, in one run.

    python benchmarks/features.py --study pictures [--shape tiny|smolvlm-256m|qwen2.5-vl-3b] [--device cpu|cuda] [--pictures 16]

Weights are random, of the true shapes. Each request has one picture of its own, drawn at random, and an answer of a fixed
length. Both engines do everything from the PIL image on: scaling, encoding, prefill, decoding. transformers gets its requests
in one batch, or, with --one-by-one, each alone. Rounds take turns behind one that is not counted; a ratio is the median over
rounds. `text_s` is how long eight text requests take where the model is served without its encoder (`max_images=0`), with it,
and with the pictures of a round beside them; medians of as many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from slipstream import LLM, SamplingParams

SMOLVLM = {
    "model_type": "smolvlm",
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49190,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
}
QWEN = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
        "bos_token_id": None,
        "eos_token_id": 151645,
        "pad_token_id": 151643,
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def tiny() -> dict[str, Any]:
    """SmolVLM's parts, small enough for a CPU."""
    config: dict[str, Any] = json.loads(json.dumps(SMOLVLM))
    config["text_config"] |= {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
    }
    config["text_config"] |= {"num_key_value_heads": 1, "vocab_size": 4096, "eos_token_id": 2}
    config["vision_config"] |= {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
    }
    config["vision_config"] |= {"image_size": 128}
    return config | {"image_token_id": 4095}


SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tiny": (
        tiny,
        {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 128}, "resample": 1},
    ),
    "smolvlm-256m": (
        lambda: SMOLVLM,
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "resample": 1},
    ),
    "qwen2.5-vl-3b": (lambda: QWEN, {"min_pixels": 3136, "max_pixels": 1003520, "resample": 3}),
}


def pictures(count: int, seed: int) -> list[Image.Image]:
    rng = np.random.default_rng(seed)
    small = (
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)) for _ in range(count)
    )
    return [image.resize((640, 480), Image.Resampling.BICUBIC) for image in small]


class Ours:
    def __init__(self, folder: Path, config: dict[str, Any], args: Any, **more: Any) -> None:
        more |= (
            {"kv_cache_bytes": 2**33} if args.device == "cuda" else {"num_threads": args.threads}
        )
        more |= {} if more.get("max_images") == 0 else {"image_cache_bytes": 0}
        self.llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, device=args.device,
            max_model_len=4096, max_num_seqs=max(16, args.pictures), enable_prefix_caching=False, **more,
        )  # fmt: skip
        self.token = config["image_token_id"]

    def prompts(self, images: list[Image.Image]) -> list[Any]:
        """A picture's runs, with a word between tiles."""
        processor = self.llm._input.pictures
        assert processor is not None
        found = []
        for picture in processor.prepare_all(images):
            tokens = [5, 6, 7]
            for piece in picture.pieces:
                tokens += [8, *[self.token] * piece.num_tokens]
            found.append(
                {"prompt_token_ids": [*tokens, 9, 10], "multi_modal_data": {"image": [picture]}}
            )
        return found

    def answer(self, images: list[Image.Image], num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [
            list(a.outputs[0].token_ids)
            for a in self.llm.generate(self.prompts(images), sampling, progress=False)
        ]


class Theirs:
    def __init__(self, config: dict[str, Any], processing: dict[str, Any], args: Any) -> None:
        import transformers as t
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
        )

        self.is_qwen = config["model_type"] == "qwen2_5_vl"
        made, kind = (
            (t.Qwen2_5_VLConfig, t.Qwen2_5_VLForConditionalGeneration)
            if self.is_qwen
            else (t.SmolVLMConfig, t.SmolVLMForConditionalGeneration)
        )
        with torch.device(args.device):
            settings = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
            self.model = kind(made(**settings)).to(getattr(torch, args.dtype)).eval()
        self.processor = (Qwen2VLImageProcessorPil if self.is_qwen else SmolVLMImageProcessorPil)(
            **processing
        )
        self.token = config["image_token_id"]
        self.device = args.device
        self.one_by_one = args.one_by_one
        vision = config["vision_config"]
        self.each = (
            0
            if self.is_qwen
            else (processing["max_image_size"]["longest_edge"] // vision["patch_size"]) ** 2
        )
        self.each //= 1 if self.is_qwen else config["scale_factor"] ** 2

    @torch.inference_mode()
    def answer(self, images: list[Image.Image], num_tokens: int) -> list[list[int]]:
        groups = [[image] for image in images] if self.one_by_one else [images]
        return [row for group in groups for row in self._batch(group, num_tokens)]

    def _batch(self, images: list[Image.Image], num_tokens: int) -> list[list[int]]:
        given = self.processor(
            images if self.is_qwen else [[x] for x in images], return_tensors="pt"
        )
        if self.is_qwen:
            counts = (given["image_grid_thw"].prod(-1) // 4).tolist()
            runs = [[8, *[self.token] * n] for n in counts]
        else:
            runs = [[8, *[self.token] * self.each] * given["pixel_values"].shape[1] for _ in images]
        rows = [
            [5, 6, 7, *run, 9, 10] for run in runs
        ]  # all pictures are of one size, so no row is padded
        ids = torch.tensor(rows, device=self.device)
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        more = {k: v.to(self.device) for k, v in given.items() if k in names}
        if self.is_qwen:
            more["mm_token_type_ids"] = (ids == self.token).int()
        made = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, **more,
        )  # fmt: skip
        found: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return found


def seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def texts(ours: Ours, without: Ours, args: argparse.Namespace) -> dict[str, float]:
    """Medians of the seconds that eight text requests take."""
    words = [{"prompt_token_ids": [11 + i, 12, 13, 14]} for i in range(8)]
    sampling = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    few = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def beside(i: int) -> float:
        shown = ours.prompts(pictures(args.pictures, 100 + i))
        both = [sampling] * len(words) + [few] * len(shown)
        return seconds(lambda: ours.llm.generate([*words, *shown], both, progress=False))

    def alone(engine: Ours, i: int) -> float:
        return seconds(lambda: engine.llm.generate(words, sampling, progress=False))

    ways: dict[str, Callable[[int], float]] = {
        "without_encoder": partial(alone, without), "alone": partial(alone, ours), "with_pictures": beside,
    }  # fmt: skip
    rounds = [{way: measure(i) for way, measure in ways.items()} for i in range(args.rounds + 1)]
    return {way: statistics.median(r[way] for r in rounds[1:]) for way in ways}


RECORD = "images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--one-by-one", action="store_true", help="transformers answers one request after another"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.set_num_threads(args.threads)
    make, processing = SHAPES[args.shape]
    config = make()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text(json.dumps(processing))
        ours, theirs = Ours(folder, config, args), Theirs(config, processing, args)
        ways = {"slipstream": ours.answer, "transformers": theirs.answer}
        rounds = []
        for i in range(args.rounds + 1):
            images = pictures(args.pictures, i)
            order = list(ways)[:: 1 if i % 2 == 0 else -1]
            rounds.append(
                {way: seconds(lambda way=way: ways[way](images, args.tokens)) for way in order}
            )
        del rounds[0]
        without = Ours(folder, config, args, max_images=0)
        text_s = texts(ours, without, args)
        ours.llm.shutdown(), without.llm.shutdown()
    ratios = [r["transformers"] / r["slipstream"] for r in rounds]
    result = {
        "shape": args.shape,
        "pictures": args.pictures,
        "tokens_each": args.tokens,
        "rounds_s": rounds,
        "pictures_per_s": {
            w: args.pictures / statistics.median(r[w] for r in rounds) for w in rounds[0]
        },
        "times_transformers": statistics.median(ratios),
        "text_s": text_s,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(result, indent=1))
    save(results=result)
