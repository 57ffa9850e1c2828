"""Makes mistral_tokens.json: what Mistral's library makes of texts and conversations. By hand, from the root:

    python tests/data/make_mistral.py     (needs mistral-common with its extra `audio`, and tokenizers)

The vocabulary is small: the bytes, and what a training on tokenizer_corpus.txt adds. A picture's and a sound's tokens are
written as one, as a prompt has them before its media are prepared.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import wave
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_SPECIAL, NUM_TOKENS = 40, 700
SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
    *("[THINK]", "[/THINK]", "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
)
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
NO_ID = "v13", "v15"
EFFORT = {"type": "enum", "accepts_none": True, "default": "none", "values": ["none", "high"]}
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SYSTEM = {"role": "system", "content": "Be * good.  "}
ASK = {"role": "user", "content": " What's 12345 in °C, <b>é?\n"}
ANSWER = {"role": "assistant", "content": "It is 7.  "}
MORE = {"role": "user", "content": "and?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Wetter für eine "Stadt"',
            "parameters": {"type": "object", "properties": {"städte": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    },
]


def call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "weather" if number else "now", "arguments": arguments}
    return {"id": f"abcdefg{number:02}", "type": "function", "function": function}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefg{number:02}", "content": content}


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(made), **more}


ONE = calls(call(1, '{"städte":  "Zürich", "n": [1, 2.5, null]}'))
TWO = calls(call(1, '{"a": "b"}'), call(0, "{}"))
TEXT, IMAGE, AUDIO = {"type": "text", "text": "so: "}, {"type": "image"}, {"type": "audio"}


def parts(*given: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(given)}


CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "plain": ([ASK], {}, VERSIONS),
    "system": ([SYSTEM, ASK, ANSWER, MORE], {}, VERSIONS),
    "systems": ([SYSTEM, ASK, SYSTEM, MORE, ANSWER, MORE], {}, VERSIONS),
    "rows": ([ASK, MORE, ANSWER, {**ANSWER, "content": "So"}, MORE, ASK], {}, VERSIONS),
    "tools": ([SYSTEM, ASK, ANSWER, MORE], {"tools": TOOLS}, VERSIONS),
    "call": ([ASK, ONE, result(1, '{"°C":  7}'), ANSWER, MORE], {"tools": TOOLS}, VERSIONS),
    "calls": (
        [SYSTEM, ASK, TWO, result(1, "warm, 'ok'"), result(0, "")],
        {"tools": TOOLS},
        VERSIONS,
    ),
    "order": ([ASK, TWO, result(0, "noon"), result(1, "5")], {"tools": TOOLS}, VERSIONS[2:]),
    "both": ([ASK, {**ONE, "content": "I look."}, result(1, "7")], {}, VERSIONS[1:]),
    "parts": ([SYSTEM, parts(TEXT, TEXT), ANSWER, parts(TEXT)], {}, VERSIONS),
    "picture": ([parts(TEXT, IMAGE), ANSWER, parts(IMAGE, TEXT, IMAGE, TEXT)], {}, VERSIONS),
    "sound": ([parts(AUDIO, TEXT), ANSWER, parts(AUDIO, AUDIO, TEXT)], {}, VERSIONS[1:]),
    "heard": ([SYSTEM, parts(AUDIO)], {}, VERSIONS[3:]),
    "thoughts": (
        [ASK, {**ANSWER, "reasoning_content": "Hm. "}, MORE],
        {"tools": TOOLS},
        VERSIONS[3:],
    ),
    "effort": ([SYSTEM, ASK, ANSWER, MORE], {"reasoning_effort": "high"}, ("v15",)),
}
"""Messages, what else is given, and the versions that take them."""


def vocabulary() -> list[bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    corpus = (HERE / "tokenizer_corpus.txt").read_bytes().decode().split("\n")
    backend.train_from_iterator(corpus, trainer)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    back = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    found = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(back[c] for c in token) for token, _ in found]
    return [bytes([b]) for b in range(256)] + [t for t in tokens if len(t) > 1]


def tekken(version: str, tokens: list[bytes]) -> dict[str, Any]:
    """The file of a version. Half of the last tokens are of no use: a file lists more than its models have."""
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate([*tokens, b"never", b" seen"])
    ]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(entries), "version": version}
    config |= {"default_vocab_size": len(tokens) + NUM_SPECIAL}
    config |= {"default_num_special_tokens": NUM_SPECIAL}
    made: dict[str, Any] = {"config": config, "vocab": entries}
    named = "multimodal" if version in ("v3", "v7", "v11") else "image"
    made[named] = {"image_patch_size": 16, "max_image_size": 64}
    if version != "v3":
        made["special_tokens"] = [
            {"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIALS)
        ]
        spectrogram = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
        made["audio"] = {"sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0}
        made["audio"]["audio_encoding_config"] = spectrogram
    if version == "v15":
        made["model_settings_builder"] = {"reasoning_effort": EFFORT}
    return made


def media() -> tuple[str, str]:
    from PIL import Image

    picture, sound = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (33, 20)).save(picture, "PNG")
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(3200))
    return tuple(base64.b64encode(x.getvalue()).decode() for x in (picture, sound))  # type: ignore[return-value]


def theirs(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as the library takes them."""
    picture, sound = media()
    named: dict[str, dict[str, Any]] = {
        "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        "audio": {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    }
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [named.get(p["type"], p) for p in content]}
        if thoughts := message.get("reasoning_content"):
            said = [{"type": "thinking", "thinking": thoughts}, {"type": "text", "text": content}]
            message = {"role": message["role"], "content": said}
        found.append(message)
    return found


def as_one(ids: list[int]) -> list[int]:
    """Runs of a medium's tokens as one token."""
    image, stop, end, audio, begin = (
        SPECIALS.index(f"[{name}]")
        for name in ("IMG", "IMG_BREAK", "IMG_END", "AUDIO", "BEGIN_AUDIO")
    )
    made: list[int] = []
    for token in ids:
        if token == end:
            made.append(image)
        elif token not in (image, stop, begin) and not (token == audio and made[-1] == audio):
            made.append(token)
        elif token == begin:
            made.append(-1)
    return [token for token in made if token != -1]


def main() -> None:
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tokens, chats = vocabulary(), dict[str, dict[str, list[int]]]()
    lines = (HERE / "tokenizer_corpus.txt").read_bytes().decode().split("\n")
    texts = []
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_text(json.dumps(tekken(version, tokens)))
            library = MistralTokenizer.from_file(path)
            if version == "v3":
                plain = library.instruct_tokenizer.tokenizer
                texts = [plain.encode(line, bos=False, eos=False) for line in lines[:400:9]]
            for name, (messages, more, versions) in CHATS.items():
                if version in versions:
                    asked = ChatCompletionRequest.from_openai(messages=theirs(messages), **more)
                    ids = library.encode_chat_completion(asked).tokens
                    chats.setdefault(name, {})[version] = as_one(ids)
    made = {
        "made by": f"mistral-common {mistral_common.__version__}",
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "texts": texts,
        "chats": chats,
    }
    (HERE / "mistral_tokens.json").write_text(json.dumps(made, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
