"""Trains a small model that sees, and says how often it is right about pictures that it was not trained on, over HTTP.

    python benchmarks/features.py --study picture-training --out DIR [--minutes 5] [--threads 2]

1. Pictures are drawn by this script: a shape (circle, square, triangle, cross) or a digit, in one of six colours, of any size
   and at any place, on a background with noise. The question is always the same; the answer is two words ("red circle").
2. The model is SmolVLM's architecture with some 200,000 parameters (a SigLIP encoder of 32 × 32 pixels, pixel shuffle,
   a Llama of two layers), from random weights. It is written as a checkpoint that transformers reads, too.
3. `slipstream serve` answers about held-out pictures, sent as data URIs with the official client's protocol. The record has the
   share of right answers, of both words and of each, and that of transformers on the same pictures.

Nothing is downloaded, and no weights are kept in the repository.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

SIDE = 32
SHAPES = ("circle", "square", "triangle", "cross")
DIGITS = tuple("0123456789")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 40),
    "white": (240, 240, 240),
    "purple": (160, 60, 200),
}
NAMES = (*SHAPES, *DIGITS)
SPECIAL = (
    *(
        "<pad>",
        "<|im_start|>",
        "<end_of_utterance>",
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
    ),
    *("User:", "Assistant:", "What", "is", "this", "?"),
)
WORDS = (*SPECIAL, *COLOURS, *NAMES)
IDS = {word: i for i, word in enumerate(WORDS)}
END, IMAGE = IDS["<end_of_utterance>"], IDS["<image>"]
NUM_IMAGE_TOKENS = 16
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] | capitalize }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %}<end_of_utterance>"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def drawn(rng: random.Random) -> tuple[Image.Image, str]:
    """A picture and its name."""
    colour, name = rng.choice(list(COLOURS)), rng.choice(NAMES)
    dark = tuple(rng.randrange(0, 70) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), dark)
    draw, fill = (
        ImageDraw.Draw(image),
        tuple(max(0, min(255, c + rng.randrange(-25, 26))) for c in COLOURS[colour]),
    )
    size = rng.randrange(13, 25)
    x, y = rng.randrange(0, SIDE - size), rng.randrange(0, SIDE - size)
    box = (x, y, x + size, y + size)
    if name == "circle":
        draw.ellipse(box, fill=fill)
    elif name == "square":
        draw.rectangle(box, fill=fill)
    elif name == "triangle":
        draw.polygon([(x + size // 2, y), (x, y + size), (x + size, y + size)], fill=fill)
    elif name == "cross":
        third = size // 3
        draw.rectangle((x + third, y, x + 2 * third, y + size), fill=fill)
        draw.rectangle((x, y + third, x + size, y + 2 * third), fill=fill)
    else:
        font = ImageFont.load_default(size + 4)
        draw.text((x + size / 2, y + size / 2), name, fill=fill, font=font, anchor="mm")
    noise = torch.tensor([rng.randrange(2**31)])
    generator = torch.Generator().manual_seed(int(noise))
    pixels = (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3).float()
    )
    pixels += torch.randn(pixels.shape, generator=generator) * 8
    return Image.fromarray(pixels.clamp(0, 255).to(torch.uint8).numpy()), f"{colour} {name}"


def prompt_ids() -> list[int]:
    image = [
        "<fake_token_around_image>",
        "<global-img>",
        *["<image>"] * NUM_IMAGE_TOKENS,
        "<fake_token_around_image>",
    ]
    words = [
        "<|im_start|>",
        "User:",
        *image,
        "What",
        "is",
        "this",
        "?",
        "<end_of_utterance>",
        "Assistant:",
    ]
    return [IDS[word] for word in words]


def make_model() -> Any:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    text = dict(
        model_type="llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    vision = dict(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=4,
    )
    torch.manual_seed(0)
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    return SmolVLMForConditionalGeneration(config)


def write_files(folder: Path) -> None:
    """Tokenizer, template and image processor, beside the weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    spelled = {
        f"Ġ{word}" if word in NAMES else word: i for word, i in IDS.items()
    }  # names come behind a space
    backend = Tokenizer(models.WordLevel(spelled, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in SPECIAL]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "do_image_splitting": True,
        "resample": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    ends = {"eos_token_id": END, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(ends))


def as_pixels(images: list[Image.Image]) -> torch.Tensor:
    raw = torch.stack(
        [
            torch.frombuffer(bytearray(i.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3)
            for i in images
        ]
    )
    return ((raw.float() / 255 - 0.5) / 0.5).permute(0, 3, 1, 2)[:, None]


def train(
    model: Any, seconds: float, most_steps: int, num_pictures: int, batch: int = 64
) -> dict[str, Any]:
    """For so many steps, unless the time is over before. Pictures are drawn once, and moved and noised anew each time they are
    seen. The loss is of the answer's words and the end."""
    rng, start = random.Random(1), prompt_ids()
    pairs = [drawn(rng) for _ in range(num_pictures)]
    pixels = as_pixels([image for image, _ in pairs])
    rows = torch.tensor([start + [IDS[word] for word in name.split()] + [END] for _, name in pairs])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    generator = torch.Generator().manual_seed(2)
    model.train()
    begin, cpu, step, losses = time.monotonic(), time.process_time(), 0, list[float]()
    while step < most_steps and time.monotonic() - begin < seconds:
        share = max(step / most_steps, (time.monotonic() - begin) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * max(0.02, 1 - share)
        chosen = torch.randint(num_pictures, (batch,), generator=generator)
        shift = torch.randint(-3, 4, (2,), generator=generator).tolist()
        seen = torch.roll(pixels[chosen], shift, dims=(3, 4))
        seen = seen + torch.randn(seen.shape, generator=generator) * 0.05
        ids, labels = rows[chosen], rows[chosen].clone()
        labels[:, : len(start)] = -100
        loss = model(input_ids=ids, pixel_values=seen, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % 50 == 0:
            spent = time.monotonic() - begin
            print(
                f"step {step}, loss {sum(losses[-50:]) / 50:.4f}, {spent:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    model.eval()
    return {
        "pictures": num_pictures,
        "steps": step,
        "batch": batch,
        "seconds": round(time.monotonic() - begin, 1),
        "processor_seconds": round(time.process_time() - cpu, 1),
        "last_loss": sum(losses[-50:]) / len(losses[-50:]),
    }


def held_out(count: int) -> list[tuple[Image.Image, str]]:
    rng = random.Random(10_000_019)
    return [drawn(rng) for _ in range(count)]


def shares(answers: list[str], names: list[str]) -> dict[str, float]:
    def first(text: str, known: tuple[str, ...]) -> str | None:
        return next((word for word in re.findall(r"\w+", text) if word in known), None)

    pairs = [(answer, *name.split()) for answer, name in zip(answers, names, strict=True)]
    colours = [first(answer, tuple(COLOURS)) == colour for answer, colour, _ in pairs]
    forms = [first(answer, NAMES) == form for answer, _, form in pairs]
    both = [a and b for a, b in zip(colours, forms, strict=True)]
    return {
        name: sum(right) / len(right)
        for name, right in (("both", both), ("colour", colours), ("form", forms))
    }


def by_server(folder: Path, pictures: list[Image.Image], threads: int) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "serve",
        str(folder),
        "--port",
        "0",
        "--json",
        "--num-threads",
        str(threads),
    ]
    command += ["--dtype", "float32", "--served-model-name", "eyes"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        return [ask(url, picture) for picture in pictures]
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG")
    image = {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}
    parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "What is this ?"}]
    body = {
        "model": "eyes",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 4,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: str = json.loads(answer.read())["choices"][0]["message"]["content"]
    return content


@torch.no_grad()
def by_transformers(model: Any, pictures: list[Image.Image]) -> list[str]:
    found, start = [], prompt_ids()
    for picture in pictures:
        ids = torch.tensor([start])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=as_pixels([picture]), max_new_tokens=4,
            do_sample=False,
        )  # fmt: skip
        found.append(" ".join(WORDS[i] for i in made[0, len(start) :].tolist() if i < len(WORDS)))
    return found


RECORD = "vision_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--drawn", type=int, default=6000, help="pictures to train with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pictures", type=int, default=400, help="held-out ones")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    torch.set_num_threads(args.threads)
    model = make_model()
    trained = train(model, args.minutes * 60, args.steps, args.drawn)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    write_files(args.out)
    pairs = held_out(args.pictures)
    pictures, names = [p for p, _ in pairs], [n for _, n in pairs]
    served, theirs = by_server(args.out, pictures, args.threads), by_transformers(model, pictures)
    same = [a.split()[:2] == b.split()[:2] for a, b in zip(served, theirs, strict=True)]
    result = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": trained,
        "held_out_pictures": args.pictures,
        "right_by_slipstream_serve": shares(served, names),
        "right_by_transformers": shares(theirs, names),
        "same_answer": sum(same) / len(same),
        "load_average": os.getloadavg(),
    }
    print(json.dumps(result, indent=1))
    save(results=result)
