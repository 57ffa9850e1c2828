// Anthropic's JavaScript client: its runner of tools, whole and streamed.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [base, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: base, apiKey: "none" });
for (const stream of [false, true]) {
  const asked = [];
  const runner = client.beta.messages.toolRunner({
    model,
    stream,
    max_tokens: 400,
    messages: [{ role: "user", content: "The weather in Paris and in Rome?" }],
    tools: [{
      name: "get_weather",
      input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      parse: (input) => input,
      run: ({ city }) => (asked.push(city), "sunny"),
    }],
  });
  const last = await runner.runUntilDone();
  assert.equal(last.content.map((block) => block.text ?? "").join(""), "Both are sunny.");
  assert.deepEqual(asked, ["Paris", "Rome"]);
}
