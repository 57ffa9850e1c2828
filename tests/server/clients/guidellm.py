import json
import pathlib
import subprocess
import sys
import tempfile

base, model, folder = sys.argv[1:4]
report = pathlib.Path(tempfile.mkdtemp()) / "report.json"
for route in ("/v1/chat/completions", "/v1/completions"):
    command = [
        pathlib.Path(sys.executable).with_name("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={base},model={model},request_format={route}",
        "--tokenizer", f"kind=huggingface_auto,model={folder}",
        "--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    (run,) = json.loads(report.read_text())["benchmarks"]
    metrics = run["metrics"]
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["output_token_count"]["successful"]["mean"] == 8
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
