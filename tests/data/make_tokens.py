"""Makes the golden data of the tokenizer tests: llama.cpp's tokens for tokenizer_corpus.txt. By hand, from the root:

    python tests/data/make_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf     (needs llama-cpp-python, gguf, tokenizers)

SmolLM2's own ids come first. Its vocabulary has no tokens that cross from word to word or digit to digit, so it can't
tell most pre-tokenizers apart; for these there is a vocabulary trained on text that was not split at all, where every
cut shows. The same goes for SentencePiece's way. Both are kept with the results, in small_vocabularies.json.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHUNK = 10_000
NUM_CHUNKS = 7
JOINT = "␟"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Every name in engine/gguf_tokenizer.py.
PRE = (  # noqa: SIM905 (shorter)
    "gpt-2 phi-2 mpt olmo jais gigachat mellum exaone4 trillion smollm starcoder refact command-r codeshell "
    "exaone minerva-7b llama-bpe llama3 llama-v3 falcon3 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4 qwen2 "
    "deepseek-r1-qwen stablelm2 megrez hunyuan grok-2 tekken gpt-4o llama4 deepseek-v3 hunyuan-dense "
    "deepseek-coder falcon bloom poro-chat gpt3-finnish viking default"
).split()
TEXTS = """The quick brown fox can't jump over 13 lazy dogs; it's 2024-05-17, 23:59:59.999 and they've paid $1,234,567.89 (−12 %).
Der süße Übermut ließ die Straße größer wirken. À l'été, où l'œuvre naïve s'achève, ça coûte 3½ €. ¿Dónde está el niño?
Съешь же ещё этих мягких французских булок, да выпей чаю. Η γρήγορη αλεπού πηδάει. השועל החום המהיר. نص عربي قصير ١٢٣٤٥.
敏捷的棕色狐狸跳过懒狗。人口为１２３４５６人。速い茶色の狐はのろまな犬を飛び越える。빠른 갈색 여우가 게으른 개를 뛰어넘는다.
तेज़ भूरी लोमड़ी १२३ कुत्ते पर कूदती है। เร็วสุนัขจิ้งจอกสีน้ำตาล ๑๒๓. ქართული ენა. Հայերեն. አማርኛ ፩፪፫. Việt Nam đẹp lắm!
😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇭🇯🇵 ☃️ ✓ → ∑∞≠≤ ½ ⅔ Ⅷ ⑨ ² ³ x² H₂O é (e + U+0301: é) ﬁ ℃ ™ \u200b\u00a0\u2003\ufeff| « » „“ ”
if (x<=y&&z!=0){a[i]+=*p++;/*c*/}  // 0xDEADBEEF 1e-10 3.14159265358979 007 __init__ snake_case camelCase HTTPServer2
<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end <|not_special|> I'LL WE'VE 'S 'RE 'Ll don''t 'tis rock'n'roll
https://example.invalid/a?b=c&d=%20#e user@example.invalid C:\\Windows\\System32 ~/.bashrc $HOME `ls -la` a^b|c~d+e=f<g>h
""".splitlines()  # noqa: E501


def corpus() -> str:
    """Half our own sources, half random mixtures of the lines above: words, runs of whitespace, digits, characters."""
    rng = random.Random(7)
    parts = [
        (HERE.parent.parent / "src/slipstream" / name).read_text()
        for name in ("messages/steps.py", "errors.py", "config/settings.py")
    ]
    words = [w for line in TEXTS for w in line.split(" ")]
    spaces = [" "] * 12 + [
        "",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\t\t ",
        " \n",
        "\n ",
        "     ",
        " \r\n \n",
        "\u3000",
    ]
    characters = "".join(TEXTS)
    parts += TEXTS
    for _ in range(9_000):
        word = rng.choice(words)
        match rng.randrange(12):
            case 0:
                word = str(rng.randrange(10 ** rng.randrange(1, 12)))
            case 1:
                word = "".join(rng.choices(characters, k=rng.randrange(1, 9)))
            case 2:
                word = word.upper()
        parts.append(word + rng.choice(spaces))
        if rng.randrange(40) == 0:
            parts.append(rng.choice(TEXTS) + "\n")
    return "".join(parts)[: CHUNK * NUM_CHUNKS]


def chunks(text: str) -> list[str]:
    return [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)]


def digest(ids: list[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


def change(folder: Path, name: str, **values: object) -> None:
    """Set values of a JSON file of a folder, which is made if it is not there."""
    file = folder / name
    old = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(old | values))


def write_gguf(path: Path, tokenizer: dict[str, object]) -> Path:
    """A GGUF file that holds a tokenizer alone."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in tokenizer.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_vocabulary(text: str) -> dict[str, object]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(
        [text[i : i + 200] for i in range(0, len(text), 200)],
        trainers.BpeTrainer(
            vocab_size=1800, initial_alphabet=alphabet, max_token_length=12, show_progress=False
        ),
    )
    merges = [" ".join(m) for m in json.loads(trained.to_str())["model"]["merges"]]
    tokens = [
        "<s>",
        "</s>",
        "<|user|>",
        *alphabet,
        *dict.fromkeys(m.replace(" ", "") for m in merges),
    ]
    # Tokens without their merges: only Llama 3's names still find these.
    merges = [m for i, m in enumerate(merges) if i < 600 or i % 10]
    return {"tokens": JOINT.join(tokens), "merges": JOINT.join(merges)}


def sentencepiece_vocabulary(text: str) -> dict[str, object]:
    from tokenizers import Tokenizer, models, trainers

    text = text.replace(" ", "▁")
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [text[i : i + 200] for i in range(0, len(text), 200)],
        trainers.BpeTrainer(
            vocab_size=1500, limit_alphabet=200, max_token_length=12, show_progress=False
        ),
    )
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "<|user|>",
        *(t for t, _ in pieces),
    ]
    return {"tokens": JOINT.join(tokens)}


def fields(kept: dict[str, object]) -> dict[str, object]:
    """A GGUF file's fields of a vocabulary as it is kept: byte level, which has merges, or SentencePiece's."""
    tokens = str(kept["tokens"]).split(JOINT)
    if "merges" in kept:
        types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)
        merges = str(kept["merges"]).split(JOINT)
        ids = {"bos_token_id": 0, "eos_token_id": 1}
        return {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges} | ids
    num_pieces = len(tokens) - 260
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [USER_DEFINED] + [NORMAL] * num_pieces
    scores = [0.0] * 260 + [-float(i) for i in range(num_pieces)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores} | ids


def golden_tokens() -> dict[str, Any]:
    """Contents of small_vocabularies.json: two vocabularies as fields of GGUF files, and
    llama.cpp's tokens for them."""
    found = json.loads((HERE / "small_vocabularies.json").read_text(encoding="utf-8"))
    return found | {kind: fields(found[kind]) for kind in ("byte_level", "sentencepiece")}


def golden(path: Path, text: str, *, bos: bool = False) -> list[list[object]]:
    """Number of tokens and their hash, for each chunk."""
    from llama_cpp import Llama

    llama = Llama(
        str(path), vocab_only=True, verbose=False
    )  # ValueError: llama.cpp knows no such name
    ids = [llama.tokenize(c.encode(), add_bos=bos, special=True) for c in chunks(text)]
    llama.close()
    return [[len(i), digest(i)] for i in ids]


def save(name: str, value: object) -> None:
    lines = json.dumps(value, ensure_ascii=False, indent=1)
    lines = re.sub(r"\[\s+(\d+),\s+(\S+)\s+\]", r"[\1, \2]", lines)
    (HERE / name).write_text(lines + "\n", encoding="utf-8")


def main(model: str) -> None:
    from llama_cpp import __version__

    text = corpus()
    (HERE / "tokenizer_corpus.txt").write_text(text, encoding="utf-8", newline="")
    save(
        "smollm2_tokens.json",
        {"llama_cpp_python": __version__, "chunks": golden(Path(model), text)},
    )
    # No token may spell the name of a control token: llama.cpp takes that for a mistake in the file, and mends it.
    plain = text.replace("<|", "< |")
    kept = {
        "byte_level": byte_level_vocabulary(plain),
        "sentencepiece": sentencepiece_vocabulary(plain),
    }
    byte_level, pieces = map(fields, kept.values())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        pre = {p: golden(write_gguf(path, byte_level | {"pre": p}), text, bos=True) for p in PRE}
        pre["(none)"] = golden(write_gguf(path, byte_level), text, bos=True)
        prefix = {
            str(p): golden(write_gguf(path, pieces | {"add_space_prefix": p}), text, bos=True)
            for p in (True, False)
        }
    found = {**kept, "pre": pre, "add_space_prefix": prefix}
    save("small_vocabularies.json", {"llama_cpp_python": __version__} | found)


if __name__ == "__main__":
    main(sys.argv[1])
