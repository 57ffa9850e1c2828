"""Log-likelihoods and generated answers over completions, generated answers over chat: a task of local data."""

import json
import pathlib
import sys
import tempfile

import lm_eval
from lm_eval.tasks import TaskManager

base, model, folder = sys.argv[1:4]
here = pathlib.Path(tempfile.mkdtemp())
rows = [
    {"question": f"Is {n} even?", "label": n % 2, "answer": "yes" if n % 2 == 0 else "no"}
    for n in range(6)
]
(here / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
shared = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {here}/rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}} Answer:"
"""
(here / "choose.yaml").write_text(f"""task: choose
output_type: multiple_choice{shared}doc_to_target: label
doc_to_choice: [" yes", " no"]
metric_list: [{{metric: acc}}]
""")
(here / "write.yaml").write_text(f"""task: write
output_type: generate_until{shared}doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
""")
tasks = TaskManager(include_path=str(here))
given = {
    "model": model,
    "tokenizer": folder,
    "num_concurrent": 2,
    "max_retries": 1,
    "max_length": 1024,
}
for kind, names, more in (
    ("local-completions", ["choose", "write"], {"base_url": base + "/v1/completions"}),
    (
        "local-completions",
        ["choose"],
        {"base_url": base + "/v1/completions", "tokenized_requests": False},
    ),
    ("local-chat-completions", ["write"], {"base_url": base + "/v1/chat/completions"}),
):
    found = lm_eval.simple_evaluate(
        model=kind, model_args={**given, **more}, tasks=names, task_manager=tasks, batch_size=2, bootstrap_iters=0,
        apply_chat_template=kind == "local-chat-completions",
    )  # fmt: skip
    for name in names:
        assert len(found["samples"][name]) == len(rows)
    if "choose" in names:
        scores = [
            float(score)
            for sample in found["samples"]["choose"]
            for score, _ in sample["filtered_resps"]
        ]
        assert all(score < 0 for score in scores)
