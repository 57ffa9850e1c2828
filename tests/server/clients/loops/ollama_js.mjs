// Ollama's JavaScript client: a loop of tools, whole and streamed.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters } }];
for (const stream of [false, true]) {
  const messages = [{ role: "user", content: "The weather in Paris and in Rome?" }];
  const asked = [];
  let content = "";
  for (let turn = 0; turn < 3; turn++) {
    const answer = await client.chat({ model, messages, tools, stream, options: { num_ctx: 8192 } });
    const parts = [];
    if (stream) for await (const part of answer) parts.push(part);
    else parts.push(answer);
    const calls = parts.flatMap((part) => part.message.tool_calls ?? []);
    content = parts.map((part) => part.message.content ?? "").join("");
    messages.push({ role: "assistant", content, tool_calls: calls });
    if (!calls.length) break;
    for (const call of calls) {
      asked.push(call.function.arguments.city);
      messages.push({ role: "tool", tool_name: call.function.name, content: "sunny" });
    }
  }
  assert.equal(content, "Both are sunny.");
  assert.deepEqual(asked, ["Paris", "Rome"]);
}
