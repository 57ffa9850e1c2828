"""Names that the project has given up do not come back (DESIGN §4 and §10: one word for one thing)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = ("src", "csrc", "tests", "benchmarks")
OLD: dict[str, str] = {  # pattern of the old name: the name of today
    r"\bScoring\b": "AttentionParams",
    r"\bclass Heads\b": "QKVLayout",
    r"\b(whole|halves|parts|tiles|kept|held|pieces|grouping|overlap)\.py\b": "bidirectional, sparse24, split_k, …",
    r"\breads_whole\b": "needs_full_prompt",
    r"\btriton[./](blocks|grouped)\b": "fp8_block, int4_groupwise",
    r"\boverlap\.follow\b": "pdl_wait",
    r"\bsorted_experts\b": "grouped_gemm",
    r"\bfew_experts\b": "moe_small_batch",
    r"\bOpSet\.look_up\b|\bops\.look_up\b": "gather_inputs",
    r"\bclass \w+Facts\b": "…Info",
    r"\battend_latents\b|\blatent\w*\.(py|cu)\b": "mla_attention, mla….py",
    r"\bplain_dim\b": "nope_dim",
    r"\bprepare_linear\b": "quantize_weight",
    r"\badopt_linear\b": "pack_weight",
    r"\b_sing\b": "run_canary",
    r"\b_bury\b": "mark_dead",
    r"\bdef _beside\b": "with_cross",
    r"\bdef _alone\b": "exclusive",
    r"\bAsker\b|\bAPART\b|\bTOGETHER\b": "the producer warp; what the constants lay out",
    r"\bCacheNews\b|\btake_news\b": "CacheEvents, drain_findings",
    r"\b(class |raise |except )Elsewhere\b": "RetryElsewhere",
    r"\bTold = |\btokens_told\b|\btell_load\b|\bnot_kept\(": "ReadStatus, OnRow, token_counts, send_load, storage_error",
    r"\bread_alone\b|\bchunk_beside\b|\bdrop_held\b": "measure_read_rate, chunk_with_decodes, drop_waiting_blocks",
    r"\bAttentionMetadata\.alone\b": "single_sequence",
    r"\b(Kept(Weights|File)|HeldWeights)\b": "CachedWeights, PackedCacheFile, StoredWeights",
    r"\bheld_(weight_bytes|weights_bytes|formats|group|products)\b|\bHELD_PRODUCTS\b": "native_…, resident_weights_bytes",
    r"\bkept_(as|ceilings|settings)\b|\bkeep_ceilings\b|\bNOT_KEPT\b": "cached_name, read_ceilings, saved_settings",
    r"\bclass (Part|Counts|Objectives|Arriving|Cut|Taken|Kept)\b": "PromptPart, DraftCounts, ScalingObjectives, …",
    r"\bSums?Beside\b|\bHeadOfPlaces\b|\bUntwine\b": "OverlappedSum(s), MedusaDrafter, Deinterleave",
    r"\b(Engine|Fleet)Room\b": "EngineLineRunner, FleetLineRunner",
    r"\b(kv|cache|prefix)[ _]pages?\b|\bpage_(size|table)\b|\bblock_tables?_pages?\b": "block",
}
ELSEWHERE = {"tests/test_words.py", "tests/data/tokenizer_corpus.txt"}
"""This list, and a text that is tokenised: it stays as it was recorded."""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    found = subprocess.run(
        ["git", "ls-files", "-z", *CODE], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [
        name
        for name in found.split("\0")
        if name and name not in ELSEWHERE and not name.endswith(".json")
    ]
    return {
        name: (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for name in files
        if (ROOT / name).is_file()
    }


@pytest.mark.parametrize("pattern", OLD, ids=OLD.values())
def test_the_old_name_is_gone(pattern, texts):
    loose = pattern.replace(r"\b", "")  # found ten times as fast
    found = [
        name for name, text in texts.items() if re.search(loose, text) and re.search(pattern, text)
    ]
    assert not found, f"it is called {OLD[pattern]}"


def test_an_old_name_is_found():
    assert re.search(next(iter(OLD)), "class Scoring:")
