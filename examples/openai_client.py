"""Start a server and ask it with the official `openai` client."""

import json
import subprocess
import sys

import openai

command = [sys.executable, "-m", "slipstream", "serve", "smollm2", "--port=0", "--json"]
server = subprocess.Popen([*command, "--max-model-len=1024"], stdout=subprocess.PIPE, text=True)
try:
    assert server.stdout is not None
    url = json.loads(server.stdout.readline())["url"]
    client = openai.OpenAI(base_url=url, api_key="none")
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name the capital of France."}],
        temperature=0,
        max_tokens=24,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()
    server.wait()
